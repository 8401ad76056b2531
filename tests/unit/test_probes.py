import dataclasses
import math

import fiddle as fdl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import AMOUNT_MAX, CommandProbe, HttpProbe, PortProbe, Probe
from nemo_run_ray.remote.spec import ProbeSpec

_NAN, _INF = float("nan"), float("inf")

_GOOD_PORTS = [1, 80, 65535, "http", "a b", "é"]
_GOOD_TIMES = [1, 0.01, 3600, 10**9]

_KINDS = {PortProbe: {"port": 80}, HttpProbe: {"port": 80}, CommandProbe: {"command": ["true"]}}

_GOOD = {
    (PortProbe, "port"): _GOOD_PORTS,
    (HttpProbe, "port"): _GOOD_PORTS,
    (HttpProbe, "path"): ["/", "/health", "/v1/models?ready=1&x=%20", "//"],
    (HttpProbe, "status"): [100, 200, 204, 503, 599],
    (CommandProbe, "command"): [["true"], ["sh", "-c", "a b; $HOME * 'x'"], ["é", "", "\n"]],
    **{(kind, name): _GOOD_TIMES for kind in _KINDS for name in ("interval_s", "timeout_s")},
}


def _cases(values: dict) -> list:
    return [
        pytest.param(kind, name, value, id=f"{kind.__name__}.{name}={value!r}"[:60])
        for (kind, name), several in values.items()
        for value in several
    ]


def _made(kind: type[Probe], **fields: object) -> Probe:
    return kind(**{**_KINDS[kind], **fields})


@pytest.mark.parametrize(("kind", "name", "value"), _cases(_GOOD))
def test_good_values(kind, name, value):
    probe = _made(kind, **{name: value})
    assert getattr(probe, name) == value
    expected = tuple(value) if name == "command" else value
    assert getattr(probe.spec(), name) == expected


@given(
    st.sampled_from(sorted(_KINDS, key=lambda kind: kind.__name__)),
    st.sampled_from(["interval_s", "timeout_s"]),
    st.floats() | st.integers(-(10**12), 10**12),
)
def test_any_number_is_a_time_or_refused(kind, name, value):
    if math.isfinite(value) and 0 < value <= AMOUNT_MAX:
        assert getattr(_made(kind, **{name: value}).spec(), name) == value
    else:
        with pytest.raises(ConfigError, match=name):
            _made(kind, **{name: value})


@given(st.text(max_size=8))
def test_any_text_is_a_path_that_fits_into_a_request_or_refused(text):
    try:
        path = HttpProbe(80, path=f"/{text}").path
    except ConfigError:
        return
    line = f"GET {path} HTTP/1.1".encode("ascii")
    assert line.split() == [b"GET", path.encode(), b"HTTP/1.1"]


_SAVED = [
    PortProbe(8000),
    PortProbe("a b", interval_s=0.25, timeout_s=5),
    HttpProbe("web", path="/up?a=1&b=%20", status=204, interval_s=2, timeout_s=3),
    CommandProbe(["sh", "-c", "test 'a b' \"$HOME\" é\n", ""], timeout_s=0.5),
]


@pytest.mark.parametrize("probe", _SAVED, ids=lambda probe: type(probe).__name__)
def test_an_executor_with_one_survives_json_and_yaml(probe):
    config = RayExecutor(service=True, ready=probe).to_config()
    text = ZlibJSONSerializer().serialize(config)
    again = fdl.build(ZlibJSONSerializer().deserialize(text))
    assert again.ready == probe
    assert again.ready.spec() == probe.spec()
    saved = YamlSerializer().serialize(config)
    assert f"nemo_run_ray.fields.{type(probe).__name__}" in saved
    assert RayExecutor(service=True, ready=probe).clone().ready == probe


@pytest.mark.parametrize("kind", _KINDS)
def test_every_field_is_in_the_spec(kind):
    """A field that the node is not told would do nothing."""
    assert {one.name for one in dataclasses.fields(kind)} <= set(ProbeSpec._fields)
