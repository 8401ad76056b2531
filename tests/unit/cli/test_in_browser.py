"""The page in a real browser, under its own policy."""

from pathlib import Path
from typing import Any

import pytest

from nemo_run_ray.cli.status_report import page
from tests.browser import browser, needs_chromium, tab
from tests.unit.cli.test_lanes_and_page import attempt, row

__all__ = ["browser", "tab"]
pytestmark = needs_chromium

_BEGAN = 1_767_225_600.0  # 2026-01-01
_HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"quotes\" & 'apostrophes' &lt;b&gt; ${x} $title",
    "two\nlines\tand a tab",
    "\u202e\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "long-" + "x" * 195,
    "train \U0001f680 \u6f22\u5b57",
)
_LOG = "exit code 1; the last lines of its log:\nTraceback (most recent call last):\n" + (
    '  File "/app/train.py", line 88, in step\nRuntimeError: CUDA error: <unknown> & "so on"\n'
)


def experiment(count: int) -> list[dict[str, Any]]:
    """Jobs of every state, each after the one before; some have hostile names."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        state = ("SUCCEEDED", "FAILED", "RUNNING", "PENDING", "LOST", "UNKNOWN")[number % 6]
        ended = None if state in ("RUNNING", "PENDING", "UNKNOWN") else number + 80.0
        name = _HOSTILE[number // 11] if number % 11 == 3 and number < 77 else f"train-{number:03d}"
        after = [rows[-1]["job"]] if rows else []
        message = _LOG if state == "FAILED" else ""
        tries = attempt(number, number + 9, ended, state)
        rows.append(row(name, state, tries, after=after, message=message))
    return rows


def _write(folder: Path, rows: list[dict[str, Any]], title: str = "llama3-sft_1767225600") -> Path:
    path = folder / "timeline.html"
    path.write_text(page(title, rows, _BEGAN, _BEGAN + 3000), encoding="utf-8")
    return path


#: Left edge and width of the axis, of what lies behind the rows, and of every row's lane.
_LANES = """[...document.querySelectorAll(".axis .lane, .under, .row .lane")].map((one) => {
    const { left, width } = one.getBoundingClientRect();
    return `${left.toFixed(1)} ${width.toFixed(1)}`;
})"""
_SHOWN = (
    """[...document.querySelectorAll(".row:not([hidden]) bdi")].map((one) => one.textContent)"""
)
_OF = "[...document.querySelectorAll({})].map((one) => one.querySelector('bdi').textContent)"


@pytest.mark.parametrize("count", [0, 1, 12, 300])
def test_the_page_works_under_its_policy(tab, tmp_path, count):
    rows = experiment(count)
    tab.open(_write(tmp_path, rows).as_uri())
    assert tab.ask("document.documentElement.dataset.ready") == "true"
    assert tab.ask("document.title") == "llama3-sft_1767225600"
    assert tab.ask(_SHOWN) == [one["job"] for one in rows]
    assert tab.ask("document.querySelectorAll('img').length") == 0
    assert tab.ask("document.querySelectorAll('script').length") == 1
    titles = "[...document.querySelectorAll('.row .name')].map((one) => one.title)"
    assert tab.ask(titles) == [one["job"] for one in rows]


def test_hostile_words_stay_words(tab, tmp_path):
    names = list(_HOSTILE)
    rows = [
        row(
            name,
            "FAILED",
            {**attempt(reason=name), "id": name, "node": name},
            reason=name,
            message=name,
            after=[names[number - 1]],
            waits_for=[name],
        )
        for number, name in enumerate(names)
    ]
    tab.open(_write(tmp_path, rows, title=_HOSTILE[0]).as_uri())
    assert tab.ask("document.documentElement.dataset.ready") == "true"
    assert tab.ask("document.title") == _HOSTILE[0]
    assert tab.ask("document.querySelector('h1').textContent") == _HOSTILE[0]
    assert tab.ask(_SHOWN) == names
    assert tab.ask(_OF.format("'.card h3'")) == names
    messages = tab.ask("[...document.querySelectorAll('.card pre')].map((one) => one.textContent)")
    assert messages == names


def test_a_script_or_a_style_that_is_not_ours_does_not_run(tab, tmp_path):
    path = _write(tmp_path, experiment(5))
    text = path.read_text(encoding="utf-8")
    foreign = (
        "<script>document.title = 'owned'</script><img src=https://example.invalid/x onerror="
        "\"document.title = 'owned'\"><style>body { padding-left: 77px }</style></body>"
    )
    path.write_text(text.replace("</body>", foreign), encoding="utf-8")
    tab.open(path.as_uri())
    assert tab.ask("document.title") == "llama3-sft_1767225600"
    assert tab.ask("getComputedStyle(document.body).paddingLeft") == "0px"
    assert len([one for one in tab.complaints if "Content Security Policy" in one]) >= 3
    tab.complaints.clear()


def _chain() -> list[dict[str, Any]]:
    """a <- b <- c, and d by itself; b failed, so c was never submitted."""
    second = {**attempt(61, None, 90, "FAILED", "exit code"), "id": "x.b"}
    return [
        row("a", "SUCCEEDED", attempt()),
        row(
            "b",
            "FAILED",
            second,
            after=["a"],
            reason="exit code",
            message="the unusual word xyzzy",
        ),
        row("c", "CANCELLED", after=["b"], reason="b failed"),
        row("d", "SUCCEEDED", attempt()),
    ]


def test_a_job_shows_what_it_needs_and_what_needs_it(tab, tmp_path):
    tab.open(_write(tmp_path, _chain()).as_uri())
    chosen = "document.querySelectorAll('.chosen use').length"
    assert tab.ask("document.querySelectorAll('.all use').length") == 2
    assert tab.ask(chosen) == 0
    tab.point(".row:nth-child(3) .name")
    assert tab.ask(_OF.format("'.row.kin'")) == ["a", "b"]
    assert tab.ask(chosen) == 1
    tab.point(".row:nth-child(2) .name")
    assert tab.ask(_OF.format("'.row.kin'")) == ["a", "c"]
    assert tab.ask(chosen) == 2
    tab.point("h1")
    assert tab.ask(chosen) == 0


def test_details_open_and_close(tab, tmp_path):
    tab.open(_write(tmp_path, _chain()).as_uri())
    visible = "[...document.querySelectorAll('.card')].filter((one) => one.checkVisibility())"
    assert tab.ask(f"{visible}.length") == 0
    tab.point(".row:nth-child(2) .name", click=True)
    words = tab.ask(f"{visible}.map((one) => one.innerText)")
    assert len(words) == 1
    assert all(word in words[0] for word in ("failed: exit code", "xyzzy", "x.b", "not seen"))
    assert len(set(tab.ask(_LANES))) == 1  # the chart made room for it
    tab.point("#job-1 ul a", click=True)  # what it runs after
    assert tab.ask(f"{visible}.map((one) => one.id)") == ["job-0"]
    tab.press("Escape")
    assert tab.ask(f"{visible}.length") == 0
    assert tab.ask("document.activeElement.getAttribute('href')") == "#job-0"


def test_rows_are_filtered(tab, tmp_path):
    tab.open(_write(tmp_path, _chain()).as_uri())
    tab.point("#only-failed", click=True)
    assert tab.ask(_SHOWN) == ["b"]
    assert tab.ask("document.querySelector('.shown').textContent") == "1 of 4 shown"
    assert tab.ask("document.querySelectorAll('.all use').length") == 0
    tab.point("#only-failed", click=True)
    tab.point("#filter", click=True)
    for key in "xyzzy":
        tab.press(key, text=key)
    assert tab.ask(_SHOWN) == ["b"]
    tab.press("Escape")
    assert tab.ask(_SHOWN) == ["a", "b", "c", "d"]
    assert tab.ask("document.querySelectorAll('.all use').length") == 2
    for key in "nowhere":
        tab.press(key, text=key)
    assert tab.ask("document.querySelector('.nothing').checkVisibility()")


def test_without_scripts_all_is_there(tab, tmp_path):
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    rows = _chain()
    tab.open(_write(tmp_path, rows).as_uri() + "#job-1")
    assert tab.ask("document.documentElement.dataset.ready") is None
    assert tab.ask(_SHOWN) == [one["job"] for one in rows]
    assert tab.ask("document.querySelector('.tools').checkVisibility()") is False
    assert tab.ask("document.querySelector('#job-1').checkVisibility()")
    assert tab.ask("document.querySelectorAll('.all use').length") == 2
