"""The page of ``timeline``: its bars, and that words of others stay words, also in a browser."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_run_ray.cli.status_report import page
from tests.browser import browser, needs_chromium, tab

__all__ = ["browser", "tab"]

_BEGAN = 1_767_225_600.0  # 2026-01-01
_STATES = ("WAITING", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "LOST", "UNKNOWN")
_HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "</title></style><img src=x onerror=\"document.title='owned'\">",
    "\"' onmouseover='alert(1)' x=\"",
    "<!-- ]]> -->",
    "$title ${rows} %s {0} \\ {{ 7 * 7 }}{% raw %}{# gone #}",
    "a\nb\tc",
    "\u202e\u05e9\u05dc\u05d5\u05dd",
    "x" * 200,
)
_UNFIT = ("a\rc\td\0\x1b[31me\x1b[0m\x7f", "\ud800 alone", "")


class _Page(HTMLParser):
    """Checks that every tag is closed, and keeps what the page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def bars(self) -> list[tuple[str, float, float, str]]:
        """Class, begin and width in percent, and title of every bar."""
        found = []
        for tag, attributes in self.tags:
            if tag == "i" and "style" in attributes:
                place = re.fullmatch(r"left: ([\d.]+)%; width: ([\d.]+)%", attributes["style"])
                assert place
                kind = attributes["class"].strip()
                found.append((kind, float(place[1]), float(place[2]), attributes["title"]))
        return found


def attempt(posted=1.0, running=5.0, ended=60.0, state="SUCCEEDED", reason=""):
    moments = {"posted_at": posted, "running_at": running, "ended_at": ended, "seen_at": None}
    at = {name: None if at is None else _BEGAN + at for name, at in moments.items()}
    return {"id": "e.job", "node": "ab", "state": state, "reason": reason, "detail": "", **at}


def row(name="job", state="SUCCEEDED", *attempts, **fields):
    given = {"after": (), "waits_for": (), "reason": "", "message": "", **fields}
    return {"job": name, "state": state, "attempts": attempts, **given}


@pytest.mark.parametrize(
    ("state", "attempts", "bars"),
    [
        (
            "SUCCEEDED",
            [attempt(10, 20, 100)],
            ["waits 0 10", "pends succeeded 10 10", "runs succeeded 20 80"],
        ),
        ("FAILED", [attempt(0, None, 100, "FAILED")], ["runs failed 0 100"]),
        ("FAILED", [attempt(0, None, 100, "FAILED", "not placed in time")], ["pends failed 0 100"]),
        (
            "RUNNING",
            [
                attempt(0, 10, 30, "FAILED", "exit code"),
                attempt(40, 50, 70, "LOST"),
                attempt(75, None, None, "RUNNING"),
            ],
            [
                *("pends failed 0 10", "runs failed 10 20", "waits 30 10"),
                *("pends lost 40 10", "runs lost 50 20", "waits 70 5", "runs running 75 25"),
            ],
        ),
        (  # The end of the first one was not seen.
            "RUNNING",
            [attempt(0, 0, None, "LOST"), attempt(40, 40, None, "RUNNING")],
            ["runs lost 0 40", "runs running 40 60"],
        ),
        ("PENDING", [attempt(20, None, None, "PENDING")], ["waits 0 20", "pends pending 20 80"]),
        ("WAITING", [], ["waits 0 100"]),
        ("CANCELLED", [], []),
        # It was seen to begin, and no more.
        ("LOST", [attempt(0, 100, None, "LOST")], ["pends lost 0 100", "runs lost 100 0"]),
    ],
)
def test_bars_of_a_job(state, attempts, bars):
    made = _Page(page("e", [row("a", state, *attempts)], _BEGAN, _BEGAN + 100)).bars()
    assert [f"{kind} {left:g} {width:g}" for kind, left, width, _ in made] == bars
    pending = ("PENDING", "not placed in time")
    words = [one["reason"] or one["state"] for one in attempts if one["running_at"] is None]
    is_unseen = any(word not in pending for word in words)
    assert any("running, start not seen" in title for *_, title in made) is is_unseen
    if len(attempts) > 2:
        assert "attempt 1: failed: exit code, pending: 10s" in made[0][-1]


_words = st.text(max_size=30) | st.sampled_from([*_HOSTILE, *_UNFIT])
_moments = st.floats(-1e6, 1e6).map(lambda at: _BEGAN + at)
_seen = st.none() | _moments
_attempts = st.fixed_dictionaries(
    {"posted_at": _moments, "running_at": _seen, "ended_at": _seen, "seen_at": _seen}
    | dict.fromkeys(("id", "node", "reason", "detail"), _words)
    | {"state": st.sampled_from(_STATES)}
)
_rows = st.fixed_dictionaries(
    dict.fromkeys(("job", "reason", "message"), _words)
    | {name: st.lists(_words, max_size=3) for name in ("after", "waits_for")}
    | {"state": st.sampled_from(_STATES), "attempts": st.lists(_attempts, max_size=3)}
)


@settings(max_examples=60, deadline=None)
@given(_words, st.lists(_rows, max_size=6), _moments, _moments)
def test_any_jobs_give_a_page_that_fetches_and_runs_nothing(title, rows, began_at, now):
    text = page(title, rows, began_at, now)
    made = _Page(text)
    assert text.encode()
    assert all(left + width <= 100.02 for _, left, width, _ in made.bars())  # each was rounded
    assert sum(tag == "details" for tag, _ in made.tags) == len(rows)
    assert "default-src 'none'" in str(made.tags)
    for tag, attributes in made.tags:
        assert tag not in {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
        assert not {"src", "href", "srcset", "action"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    assert sum(tag == "style" for tag, _ in made.tags) == 1


@needs_chromium
def test_words_of_others_stay_words_in_a_browser(tab, tmp_path):
    path = tmp_path / "timeline.html"
    rows = [
        row(
            name,
            "FAILED",
            {**attempt(reason=name), "id": name, "node": name},
            reason=name,
            message=name,
            after=[_HOSTILE[number - 1]],
            waits_for=[name],
        )
        for number, name in enumerate(_HOSTILE)
    ]
    path.write_text(page(_HOSTILE[0], rows, _BEGAN, _BEGAN + 3000), encoding="utf-8")
    tab.open(path.as_uri())
    assert tab.ask("document.title") == _HOSTILE[0]
    assert tab.ask("document.querySelectorAll('script, img').length") == 0
    for selector in ("summary bdi", "pre"):
        texts = f"[...document.querySelectorAll('{selector}')].map((one) => one.textContent)"
        assert tab.ask(texts) == list(_HOSTILE)
