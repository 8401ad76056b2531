"""Which files travel."""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import nemo_run as run
import pytest

from nemo_run_ray import FolderPackager
from nemo_run_ray.cloud import ShipSource, SourcePackager, source
from nemo_run_ray.cloud.source import Entry, File, Link
from nemo_run_ray.errors import SourceTooLarge, TransportError


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


def fill(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def collect(root: Path, **choice) -> dict[str, Entry]:
    return SourcePackager(root=str(root), **choice).collect()


def sent(root: Path, **choice) -> set[str]:
    return set(collect(root, **choice))


def test_a_src_layout_is_found(root):
    fill(root, "src/a/__init__.py", "src/a/b.json", "src/c.py", "tests/t.py", "setup.py", "README")
    assert sent(root) == {"src/a/__init__.py", "src/a/b.json", "src/c.py"}
    assert source.import_base(root) == "src"


def test_packages_in_the_root_are_found(root):
    fill(root, "a/__init__.py", "a/b.txt", "m.py", "docs/x.py", "README", "src/notes.txt")
    assert sent(root) == {"a/__init__.py", "a/b.txt", "m.py"}
    assert source.import_base(root) == "."


def test_a_pattern_does_not_match_the_folders_above_the_root(tmp_path):
    repository = tmp_path / "wandb" / "checkpoints"
    root = repository / "data" / "proj"
    fill(root, "pk/__init__.py", "pk/data/x.py", "wandb/y.py")
    assert sent(root, exclude=["data"]) == {"pk/__init__.py"}
    subprocess.run(["git", "init", "--quiet", repository], check=True)
    assert sent(root, exclude=["data"]) == {"pk/__init__.py"}
    subprocess.run(["git", "-C", root, "add", "pk/__init__.py"], check=True)
    fill(root, "pk/new.py")
    assert sent(root, exclude=["data"]) == {"pk/__init__.py", "pk/new.py"}


RECIPES = (
    "src/p/__init__.py",
    "src/p/core.py",
    "src/p/recipes/__init__.py",
    "src/p/recipes/shared.py",
    "src/p/recipes/nano/train.py",
    "src/p/recipes/nano/deep/conf.yaml",
    "src/p/recipes/super/train.py",
    "src/q/recipes/other/x.py",
    "src/r/recipes/nano/x.py",
    "src/r/recipes/super/x.py",
)


STEPS = (
    "src/p/cli.py",
    "src/p/steps/__init__.py",
    "src/p/steps/_runners/rl.py",
    "src/p/steps/prep/step.py",
    "src/p/steps/train/step.py",
    "src/p/recipes/nano/steps/helper/a.py",
    "src/q/steps/foo/b.py",
)


@pytest.mark.parametrize(
    ("script", "stays"),
    [
        ("src/p/steps/prep/step.py", {*STEPS[4:6], *RECIPES[4:7]}),
        ("src/p/recipes/nano/train.py", {*STEPS[3:5], RECIPES[6], RECIPES[9]}),
        ("src/p/steps/index.py", set()),
        ("src/p/cli.py", set()),
    ],
)
def test_only_the_family_of_the_script_is_sent(root, script, stays):
    fill(root, *RECIPES, *STEPS, script)
    executor = run.DockerExecutor(container_image="i")
    ShipSource(root).setup(run.Script(str(root / script), entrypoint="python"), executor)
    packager = executor.packager
    found = sent(root, collections=packager.collections, scripts=packager.scripts)
    assert found == {*RECIPES, *STEPS, script} - stays


def test_a_family_is_that_of_its_package(root):
    fill(root, *RECIPES)
    scripts = ["src/p/recipes/nano/train.py", "src/r/recipes/super/x.py"]
    found = sent(root, collections=["recipes"], scripts=scripts)
    assert found == set(RECIPES) - {"src/p/recipes/super/train.py", "src/r/recipes/nano/x.py"}


def test_a_script_that_is_a_link_keeps_its_name(root, tmp_path):
    fill(tmp_path, "root/src/a/real.py", "other.py")
    (root / "main.py").symlink_to("src/a/real.py")
    (root / "b").mkdir()
    (root / "b/out.py").symlink_to("../../other.py")
    executor = run.LeptonExecutor(container_image="i", nemo_run_dir="/shared/runs")
    executor.lepton_job_dir = "/shared/runs/job"
    task = run.Script(str(root / "main.py"), entrypoint="python")
    ShipSource(root).setup(task, executor)
    assert task.path == "main.py"
    with pytest.raises(TransportError, match=r"out\.py is a link to .*other\.py, which is out of"):
        ShipSource(root).setup(run.Script(str(root / "b/out.py"), entrypoint="python"), executor)


@pytest.mark.parametrize(
    "task",
    [
        run.Script("src/p/recipes/nano/train.py", entrypoint="python"),
        run.Script("p.recipes.nano.train", m=True, entrypoint="python"),
        run.Script(inline="cd x && python -m p.recipes.nano.train --a"),
        run.Script(inline="python src/p/recipes/nano/train.py"),
    ],
)
def test_the_script_is_found_in_every_kind_of_task(root, task, monkeypatch):
    fill(root, *RECIPES)
    executor = run.DockerExecutor(container_image="i")
    ShipSource(root).setup(task, executor)
    assert executor.packager.scripts == ["src/p/recipes/nano/train.py"]


def test_the_families_of_all_that_a_partial_is_built_from(root, monkeypatch):
    fill(root, *RECIPES)
    for empty in ("p", "p/recipes", "r"):
        (root / f"src/{empty}/__init__.py").write_text("")
    for family, text in (("nano", "def train(model, hook): ..."), ("super", "class Model: ...")):
        (root / f"src/p/recipes/{family}/train.py").write_text(text)
    (root / "src/r/recipes/nano/x.py").write_text("def hook(): ...")
    monkeypatch.syspath_prepend(str(root / "src"))
    try:
        nano, super_, hook = map(
            importlib.import_module,
            ("p.recipes.nano.train", "p.recipes.super.train", "r.recipes.nano.x"),
        )
        task = run.Partial(nano.train, model=[run.Config(super_.Model)], hook={"a": hook.hook})
        executor = run.DockerExecutor(container_image="i")
        ShipSource(root).setup(task, executor)
    finally:
        for name in [one for one in sys.modules if one.split(".")[0] in ("p", "r")]:
            del sys.modules[name]
    assert sorted(executor.packager.scripts) == [
        "src/p/recipes/nano/train.py",
        "src/p/recipes/super/train.py",
        "src/r/recipes/nano/x.py",
    ]


def test_the_tasks_of_a_group_share_a_packager_with_all_their_families(root):
    fill(root, *RECIPES)
    executor = run.DockerExecutor(container_image="i")
    for family in ("nano", "super"):
        task = run.Script(f"p.recipes.{family}.train", m=True, entrypoint="python")
        ShipSource(root).setup(task, executor)
    packager = executor.packager
    chosen = sent(root, collections=packager.collections, scripts=packager.scripts)
    assert chosen == set(RECIPES)
    ShipSource(root).setup(run.Script(inline="echo no script that we know"), executor)
    assert packager.scripts == []


@pytest.mark.parametrize("is_behind_a_link", [False, True])
def test_too_much_is_refused_before_it_is_read(root, is_behind_a_link):
    fill(root, "src/a/__init__.py", "src/a/small.txt")
    big = root / ("big.csv" if is_behind_a_link else "src/a/big.csv")
    with big.open("wb") as stream:
        stream.truncate(400_000_000_000)  # nobody could read that
    if is_behind_a_link:
        (root / "src/a/big.csv").symlink_to(big)
    executor = run.LeptonExecutor(container_image="i", nemo_run_dir="/shared/runs")
    with pytest.raises(SourceTooLarge) as caught:
        ShipSource(root).setup(run.Script(inline="true"), executor)
    lines = str(caught.value).splitlines()
    for word in ("400,000,000,0", "the limit is 200,000,000", "Nothing was sent"):
        assert word in lines[0]
    assert lines[1].split() == ["400,000,000,000", "src/a/big.csv"]


def test_caches_data_and_models_stay(root):
    names = ("x.pyc", "w.safetensors", "d.parquet", ".venv/lib.py", "__pycache__/m.py", "a.tar.gz")
    fill(root, "src/a/__init__.py", *(f"src/a/{name}" for name in names))
    assert sent(root) == {"src/a/__init__.py"}


def test_include_and_exclude(root):
    fill(root, "src/a/__init__.py", "src/a/w.npy", "src/a/big.txt", "conf/x.yaml", "conf/y.yaml")
    found = sent(root, include=["conf/*.yaml", "src/a/*.npy"], exclude=["big.txt", "conf/y.yaml"])
    assert found == {"src/a/__init__.py", "src/a/w.npy", "conf/x.yaml"}
    for name in ("src/a/big.txt", "./src/a/big.txt"):
        assert sent(root, exclude=[name, "*.npy"]) == {"src/a/__init__.py"}


@pytest.mark.parametrize(
    "pattern", ["../other/*.py", "/etc/*", "src/../../x", "src/..", "src/link/*.py"]
)
def test_an_include_that_leaves_the_root(root, pattern):
    fill(root, "src/a.py", "b/c.py")
    (root / "src/link").symlink_to("../b")
    with pytest.raises(TransportError, match="Nothing was sent"):
        collect(root, include=[pattern])


def test_a_repository_that_git_does_not_trust_is_refused(root, monkeypatch):
    """What it tracks cannot be known then, and would stay here without a word."""
    fill(root, "src/a/__init__.py")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    with pytest.raises(TransportError, match="dubious ownership"):
        collect(root)


def test_links(root):
    fill(root, "src/a/__init__.py", "src/b/real.py", "conf/base.yaml", "src/a/w.npy")
    for name, target in (
        ("near.py", "__init__.py"),
        ("far.py", root / "src/b/real.py"),
        ("folder", "../b"),
        ("nowhere", "../b/none"),
        ("base.yaml", "../../conf/base.yaml"),
        ("weights", "w.npy"),
    ):
        (root / "src/a" / name).symlink_to(target)
    tree = collect(root)
    assert {name.removeprefix("src/"): entry for name, entry in tree.items()} == {
        "a/__init__.py": File(b"src/a/__init__.py"),
        "b/real.py": File(b"src/b/real.py"),
        "a/near.py": Link("__init__.py"),
        "a/far.py": Link("../b/real.py"),
        "a/folder": Link("../b"),
        "a/nowhere": Link("../b/none"),
        "a/base.yaml": File(b"conf/base.yaml"),
        "a/weights": File(b"src/a/w.npy"),
    }
    (root / "src/a/conf").symlink_to("../../conf")
    with pytest.raises(TransportError) as caught:
        collect(root)
    for word in ("src/a/conf is a link to", "include=[", "exclude=['src/a/conf']"):
        assert word in str(caught.value)
    tree = collect(root, include=["conf"])
    assert tree["src/a/conf"] == Link("../../conf")
    assert tree["conf/base.yaml"] == File(b"conf/base.yaml")


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("checkpoints/convert.py", set()),
        ("scratch/try.py", set()),
        ("scripts/train.py", {"scripts/helper.py"}),
        ("tools/deep/x.py", {"tools/__init__.py", "tools/deep/__init__.py", "tools/y.json"}),
    ],
)
def test_a_script_travels_wherever_it_is_with_what_it_may_import(root, script, more):
    fill(root, "src/a/__init__.py", script, "scripts/sub/no.py", *more)
    (root / ".gitignore").write_text("scratch/\n")
    assert sent(root, scripts=[script]) == {"src/a/__init__.py", script, *more}
    with pytest.raises(TransportError, match=f"keeps {script} here, which the task runs"):
        sent(root, exclude=[script.partition("/")[0]], scripts=[script])


def test_a_submodule_asks_for_itself(root, tmp_path, caplog):
    fill(root, "src/a.py")
    other = tmp_path / "other"
    other.mkdir()
    (other / "module.py").touch()
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(other), *words], check=True)
    subprocess.run(["git", "-C", str(root), "init", "-q"], check=True)
    add = ["-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "src/sub"]
    subprocess.run(["git", "-C", str(root), *add], check=True)
    (root / "src/sub/.gitignore").write_text("local.py")
    (root / "src/sub/local.py").touch()
    assert "src/sub/module.py" in collect(root)
    assert "names them, such as src/sub/local.py." in caplog.text


@pytest.mark.parametrize("is_repository", [True, False])
def test_gitignore_is_honoured_and_reported(root, is_repository, caplog):
    fill(root, "src/a/__init__.py", "src/a/local.py", "src/a/kept.py", "src/a/with\nnewline.py")
    (root / ".gitignore").write_text("local.py\n!kept.py\n")
    (root / "src/a/.gitignore").write_text("with*\n")
    if is_repository:
        subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    assert sent(root) == {"src/a/__init__.py", "src/a/kept.py", "src/a/.gitignore"}
    assert "names them, such as src/a/local.py, src/a/with\nnewline.py." in caplog.text
    assert not is_repository or set(sent(root, include=["src/a/local.py"])) >= {"src/a/local.py"}
    assert (root / ".git").exists() is is_repository


@pytest.mark.parametrize("name", ["local.py", "seeds.jsonl", "checkpoints/a.py", "build/deep/b.py"])
def test_a_tracked_file_travels_though_a_pattern_names_it(root, name):
    fill(root, "src/a/__init__.py", f"src/a/{name}")
    (root / ".gitignore").write_text("local.py\nbuild/\n")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "-f", "."], check=True)
    (root / f"src/a/{name}").write_text("edited")
    fill(root, "src/a/untracked.jsonl", "src/a/build/deep/untracked.py")
    found = collect(root)
    assert found[f"src/a/{name}"] == File(b"edited")
    assert not [one for one in found if "untracked" in one]


@pytest.mark.parametrize(
    ("name", "mode"), [("sub/secret.py", 0), ("sub", 0), ("sub", 0o444), ("sub", 0o111)]
)
def test_what_cannot_be_read_is_named(open_root, name, mode):
    root = open_root
    fill(root, "src/a/__init__.py", "src/a/sub/secret.py")
    secret = root / "src/a" / name
    secret.chmod(mode)
    for pack in (collect, _packed):
        text = _as_nobody(partial(pack, root))
        for word in (f"src/a/{name}", ": Permission denied", "exclude=", "Nothing was sent"):
            assert word in text


@pytest.mark.parametrize("mode", [0, 0o444])
@pytest.mark.parametrize("name", ["ignored", "excluded", "excluded/sub", "top"])
def test_what_is_left_out_is_not_looked_into(open_root, name, mode):
    """It may be another user's, and have any number of files."""
    root = open_root
    fill(root, "a/__init__.py", *(f"{above}/ignored/x.py" for above in ("a", "a/excluded/sub")))
    fill(root, "top/__init__.py")
    (root / ".gitignore").write_text("ignored/\ntop\n")
    secret = root / name if name == "top" else root / "a" / name
    secret.chmod(mode)
    for pack in (collect, _packed):
        assert _as_nobody(partial(pack, root, exclude=["excluded"])) == "packed"


def _packed(root: Path, exclude: Sequence[str] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        FolderPackager(str(root), exclude=list(exclude)).package(root, folder, "code")


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A tree that other users can reach; pytest closes its own folders to them."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for place in folder.rglob("*"):  # from above to below
        place.chmod(0o755)
    shutil.rmtree(folder)


def _as_nobody(work: Callable[[], object]) -> str:
    """What a call ends with as another user: the superuser reads everything."""
    read, write = os.pipe()
    child = os.fork()  # there is no way back
    if not child:
        try:
            os.close(read)
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            work()
            os.write(write, b"packed")
        except TransportError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


def test_a_module_is_found_in_its_tree(root):
    fill(root, "src/a/__init__.py", "src/a/b.py", "src/a/c/__main__.py")
    assert source.find_module(root, "a.b") == "src/a/b.py"
    assert source.find_module(root, "a.c") == "src/a/c/__main__.py"
    assert source.find_module(root, "a") == "src/a/__init__.py"
    assert source.find_module(root, "os.path") is None
