"""What wrong values are refused with: golden/fields.txt has expressions, each with its message.

`python -m tests.unit.test_messages` writes the messages as they are now.
"""

from decimal import Decimal
from pathlib import Path

import pytest
from nemo_run.core.execution import SlurmExecutor
from nemo_run.core.execution.launcher import Launcher, SlurmTemplate, Torchrun
from nemo_run.core.packaging.git import GitArchivePackager

import nemo_run_ray
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import Probe

GOLDEN = Path(__file__).parent / "golden" / "fields.txt"
_NAMES = {name: getattr(nemo_run_ray, name) for name in nemo_run_ray.__all__} | {
    kind.__name__: kind
    for kind in (
        *(Launcher, SlurmTemplate, Torchrun, GitArchivePackager),
        *(Decimal, Probe, SlurmExecutor),
    )
}


def _message(expression: str) -> str:
    with pytest.raises(ConfigError) as caught:
        eval(expression, {**_NAMES, "nan": float("nan"), "inf": float("inf")})
    return str(caught.value)


def _table() -> dict[str, str]:
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    return dict(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


def test_a_wrong_value_is_refused_with_field_value_and_what_is_allowed():
    assert {expression: _message(expression) for expression in _table()} == _table()


if __name__ == "__main__":
    rows = [f"{expression}\n    {_message(expression)}\n" for expression in _table()]
    GOLDEN.write_text("".join(rows), encoding="utf-8")
