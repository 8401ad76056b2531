"""``dgxcloud_exports``: source code in the environment stays out of the job's script."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor, DGXCloudRequest

from nemo_run_ray.patches import Edit, Patch

#: Variables of ``nemo_run_ray.cloud``.
OUR_PREFIX = "_NEMO_RUN_RAY_SRC_"
#: Prefix of the variables that carry source code: this package's, and that of the
#: Nemotron recipes, whose transport works the same way.
SOURCE_PREFIXES = (OUR_PREFIX, "_NEMOTRON_SRC_")
#: Characters of a value that is source code, and not a count or a path beside it.
_LONG = 200


class DGXCloudExportsPatch(Patch):
    name = "dgxcloud_exports"
    why = (
        "DGX Cloud: variables that carry source code stay in the workload's environment, where "
        "they are already, and are not written into the job's script too, which would then be "
        "moved to the cluster in pieces, one workload each; nor are they logged."
    )
    retired_by = (
        "a DGXCloudRequest.materialize() that does not repeat the structured environment variables"
    )

    def edits(self) -> Sequence[Edit]:
        render = self.method(DGXCloudRequest, "materialize")
        fields = getattr(DGXCloudRequest, "__dataclass_fields__", {})
        self.must({"executor", "extra_env"} <= set(fields), "the fields of DGXCloudRequest")
        create = self.method(DGXCloudExecutor, "create_training_job")
        self.must(
            isinstance(getattr(dgxcloud, "logger", None), logging.Logger),
            f"{dgxcloud.__name__}.logger",
        )
        return [
            Edit(DGXCloudRequest, "materialize", _without_source(render)),
            Edit(DGXCloudExecutor, "create_training_job", _logging_no_source(create)),
        ]


PATCH = DGXCloudExportsPatch()


def _without_source(render: Any) -> Any:
    @functools.wraps(render)
    def materialize(self: DGXCloudRequest) -> str:
        # Copies, because other threads read the executor, and rendering may raise.
        request = copy.copy(self)
        request.executor = copy.copy(self.executor)
        structured = self.executor.env_vars
        request.executor.env_vars = _kept(structured, structured)
        request.extra_env = _kept(self.extra_env, structured)
        return str(render(request))

    return materialize


def _logging_no_source(create: Any) -> Any:
    @functools.wraps(create)
    def create_training_job(self: DGXCloudExecutor, *args: Any, **kwargs: Any) -> Any:
        values = [
            value for name, value in self.env_vars.items() if name.startswith(SOURCE_PREFIXES)
        ]
        short = _Shortened(values)
        dgxcloud.logger.addFilter(short)
        try:
            return create(self, *args, **kwargs)
        finally:
            dgxcloud.logger.removeFilter(short)

    return create_training_job


class _Shortened(logging.Filter):
    """NeMo-Run logs the workload and the answer to it; source code has no place there."""

    def __init__(self, values: Iterable[str]) -> None:
        super().__init__()
        self._values = [json.dumps(value)[1:-1] for value in values if len(value) > _LONG]

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        for value in self._values:
            text = text.replace(value, "…")
        record.msg, record.args = text, ()
        return True


def _kept(variables: Mapping[str, str], structured: Mapping[str, str]) -> dict[str, str]:
    """The variables that the script must set: all but source code that the workload has anyway."""
    return {
        name: value
        for name, value in variables.items()
        if not (name.startswith(SOURCE_PREFIXES) and structured.get(name) == value)
    }
