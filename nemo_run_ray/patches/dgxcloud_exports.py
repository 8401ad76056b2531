"""``dgxcloud_exports``: source code in the environment stays out of the job's script."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Mapping, Sequence
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
        create = self.method(DGXCloudExecutor, "create_training_job")
        return [
            Edit(DGXCloudRequest, "materialize", _without_source(render)),
            Edit(DGXCloudExecutor, "create_training_job", _logging_no_source(create)),
        ]


PATCH = DGXCloudExportsPatch()


def _without_source(render: Any) -> Any:
    def kept(variables: Mapping[str, str]) -> dict[str, str]:
        return {k: value for k, value in variables.items() if not k.startswith(SOURCE_PREFIXES)}

    @functools.wraps(render)
    def materialize(self: DGXCloudRequest) -> str:
        # Copies, because other threads read the executor, and rendering may raise.
        request = copy.copy(self)
        request.executor = copy.copy(self.executor)
        request.executor.env_vars = kept(self.executor.env_vars)
        request.extra_env = kept(self.extra_env)
        return str(render(request))

    return materialize


def _logging_no_source(create: Any) -> Any:
    @functools.wraps(create)
    def create_training_job(self: DGXCloudExecutor, *args: Any, **kwargs: Any) -> Any:
        variables = self.env_vars.items()
        source = [value for name, value in variables if name.startswith(SOURCE_PREFIXES)]

        def shorten(record: logging.LogRecord) -> bool:
            """NeMo-Run logs the workload and the answer to it, as JSON."""
            text = record.getMessage()
            for value in source:
                if len(value) > _LONG:
                    text = text.replace(json.dumps(value)[1:-1], "…")
            record.msg, record.args = text, ()
            return True

        dgxcloud.logger.addFilter(shorten)
        try:
            return create(self, *args, **kwargs)
        finally:
            dgxcloud.logger.removeFilter(shorten)

    return create_training_job
