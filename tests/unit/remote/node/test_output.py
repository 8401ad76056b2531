"""Output cut into lines, wherever the reads are cut."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_run_ray.remote.node.output import CHUNK_BYTES, LINE_MAX, Lines


def _fed(*pieces: bytes) -> list[str]:
    """What each piece made complete, and last what the end did."""
    lines = Lines()
    return [lines.feed(piece) for piece in (*pieces, b"")]


def _expected(data: bytes) -> str:
    text = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n").replace("\r", "\n")
    return text if text.endswith("\n") or not text else f"{text}\n"


#: Rich in what can be cut in two: line ends, characters of several bytes, and wrong bytes.
_PARTS = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"a", "é".encode(), "漢".encode(), "😀".encode(), b"\xff", b"\xe2\x82"]
)
_BYTES = st.lists(_PARTS | st.binary(max_size=4), max_size=30).map(b"".join)


@given(_BYTES, st.lists(st.integers(0, 100), max_size=12))
@example(b"a\r\nb", [2])
@example("é".encode() * 4, [1, 2, 3])
@example(b"\xed\xa0\x80\n", [1, 2])
@settings(max_examples=400, deadline=None)
def test_bytes_cut_anywhere_give_the_same_lines(data, cuts):
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    assert "".join(_fed(*pieces)) == _expected(data)


@given(_BYTES)
@settings(max_examples=200, deadline=None)
def test_bytes_one_by_one_give_whole_lines_only(data):
    fed = _fed(*(data[index : index + 1] for index in range(len(data))))
    assert "".join(fed) == _expected(data)
    assert all(one == "" or one.endswith("\n") for one in fed)
    assert not any("\r" in one for one in fed)


def test_a_line_waits_for_its_end_and_goes_with_it():
    assert _fed(b"a", b"b", b"c\nd", b"\n") == ["", "", "abc\n", "d\n", ""]


def test_several_lines_go_at_once():
    assert _fed(b"a\n\nb\nc") == ["a\n\nb\n", "c\n"]


def test_many_lines_at_once_leave_the_begun_one_whole():
    assert _fed(b"x\n" * LINE_MAX + b"res", b"t\n") == ["x\n" * LINE_MAX, "rest\n", ""]


def test_a_last_line_without_its_end_gets_one():
    assert _fed(b"a\nb") == ["a\n", "b\n"]


def test_nothing_is_no_line():
    assert _fed() == [""]


@pytest.mark.parametrize(
    "pieces", [[b"a\r\nb\n"], [b"a\r", b"\nb\n"], [b"a", b"\r", b"\n", b"b\n"]]
)
def test_a_pair_is_one_end_also_when_it_is_cut_in_two(pieces):
    assert "".join(_fed(*pieces)) == "a\nb\n"


def test_a_return_ends_a_line():
    assert "".join(_fed(b"10%\r20%\r", b"30%\r\r", b"done")) == "10%\n20%\n30%\n\ndone\n"


def test_a_return_at_the_very_end_is_a_lines_end():
    assert "".join(_fed(b"a\r")) == "a\n"


def test_wrong_bytes_are_shown():
    assert "".join(_fed(b"a\xffb\xc3(\n", b"\xe2\x82")) == "a\\xffb\\xc3(\n\\xe2\\x82\n"


def test_other_characters_that_unicode_takes_for_line_ends_are_none():
    text = "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g"
    assert _fed(text.encode(), b"\n") == ["", f"{text}\n", ""]


def test_a_line_of_the_greatest_length_stays_whole():
    assert _fed(b"x" * LINE_MAX, b"\n") == ["", "x" * LINE_MAX + "\n", ""]


@pytest.mark.parametrize("piece", ["x", "é", "😀"])
def test_a_longer_line_is_cut_and_nothing_is_lost(piece):
    data = (piece * (3 * LINE_MAX + 17)).encode()
    lines, fed = Lines(), []
    for start in range(0, len(data), CHUNK_BYTES):
        fed.append(lines.feed(data[start : start + CHUNK_BYTES]))
    fed.append(lines.feed(b""))
    text = "".join(fed)
    assert text.replace("\n", "") == data.decode()
    longest = max(map(len, text.split("\n")))
    assert LINE_MAX <= longest <= LINE_MAX + CHUNK_BYTES
    assert text.count("\n") <= 4


def test_what_waits_for_its_lines_end_is_bounded():
    lines, waits = Lines(), 0
    for _ in range(100):
        fed = lines.feed(b"x" * CHUNK_BYTES)
        waits = waits + CHUNK_BYTES - len(fed.replace("\n", ""))
        assert waits <= LINE_MAX + CHUNK_BYTES
