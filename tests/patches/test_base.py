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
    """Sets the version of NeMo-Run that is found; one that is supported until then."""

    def be(found: str) -> None:
        def version(name: str) -> str:
            if name != "nemo-run":
                raise PackageNotFoundError(name)
            return found

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
        Edit(target.Child, "plain", lambda self: "new"),
        Edit(target.Child, "of_class", classmethod(lambda cls: "new")),
        Edit(target.Child, "free", staticmethod(lambda: "new")),
        Edit(target.Child, "seen", property(lambda self: "new")),
        Edit(target.Child, "fresh", "new"),
        Edit(target.module, "fresh", "new"),
    )


@pytest.fixture
def held(target) -> Callable[[], list[dict[str, object]]]:
    """What each target holds itself, to compare by identity."""
    owners = (target.Parent, target.Child, target.module)
    return lambda: [dict(vars(owner)) for owner in owners]


def _same(before: list[dict[str, object]], after: list[dict[str, object]]) -> bool:
    return [one.keys() for one in before] == [one.keys() for one in after] and all(
        one[name] is value
        for was, one in zip(before, after, strict=True)
        for name, value in was.items()
    )


def test_what_counts_as_the_same(target, held):
    """The comparison that the tests below rest on can fail."""
    before = held()
    assert _same(before, held())
    target.Child.own = tuple(["a", "tuple"])  # noqa: C409 an equal one, and not the same
    assert not _same(before, held())
    target.Child.own = before[1]["own"]
    assert _same(before, held())
    target.Child.inherited = target.Parent.inherited  # reads the same, and is set
    assert not _same(before, held())


# ---------------------------------------------------------------------- apply and undo


def test_apply_sets_every_attribute(target, every_kind):
    _Made(*every_kind).apply()
    child = target.Child()
    assert target.module.function() == target.module.fresh == "new"
    assert [child.inherited(), child.plain(), child.of_class(), child.free(), child.seen] == [
        "new"
    ] * 5
    assert (target.Child.limit, target.Child.own, target.Child.fresh) == (2, ["new"], "new")


def test_undo_puts_back_the_very_objects(held, every_kind):
    before = held()
    patch = _Made(*every_kind)
    patch.apply()
    assert not _same(before, held())
    assert patch.undo() is True
    assert _same(before, held())
    assert patch.status() == "off"


def test_apply_returns_its_undo(held, every_kind):
    before = held()
    undo = _Made(*every_kind).apply()
    assert undo() is True
    assert _same(before, held())


def test_an_inherited_attribute_is_deleted_again(target):
    undo = _Made(Edit(target.Child, "inherited", lambda self: "new")).apply()
    undo()
    assert "inherited" not in vars(target.Child)
    target.Parent.inherited = lambda self: "changed later"
    assert target.Child().inherited() == "changed later"


def test_an_attribute_that_was_nowhere_is_deleted_again(target):
    undo = _Made(Edit(target.Child, "fresh", 1)).apply()
    undo()
    assert not hasattr(target.Child, "fresh")


def test_descriptors_come_back_unbound(target):
    """``getattr`` would have bound them to the class."""
    made, free = vars(target.Child)["of_class"], vars(target.Child)["free"]
    undo = _Made(
        Edit(target.Child, "of_class", classmethod(lambda cls: "new")),
        Edit(target.Child, "free", staticmethod(lambda: "new")),
    ).apply()
    undo()
    assert vars(target.Child)["of_class"] is made
    assert vars(target.Child)["free"] is free
    assert type("Grandchild", (target.Child,), {}).of_class() == "Grandchild"


def test_a_value_of_none_is_put_back(target):
    """``None`` is a value; only what was absent is deleted."""
    target.Child.own = None
    undo = _Made(Edit(target.Child, "own", 1)).apply()
    undo()
    assert "own" in vars(target.Child)
    assert target.Child.own is None


def test_two_edits_of_one_attribute_are_undone_in_reverse(target, held):
    before = held()
    second = _Made(Edit(target.Child, "own", "second"))
    first = _Made(Edit(target.Child, "own", "first"))
    first.apply()
    second.apply()
    assert second.undo()
    assert target.Child.own == "first"
    assert first.undo()
    assert _same(before, held())


def test_twice_is_once(held, every_kind):
    before = held()
    patch = _Made(*every_kind)
    patch.apply()
    once = held()
    patch.apply()
    assert patch.asked == 1
    assert _same(once, held())
    patch.undo()
    assert _same(before, held())


def test_undo_twice(held, every_kind):
    before = held()
    patch = _Made(*every_kind)
    undo = patch.apply()
    assert undo() is True
    assert undo() is True
    assert _same(before, held())
    assert patch.status() == "off"


def test_undo_of_what_was_never_applied(held, every_kind):
    before = held()
    assert _Made(*every_kind).undo() is True
    assert _same(before, held())


def test_on_and_off_and_on(target, every_kind, held):
    before = held()
    patch = _Made(*every_kind)
    for _ in range(3):
        patch.apply()
        assert target.Child.limit == 2
        patch.undo()
        assert _same(before, held())
    assert patch.asked == 3


def test_many_threads_apply_it_once(target, held):
    before = held()
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
    assert _same(before, held())


# ---------------------------------------------------------------------- all or nothing


def test_an_edit_that_fails_in_the_middle_undoes_those_before(every_kind, held):
    before = held()
    middle = len(every_kind) // 2
    impossible = Edit(int, "made_up", 1)  # Python refuses it
    patch = _Made(*every_kind[:middle], impossible, *every_kind[middle:])
    with pytest.raises(TypeError, match="immutable type"):
        patch.apply()
    assert _same(before, held())
    assert patch.status() == "off"


def test_after_a_failure_it_can_be_applied(every_kind, held):
    before = held()
    patch = _Made(*every_kind, Edit(int, "made_up", 1))
    with pytest.raises(TypeError):
        patch.apply()
    patch.wanted = every_kind
    patch.apply()
    assert patch.status() == "applied"
    patch.undo()
    assert _same(before, held())


def test_an_interrupt_in_the_middle_changes_nothing(every_kind, held):
    class Interrupting(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise KeyboardInterrupt

    before = held()
    patch = _Made(*every_kind, Edit(Interrupting("Owner", (), {}), "x", 1))
    with pytest.raises(KeyboardInterrupt):
        patch.apply()
    assert _same(before, held())
    assert patch.status() == "off"


def test_edits_that_cannot_be_made_out_change_nothing(every_kind, held, target):
    class Puzzled(_Made):
        def edits(self):
            self.must(not hasattr(target.module, "function"), "module.function")
            return every_kind

    before = held()
    patch = Puzzled()
    with pytest.raises(UnsupportedNemoRun):
        patch.apply()
    assert _same(before, held())
    assert patch.status() == "off"


# ---------------------------------------------------------------------- another package's on top


@pytest.fixture
def covered(target, every_kind) -> tuple[_Made, Callable[[], None]]:
    """An applied patch with another's wrapper on one of its attributes, and what takes it off."""
    patch = _Made(*every_kind)
    patch.apply()
    ours = vars(target.Child)["plain"]

    def somebodys_wrapper(self: Any) -> str:
        return f"wrapped {ours(self)}"

    target.Child.plain = somebodys_wrapper
    return patch, lambda: setattr(target.Child, "plain", ours)


def test_a_wrapper_on_top_is_left_alone(target, covered, held):
    patch, _ = covered
    before = held()
    assert patch.undo() is False
    assert _same(before, held())
    assert target.Child().plain() == "wrapped new"
    assert target.Child().seen == "new"


def test_the_warning_names_patch_and_wrapper(covered, caplog):
    patch, _ = covered
    with caplog.at_level(logging.WARNING):
        patch.undo()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for word in ("made_up", "Child.plain", "somebodys_wrapper"):
        assert word in record.getMessage()


def test_the_status_says_covered_by(covered):
    patch, _ = covered
    status = patch.status()
    assert status.startswith("applied, covered by ")
    assert "Child.plain" in status
    assert "somebodys_wrapper" in status
    assert "Child.seen" not in status


def test_when_the_wrapper_is_gone_it_can_be_undone(covered, target, caplog):
    patch, uncover = covered
    assert not patch.undo()
    uncover()
    assert patch.status() == "applied"
    caplog.clear()
    assert patch.undo()
    assert not caplog.records
    assert target.Child().plain() == "child"


def test_applying_a_covered_patch_leaves_the_wrapper_on_top(covered, held):
    patch, _ = covered
    before = held()
    patch.apply()
    assert _same(before, held())
    assert patch.asked == 1


def test_an_attribute_that_somebody_deleted_is_not_brought_back(target, caplog):
    patch = _Made(Edit(target.Child, "own", "new"), Edit(target.Child, "limit", 2))
    patch.apply()
    del target.Child.own
    assert patch.undo() is False
    assert "own" not in vars(target.Child)
    assert target.Child.limit == 2
    assert "Child.own is nothing" in patch.status()


def test_an_equal_value_is_not_ours(target):
    """Only the very object that we set is."""
    patch = _Made(Edit(target.Child, "own", [1]))
    patch.apply()
    target.Child.own = [1]
    assert "covered by" in patch.status()


# ---------------------------------------------------------------------- versions and guards


@pytest.mark.parametrize("found", ["0.8", "0.8.99", "0.1.0"])
def test_an_older_version_is_refused(nemo_run_is, every_kind, held, found):
    before = held()
    nemo_run_is(found)
    patch = _Made(*every_kind)
    with pytest.raises(UnsupportedNemoRun, match=re.escape(f"NeMo-Run {found};")) as caught:
        patch.apply()
    for word in ("made_up", "0.9 to 0.12", "Nothing was changed"):
        assert word in str(caught.value)
    assert patch.asked == 0
    assert _same(before, held())
    assert patch.status() == "off"


@pytest.mark.parametrize(
    "found",
    ["0.9", "0.9.0", "0.9.0rc3", "0.10.7", "0.11.99", "0.11.1+local", "0.12.0", "0.110.0", "1.0"],
)
def test_a_known_version_is_taken(nemo_run_is, target, found):
    nemo_run_is(found)
    _Made(Edit(target.Child, "own", "new")).apply()
    assert target.Child.own == "new"


def test_on_a_newer_version_what_is_replaced_must_be_known(nemo_run_is, target, held):
    """A wrapper needs no such thing: it calls what is there."""
    before = held()
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
    assert _same(before, held())
    nemo_run_is("0.12.9")  # it was verified there, so that NeMo-Run was changed
    wrong.apply()
    assert wrong.undo()


def test_what_has_no_source_has_no_digest():
    assert base.digest_of(len) == ""


def test_a_patch_has_its_own_range(nemo_run_is, target):
    class Narrow(_Made):
        verified = ("0.11", "0.11")

    nemo_run_is("0.10.9")
    with pytest.raises(UnsupportedNemoRun, match=r"NeMo-Run 0\.10\.9.*0\.11 to 0\.11"):
        Narrow(Edit(target.Child, "own", "new")).apply()


def test_an_applied_patch_can_be_undone_on_any_version(nemo_run_is, every_kind, held):
    before = held()
    patch = _Made(*every_kind)
    patch.apply()
    nemo_run_is("9.9")
    patch.apply()
    assert patch.undo()
    assert _same(before, held())


def test_must_refuses_naming_target_and_version():
    patch = _Made()
    patch.must(True, "Thing.method")
    with pytest.raises(UnsupportedNemoRun) as caught:
        patch.must(False, "Thing.method")
    for word in ("made_up", "Thing.method", "0.11.1", "0.9 to 0.12", "Nothing was changed"):
        assert word in str(caught.value)
    assert isinstance(caught.value, PatchError)


def test_what_is_not_needed_changes_nothing(nemo_run_is, every_kind, held):
    before = held()
    patch = _Made(*every_kind)
    patch.needed = False
    nemo_run_is("9.9")  # a NeMo-Run that has it is one that we need not know
    undo = patch.apply()
    assert patch.asked == 0
    assert _same(before, held())
    assert patch.status() == "not needed"
    assert undo() is True
    assert _same(before, held())


def test_an_applied_patch_stays_applied_though_it_makes_itself_unneeded(target):
    """As a patch that adds what it asks for."""

    class Adds(_Made):
        def is_needed(self) -> bool:
            return not hasattr(target.Child, "fresh")

    patch = Adds(Edit(target.Child, "fresh", 1))
    patch.apply()
    assert patch.status() == "applied"
    assert patch.undo()
    assert patch.status() == "off"


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


def _set_by(target: SimpleNamespace) -> tuple[object, object, object]:
    return target.Child.own, target.Child.limit, target.module.function


def test_apply_takes_all_or_those_named(several, target):
    patches.apply("two")
    assert patches.status() == {"one": "off", "two": "applied", "three": "off"}
    assert target.Child.limit == "two"
    patches.apply()
    assert _set_by(target) == ("one", "two", "three")
    assert set(patches.status().values()) == {"applied"}


def test_the_undo_of_apply_undoes_what_this_call_applied(several, target, held):
    patches.apply("one")
    undo = patches.apply()
    assert undo() is True
    assert patches.status() == {"one": "applied", "two": "off", "three": "off"}
    assert target.Child.own == "one"


def test_the_undo_of_apply_puts_back_all(several, held):
    before = held()
    assert patches.apply()() is True
    assert _same(before, held())


def test_an_unknown_name_lists_those_there_are(several, held):
    before = held()
    for act in (patches.apply, patches.undo):
        with pytest.raises(PatchError, match="'four'") as caught:
            act("one", "four")
        assert "one, two, three" in str(caught.value)
        assert not isinstance(caught.value, UnsupportedNemoRun)
    assert _same(before, held())


def test_when_one_of_several_names_fails_the_others_are_undone(several, target, held):
    several["three"].verified = ("1.8", "1.8")
    patches.apply("one")
    before = held()
    with pytest.raises(UnsupportedNemoRun, match="three"):
        patches.apply("one", "two", "three")
    assert _same(before, held())
    assert patches.status() == {"one": "applied", "two": "off", "three": "off"}


def test_without_names_one_that_fails_is_left_out(several, held, caplog):
    several["two"].verified = ("1.8", "1.8")
    before = held()
    undo = patches.apply()
    assert patches.status() == {"one": "applied", "two": "off", "three": "applied"}
    (record,) = caplog.records
    assert "A patch is left out: The patch two does not know NeMo-Run" in record.getMessage()
    assert undo() is True
    assert _same(before, held())


def test_undo_takes_all_or_those_named(several, held):
    before = held()
    patches.apply()
    assert patches.undo("two") is True
    assert patches.status() == {"one": "applied", "two": "off", "three": "applied"}
    assert patches.undo() is True
    assert _same(before, held())
    assert patches.undo() is True


def test_a_covered_patch_does_not_keep_the_others_on(several, target):
    patches.apply()
    target.Child.limit = "another's"
    assert patches.undo() is False
    status = patches.status()
    assert status.pop("two").startswith("applied, covered by ")
    assert status == {"one": "off", "three": "off"}
    assert target.Child.limit == "another's"


def test_patches_on_top_of_each_other_are_undone_in_reverse(several, target, held):
    before = held()
    several["three"].wanted = (Edit(target.Child, "own", "three"),)
    patches.apply()
    assert several["one"].status().startswith("applied, covered by ")
    assert patches.undo() is True
    assert _same(before, held())


def test_one_that_is_not_needed_is_passed_over(several):
    several["two"].needed = False
    undo = patches.apply()
    assert patches.status() == {"one": "applied", "two": "not needed", "three": "applied"}
    assert undo() is True


@pytest.mark.parametrize("name", sorted(patches.PATCHES))
def test_every_patch_says_what_it_is(name):
    patch = patches.PATCHES[name]
    assert patch.name == name
    for text in (patch.why, patch.retired_by):
        assert text.strip()
        assert text == " ".join(text.split())
    assert [re.fullmatch(r"\d+\.\d+", one) is not None for one in patch.verified] == [True, True]
