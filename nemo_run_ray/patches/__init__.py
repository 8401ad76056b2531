"""Changes of NeMo-Run itself, each by its name: ``apply``, ``undo``, ``status``.

A patch is applied whole or not at all, undone exactly, and never applied to an unknown structure.
One record drives both ways: ``undo`` takes back what ``apply`` set.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from importlib.metadata import version
from typing import Any, ClassVar, NamedTuple

from nemo_run_ray.errors import PatchError, UnsupportedNemoRun

log = logging.getLogger(__name__)

#: Names the patches that ``import nemo_run_ray`` applies: separated by commas, or ``all``.
VARIABLE = "NEMO_RUN_RAY_PATCHES"
#: The module of each patch, which has it as ``PATCH`` and is imported when the patch is used.
MODULES = {
    name: f"{__name__}.{name}"
    for name in (
        "job_group",
        "data_mover_configs",
        "dgxcloud_exports",
        "dgxcloud_legacy_kwargs",
        "dgxcloud_refusal",
        "slurm_ray",
    )
}
_ABSENT = object()


class Edit(NamedTuple):
    """One attribute of a class or a module, and its new value."""

    owner: Any
    name: str
    value: Any

    @property
    def now(self) -> Any:
        """The value that the owner itself holds; ``_ABSENT`` when it inherits one or has none."""
        return vars(self.owner).get(self.name, _ABSENT)


class Patch(ABC):
    """One change of NeMo-Run. Subclasses name the edits; applying and undoing them is here.

    The docstring of a subclass says what it changes and why, in one sentence.
    """

    #: The name by which users ask for it.
    name: ClassVar[str]
    #: The change of NeMo-Run that would make it unnecessary.
    retired_by: ClassVar[str]
    #: First and last version of NeMo-Run that it was verified on. Its structure decides, and not
    #: its version, whether a patch is applied.
    verified: ClassVar[tuple[str, str]] = ("0.9", "0.12")

    def __init__(self) -> None:
        self._applied: Sequence[Edit] = ()
        self._before = ExitStack()  # puts back what they have replaced

    @property
    def why(self) -> str:
        """Its change and the reason."""
        return " ".join(str(self.__doc__).split())

    @abstractmethod
    def edits(self) -> Sequence[Edit]:
        """The attributes to replace. It is called only when the patch is not applied.

        Raises:
            UnsupportedNemoRun: a target is not as this patch knows it.
        """

    def is_needed(self) -> bool:
        """Whether this NeMo-Run lacks what the patch adds."""
        return True

    def apply(self) -> Callable[[], bool]:
        """Apply it, if it is needed and not applied yet.

        Raises:
            UnsupportedNemoRun: a target is not as the patch knows it. Nothing was changed.
        """
        if not self._applied and self.is_needed():
            with ExitStack() as stack:
                edits = self.edits()
                for edit in edits:
                    before = edit.now
                    setattr(*edit)
                    if before is _ABSENT:
                        stack.callback(delattr, edit.owner, edit.name)
                    else:
                        stack.callback(setattr, edit.owner, edit.name, before)
                self._applied, self._before = edits, stack.pop_all()
        return self.undo

    def undo(self) -> bool:
        """Put everything back as it was, and return whether it is off now.

        ``False`` means that another program's patch lies on top: a warning names it.
        """
        if covered := self._covered():
            log.warning("The patch %s stays: another patch is on top of %s.", self.name, covered)
        else:
            self._before.close()
            self._applied = ()
        return not covered

    def status(self) -> str:
        """Its state: ``applied``, ``off``, ``not needed``, or ``applied, covered at …``."""
        if not self._applied:
            return "off" if self.is_needed() else "not needed"
        covered = self._covered()
        return f"applied, covered at {covered}" if covered else "applied"

    def wrapped(self, owner: type, name: str, wrap: Callable[[Any], Any], digest: str = "") -> Edit:
        """The edit that wraps a function of a class, which may be another package's wrapper.

        Where the patch replaces the body, that has the ``digest`` of ``digest_of``.

        Raises:
            UnsupportedNemoRun: the function is missing, or has another body.
        """
        target = f"{owner.__name__}.{name}"
        self.must(vars(owner).get(name) is not None, target)
        self.must(not digest or digest == digest_of(owner, name), f"the body of {target}")
        return Edit(owner, name, wrap(vars(owner)[name]))

    def must(self, holds: bool, target: str) -> None:
        """Guard of a subclass: raise ``UnsupportedNemoRun`` when a target is not as expected."""
        if not holds:
            raise UnsupportedNemoRun(
                f"The patch {self.name} does not know {target} of NeMo-Run {version('nemo-run')}; "
                f"it was verified on {' to '.join(self.verified)}. Nothing was changed."
            )

    def _covered(self) -> str:
        """The attributes that another program has replaced since."""
        return ", ".join(
            f"{getattr(edit.owner, '__name__', edit.owner)}.{edit.name}"
            for edit in self._applied
            if edit.now is not edit.value
        )


def around(replacement: Any) -> Any:
    """The wrapper of a function, which ``replacement`` gets before the arguments of a call."""

    def wrap(original: Any) -> Any:
        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return wrapper

    return wrap


def digest_of(owner: type, name: str) -> str:
    """The first characters of the SHA-256 of a method in its class's file, whatever wraps it."""
    method = rf"def {name}\(.*?(?=\n    (?:@|def )|\Z)"
    body = re.search(method, inspect.getsource(owner), re.DOTALL)
    return hashlib.sha256((body[0] if body else "").strip().encode()).hexdigest()[:16]


# ---------------------------------------------------------------------- all patches by their names


def patch(name: str) -> Patch:
    """The patch of a name; ``PatchError`` when there is none."""
    if name not in MODULES:
        raise PatchError(f"There is no patch {name!r}; there are {', '.join(MODULES)}.")
    return importlib.import_module(MODULES[name]).PATCH  # type: ignore[no-any-return]


def apply(*names: str) -> Callable[[], bool]:
    """Apply the named patches: every one of them or, after an error, none.

    Without a name it applies all that fit; a warning names each that is left out.

    Returns:
        A function that undoes those that this call applied; ``True`` when all of them are off.

    Raises:
        PatchError: there is no patch of that name.
        UnsupportedNemoRun: a patch that is named does not know this NeMo-Run.
    """
    done: list[Patch] = []
    for one in [patch(name) for name in names or MODULES]:
        try:
            if one.status() == "off":
                one.apply()
                done.append(one)
        except BaseException as error:
            if names or not isinstance(error, UnsupportedNemoRun):
                _all_off(done)
                raise
            log.warning("A patch is left out: %s", error)
    return partial(_all_off, done)


def apply_from_environment() -> None:
    """Apply the patches that ``NEMO_RUN_RAY_PATCHES`` names; ``all`` is ``apply()``.

    Raises:
        PatchError: there is no patch of a name, or it does not know this NeMo-Run.
    """
    names = os.environ.get(VARIABLE, "").replace(",", " ").split()
    try:
        if names:
            apply(*(() if "all" in names else names))
    except PatchError as error:
        raise PatchError(f"{VARIABLE} (names with commas, or 'all'): {error}") from error


def undo(*names: str) -> bool:
    """Undo the named patches, or all, and return whether all of them are off now."""
    return _all_off([patch(name) for name in names or MODULES])


def _all_off(chosen: Sequence[Patch]) -> bool:
    off = [one.undo() for one in reversed(chosen)]  # every one, whatever the others say
    return all(off)


def status() -> dict[str, str]:
    """The state of every patch, by its name; see ``Patch.status``."""
    return {name: patch(name).status() for name in MODULES}
