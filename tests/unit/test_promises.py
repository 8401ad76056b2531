"""The table of promises names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ROWS = re.findall(
    r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/promises.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("path", "name"), _ROWS, ids=[name or path for path, name in _ROWS])
def test_the_test_of_a_promise_exists(path, name):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {name or 'test_'}" in text


def test_the_table_names_tests():
    assert len(_ROWS) > 40
    assert len(set(_ROWS)) == len(_ROWS), "one promise, one test"
