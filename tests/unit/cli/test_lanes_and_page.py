import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_run_ray.cli.status_report import ALL_LINKS_MAX, page

_BEGAN = 1_767_225_600.0  # 2026-01-01
_VOID = {"meta", "input"}
_STATES = ("WAITING", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "LOST", "UNKNOWN")
_HOSTILE = (
    "</script><script>alert(1)</script>",
    "</title></style><img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)' x=\"",
    "<!-- ]]> -->",
    "$title ${rows} %s {0} \\ {{ 7 * 7 }}{% raw %}{# gone #}",
    "a\nb\rc\td\0\x1b[31me\x1b[0m\x7f",
    "\u202e\u05e9\u05dc\u05d5\u05dd",
    "\ud800 alone",
    "x" * 200,
    "",
)


class _Page(HTMLParser):
    """Checks that every tag is closed, and keeps what the page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and wanted.items() <= attributes.items()
        ]

    def texts_in(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside == tag]

    def bars(self) -> list[dict[str, str]]:
        """Those of the lanes, without those of the legend."""
        return [one for one in self.all("rect") if one.get("width", "").endswith("%")]

    def kinds(self) -> list[str]:
        return [one["class"] for one in self.bars()]


def attempt(posted=1.0, running=5.0, ended=60.0, state="SUCCEEDED", reason=""):
    moments = {"posted_at": posted, "running_at": running, "ended_at": ended, "seen_at": None}
    at = {name: None if at is None else _BEGAN + at for name, at in moments.items()}
    return {
        "id": "exp.job",
        "node": "ab" * 28,
        "state": state,
        "reason": reason,
        "detail": "",
        **at,
    }


def row(name="job", state="SUCCEEDED", *attempts, **fields):
    said = {"after": (), "waits_for": (), "reason": "", "message": "", **fields}
    return {"job": name, "state": state, "attempts": attempts, **said}


def _page(*rows, now: float = 100.0, title: str = "exp_1") -> _Page:
    return _Page(page(title, rows, _BEGAN, _BEGAN + now))


def _percent(words: str) -> float:
    assert words.endswith("%")
    return float(words[:-1])


def _check_bars(made: _Page) -> None:
    for bar in made.bars():
        left, width = _percent(bar["x"]), _percent(bar["width"])
        assert 0 <= left <= 100
        assert width > 0
        assert left + width <= 100.02  # each was rounded


@pytest.mark.parametrize(
    ("state", "attempts", "bars"),
    [
        (
            "SUCCEEDED",
            [attempt(10, 20, 100)],
            ["waiting 0 10", "pending succeeded 10 10", "running succeeded 20 80"],
        ),
        ("FAILED", [attempt(0, None, 100, "FAILED")], ["running failed 0 100"]),
        (
            "RUNNING",
            [attempt(0, 50, None, "RUNNING")],
            ["pending running 0 50", "running running 50 50"],
        ),
        (
            "PENDING",
            [attempt(20, None, None, "PENDING")],
            ["waiting 0 20", "pending pending 20 80"],
        ),
        ("WAITING", [], ["waiting 0 100"]),
        # It was seen to begin, and no more.
        ("LOST", [attempt(0, 100, None, "LOST")], ["pending lost 0 100", "running lost 100 0"]),
    ],
)
def test_bars_of_a_job(state, attempts, bars):
    made = _page(row("a", state, *attempts))
    found = [(bar["class"], _percent(bar["x"]), _percent(bar["width"])) for bar in made.bars()]
    assert [f"{kind} {round(left)} {round(width)}" for kind, left, width in found] == bars
    is_unseen = any(one["running_at"] is None and one["ended_at"] for one in attempts)
    tips = made.texts_in("title")
    assert any("start not seen" in text for text in tips) is is_unseen


def test_an_array_has_a_band_with_a_part_for_each_state_of_its_elements():
    failed = row("a", "FAILED", attempt(posted=10, running=20, ended=100, state="FAILED"))
    counts = {"succeeded": 150, "failed": 50, "cancelled": 0, "running": 0, "waiting": 0}
    made = _page({**failed, **counts})
    parts = [one for one in made.bars() if one["class"].startswith("element ")]
    assert [(one["class"], _percent(one["x"]), _percent(one["width"])) for one in parts] == [
        ("element succeeded", 20, 60),
        ("element failed", 80, 20),
    ]
    _check_bars(made)
    assert any("50 of 200 elements: failed: 20s" in text for text in made.texts_in("title"))


def test_every_attempt_has_its_bars():
    attempts = (
        attempt(0, 10, 30, "FAILED", "exit code"),
        attempt(40, 50, 70, "LOST"),
        attempt(75, None, None, "RUNNING"),
    )
    made = _page(row("a", "RUNNING", *attempts))
    assert made.kinds() == [
        *("pending failed", "running failed", "waiting"),
        *("pending lost", "running lost", "waiting", "running running"),
    ]
    tips = "\n".join(made.texts_in("title"))
    assert "attempt 1 of 3: failed: exit code" in tips


@pytest.mark.parametrize("state", _STATES)
def test_every_state_has_a_mark_a_word_and_a_count(state):
    made = _page(row("a", state, attempt(state=state)), row("b", state))
    assert len(made.all("g", id=f"mark-{state.lower()}")) == 1
    rows = made.all("li", **{"class": f"row {state.lower()}"})
    assert len(rows) == 2
    places = [one for one in made.all("use", href=f"#mark-{state.lower()}") if "y" in one]
    assert len(places) == 2
    assert f" {state.lower()}" in made.texts_in("li")
    assert "2" in made.texts_in("b")
    assert made.texts_in("span").count(state.lower()) == 2


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "SUCCEEDED", "LOST"])
def test_a_job_that_was_never_submitted_has_only_a_mark(state):
    above = row("a", "FAILED", attempt(posted=0, ended=40, state="FAILED"))
    last = row("c", "SUCCEEDED", attempt(posted=0, ended=80))
    made = _page(above, row("b", state, after=("a",)), row("d", state, after=("b",)), last)
    marks = [one for one in made.all("use") if one.get("y") == "50%"]
    assert [_percent(one["x"]) for one in marks] == [50, 50, 50, 100]  # where the first one failed
    assert len(made.bars()) == 4
    told = "No attempt of it was seen." if state == "LOST" else "It was never submitted."
    assert made.texts_in("p").count(told) == 2


def test_dependencies_are_drawn_for_few_jobs():
    few = [row(str(number), after=(str(number - 1),)) for number in range(ALL_LINKS_MAX)]
    heads = _page(*few).all("use", href="#head-down")
    assert len(heads) == ALL_LINKS_MAX - 1
    assert not _page(*few, row("one more")).all("use", href="#head-down")


@pytest.mark.parametrize(
    ("span", "labels"),
    [
        (0, ["0", "0.2s", "0.4s", "0.6s", "0.8s", "1s"]),
        (60, ["0", "10s", "20s", "30s", "40s", "50s", "1m"]),
        (5400, ["0", "10m", "20m", "30m", "40m", "50m", "1h", "1h 10m", "1h 20m", "1h 30m"]),
        (30 * 3600, ["0", "6h", "12h", "18h", "1d", "1d 6h"]),
        (10 * 86400, ["0", "2d", "4d", "6d", "8d", "10d"]),
        (400 * 86400, ["0", "64d", "128d", "192d", "256d", "320d", "384d"]),
    ],
)
def test_ticks(span, labels):
    assert _page(row("a", "WAITING"), now=span).texts_in("text") == labels


def test_the_policy_names_the_only_style_and_script():
    text = page("t", [row(name, message=name) for name in _HOSTILE], _BEGAN, _BEGAN)
    policy = _Page(text).all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    for tag in ("style", "script"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style>")


_words = st.text(max_size=30) | st.sampled_from(_HOSTILE)
_moments = st.floats(-1e6, 1e6).map(lambda at: _BEGAN + at)
_attempts = st.fixed_dictionaries(
    {
        "id": _words,
        "node": _words,
        "posted_at": _moments,
        "running_at": st.none() | _moments,
        "ended_at": st.none() | _moments,
        "seen_at": st.none() | _moments,
        "state": st.sampled_from(_STATES),
        "reason": _words,
        "detail": _words,
    }
)
_rows = st.fixed_dictionaries(
    {
        "job": _words,
        "state": st.sampled_from(_STATES),
        "reason": _words,
        "message": _words,
        "after": st.lists(_words, max_size=3),
        "waits_for": st.lists(_words, max_size=2),
        "attempts": st.lists(_attempts, max_size=3),
    }
)


@settings(max_examples=60, deadline=None)
@given(_words, st.lists(_rows, max_size=6), _moments, _moments)
def test_any_jobs_give_a_page(title, rows, began_at, now):
    text = page(title, rows, began_at, now)
    made = _Page(text)
    _check_bars(made)
    assert text.encode()
    lanes = [one for one in made.all("li") if one.get("class", "").startswith("row ")]
    assert len(lanes) == len(made.all("section")) == len(rows)
    assert len(made.all("script")) == len(made.all("style")) == 1
    for tag, attributes in made.tags:  # nothing is fetched, and no attribute runs
        assert tag not in {"img", "link", "iframe", "object", "embed", "base", "form"}
        assert not {"src", "style", "srcset", "action"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
