"""``dgxcloud_refusal``: credentials that DGX Cloud refuses are not tried again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

from nemo_run_ray.patches import Edit, Patch, original

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
        ask = self.method(DGXCloudExecutor, "get_auth_token", "self")
        # How it asks, which the signature does not tell.
        names = original(ask, "get_auth_token").__code__.co_names
        self.must({"requests", "post"} <= set(names), "how get_auth_token asks", ask)
        requests = vars(dgxcloud).get("requests")
        self.must(callable(getattr(requests, "post", None)), f"{dgxcloud.__name__}.requests")
        self.must(hasattr(dgxcloud, "logger"), f"{dgxcloud.__name__}.logger")
        asking: ContextVar[bool] = ContextVar("asking", default=False)
        return [
            Edit(dgxcloud, "requests", _Requests(requests, asking)),
            Edit(DGXCloudExecutor, "get_auth_token", _once(ask, asking)),
        ]


PATCH = DGXCloudRefusalPatch()


class _Refusal(BaseException):  # has to pass NeMo-Run's "except Exception"
    """The platform's answer is final."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class _Requests:
    """The module ``requests``, as NeMo-Run's module sees it."""

    def __init__(self, real: Any, asking: ContextVar[bool]) -> None:
        self._real = real
        self._asking = asking

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def post(self, *args: Any, **kwargs: Any) -> Any:
        """Post as ``requests.post`` does.

        Raises:
            _Refusal: it was asked for a token, and the answer is final.
        """
        answer = self._real.post(*args, **kwargs)
        # It is raised only below this patch's frame, which catches it: others may ask meanwhile.
        if self._asking.get() and answer.status_code in FINAL:
            raise _Refusal(answer.status_code, answer.text.strip() or answer.reason)
        return answer


def _once(ask: Any, asking: ContextVar[bool]) -> Any:
    @functools.wraps(ask)
    def get_auth_token(self: DGXCloudExecutor, *args: Any, **kwargs: Any) -> str | None:
        before = asking.set(True)
        try:
            token: str | None = ask(self, *args, **kwargs)
            return token
        except _Refusal as refusal:
            dgxcloud.logger.error(
                "Failed to retrieve auth token: %s/token answered %d, which asking again does not "
                "change: %s",
                self.base_url,
                refusal.status,
                refusal.reason,
            )
            return None
        finally:
            asking.reset(before)

    return get_auth_token
