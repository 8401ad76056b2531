"""What the readers of other projects' files share."""

import pytest

from nemo_run_ray.cluster_files.credentials import looks_like_credential
from nemo_run_ray.cluster_files.foreign import at, shown


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), {"a": [1, {"b": 2}]}),
        (("a", 1, "b"), 2),
        (("a", 2), None),
        (("a", "b"), None),
        (("a", 0, 0), None),
        (("a", 0, "b"), None),
        (("c", "d"), None),
    ],
)
def test_what_lies_at_a_path(path, value):
    assert at({"a": [1, {"b": 2}]}, path) == value


def test_a_value_in_a_message_is_short_and_nothing_of_a_table_is_shown():
    assert shown({"token": "hunter2"}) == "a table of keys"
    assert shown(["hunter2"]) == "a list"
    assert shown(None) == "without a value"
    assert shown({1}) == "of the type set"
    assert shown("a" * 70) == "'" + "a" * 56 + "..."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", True),
        ("OPENAI_API_KEY", True),
        ("client_secret", True),
        ("DB_PASSWORD", True),
        ("TOKEN", True),
        ("MY_JUDGE_KEY", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("MYTOKEN", False),
        ("HF_TOKEN_PATH", False),
        ("HF_HOME", False),
    ],
)
def test_names_of_credentials(name, expected):
    assert looks_like_credential(name) is expected
