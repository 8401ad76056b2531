"""``dgxcloud_exports``: source code in the environment stays out of the job's script."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor, DGXCloudRequest

from nemo_run_ray.patches.base import Edit, Patch

#: Variables of ``nemo_run_ray.transport``.
OUR_PREFIX = "_NEMO_RUN_RAY_SRC_"
#: What starts the name of a variable that carries source code: ours, and that of the Nemotron
#: recipes, whose transport works the same way.
SOURCE_PREFIXES = (OUR_PREFIX, "_NEMOTRON_SRC_")


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
        render: Any = vars(DGXCloudRequest).get("materialize")
        self.must(callable(render), "DGXCloudRequest.materialize")
        fields = getattr(DGXCloudRequest, "__dataclass_fields__", {})
        self.must({"executor", "extra_env"} <= set(fields), "the fields of DGXCloudRequest")
        create: Any = vars(DGXCloudExecutor).get("create_training_job")
        self.must(callable(create), "DGXCloudExecutor.create_training_job")
        self.must(isinstance(getattr(dgxcloud, "logger", None), logging.Logger), "its logger")
        return [
            Edit(DGXCloudRequest, "materialize", _without_source(render)),
            Edit(DGXCloudExecutor, "create_training_job", _logging_no_source(create)),
        ]


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
        short = _Shortened()
        dgxcloud.logger.addFilter(short)
        try:
            return create(self, *args, **kwargs)
        finally:
            dgxcloud.logger.removeFilter(short)

    return create_training_job


class _Shortened(logging.Filter):
    """NeMo-Run logs the whole workload at INFO; source code has no place there."""

    _VALUE = re.compile(
        rf'("name": "(?:{"|".join(SOURCE_PREFIXES)})\w*", "value": )"(?:[^"\\]|\\.)*"'
    )

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and not record.args:
            record.msg = self._VALUE.sub(r'\1"…"', record.msg)
        return True


def _kept(variables: Mapping[str, str], structured: Mapping[str, str]) -> dict[str, str]:
    """The variables that the script must set: all but source code that the workload has anyway."""
    return {
        name: value
        for name, value in variables.items()
        if not (name.startswith(SOURCE_PREFIXES) and structured.get(name) == value)
    }
