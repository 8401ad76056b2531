"""Patches of made-up targets: what ``apply``, ``undo`` and ``status`` promise for every patch."""

import logging
import re
import threading
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_run_ray import patches
from nemo_run_ray.errors import PatchError, UnsupportedNemoRun
from nemo_run_ray.patches import base
from nemo_run_ray.patches.base import Edit, Patch


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


@pytest.fixture(autouse=True)
def nemo_run_is(monkeypatch) -> Callable[[str], None]:
    """Sets the version of NeMo-Run that is found; a supported one until then."""

    def be(number: str) -> None:
        def version(name: str) -> str:
            if name != "nemo-run":
                raise PackageNotFoundError(name)
            return number

        monkeypatch.setattr(base, "version", version)

    be("0.11.1")
    return be


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


def test_the_comparison_of_these_tests_can_fail(target):
    held = _Held(target)
    own = target.Child.own
    target.Child.own = tuple(["a", "tuple"])  # noqa: C409 an equal one, and not the same
    assert not held.is_unchanged()
    target.Child.own = own
    assert held.is_unchanged()
    target.Child.inherited = target.Parent.inherited  # reads the same, and is set
    assert not held.is_unchanged()


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


def test_two_edits_of_one_attribute_are_undone_in_reverse(target):
    held = _Held(target)
    first, second = (_Made(Edit(target.Child, "own", name)) for name in ("first", "second"))
    first.apply()
    second.apply()
    assert second.undo()
    assert target.Child.own == "first"
    assert first.undo()
    assert held.is_unchanged()


def test_many_threads_apply_it_once(target):
    held = _Held(target)
    patch = _Made(Edit(target.Child, "own", "new"))
    start = threading.Barrier(8)

    def apply() -> None:
        start.wait(timeout=30)
        patch.apply()

    threads = [threading.Thread(target=apply) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout=30)
    assert patch.asked == 1
    assert patch.undo()
    assert held.is_unchanged()


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
    for word in ("made_up", "Child.plain", "somebodys_wrapper"):
        assert word in record.getMessage()
    assert patch.status().startswith("applied, covered by ")
    assert "Child.plain" in patch.status()
    assert "Child.seen" not in patch.status()

    target.Child.plain = ours
    assert patch.status() == "applied"
    assert patch.undo()
    assert target.Child().plain() == "child"


def test_only_the_very_object_that_was_set_can_be_undone(target):
    patch = _Made(Edit(target.Child, "own", [1]), Edit(target.Child, "limit", 2))
    patch.apply()
    target.Child.own = [1]
    assert "covered by" in patch.status()
    del target.Child.own
    assert patch.undo() is False
    assert "own" not in vars(target.Child)
    assert target.Child.limit == 2
    assert "Child.own is nothing" in patch.status()


@pytest.mark.parametrize("number", ["0.8", "0.8.99", "0.1.0"])
def test_an_older_nemo_run_is_refused(nemo_run_is, target, every_kind, number):
    held = _Held(target)
    nemo_run_is(number)
    patch = _Made(*every_kind)
    with pytest.raises(UnsupportedNemoRun, match=re.escape(f"NeMo-Run {number};")) as caught:
        patch.apply()
    for word in ("made_up", "0.9 to 0.12", "Nothing was changed"):
        assert word in str(caught.value)
    assert patch.asked == 0
    assert held.is_unchanged()


@pytest.mark.parametrize(
    "number",
    ["0.9", "0.9.0", "0.9.0rc3", "0.10.7", "0.11.99", "0.11.1+local", "0.12.0", "0.110.0", "1.0"],
)
def test_a_known_or_newer_nemo_run_is_taken(nemo_run_is, target, number):
    nemo_run_is(number)
    patch = _Made(Edit(target.Child, "own", "new"))
    patch.apply()
    assert target.Child.own == "new"
    nemo_run_is("0.1")
    assert patch.undo(), "on any version"


def test_on_a_newer_nemo_run_what_is_replaced_must_be_known(nemo_run_is, target):
    """A wrapper needs no such thing: it calls the function that it wraps."""
    held = _Held(target)
    known = frozenset({base.digest_of(vars(target.Child)["plain"])})
    nemo_run_is("0.13")
    fits = _Made(Edit(target.Child, "plain", lambda self: "new", known))
    fits.apply()
    assert fits.undo()
    wrong = _Made(
        Edit(target.Child, "own", "new"),
        Edit(target.Child, "plain", lambda self: "new", frozenset({"0123456789abcdef"})),
    )
    with pytest.raises(UnsupportedNemoRun, match=r"the body of Child\.plain .*0123456789abcdef"):
        wrong.apply()
    assert held.is_unchanged()
    nemo_run_is("0.12.9")  # it was verified there
    wrong.apply()
    assert base.digest_of(len) == "", "it has no source"


def test_a_target_that_is_not_as_expected_is_named():
    patch = _Made()
    patch.must(True, "Thing.method")
    with pytest.raises(PatchError) as caught:
        patch.must(False, "Thing.method")
    for word in ("made_up", "Thing.method", "0.11.1", "0.9 to 0.12", "Nothing was changed"):
        assert word in str(caught.value)


def test_what_is_not_needed_changes_nothing(nemo_run_is, target, every_kind):
    held = _Held(target)
    patch = _Made(*every_kind)
    patch.needed = False
    nemo_run_is("0.1")
    undo = patch.apply()
    assert patch.asked == 0
    assert held.is_unchanged()
    assert patch.status() == "not needed"
    assert undo() is True
    patch.needed = True
    nemo_run_is("0.11")
    patch.apply()
    patch.needed = False  # it has added what it asks for
    assert patch.status() == "applied"


# ---------------------------------------------------------------------- all patches by their names


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
    monkeypatch.setattr(patches, "PATCHES", made)
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


def test_an_unknown_name_is_refused_with_the_known_ones(several, target):
    held = _Held(target)
    for act in (patches.apply, patches.undo):
        with pytest.raises(PatchError, match=r"'four'.* one, two, three"):
            act("one", "four")
    assert held.is_unchanged()


def test_one_that_fails_stops_those_named_and_is_left_out_of_all(several, target, caplog):
    several["three"].verified = ("1.8", "1.8")
    patches.apply("one")
    held = _Held(target)
    with pytest.raises(UnsupportedNemoRun, match="three"):
        patches.apply("one", "two", "three")
    assert held.is_unchanged()
    patches.apply()
    assert patches.status() == _states("applied", "applied", "off")
    (record,) = caplog.records
    assert "A patch is left out: The patch three does not know NeMo-Run" in record.getMessage()


def test_one_that_is_not_needed_or_covered_does_not_keep_the_others_on(several, target):
    several["three"].needed = False
    patches.apply()
    target.Child.limit = "another's"
    assert patches.undo() is False
    states = patches.status()
    assert states.pop("two").startswith("applied, covered by ")
    assert states == {"one": "off", "three": "not needed"}
    assert target.Child.limit == "another's"


def test_patches_on_top_of_each_other_are_undone_in_reverse(several, target):
    held = _Held(target)
    several["three"].wanted = (Edit(target.Child, "own", "three"),)
    patches.apply()
    assert several["one"].status().startswith("applied, covered by ")
    assert patches.undo() is True
    assert held.is_unchanged()
