"""``data_mover_configs``: config files that no process on the pod reads do not travel."""

from __future__ import annotations

import base64
import copy
import functools
import gzip
import inspect
import io
import os
import re
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_run.core.execution.dgxcloud import DGXCloudExecutor
from nemo_run.core.execution.lepton import LeptonExecutor

from nemo_run_ray.patches.base import Edit, Patch

#: What NeMo-Run writes for people: the executor and the task, as YAML. A ``run.Partial`` is read
#: from ``<name>_fn_or_script`` beside them, so the folder itself must travel.
UNREAD = ("_executor.yaml", "_config.yaml")


class DataMoverConfigsPatch(Patch):
    name = "data_mover_configs"
    why = (
        "Lepton and DGX Cloud: the YAML files about executor and task, which no process on the "
        "pod reads, stay out of what is sent inside a command line; the tarball is the same for "
        "the same files, and paths with spaces and quotes survive."
    )
    retired_by = "executors of NeMo-Run that do not send a job's folder inside a command line"

    def edits(self) -> Sequence[Edit]:
        for kind in (LeptonExecutor, DGXCloudExecutor):
            where = f"{kind.__name__}.copy_directory_data_command"
            make: Any = vars(kind).get("copy_directory_data_command")
            self.must(callable(make), where)
            parameters = list(inspect.signature(make).parameters)
            self.must(parameters == ["self", "local_dir_path", "dest_path"], where)
        move: Any = vars(DGXCloudExecutor).get("move_data")
        self.must(callable(move), "DGXCloudExecutor.move_data")
        return [
            Edit(LeptonExecutor, "copy_directory_data_command", _lepton_command),
            Edit(DGXCloudExecutor, "copy_directory_data_command", _dgxcloud_command),
            Edit(DGXCloudExecutor, "move_data", _moving_less(move)),
        ]


def unread(job_name: str) -> frozenset[str]:
    """Paths, relative to a job's folder, of the files that no process on a pod reads."""
    return frozenset(f"configs/{job_name}{ending}" for ending in UNREAD)


def tarball(folder: Path, without: frozenset[str] = frozenset()) -> bytes:
    """A tar.gz of a folder: the same bytes for the same names, contents and modes.

    Args:
        folder: whose entries are archived, below ``.``.
        without: paths relative to it, with ``/``, that are left out.

    Raises:
        OSError: something in it cannot be read.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(_entries(folder)):
            if name not in without:
                _add(archive, folder / name, name)
    return gzip.compress(raw.getvalue(), compresslevel=9, mtime=0)


def _entries(folder: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=refuse):
        for name in folders + files:
            yield Path(root, name).relative_to(folder).as_posix()


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    archive.inodes.clear()  # type: ignore[attr-defined]  # a hard link's content travels
    entry: tarfile.TarInfo | None = archive.gettarinfo(str(path), arcname=name)
    if entry is None:  # a socket
        return
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    if entry.isreg():
        with path.open("rb") as content:
            archive.addfile(entry, content)
    else:
        archive.addfile(entry)


def _lepton_command(self: LeptonExecutor, local_dir_path: str, dest_path: str) -> list[str]:
    """The data mover's argv."""
    return ["sh", "-c", _script(self, local_dir_path, dest_path, shlex.quote)]


def _dgxcloud_command(self: DGXCloudExecutor, local_dir_path: str, dest_path: str) -> str:
    """The data mover's script, which NeMo-Run puts between single quotes."""
    return _script(self, local_dir_path, dest_path, quote_between_single_quotes)


def _script(executor: Any, source: str, target: str, quote: Callable[[str], str]) -> str:
    data = base64.b64encode(tarball(Path(source), unread(executor.job_name))).decode("ascii")
    folder, archive = quote(target), quote(f"{target}/archive.tar.gz")
    return (
        f"rm -rf {folder} && mkdir -p {folder} && echo {data} | base64 -d > {archive} && "
        f"tar -xzf {archive} -C {folder} && rm {archive}"
    )


def quote_between_single_quotes(text: str) -> str:
    """A shell word of the text that has no single quote in it itself."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    escaped = re.sub(r'([$`"\\])', r"\\\1", text)
    return '"' + escaped.replace("'", r'$(printf "\047")') + '"'


def _moving_less(move: Any) -> Any:
    @functools.wraps(move)
    def move_data(self: DGXCloudExecutor, *args: Any, **kwargs: Any) -> Any:
        # When the tarball is too large, NeMo-Run walks the folder itself, file by file.
        names = unread(getattr(self, "job_name", ""))
        if not any(os.path.exists(os.path.join(self.job_dir, name)) for name in names):
            return move(self, *args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            lighter = copy.copy(self)
            lighter.job_dir = os.path.join(folder, "job")
            shutil.copytree(self.job_dir, lighter.job_dir, symlinks=True)
            for name in names:
                Path(lighter.job_dir, name).unlink(missing_ok=True)
            return move(lighter, *args, **kwargs)

    return move_data
