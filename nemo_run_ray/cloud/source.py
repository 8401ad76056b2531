"""Chooses the files of a source tree that are sent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nemo_run_ray.cloud import platform_limits
from nemo_run_ray.cloud.encode import Entry, File
from nemo_run_ray.cloud.tree import Git, Walk, file_size, matches, read_entry, with_links
from nemo_run_ray.errors import TransportError

#: Names, or patterns of names, of files and folders that are left out unless git tracks them or
#: ``include`` names them: caches, environments, data and models.
LEFT_OUT: tuple[str, ...] = (
    *("__pycache__", "*.py[co]", ".git", ".hg", ".svn", ".DS_Store", "*.egg-info", ".eggs"),
    *(".venv", "venv", ".tox", ".nox", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".cache"),
    *("*.pt", "*.pth", "*.bin", "*.ckpt", "*.distcp", "*.safetensors", "*.gguf", "*.onnx"),
    *("*.nemo", "*.engine", "*.h5", "*.hdf5", "*.npy", "*.npz", "*.pkl", "*.pickle"),
    *("*.parquet", "*.arrow", "*.feather", "*.jsonl", "*.tfrecord", "*.idx", "*.sqlite", "*.db"),
    *("*.tar", "*.tar.*", "*.tgz", "*.gz", "*.xz", "*.zst", "*.zip", "*.7z", "*.so", "*.whl"),
    *("*.mp4", "*.wav", "*.flac", "*.mp3", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.pdf"),
    *("wandb", "mlruns", "lightning_logs", "nemo_experiments", "checkpoints"),
)


@dataclass(frozen=True)
class Source:
    """The files to be sent.

    Attributes:
        tree: the entries, by path relative to the root, with ``/``.
        roots: the folders of it that belong on ``PYTHONPATH``.
        ignored: files and folders that ``.gitignore`` keeps here.
        left_out: files and folders that ``LEFT_OUT`` or a collection keeps here.
        packages_left_out: Python packages that ``LEFT_OUT`` keeps here.
    """

    tree: dict[str, Entry]
    roots: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = field(default=(), repr=False)
    packages_left_out: tuple[str, ...] = ()

    def largest(self, count: int = 10) -> list[tuple[str, int]]:
        """The largest files, with their sizes in bytes."""
        sizes = [(n, len(e.content)) for n, e in self.tree.items() if isinstance(e, File)]
        return sorted(sizes, key=lambda file: (-file[1], file[0]))[:count]


def collect(
    root: Path,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    collections: Sequence[str] = (),
    scripts: Sequence[str] = (),
    most_bytes: int | None = None,
) -> Source:
    """Choose and read the files of a source tree, as they are now, committed or not.

    Args:
        root: of the tree. With packages below ``src/`` that folder is sent, otherwise the
            packages and modules in the root itself.
        include: patterns, relative to the root, of more that is sent, whatever ``LEFT_OUT`` and
            ``.gitignore`` say.
        exclude: patterns, relative to the root, or of names, of what is not sent.
        collections: names of folders of which only the subfolder with a script is sent. One that
            no script is in stays here, when a script is in another one of the same package.
        scripts: paths, relative to the root, of what will run. They are sent whatever ``LEFT_OUT``
            and ``.gitignore`` say, with the packages that they are in or the files beside them.
        most_bytes: more than that is refused before it is read.

    Raises:
        TransportError: there is no Python source, a file cannot be read, a link leaves the root or
            what is sent, or ``exclude`` names a script.
        SourceTooLarge: the files have more than ``most_bytes``.
    """
    if not root.is_dir():
        raise TransportError(f"ShipSource: there is no folder {root}. Nothing was sent.")
    roots = import_roots(root)
    asked = Walk(root, exclude).below(_globbed(root, include)) | _wanted(scripts, exclude)
    families = _families(scripts, collections)

    def skips(folder: str) -> bool:
        return _is_other_family(root, folder, families, collections)

    walk = Walk(root, exclude, Git(root), LEFT_OUT, skips)
    names = asked | walk.below(_starts(root, roots, scripts, walk))
    chosen = sorted({path for name in names for path in with_links(root, name)})
    _check_chosen(root, chosen, most_bytes)
    tree = {name: read_entry(root, name, chosen) for name in chosen}
    reached = {*asked, *(str(above) for name in asked for above in PurePosixPath(name).parents)}
    ignored, left_out = (sorted(names - reached) for names in (walk.ignored, walk.left_out))
    return Source(tree, roots, tuple(ignored), tuple(left_out), _packages(root, left_out))


def _check_chosen(root: Path, chosen: Sequence[str], most_bytes: int | None) -> None:
    """Refuse a choice without Python source, and one that is too large."""
    if not any(name.endswith(".py") for name in chosen):
        raise TransportError(
            f"ShipSource: no Python source to send in {root}: looked for packages and modules in "
            f"{root / 'src'} and in the folder itself. Give the root of your project, or name "
            "files with include=[…]."
        )
    if most_bytes is not None:
        # The size of a link is that of the file it points to, which may be what is sent.
        sizes = [(name, size) for name in chosen if (size := file_size(root / name)) is not None]
        platform_limits.check_source(sizes, most_bytes)


def import_roots(root: Path) -> tuple[str, ...]:
    """The folders, relative to the root, from which its packages are imported."""
    below = root / "src"
    try:
        is_src = below.is_dir() and any(
            entry.suffix == ".py" or (entry.is_dir() and any(entry.rglob("*.py")))
            for entry in below.iterdir()
        )
        return ("src",) if is_src and not (below / "__init__.py").exists() else (".",)
    except PermissionError:
        return ("src",)  # the walk refuses it, unless it is left out


def find_module(root: Path, module: str) -> str | None:
    """The file of a module, relative to the root; ``None`` when it is not in this tree."""
    for base in (*import_roots(root), "."):  # commands start in the root
        path = root / base / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"):
            if os.path.isfile(file):
                return file.relative_to(root).as_posix()
    return None


def _starts(root: Path, roots: Sequence[str], scripts: Sequence[str], walk: Walk) -> Iterator[str]:
    """The paths whose files are sent for the place where they are."""
    if roots == (".",):
        for name in walk.kept(walk.listed(".")):
            if name.endswith(".py") or _is_package(root / name):
                yield name
    else:
        yield from roots
    for script in scripts:
        yield from _beside(root, root / script, walk)


def _is_package(path: Path) -> bool:
    """Whether a folder has an ``__init__.py``; one that nobody may look into could have it."""
    try:
        return (path / "__init__.py").is_file()
    except PermissionError:
        return True  # the walk refuses it


def _beside(root: Path, script: Path, walk: Walk) -> Iterator[str]:
    """The package that a script is in, or its neighbours: it may import them."""
    package = None
    for folder in script.parents:
        if folder == root or not os.path.isfile(folder / "__init__.py"):
            break
        package = folder
    if package is not None:
        yield package.relative_to(root).as_posix()
        return
    for name in walk.listed(script.parent.relative_to(root).as_posix()):
        if os.path.isfile(root / name) and (script.parent != root or name.endswith(".py")):
            yield name


def _wanted(scripts: Iterable[str], exclude: Sequence[str]) -> set[str]:
    for script in scripts:
        if matches(script, exclude):
            raise TransportError(
                f"ShipSource: exclude={list(exclude)} keeps {script} here, which the task runs. "
                "Nothing was sent."
            )
    return set(scripts)


def _globbed(root: Path, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        if PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts:
            raise TransportError(
                f"ShipSource: include={pattern!r} leaves {root}; patterns are relative to it and "
                "stay in it. Nothing was sent."
            )
        found = list(root.glob(pattern))
        if not found:
            raise TransportError(f"ShipSource: include={pattern!r} names nothing in {root}.")
        yield from (path.relative_to(root).as_posix() for path in found)


def _packages(root: Path, left_out: Iterable[str]) -> tuple[str, ...]:
    """The Python packages among what is left out for its name."""
    named = (name for name in left_out if matches(PurePosixPath(name).name, LEFT_OUT))
    return tuple(name for name in named if os.path.isfile(root / name / "__init__.py"))


#: The subfolders that scripts are in, by the package and the name of a collection. A script that is
#: in no subfolder adds none.
_Families = Mapping[tuple[str, str], set[str]]


def _families(scripts: Iterable[str], collections: Sequence[str]) -> _Families:
    families: dict[tuple[str, str], set[str]] = {}
    for script in scripts:
        parts = script.split("/")
        for depth, name in enumerate(parts[:-1]):
            if name in collections:
                family = families.setdefault(("/".join(parts[:depth]), name), set())
                family.update(parts[depth + 1 : -1][:1])
    return families


def _is_other_family(
    root: Path, folder: str, families: _Families, collections: Sequence[str]
) -> bool:
    """Whether a folder is a collection, or a family of one, that no script is in.

    Folders whose names begin with ``_`` are shared by the families. Another package is sent whole,
    unless it has families of the same names.
    """
    above, _, name = folder.rpartition("/")
    packages = {package for (package, _), family in families.items() if family}
    if name in collections and above in packages and (above, name) not in families:
        return True
    package, _, collection = above.rpartition("/")
    wanted = families.get((package, collection))
    if wanted is None and package not in packages:
        same = [family for (_, other), family in families.items() if other == collection]
        wanted = {one for one in set().union(*same) if (root / above / one).is_dir()}
    return not (not wanted or name in wanted or name.startswith("_"))


def scripts_in(text: str) -> tuple[list[str], list[str]]:
    """Paths of Python files and names of modules (after ``-m``) in a shell script."""
    return re.findall(r"[\w./-]+\.py\b", text), re.findall(r"(?<!\S)-m\s+([\w.]+)", text)
