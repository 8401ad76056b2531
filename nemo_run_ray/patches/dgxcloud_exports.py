"""``dgxcloud_exports``: source code in the environment stays out of the job's script."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Sequence
from typing import Any

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudRequest

from nemo_run_ray.patches import Edit, Patch, around

#: Variables of ``nemo_run_ray.cloud``.
OUR_PREFIX = "_NEMO_RUN_RAY_SRC_"


class DGXCloudExportsPatch(Patch):
    """DGX Cloud: variables that carry source code stay in the workload's environment alone. They
    are not logged, nor written into the job's script, which would then be sent in many workloads.
    """

    name = "dgxcloud_exports"
    retired_by = (
        "a DGXCloudRequest.materialize() that does not repeat the structured environment variables"
    )

    def edits(self) -> Sequence[Edit]:
        return [
            self.wrapped(DGXCloudRequest, "materialize", _without_source),
            Edit(dgxcloud.logger, "filter", functools.partial(_shorten, dgxcloud.logger.filter)),
        ]


PATCH = DGXCloudExportsPatch()


@around
def _without_source(render: Any, self: DGXCloudRequest) -> str:
    # Copies, because other threads read the executor.
    request = copy.copy(self)
    request.executor = copy.copy(self.executor)
    for owner, name in ((request.executor, "env_vars"), (request, "extra_env")):
        kept = {
            key: value
            for key, value in getattr(owner, name).items()
            # The transport of the Nemotron recipes works the same way.
            if not key.startswith((OUR_PREFIX, "_NEMOTRON_SRC_"))
        }
        setattr(owner, name, kept)
    return str(render(request))


def _shorten(judge: Any, record: logging.LogRecord) -> Any:
    """NeMo-Run logs the workload and the answer to it, as JSON."""
    # A long value is source code, and not a count or a path beside it.
    record.msg = re.sub(r'("value": ?)"(?:[^"\\]|\\.){200,}"', r'\1"…"', record.getMessage())
    record.args = ()
    return judge(record)
