import itertools
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray.dashboard.log_text import decode_log
from nemo_run_ray.errors import StreamCut

_texts = st.text(max_size=60) | st.text(
    'a"\\/\n\r\t\0\x1fué😀\u2028\ud7ff\ue000\U0010ffff', max_size=40
)
_bodies = st.tuples(_texts, st.booleans(), st.booleans()).map(
    lambda drawn: (
        drawn[0],
        json.dumps(
            {"logs": drawn[0]},
            ensure_ascii=drawn[1],
            separators=(",", ":") if drawn[2] else None,
        ),
    )
)


def _cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in itertools.cycle(sizes):
        if not text:
            return pieces
        pieces.append(text[:size])
        text = text[size:]


@given(_bodies, st.lists(st.integers(1, 15), min_size=1, max_size=8))
def test_every_text_however_it_is_cut(body, sizes):
    text, sent = body
    assert "".join(decode_log(iter(_cut(sent, sizes)))) == text


@given(_bodies, st.lists(st.integers(1, 15), min_size=1, max_size=8), st.floats(0, 1))
def test_an_answer_that_ends_early_is_noticed(body, sizes, share):
    text, sent = body
    found: list[str] = []
    pieces = decode_log(iter(_cut(sent[: int((len(sent) - 2) * share)], sizes)))
    with pytest.raises(StreamCut):
        found.extend(pieces)
    assert text.startswith("".join(found))


def test_what_has_arrived_is_passed_on_at_once():
    pieces = decode_log(iter(['{"logs": "one\\n', "two\\ud83d", '\\ude00"}']))
    assert [next(pieces) for _ in range(3)] == ["one\n", "two", "😀"]


def test_an_answer_without_a_log():
    with pytest.raises(StreamCut):
        list(decode_log(iter(['{"detail": "nothing"}'])))


def test_a_large_log_needs_little_memory():
    line = json.dumps("0123456789 é\t" * 400)[1:-1]
    pieces = itertools.chain(['{"logs": "'], itertools.repeat(line, 2000), ['"}'])
    tracemalloc.start()
    try:
        size = sum(len(piece) for piece in decode_log(pieces))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == 13 * 400 * 2000
    assert peak < 8 * 1024**2


def test_an_answer_that_never_comes_to_its_log_is_given_up():
    with pytest.raises(StreamCut, match="has no log"):
        list(decode_log(itertools.repeat(" " * 100)))
