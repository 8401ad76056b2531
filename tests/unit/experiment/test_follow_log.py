import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray.errors import StreamCut, Unanswered, Unauthorised
from nemo_run_ray.experiment.logs import LINE_MAX_CHARS, attempt_mark, follow, lines, output_of
from nemo_run_ray.remote.end_record import end_mark

_MARK = end_mark("0123456789")
_END = f"{_MARK}{{}}\n"
#: The last line of another job, which a task may print.
_OTHERS_END = f"{end_mark('abcdefghij')}{{}}\n"
_bodies = st.text("ab\n\ré", max_size=40)
_logs = st.tuples(_bodies, st.sampled_from(["", "\n", f"\n{_END}", _END])).map("".join)
_faults = st.lists(st.integers(0, 10_000), max_size=40)
_sizes = st.lists(st.integers(1, 12), min_size=1, max_size=6)


class Flaky:
    """A growing log behind a bad line. One number decides what goes wrong at one call.

    When the numbers are used up, the job is over and every answer is complete.
    """

    def __init__(self, text: str, faults: list[int], sizes: list[int]) -> None:
        self._text = text
        self._faults = iter(faults)
        self._sizes = itertools.cycle(sizes)
        self._over = False
        self._there = 0

    def is_over(self) -> bool:
        fault = next(self._faults, None)
        if fault is not None and fault % 4 == 0:
            raise Unanswered("no answer")
        self._over = self._over or fault is None or fault % 7 == 0
        return self._over

    def __call__(self, at_once: bool) -> Iterator[str]:
        return self.whole() if at_once else self.tail()

    def tail(self) -> Iterator[str]:
        fault = next(self._faults, None)
        text = self._now(fault)
        if fault is None:
            yield from self._pieces(text)
            return
        yield from self._pieces(text[: fault % (len(text) + 1)])
        if fault % 2:
            raise StreamCut("cut")

    def whole(self) -> Iterator[str]:
        fault = next(self._faults, None)
        text = self._now(fault)
        if fault is not None and fault % 2:
            yield from self._pieces(text[: fault % (len(text) + 1)])
            raise StreamCut("cut")
        yield from self._pieces(text)

    def _now(self, fault: int | None) -> str:
        grown = len(self._text) if fault is None or self._over else fault % (len(self._text) + 1)
        self._there = max(self._there, grown)
        return self._text[: self._there]

    def _pieces(self, text: str) -> Iterator[str]:
        while text:
            size = next(self._sizes)
            yield text[:size]
            text = text[size:]


class Pauses:
    """Time that passes at once, but not for ever."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        assert len(self.slept_s) < 1000, "it never ends"


def followed(source: Flaky, sleep: Callable[[float], None]) -> Iterator[str]:
    return follow(source, source.is_over, (_MARK,), sleep)


def check_every_character_once(text: str, faults: list[int], sizes: list[int]) -> None:
    """All of it, or the beginning and an error when the log of an ended job cannot be read."""
    found = ""
    try:
        for piece in followed(Flaky(text, faults, sizes), Pauses()):
            found += piece
    except (Unanswered, StreamCut):
        assert text.startswith(found)
        assert len(faults) >= 6
    else:
        assert found == text


@given(_logs, _faults, _sizes)
def test_every_character_once_whatever_goes_wrong(text, faults, sizes):
    check_every_character_once(text, faults, sizes)


@given(_bodies, _bodies, st.sampled_from(["", _END]), _faults, _sizes)
def test_a_line_of_the_user_that_looks_like_our_last_one(before, after, end, faults, sizes):
    check_every_character_once(f"{before}\n{_OTHERS_END}{after}\n{end}", faults, sizes)


def test_an_ended_jobs_log_that_breaks_off_comes_by_the_stream():
    """Ray holds the whole of a log in memory to answer; one of gigabytes may not come that way."""
    text = f"a\nb\n{_END}"
    source, pauses = Flaky(text, [], [3]), Pauses()

    def cut() -> Iterator[str]:
        yield text[:2]
        raise StreamCut("cut")

    source.whole = cut
    assert "".join(followed(source, pauses)) == text
    assert sum(pauses.slept_s) < 5


def test_what_is_written_right_after_the_end_is_not_lost():
    """Ray tells that the first process is dead before the group's driver has written why."""
    source = Flaky("a\n", [], [3])

    def sleep(seconds: float) -> None:
        source._text = "a\nthis program's first process was killed\n"

    found = "".join(followed(source, sleep))
    assert found == "a\nthis program's first process was killed\n"


class Short(Flaky):
    """A line beyond the WebSocket's limit: the stream ends before it, each time."""

    def tail(self) -> Iterator[str]:
        yield self._text[:2]

    def is_over(self) -> bool:
        return next(self._faults, None) is None


def test_a_stream_that_never_gets_further_is_read_the_other_way():
    source = Short("a\nlong line\n", [1] * 20, [5])
    pauses = Pauses()
    found = followed(source, pauses)
    seen = ""
    while len(seen) < 12:
        seen += next(found)
    assert seen == "a\nlong line\n"
    assert len(pauses.slept_s) < 20
    assert "".join(found) == ""


def test_the_log_of_an_ended_job_that_cannot_be_read_is_an_error_soon():
    pauses = Pauses()
    with pytest.raises(StreamCut):
        list(followed(Flaky("abc", [7] * 100, [1]), pauses))
    assert sum(pauses.slept_s) < 15


def test_wrong_credentials_are_not_waited_for():
    class Locked(Flaky):
        def is_over(self) -> bool:
            raise Unauthorised("401")

    with pytest.raises(Unauthorised):
        list(followed(Locked("abc", [], [1]), Pauses()))


@given(st.lists(st.text("ab\n\r\x0c\u2028é", max_size=10)))
def test_lines(texts):
    found = list(lines(iter(texts)))
    text = "".join(texts)
    assert "".join(found) == text
    assert all(one.endswith("\n") for one in found[:-1])
    assert all("\n" not in one[:-1] for one in found)
    assert len(found) == text.count("\n") + (not text.endswith("\n") and text != "")


@pytest.mark.parametrize("size", [1000, LINE_MAX_CHARS, 3 * LINE_MAX_CHARS + 5])
def test_a_very_long_line_comes_in_pieces(size):
    text = "x" * (2 * LINE_MAX_CHARS + 7) + "\nend\n"
    found = list(lines(text[at : at + size] for at in range(0, len(text), size)))
    assert "".join(found) == text
    assert max(len(one) for one in found) <= LINE_MAX_CHARS
    assert found[-1] == "end\n"


_SETTING_UP = "2026-11-22 04:53:24,072\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
_HEAD = f"{_SETTING_UP}Running entrypoint for job exp.job: exec python3 -m x task job exp.job 01\n"
_OUTPUTS = st.lists(
    st.sampled_from(
        ["a\n", "\n", "no end", "nemo_run_ray| a hint\n", "nemo_run", "| x\r\n", "50%\r", "| "]
    )
)


def _in_pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(_OUTPUTS, st.lists(st.integers(0, 10_000)))
def test_only_what_the_task_printed_is_left(printed, cuts):
    body = "".join(printed)
    body += "" if not body or body.endswith("\n") else "\n"
    log = f"{_HEAD}{body}{_END}"
    assert "".join(output_of(_in_pieces(log, cuts), (_MARK,))) == body
    running = log[: -len(_END)]
    assert "".join(output_of(_in_pieces(running, cuts), (_MARK,))) == body


def test_a_line_without_its_end_is_passed_on_unless_it_may_be_ours():
    texts = [_HEAD, "Name? ", "me", "\nne", "mo_run_", "x", f"{_MARK}\n", _MARK[:20], _MARK[20:]]
    seen = []
    arriving = (seen.append(text) or text for text in texts)
    found = [(text, len(seen)) for text in output_of(arriving, (_MARK,))]
    assert found == [("Name? ", 2), ("me", 3), ("\n", 4), ("nemo_run_x", 6), (f"{_MARK}\n", 7)]


@given(st.lists(st.integers(0, 10_000)))
def test_a_job_that_never_started_shows_what_ray_says(cuts):
    text = "runtime_env setup failed: x -- Runtime env is setting up.\nTraceback\n  y"
    assert "".join(output_of(_in_pieces(f"{_SETTING_UP}{text}", cuts), (_MARK,))) == text


@given(st.lists(st.integers(0, 10_000)))
def test_every_attempt_has_a_head_of_its_own(cuts):
    """A line of the task's that looks like ours begins none."""
    mark = attempt_mark("0123456789")
    never = "why\n"
    own = "nemo_run_ray| attempt 2\nRunning entrypoint for job x: y\n"
    log = (
        f"{_HEAD}one\n{own}{_END}{mark}2\n{_HEAD}two\n{_END}{mark}3\n"
        f"{_SETTING_UP}{never}{mark}4\n{_HEAD}4"
    )
    expected = (
        f"one\n{own}nemo_run_ray| attempt 2\ntwo\nnemo_run_ray| attempt 3\n{never}"
        "nemo_run_ray| attempt 4\n4"
    )
    assert "".join(output_of(_in_pieces(log, cuts), (_MARK,), (mark,))) == expected


@given(st.lists(st.integers(0, 10_000)), st.integers(0, 14) | st.just(1000))
def test_output_that_comes_before_rays_line_is_shown(cuts, early):
    """Ray flushes its line when the command runs already."""
    printed = "one\ntwo\nthree\n"
    head = _HEAD.removeprefix(_SETTING_UP)
    whole = f"{printed}{_END}"
    log = f"{_SETTING_UP}{whole[:early]}{head}{whole[early:]}"
    assert "".join(output_of(_in_pieces(log, cuts), (_MARK,))) == printed
