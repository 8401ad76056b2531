"""A patch of NeMo-Run: applied whole or not at all, undone exactly, never on an unknown structure.

A NeMo-Run older than those that a patch was verified on is refused by its version. On a newer one
the targets decide: the patch is applied when all of them are as it knows them. One record drives
both ways: what ``apply`` sets is what ``undo`` takes back.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import textwrap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

from nemo_run_ray.errors import UnsupportedNemoRun
from nemo_run_ray.fields import version_of

log = logging.getLogger(__name__)

_ABSENT = object()
_lock = threading.RLock()


@dataclass(frozen=True)
class Edit:
    """One attribute to replace.

    Attributes:
        owner: the class or module that gets it.
        name: of the attribute.
        value: the new one.
        bodies: digests, by ``digest_of``, of all function bodies that the new one can take the
            place of; empty when it wraps what is there and does not replace it.
    """

    owner: Any
    name: str
    value: Any
    bodies: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Done:
    edit: Edit
    before: Any  # what the owner itself held; _ABSENT when it inherited the attribute or had none


class Patch(ABC):
    """One change of NeMo-Run. Subclasses say what; applying and undoing is here."""

    #: The name by which users ask for it.
    name: ClassVar[str]
    #: Its change and the reason, in one sentence.
    why: ClassVar[str]
    #: The change of NeMo-Run that would make it unnecessary.
    retired_by: ClassVar[str]
    #: First and last version of NeMo-Run that it was verified on; the third number is not compared.
    verified: ClassVar[tuple[str, str]] = ("0.9", "0.12")

    def __init__(self) -> None:
        self._done: list[_Done] = []
        self._told = False

    @abstractmethod
    def edits(self) -> Sequence[Edit]:
        """The attributes to replace. It is called only when the patch is not applied.

        Raises:
            UnsupportedNemoRun: a target is not as this patch knows it.
        """

    def is_needed(self) -> bool:
        """Whether this NeMo-Run lacks what the patch adds."""
        return True

    def refresh(self) -> None:  # noqa: B027 nothing to drop, for most
        """Drop what other libraries remember of the targets; after every change, either way."""

    def apply(self) -> Callable[[], bool]:
        """Apply it, if it is needed and not applied yet.

        Returns:
            ``undo``.

        Raises:
            UnsupportedNemoRun: this NeMo-Run is older than those that the patch was verified on,
                or a target is not as it knows it. Nothing was changed.
        """
        with _lock:
            if not self._done and self.is_needed():
                self._refuse_older()
                edits = self.edits()
                self._check_newer(edits)
                self._set(edits)
                self.refresh()
        return self.undo

    def undo(self) -> bool:
        """Put everything back as it was, unless another program has put something on top.

        Returns:
            Whether the patch is off now. ``False`` means that a patch of another program lies on
            top of this one; then nothing is changed, and a warning names it.
        """
        with _lock:
            covers = self._covers()
            if covers:
                log.warning(
                    "The patch %s stays: something lies on top of it (%s). Undo that first.",
                    self.name,
                    "; ".join(covers),
                )
                return False
            if self._done:
                while self._done:
                    _restore(self._done.pop())
                self.refresh()
            return True

    def status(self) -> str:
        """Its state: ``applied``, ``off``, ``not needed``, or ``applied, covered by …``."""
        with _lock:
            if not self._done:
                return "off" if self.is_needed() else "not needed"
            covers = self._covers()
            return f"applied, covered by {'; '.join(covers)}" if covers else "applied"

    def method(self, owner: type, name: str, *parameters: str, exactly: bool = False) -> Any:
        """The function that a class holds itself, another package's wrapper of it included.

        Args:
            owner: the class.
            name: of the function.
            parameters: which NeMo-Run's function must have, below all wrappers.
            exactly: whether it may have no others.

        Raises:
            UnsupportedNemoRun: it is not there, or has other parameters.
        """
        function = vars(owner).get(name)
        known = inspect.isfunction(function)
        if known:
            found = list(inspect.signature(original(function, name)).parameters)
            known = found == [*parameters] if exactly else set(parameters) <= set(found)
        self.must(known, f"{owner.__name__}.{name}", function)
        return function

    def must(self, holds: bool, target: str, found: Any = None) -> None:
        """Guard of a subclass: refuse when a target is not as expected.

        Args:
            holds: whether it is.
            target: its name.
            found: the function in its place, which may be another package's.

        Raises:
            UnsupportedNemoRun: it is not.
        """
        if not holds and inspect.isfunction(found) and not _is_nemo_runs(found):
            raise UnsupportedNemoRun(
                f"The patch {self.name} does not know {target}: another package has put "
                f"{found.__module__}.{found.__qualname__} there. Nothing was changed. Apply the "
                "patch before that package does so."
            )
        if not holds:
            raise UnsupportedNemoRun(
                f"The patch {self.name} does not know {target} of NeMo-Run {version('nemo-run')}; "
                f"{self._supported()} Nothing was changed."
            )

    def _refuse_older(self) -> None:
        found = version("nemo-run")
        if version_of(found) < version_of(self.verified[0]):
            raise UnsupportedNemoRun(
                f"The patch {self.name} does not know NeMo-Run {found}; {self._supported()} "
                "Nothing was changed."
            )

    def _check_newer(self, edits: Sequence[Edit]) -> None:
        """On a NeMo-Run that it was not verified on, what it replaces must be what it knows."""
        found = version("nemo-run")
        if version_of(found) <= version_of(self.verified[1]):
            return
        for edit in edits:
            if edit.bodies:
                function = vars(edit.owner)[edit.name]
                body = digest_of(function)
                expected = " or ".join(sorted(edit.bodies))
                where = f"{edit.owner.__name__}.{edit.name}"
                self.must(
                    body in edit.bodies,
                    f"the body of {where} (digest {body}, not {expected})",
                    function,
                )
        if not self._told:
            self._told = True
            log.info(
                "The patch %s was verified on NeMo-Run %s to %s; %s has the same targets.",
                self.name,
                *self.verified,
                found,
            )

    def _supported(self) -> str:
        return f"it was verified on {self.verified[0]} to {self.verified[1]}."

    def _set(self, edits: Sequence[Edit]) -> None:
        try:
            for edit in edits:
                before = vars(edit.owner).get(edit.name, _ABSENT)
                setattr(edit.owner, edit.name, edit.value)
                self._done.append(_Done(edit, before))
        except BaseException:
            while self._done:
                _restore(self._done.pop())
            raise

    def _covers(self) -> list[str]:
        found = []
        for done in self._done:
            now = vars(done.edit.owner).get(done.edit.name, _ABSENT)
            if now is not done.edit.value:
                what = "nothing" if now is _ABSENT else repr(now)
                found.append(f"{done.edit.owner.__name__}.{done.edit.name} is {what}")
        return found


def original(function: Any, name: str) -> Any:
    """NeMo-Run's function below the wrappers that other packages have put on it.

    Most of those are plain functions with ``*args, **kwargs``, which refer to the one below.
    """
    seen = [function]
    for one in seen:
        if _is_nemo_runs(one) and one.__name__ == name:
            return inspect.unwrap(one)
        try:
            names = inspect.getclosurevars(one)
        except ValueError:  # it refers to a name that has no value yet
            continue
        for below in (*names.nonlocals.values(), *names.globals.values()):
            if inspect.isfunction(below) and below not in seen:
                seen.append(below)
    return function


def _is_nemo_runs(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "nemo_run"


def digest_of(function: Any) -> str:
    """The first characters of the SHA-256 of a function's source; empty when it has none."""
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(textwrap.dedent(source).strip().encode()).hexdigest()[:16]


def _restore(done: _Done) -> None:
    if done.before is _ABSENT:
        delattr(done.edit.owner, done.edit.name)
    else:
        setattr(done.edit.owner, done.edit.name, done.before)
