import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_run_ray.remote.spec import JobSpec

_texts = st.text(max_size=30)
_specs = st.builds(
    JobSpec,
    argv=st.lists(_texts, min_size=1, max_size=5).map(tuple),
    env=st.dictionaries(_texts, _texts, max_size=4),
    cwd=st.none() | _texts,
    python=st.none() | _texts,
    grace_s=st.floats(0, 1e6),
    keep_run_dir=st.booleans(),
    has_code=st.booleans(),
    secrets=st.lists(_texts, max_size=3).map(tuple),
    config=st.none() | _texts,
)


@given(_specs)
def test_json_and_back(spec):
    text = spec.to_json()
    assert JobSpec.from_json(text) == spec
    assert text.isascii()


@given(st.dictionaries(_texts, _texts, min_size=2, max_size=4))
def test_equal_specs_make_equal_texts(env):
    turned = dict(reversed(env.items()))
    assert JobSpec(argv=("x",), env=env).to_json() == JobSpec(argv=("x",), env=turned).to_json()


def test_defaults_may_be_left_out():
    assert JobSpec.from_json('{"version": 1, "argv": ["true"]}') == JobSpec(argv=("true",))


@pytest.mark.parametrize("change", [{"version": 2}, {"version": None}, {"color": "red"}])
def test_another_version_is_refused(change):
    values = {**json.loads(JobSpec(argv=("true",)).to_json()), **change}
    with pytest.raises(ValueError, match="this code reads version 1"):
        JobSpec.from_json(json.dumps(values))
