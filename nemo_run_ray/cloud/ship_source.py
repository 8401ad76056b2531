"""``ShipSource``: the plug-in of NeMo-Run that sends a task's source code with it."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fiddle import Buildable, daglish
from nemo_run.config import Partial, Script
from nemo_run.core.execution.base import Executor
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor
from nemo_run.core.execution.lepton import LeptonExecutor
from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager
from nemo_run.run.plugin import ExperimentPlugin

from nemo_run_ray import patches
from nemo_run_ray.cloud import encode
from nemo_run_ray.cloud.source import Source, collect, find_module, scripts_in
from nemo_run_ray.errors import TransportError
from nemo_run_ray.patches.dgxcloud_exports import OUR_PREFIX

log = logging.getLogger(__name__)

_BOOT, _SPEC = f"{OUR_PREFIX}BOOT", f"{OUR_PREFIX}SPEC"
_TREE = "NEMO_RUN_RAY_SRC"
_PATCHES = ("data_mover_configs", "dgxcloud_exports")
_DGXCLOUD_PATCHES = (*_PATCHES, "dgxcloud_refusal")
#: Runs what stands behind it when the source code is there. No "$(", which Kubernetes reads as a
#: variable of its own, and no single quote, between which DGX Cloud's form stands.
_UNPACK = (
    "nrr=python3; command -v python3 >/dev/null || nrr=python; command -v $nrr >/dev/null || "
    '{ echo "nemo-run-ray: the image has no python3, which unpacks the source code" >&2; '
    f'exit 127; }}; exec $nrr -I -c "${{{_BOOT}:?nemo-run-ray: the source code has not arrived}}"'
)
#: First line of Lepton's launch script, which starts itself again when ``pod.py`` has set this.
_LEPTON_LINE = f'if [ -z "${_TREE}" ]; then {_UNPACK} /bin/bash "$0"; fi'


@dataclass
class ShipSource(ExperimentPlugin):
    """Sends the caller's source code along with a task, to pods that share no files with it.

    On Lepton and DGX Cloud it is sent in the environment of the pods, unpacked into a folder
    that they share, and is on ``PYTHONPATH``; commands start in it. Other executors unpack what a
    packager makes: one that the user chose stays, else it is ``SourcePackager``; nothing else
    changes.

    Attributes:
        root: of the project.
        include: patterns, relative to the root, of files that are sent beside the packages.
        exclude: patterns of files that are not.
        collections: names of folders with families of scripts. Only the family that the task's
            script belongs to is sent, and nothing of the package's other collections.
    """

    root: str = "."
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    collections: Sequence[str] = ("recipes", "steps")

    def __post_init__(self) -> None:
        self.root = str(self.root)
        for name in ("include", "exclude", "collections"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TransportError(
                    f"ShipSource: {name} is a list of patterns, not the text {value!r}."
                )
            setattr(self, name, list(value))

    def setup(self, task: Partial | Script, executor: Executor) -> None:
        """Prepare a task and its executor. Nothing is sent yet.

        Raises:
            TransportError: the source code cannot be sent; see the message.
            SourceTooLarge: it exceeds a limit of the platform.
            UnsupportedNemoRun: a patch that this needs does not know this NeMo-Run.
        """
        root = Path(self.root).resolve()
        scripts = list(_scripts(task, root))
        if not isinstance(executor, (LeptonExecutor, DGXCloudExecutor)):
            _use_packager(self, executor, root, scripts)
            return
        if type(executor.packager) is not Packager:
            raise TransportError(
                f"ShipSource: the executor has a {type(executor.packager).__name__}, which sends "
                "code too. Keep one of the two."
            )
        most = encode.MOST_SOURCE_BYTES
        source = collect(root, self.include, self.exclude, self.collections, scripts, most)
        _report(source)
        _into_environment(source, task, executor)
        if isinstance(task, Script):
            _start_in_tree(task, root)
        is_dgxcloud = isinstance(executor, DGXCloudExecutor)
        patches.apply(*(_DGXCLOUD_PATCHES if is_dgxcloud else _PATCHES))


@dataclass(kw_only=True)
class SourcePackager(Packager):
    """Packs the files of ``ShipSource`` for executors that unpack an archive.

    Attributes:
        root, include, exclude, collections: as of ``ShipSource``.
        scripts: paths, relative to the root, of what will run.
    """

    root: str = "."
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    collections: Sequence[str] = ()
    scripts: Sequence[str] = ()

    def package(self, path: Path, job_dir: str, name: str) -> str:
        """Write the archive.

        Returns:
            Its path, ``<job_dir>/<name>.tar.gz``.

        Raises:
            TransportError: the source code cannot be read.
        """
        target = Path(job_dir, f"{name}.tar.gz")
        if target.exists():
            return str(target)
        source = collect(
            Path(self.root), self.include, self.exclude, self.collections, self.scripts
        )
        _report(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        encode.write_tar(target, sorted(source.tree.items()))
        return str(target)


def _use_packager(ship: ShipSource, executor: Executor, root: Path, scripts: list[str]) -> None:
    known = executor.packager
    if isinstance(known, SourcePackager):  # of another task of the same group
        both = [*known.scripts, *scripts] if known.scripts and scripts else []
        known.scripts = list(dict.fromkeys(both))
    elif known in (Packager(), GitArchivePackager()):  # the executors' defaults
        executor.packager = SourcePackager(
            root=str(root),
            include=list(ship.include),
            exclude=list(ship.exclude),
            collections=list(ship.collections),
            scripts=scripts,
        )


def _scripts(task: Partial | Script, root: Path) -> Iterator[str]:
    """The scripts of the task that are in the tree, relative to the root."""
    paths: list[str] = []
    modules: list[str] = []
    if isinstance(task, Script):
        if task.inline:
            paths, modules = scripts_in(task.inline)
        elif task.m:
            modules = [task.path]
        else:
            paths = [task.path]
    else:
        modules = list(_modules(task))
    for path in paths:
        found = _in_tree(path, root)
        if found:
            yield found
    for module in modules:
        found = find_module(root, module) if module else None
        if found:
            yield found


def _modules(task: Partial) -> Iterator[str]:
    """The modules of the function, and of all that its arguments are built from or name."""
    for value, _ in daglish.iterate(task):
        named = value.__fn_or_cls__ if isinstance(value, Buildable) else value
        if inspect.isroutine(named) or inspect.isclass(named):
            yield named.__module__


def _in_tree(path: str, root: Path) -> str | None:
    for base in (Path.cwd(), root):
        whole = Path(os.path.abspath(base / path))
        whole = whole.parent.resolve() / whole.name
        if os.path.isfile(whole) and whole.is_relative_to(root):
            return whole.relative_to(root).as_posix()
    return None


def _start_in_tree(task: Script, root: Path) -> None:
    """Commands start in the tree, so a script's path is relative to its root."""
    if task.path and not task.m:
        task.path = _in_tree(task.path, root) or task.path  # or it is in the image


def _report(source: Source) -> None:
    if source.ignored:
        shown = ", ".join(source.ignored[:10]) + (", …" if len(source.ignored) > 10 else "")
        log.warning(
            "ShipSource: %d file(s) or folder(s) stay here because .gitignore names them: %s. "
            "include=[…] sends them.",
            len(source.ignored),
            shown,
        )
    if source.left_out:
        log.info(
            "ShipSource: left out as caches, data, models, or families of other scripts: %s",
            ", ".join(source.left_out),
        )
    if source.packages_left_out:
        log.warning(
            "ShipSource: packages stay here because of their names, which those of caches, data or "
            "models are: %s. include=[…] sends them.",
            ", ".join(source.packages_left_out),
        )


def _into_environment(
    source: Source, task: Partial | Script, executor: LeptonExecutor | DGXCloudExecutor
) -> None:
    packed = encode.pack(source.tree)
    older = json.loads(executor.env_vars.get(_SPEC, "{}"))  # of an experiment that runs again
    variables = {
        name: value
        for name, value in executor.env_vars.items()
        if not name.startswith(OUR_PREFIX) and name != _TREE  # as a shipped driver has it
    }
    spec = _places(executor, encode.digest(packed))
    spec["roots"] = list(source.roots)
    # The scripts of DGX Cloud would set a PYTHONPATH of the user's anew, without the tree.
    path = variables.pop("PYTHONPATH", older.get("path"))
    if isinstance(task, Script):
        task.env.pop(_TREE, None)
        path = task.env.pop("PYTHONPATH", path)
    if path is not None:
        spec["path"] = path
    is_lepton = isinstance(executor, LeptonExecutor)
    allowed = encode.LEPTON if is_lepton else encode.dgxcloud(executor.nodes)
    pieces = encode.chunks(encode.encode(packed), allowed.value_chars)
    spec["count"] = len(pieces)
    carriers = {f"{OUR_PREFIX}{number}": piece for number, piece in enumerate(pieces)}
    carriers[_SPEC] = json.dumps(spec, separators=(",", ":"))
    carriers[_BOOT] = Path(__file__).with_name("pod.py").read_text(encoding="utf-8")
    encode.check_limits(allowed, carriers, variables, source.largest())
    if isinstance(executor, LeptonExecutor):
        others = [command for command in executor.pre_launch_commands if command != _LEPTON_LINE]
        executor.pre_launch_commands = [_LEPTON_LINE, *others]
    else:
        _wrap_command(executor)
    executor.env_vars = {**variables, **carriers}


def _places(executor: LeptonExecutor | DGXCloudExecutor, digest: str) -> dict[str, Any]:
    """The digest, and the paths of the tree and of the job's code folder on the cluster."""
    shared, job = (
        (executor.nemo_run_dir, executor.lepton_job_dir)
        if isinstance(executor, LeptonExecutor)
        else (executor.pvc_nemo_run_dir, executor.pvc_job_dir)
    )
    for path in (shared, job):
        if not re.fullmatch(r"/[\w@%+=:,./-]*", path, re.ASCII):
            raise TransportError(
                f"ShipSource: the folder {path!r} on the cluster must be absolute, of letters, "
                "digits and @%+=:,./- only, because NeMo-Run writes it unquoted into its scripts."
            )
    tree = f"{shared.rstrip('/')}/.source/src-{digest[:40]}"
    return {"digest": digest, "tree": tree, "code": f"{job}/code"}


def _wrap_command(executor: DGXCloudExecutor) -> None:
    given = {"command", "args", "environmentVariables"} & set(executor.custom_spec)
    if given and _BOOT not in str(executor.custom_spec.get("args")):
        raise TransportError(
            f"ShipSource: custom_spec has {' and '.join(sorted(given))}, which ShipSource needs to "
            "send the source code and to unpack it before the job's script. Remove it from "
            "custom_spec; env_vars takes variables."
        )
    script = f"{_UNPACK} /bin/bash {executor.pvc_job_dir}/launch_script.sh"
    executor.custom_spec = {
        **executor.custom_spec,
        "command": "/bin/bash -c",
        "args": f"'{script}'",  # as NeMo-Run writes those of its data mover
    }
