"""The site is built without a warning, its references are the code's, and its search finds them."""

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.cli.main import VERBS
from nemo_run_ray.remote.status import JobState, Reason
from tests.browser import browser, needs_chromium, tab
from tests.conftest import ROOT

__all__ = ["browser", "tab"]

_SET_BY_THE_EXECUTOR = {"resource_group", "given_fields"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """The built site, and the address of a server with it."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever).start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("executor", sorted(RayExecutor.__annotations__.keys() - _SET_BY_THE_EXECUTOR)),
        ("cli", list(VERBS)),
        ("states", [*JobState, *(reason.value for reason in Reason)]),
    ],
    ids=["executor", "cli", "states"],
)
def test_a_reference_names_everything(site, page, names):
    text = (
        (site[0] / "reference" / f"{page}.html").read_text(encoding="utf-8").replace("&#39;", "'")
    )
    assert [name for name in names if name not in text] == []


@needs_chromium
@pytest.mark.parametrize("page", ["index", "guides/chains", "reference/executor"])
def test_a_page_opens(site, tab, page):
    tab.open(f"{site[1]}/{page}.html")
    tab.wait_for("document.querySelector('h1') !== null")
    assert tab.ask("[...document.images].every((image) => image.naturalWidth > 0)")


@needs_chromium
def test_what_follows_the_generated_text_is_shown(site, tab):
    tab.open(f"{site[1]}/reference/cli.html")
    cells = "[...document.querySelectorAll('#exit-codes ~ * td')].map((cell) => cell.innerText)"
    tab.wait_for(f"{cells}.includes('130')")


@needs_chromium
def test_the_search_finds_a_field(site, tab):
    tab.open(f"{site[1]}/index.html")
    tab.wait_for("document.querySelector('.md-search__input') !== null")
    field = "document.querySelector('.md-search__input')"
    tab.ask(f"{field}.focus()")
    for letter in "keep_logs_max_bytes":
        tab.press(letter, letter)
    hits = "[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"
    tab.wait_for(f"{hits}.some((link) => link.includes('reference/executor'))")
