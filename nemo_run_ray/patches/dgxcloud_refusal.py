"""``dgxcloud_refusal``: credentials that DGX Cloud refuses are not tried again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

from nemo_run_ray.patches import Edit, Patch

#: Answers that the same question gets again: malformed, unknown credentials, forbidden.
FINAL = frozenset({400, 401, 403})


class DGXCloudRefusalPatch(Patch):
    name = "dgxcloud_refusal"
    why = (
        "DGX Cloud: when the platform refuses the credentials, its reason is logged once and "
        "nothing is asked again; NeMo-Run asks three times in 30 s and logs it each time."
    )
    retired_by = "a get_auth_token() that looks at the status of the answer"

    def edits(self) -> Sequence[Edit]:
        ask = self.method(DGXCloudExecutor, "get_auth_token")
        self.must(hasattr(dgxcloud, "requests"), f"{dgxcloud.__name__}.requests")
        return [
            Edit(dgxcloud, "requests", _Requests(vars(dgxcloud)["requests"])),
            Edit(DGXCloudExecutor, "get_auth_token", _once(ask)),
        ]


PATCH = DGXCloudRefusalPatch()


class _Refusal(BaseException):  # has to pass NeMo-Run's "except Exception"
    """The platform's answer is final: its status, and the reason."""


class _Requests:
    """The module ``requests``, as NeMo-Run's module sees it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def post(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """Post as ``requests.post`` does.

        Raises:
            _Refusal: a token was asked for, and the answer is final.
        """
        answer = self._real.post(url, *args, **kwargs)
        if url.endswith("/token") and answer.status_code in FINAL:
            raise _Refusal(answer.status_code, answer.text.strip() or answer.reason)
        return answer


def _once(ask: Any) -> Any:
    @functools.wraps(ask)
    def get_auth_token(self: DGXCloudExecutor) -> str | None:
        try:
            token: str | None = ask(self)
            return token
        except _Refusal as refusal:
            dgxcloud.logger.error(
                "Failed to retrieve auth token: %s/token answered %d, which asking again does not "
                "change: %s",
                self.base_url,
                *refusal.args,
            )
            return None

    return get_auth_token
