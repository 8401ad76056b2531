"""Patches of made-up targets: what ``apply``, ``undo`` and ``status`` promise for every patch."""

import logging
import sys
import types
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_run_ray import patches
from nemo_run_ray.errors import PatchError, UnsupportedNemoRun
from nemo_run_ray.patches import Edit, Patch, digest_of


class _Made(Patch):
    """A patch of whatever a test gives it."""

    name = "made_up"
    why = "tests"
    retired_by = "nothing"

    def __init__(self, *edits: Edit) -> None:
        super().__init__()
        self.wanted: Any = edits
        self.needed = True
        self.asked = 0

    def edits(self):
        self.asked += 1
        return self.wanted

    def is_needed(self) -> bool:
        return self.needed


@pytest.fixture
def target() -> SimpleNamespace:
    """Classes and a module to patch, new for every test."""

    class Parent:
        limit = 1

        def inherited(self) -> str:
            return "parent"

    class Child(Parent):
        own = ("a", "tuple")
        empty = None

        def plain(self) -> str:
            return "child"

        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

        @staticmethod
        def free() -> str:
            return "free"

        @property
        def seen(self) -> str:
            return "seen"

    module = types.ModuleType("made_up_module")
    module.function = lambda: "module"
    return SimpleNamespace(Parent=Parent, Child=Child, module=module)


@pytest.fixture
def every_kind(target) -> tuple[Edit, ...]:
    """An edit of each kind of attribute."""
    return (
        Edit(target.module, "function", lambda: "new"),
        Edit(target.Child, "inherited", lambda self: "new"),
        Edit(target.Child, "limit", 2),
        Edit(target.Child, "own", ["new"]),
        Edit(target.Child, "empty", "new"),
        Edit(target.Child, "plain", lambda self: "new"),
        Edit(target.Child, "of_class", classmethod(lambda cls: "new")),
        Edit(target.Child, "free", staticmethod(lambda: "new")),
        Edit(target.Child, "seen", property(lambda self: "new")),
        Edit(target.Child, "fresh", "new"),
        Edit(target.module, "fresh", "new"),
    )


class _Held:
    """What the targets hold themselves at one moment, to compare by identity."""

    def __init__(self, target: SimpleNamespace) -> None:
        self._owners = (target.Parent, target.Child, target.module)
        self._before = [dict(vars(owner)) for owner in self._owners]

    def is_unchanged(self) -> bool:
        now = [vars(owner) for owner in self._owners]
        return all(
            was.keys() == is_.keys() and all(is_[name] is value for name, value in was.items())
            for was, is_ in zip(self._before, now, strict=True)
        )


def test_apply_sets_every_attribute_once_and_undo_puts_back_the_very_objects(target, every_kind):
    held = _Held(target)
    patch = _Made(*every_kind)
    assert patch.undo() is True, "it was never applied"
    for number in (1, 2):
        undo = patch.apply()
        patch.apply()
        assert patch.asked == number
        child = target.Child()
        methods = [child.inherited(), child.plain(), child.of_class(), child.free()]
        assert [*methods, child.seen, target.module.function()] == ["new"] * 6
        assert (child.limit, child.own, child.empty, child.fresh) == (2, ["new"], "new", "new")
        assert undo() is patch.undo() is True
        assert held.is_unchanged()
        assert patch.status() == "off"
    target.Parent.inherited = lambda self: "changed later"
    assert target.Child().inherited() == "changed later"


class _Interrupting(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "error"), [(int, TypeError), (_Interrupting("Owner", (), {}), KeyboardInterrupt)]
)
def test_after_an_edit_that_fails_nothing_is_changed(target, every_kind, owner, error):
    held = _Held(target)
    patch = _Made(*every_kind, Edit(owner, "made_up", 1))
    with pytest.raises(error):
        patch.apply()
    assert held.is_unchanged()
    assert patch.status() == "off"
    patch.wanted = every_kind
    patch.apply()
    assert patch.status() == "applied"


def test_somebodys_wrapper_on_top_is_left_alone(target, every_kind, caplog):
    patch = _Made(*every_kind)
    patch.apply()
    ours = vars(target.Child)["plain"]

    def somebodys_wrapper(self: Any) -> str:
        return f"wrapped {ours(self)}"

    target.Child.plain = somebodys_wrapper
    covered = _Held(target)
    patch.apply()
    assert patch.asked == 1
    with caplog.at_level(logging.WARNING):
        assert patch.undo() is False
    assert covered.is_unchanged()
    (record,) = caplog.records
    assert "The patch made_up stays: another patch is on top of Child.plain." in record.getMessage()
    assert patch.status() == "applied, covered at Child.plain"

    target.Child.plain = ours
    assert patch.status() == "applied"
    assert patch.undo()
    assert target.Child().plain() == "child"


def test_a_patch_that_is_not_needed_changes_nothing(target, every_kind):
    held = _Held(target)
    patch = _Made(*every_kind)
    patch.needed = False
    undo = patch.apply()
    assert (patch.asked, patch.status(), undo()) == (0, "not needed", True)
    assert held.is_unchanged()
    patch.needed = True
    patch.apply()
    patch.needed = False  # it has added what it asks for
    assert patch.status() == "applied"


def test_a_method_that_is_replaced_must_have_the_known_body(target):
    """A wrapper needs no such thing: it calls the function that it wraps."""
    patch = _Made()
    digest = digest_of(target.Child, "plain")
    target.Child.plain = somebodys_wrapper = lambda self: "wrapped"
    edit = patch.wrapped(target.Child, "plain", lambda below: (below,), digest=digest)
    assert edit.value == (somebodys_wrapper,)
    with pytest.raises(UnsupportedNemoRun, match=r"the body of Child\.plain"):
        patch.wrapped(target.Child, "plain", str, digest="0123456789abcdef")
    with pytest.raises(PatchError) as caught:
        patch.wrapped(target.Child, "gone", str)
    for word in ("made_up", "Child.gone", version("nemo-run"), "Nothing was changed"):
        assert word in str(caught.value)


@pytest.fixture
def several(target, monkeypatch) -> dict[str, _Made]:
    """Three patches instead of the real ones."""
    made = {
        "one": _Made(Edit(target.Child, "own", "one")),
        "two": _Made(Edit(target.Child, "limit", "two")),
        "three": _Made(Edit(target.module, "function", "three")),
    }
    for name, patch in made.items():
        patch.name = name
        monkeypatch.setitem(sys.modules, f"made_up.{name}", SimpleNamespace(PATCH=patch))
    monkeypatch.setattr(patches, "MODULES", {name: f"made_up.{name}" for name in made})
    return made


def _states(one: str, two: str, three: str) -> dict[str, str]:
    return {"one": one, "two": two, "three": three}


def test_apply_and_undo_take_all_or_those_named(several, target):
    held = _Held(target)
    patches.apply("two")
    assert patches.status() == _states("off", "applied", "off")
    undo = patches.apply()
    assert patches.status() == _states("applied", "applied", "applied")
    assert undo() is True
    assert patches.status() == _states("off", "applied", "off"), "what this call has applied"
    patches.apply()
    assert patches.undo("three") is True
    assert patches.status() == _states("applied", "applied", "off")
    assert patches.undo() is patches.undo() is True
    assert held.is_unchanged()


def test_one_that_fails_stops_those_named_and_is_left_out_of_all(several, target, caplog):
    patches.apply("one")
    held = _Held(target)
    several["three"].wanted = (Edit(int, "made_up", 1),)
    with pytest.raises(TypeError):
        patches.apply("one", "two", "three")
    assert held.is_unchanged()

    def unknown() -> None:
        several["three"].must(False, "Thing.method")

    several["three"].edits = unknown
    with pytest.raises(UnsupportedNemoRun, match="three"):
        patches.apply("two", "three")
    assert held.is_unchanged()
    patches.apply()
    assert patches.status() == _states("applied", "applied", "off")
    (record,) = caplog.records
    assert "A patch is left out: The patch three does not know Thing" in record.getMessage()
