"""Which files of a source tree are sent."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nemo_run_ray.errors import TransportError
from nemo_run_ray.transport import gitignore, platform_limits
from nemo_run_ray.transport.encode import Entry, File
from nemo_run_ray.transport.tree import matches, read_entry, walk, with_links

#: Names, or patterns of names, of files and folders that are left out unless ``include`` names
#: them: caches, environments, data and models.
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
        ignored: paths that ``.gitignore`` keeps here.
        left_out: paths that ``LEFT_OUT`` keeps here.
    """

    tree: dict[str, Entry]
    roots: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = field(default=(), repr=False)

    def largest(self, count: int = 10) -> list[tuple[str, int]]:
        """The largest files, with their sizes in bytes."""
        sizes = [(n, len(e.content)) for n, e in self.tree.items() if isinstance(e, File)]
        return sorted(sizes, key=lambda file: (-file[1], file[0]))[:count]

    def packages_left_out(self) -> list[str]:
        """Python packages that stay here for nothing but their own name."""
        above = [
            PurePosixPath(name).parent for name in self.left_out if name.endswith("__init__.py")
        ]
        return [str(folder) for folder in above if _is_left_out(folder.name)]


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
        collections: names of folders of which only the subfolder with a script is sent.
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
    asked = {name for name in _globbed(root, include) if not matches(name, exclude)}
    asked |= _wanted(scripts, exclude)
    others = _candidates(root, roots, scripts, collections, exclude) - asked
    left_out = sorted(name for name in others if _is_left_out(name))
    found = sorted(others.difference(left_out))
    ignored = gitignore.ignored(root, found)
    names = asked | {name for name in found if name not in ignored}
    chosen = sorted({path for name in names for path in with_links(root, name)})
    _check_chosen(root, chosen, most_bytes)
    tree = {name: read_entry(root, name, chosen) for name in chosen}
    return Source(tree, roots, tuple(sorted(ignored)), tuple(left_out))


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
        sizes = [(name, (root / name).stat().st_size) for name in chosen if (root / name).is_file()]
        platform_limits.check_source(sizes, most_bytes)


def import_roots(root: Path) -> tuple[str, ...]:
    """The folders, relative to the root, from which its packages are imported."""
    below = root / "src"
    is_src = below.is_dir() and any(
        entry.suffix == ".py" or (entry.is_dir() and any(entry.rglob("*.py")))
        for entry in below.iterdir()
    )
    return ("src",) if is_src and not (below / "__init__.py").exists() else (".",)


def find_module(root: Path, module: str) -> str | None:
    """The file of a module, relative to the root; ``None`` when it is not in this tree."""
    for base in (*import_roots(root), "."):  # commands start in the root
        path = root / base / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"):
            if file.is_file():
                return file.relative_to(root).as_posix()
    return None


def _candidates(
    root: Path,
    roots: Sequence[str],
    scripts: Sequence[str],
    collections: Sequence[str],
    exclude: Sequence[str],
) -> set[str]:
    """The files that are sent for the place where they are, unless another rule keeps them."""
    names: set[str] = set()
    if roots == (".",):
        for path in sorted(root.iterdir()):
            if path.suffix == ".py" or (path / "__init__.py").is_file():
                names.update(walk(root, path))
    else:
        for base in roots:
            names.update(walk(root, root / base))
    for script in scripts:
        names.add(script)
        names.update(_beside(root, root / script))
    families = _families(scripts, collections)
    return {
        name
        for name in names
        if not matches(name, exclude) and not _is_other_family(root, name, families)
    }


def _beside(root: Path, script: Path) -> Iterator[str]:
    """What a script imports: the package that it is in, or its neighbours."""
    package = None
    for folder in script.parents:
        if folder == root or not (folder / "__init__.py").is_file():
            break
        package = folder
    if package is not None:
        yield from walk(root, package)
        return
    for path in script.parent.iterdir():
        if path.is_file() and (script.parent != root or path.suffix == ".py"):
            yield path.relative_to(root).as_posix()


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
        for path in found:
            yield from walk(root, path)


def _is_left_out(name: str) -> bool:
    parts = name.split("/")
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in LEFT_OUT)


def _families(scripts: Iterable[str], collections: Sequence[str]) -> dict[str, set[str]]:
    """For each collection's name the subfolders that scripts are in."""
    families: dict[str, set[str]] = {}
    for script in scripts:
        parts = script.split("/")
        for above, below in itertools.pairwise(parts[:-1]):
            if above in collections:
                families.setdefault(above, set()).add(below)
    return families


def _is_other_family(root: Path, name: str, families: dict[str, set[str]]) -> bool:
    parts = name.split("/")
    for depth, (above, below) in enumerate(itertools.pairwise(parts[:-1])):
        wanted = families.get(above)
        if wanted and below not in wanted:
            # A collection of another package, without such a family, is sent whole.
            folder = root.joinpath(*parts[: depth + 1])
            return any((folder / family).is_dir() for family in wanted)
    return False


def scripts_in(text: str) -> tuple[list[str], list[str]]:
    """Paths of Python files and names of modules (after ``-m``) in a shell script."""
    return re.findall(r"[\w./-]+\.py\b", text), re.findall(r"(?<!\S)-m\s+([\w.]+)", text)
