"""Output cut into lines, wherever the reads are cut."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_run_ray.remote.node.output import CHUNK_BYTES, LINE_MAX, Lines


def _fed(*pieces: bytes) -> list[str]:
    """What each piece made complete, and last what the end did."""
    lines = Lines()
    return [lines.take(piece) for piece in (*pieces, b"")]


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


@pytest.mark.parametrize("piece", ["x", "é", "😀"])
def test_a_longer_line_is_cut_and_nothing_is_lost(piece):
    data = (piece * (3 * LINE_MAX + 17)).encode()
    lines, fed = Lines(), []
    for start in range(0, len(data), CHUNK_BYTES):
        fed.append(lines.take(data[start : start + CHUNK_BYTES]))
    fed.append(lines.take(b""))
    text = "".join(fed)
    assert text.replace("\n", "") == data.decode()
    longest = max(map(len, text.split("\n")))
    assert LINE_MAX <= longest <= LINE_MAX + CHUNK_BYTES
    assert text.count("\n") <= 4
