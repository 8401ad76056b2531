"""What an executor knows of cluster files: which fields were given, and who resolves the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, ClassVar

#: Gives an executor what its cluster file says. It stands above this module, and adds itself.
FROM_FILE: list[Callable[[Any], Any]] = []


class TakesFile:
    """A dataclass of fields that a cluster file may give, where the code does not.

    Its field ``given_fields`` names those that were given the value of their default: such a value
    wins over a file, and cannot be told by looking at it.
    """

    given_fields: list[str]
    _given: frozenset[str]
    _is_made: bool
    __dataclass_fields__: ClassVar[dict[str, Any]]
    #: Where the file says that the values of secrets come from; no field, since it is not saved.
    secret_places: Mapping[str, Sequence[str]] = MappingProxyType({})
    #: Name of the file whose values this executor has, when it was resolved; empty otherwise.
    resolved_from: str = ""

    def __new__(cls, *args: Any, **given: Any) -> Any:
        self = super().__new__(cls)
        self._given = frozenset(given)
        return self

    def _note_given_fields(self) -> None:
        # A saved executor is built with all its fields, and says which of them were given.
        if "given_fields" not in self._given:
            self.given_fields = sorted(name for name in self._given if self._is_default(name))
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # A field that is assigned later is given in code too, also with its default's value.
        later = self.__dict__.get("_is_made") and name in self.__dataclass_fields__
        if later and name != "given_fields" and self._is_default(name):
            super().__setattr__("given_fields", sorted({*self.given_fields, name}))

    def resolved(self) -> Any:
        """The executor with what its cluster file says; itself when it names none.

        Raises:
            ConfigError: the file is wrong, or does not have what the fields name.
        """
        found = self
        for resolve in FROM_FILE:
            found = resolve(found)
        return found

    def has_own(self, name: str) -> bool:
        """Whether a field was given in code, and so wins over a cluster file."""
        return name in self.given_fields or not self._is_default(name)

    def _is_default(self, name: str) -> bool:
        (known,) = (known for known in fields(self) if known.name == name)
        made = known.default if known.default_factory is MISSING else known.default_factory()
        return bool(getattr(self, name) == made)
