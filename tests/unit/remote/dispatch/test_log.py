"""Lines of a dispatcher's log, as it writes them and as others read them."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_run_ray.remote.dispatch.log import Line, parse
from nemo_run_ray.remote.node.output import PREFIX
from nemo_run_ray.remote.status import JobState

AT = 1_800_000_000.25  # 2027-01-15 08:00:00.250 UTC
LINE = Line(AT, "RUNNING", "exp_1.job-a@2", "on node ffff")
TEXT = "2027-01-15T08:00:00.250Z RUNNING exp_1.job-a@2 on node ffff"


def test_a_line_is_for_people_too():
    assert str(LINE) == TEXT
    assert list(parse([f"{PREFIX}{TEXT}\n"])) == [LINE]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_the_readers_time_zone_does_not_matter(monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert str(LINE) == TEXT
        assert list(parse([PREFIX + TEXT])) == [LINE]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("state", JobState)
def test_every_state_can_be_read(state):
    line = Line(AT, state.value, "e.a")
    assert list(parse([f"{PREFIX}{line}"])) == [line]


def test_words_of_several_lines_become_one():
    line = Line(AT, "FAILED", "e.a", " exit code 1:\n  Traceback\r\n\tdied ")
    assert "\n" not in str(line)
    (read,) = parse([f"{PREFIX}{line}\n"])
    assert read.words == "exit code 1: Traceback died"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        TEXT,
        f" {PREFIX}{TEXT}",
        f"{PREFIX}{PREFIX}{TEXT}",
        f"{PREFIX}12 jobs, at most 78 at once: 50% of this node's 16.0 GiB",
        f"{PREFIX}stopping e.a: cancelled",
        f"{PREFIX}end 01234567: exit code 0",
        f"{PREFIX}2027-01-15T08:00:00.250Z",
        f"{PREFIX}2027-01-15T08:00:00.250Z running e.a",
        f"{PREFIX}2027-01-15T08:00:00Z RUNNING e.a",
        f"{PREFIX}2027-01-15T08:00:00.250 RUNNING e.a",
        f"{PREFIX}2027-01-15 08:00:00.250Z RUNNING e.a",
        "2026-01-01 00:00:00,000\tINFO job_manager.py:531 -- Runtime env is setting up.",
    ],
)
def test_other_lines_are_left_out(text):
    good = f"{PREFIX}{TEXT}"
    assert list(parse([good, text, good])) == [LINE, LINE]


@pytest.mark.parametrize(
    "when",
    [
        "2027-13-15T08:00:00.250Z",
        "2027-02-30T08:00:00.250Z",
        "2027-01-15T25:00:00.250Z",
        "2027-01-15T08:61:00.250Z",
        "0000-00-00T00:00:00.000Z",
    ],
)
def test_a_line_of_no_moment_is_left_out(when):
    """Somebody else may print into the log too."""
    good = f"{PREFIX}{TEXT}"
    assert list(parse([good, f"{PREFIX}{when} RUNNING e.a", good])) == [LINE, LINE]


_ids = st.text("aZ09_.-@", min_size=1, max_size=20)
_lines = st.builds(
    Line,
    at=st.floats(0, 4e9),
    state=st.sampled_from([one.value for one in JobState]),
    submission_id=_ids,
    words=st.text(max_size=60),
)


@settings(max_examples=60)
@given(st.lists(_lines, max_size=3), st.lists(st.text(max_size=20), max_size=3))
def test_what_is_written_can_be_read(lines, others):
    told = [f"{PREFIX}{line}\n" for line in lines]
    strangers = [text for text in others if not text.startswith(PREFIX)]
    read = list(parse([*strangers, *told, *strangers]))
    assert len(read) == len(lines)
    for line, found in zip(lines, read, strict=True):
        assert (found.state, found.submission_id) == (line.state, line.submission_id)
        assert found.words == " ".join(line.words.split())
        # Milliseconds are written, and the rest is cut off.
        assert line.at - 0.0011 < found.at <= line.at + 1e-6


@given(_lines)
def test_a_line_is_one_line(line):
    assert not re.search(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", str(line))
    assert len(f"{PREFIX}{line}".splitlines()) == 1


@given(st.text())
def test_any_text_can_be_read(text):
    assert list(parse(text.splitlines(keepends=True))) == []
    list(parse([f"{PREFIX}{text}", f"{PREFIX}{TEXT}{text}"]))
