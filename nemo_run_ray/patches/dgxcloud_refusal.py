"""``dgxcloud_refusal``: credentials that DGX Cloud refuses are not tried again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

from nemo_run_ray.patches import Edit, Patch, around


class DGXCloudRefusalPatch(Patch):
    """DGX Cloud: when the platform refuses the credentials, its reason is logged once and nothing
    is asked again; NeMo-Run asks three times in 30 s and logs it each time.
    """

    name = "dgxcloud_refusal"
    retired_by = "a get_auth_token() that looks at the status of the answer"

    def edits(self) -> Sequence[Edit]:
        return [
            self.wrapped(dgxcloud, "requests", _with_refusals),
            self.wrapped(DGXCloudExecutor, "get_auth_token", _once),
        ]


PATCH = DGXCloudRefusalPatch()


class _Refusal(BaseException):  # has to pass NeMo-Run's "except Exception"
    """The platform's answer is final: its status, and the reason."""


def _with_refusals(real: Any) -> ModuleType:
    """The module ``requests`` for NeMo-Run: ``post`` raises a final answer to a token request."""

    def post(url: str, *args: Any, **kwargs: Any) -> Any:
        answer = real.post(url, *args, **kwargs)
        # Malformed, unknown credentials, forbidden: the same question gets the same answer.
        if url.endswith("/token") and answer.status_code in (400, 401, 403):
            raise _Refusal(answer.status_code, answer.text.strip() or answer.reason)
        return answer

    module = ModuleType("requests")
    vars(module).update(post=post, __getattr__=functools.partial(getattr, real))
    return module


@around
def _once(ask: Any, self: DGXCloudExecutor) -> str | None:
    try:
        return ask(self)  # type: ignore[no-any-return]
    except _Refusal as refusal:
        dgxcloud.logger.error(
            "Failed to retrieve auth token: %s/token answered %d, which asking again does not "
            "change: %s",
            self.base_url,
            *refusal.args,
        )
        return None
