"""``ShipSource``: the plug-in of NeMo-Run that sends a task's source code with it."""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import json
import logging
import lzma
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from fiddle import Buildable, daglish
from nemo_run.config import Partial, Script
from nemo_run.core.execution.base import Executor
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor
from nemo_run.core.execution.lepton import LeptonExecutor
from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager
from nemo_run.run.plugin import ExperimentPlugin

from nemo_run_ray import patches
from nemo_run_ray.cloud.source import (
    LEFT_OUT,
    Entry,
    File,
    Source,
    collect,
    find_module,
    too_large,
    write_tar,
    write_tar_gz,
)
from nemo_run_ray.errors import TransportError
from nemo_run_ray.patches.dgxcloud_exports import OUR_PREFIX

__all__ = ["LEFT_OUT", "ShipSource", "SourcePackager"]
log = logging.getLogger(__name__)

_BOOT, _SPEC = f"{OUR_PREFIX}BOOT", f"{OUR_PREFIX}SPEC"
_TREE = "NEMO_RUN_RAY_SRC"
_PATCHES = ("data_mover_configs", "dgxcloud_exports")
#: Runs what stands behind it when the source code is there. No "$(", which Kubernetes reads as a
#: variable of its own, and no single quote, between which DGX Cloud's form stands.
_UNPACK = (
    "nrr=python3; command -v python3 >/dev/null || nrr=python; command -v $nrr >/dev/null || "
    '{ echo "nemo-run-ray: the image has no python3, which unpacks the source code" >&2; '
    f'exit 127; }}; exec $nrr -I -c "${{{_BOOT}:?nemo-run-ray: the source code has not arrived}}"'
)
#: First line of Lepton's launch script, which starts itself again when ``pod.py`` has set this.
_LEPTON_LINE = f'if [ -z "${_TREE}" ]; then {_UNPACK} /bin/bash "$0"; fi'
#: Kubernetes makes ``$`` of ``$$`` in a value, and Go writes ``<``, ``>`` and ``&`` as six
#: characters in JSON. Base 85 has them; these four it does not have.
_TO_SAFE = str.maketrans("$<>&", ".,/:")
#: Size of the parts that are compressed at the same time.
_PART_BYTES = 4 * 1024**2
#: Characters of one variable. One string of a new process is at most 128 KiB with its name and end:
#: MAX_ARG_STRLEN, execve(2). run:ai answers 400 for a value of more than 10,000 characters.
LEPTON_CHARS, DGXCLOUD_CHARS = 120_000, 9_500
#: For other contents: the object's status and managed fields, the platform's own variables.
_RESERVE_BYTES = 131_072
#: All arguments and variables of a new process: a quarter of a stack of 8 MiB, execve(2).
_PROCESS_BYTES = 2_097_152 - _RESERVE_BYTES
#: An object in etcd, which holds it for Kubernetes: --max-request-bytes, 1.5 MiB.
_OBJECT_BYTES = 1_572_864 - _RESERVE_BYTES
#: Approximate size of one variable's entry in the managed fields of a Kubernetes object.
_MANAGED_BYTES = 80


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
        scripts = list(dict.fromkeys(_scripts(task, root)))
        if not isinstance(executor, (LeptonExecutor, DGXCloudExecutor)):
            known = executor.packager
            if isinstance(known, SourcePackager):  # of another task of the same group
                both = [*known.scripts, *scripts] if known.scripts and scripts else []
                known.scripts = list(dict.fromkeys(both))
            elif known in (Packager(), GitArchivePackager()):  # the executors' defaults
                fields = {**asdict(self), "root": str(root)}
                del fields["experiment_id"]
                executor.packager = SourcePackager(**fields, scripts=scripts)
            return
        if type(executor.packager) is not Packager:
            raise TransportError(
                f"ShipSource: the executor has a {type(executor.packager).__name__}, which sends "
                "code too. Keep one of the two."
            )
        source = _collect(root, self.include, self.exclude, self.collections, scripts)
        _into_environment(source, task, executor)
        if isinstance(task, Script) and not task.m:  # commands start in the tree
            task.path = _in_tree(task.path, root) or task.path  # or it is in the image
        refusal = ["dgxcloud_refusal"] if isinstance(executor, DGXCloudExecutor) else []
        patches.apply(*_PATCHES, *refusal)


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
        source = _collect(
            Path(self.root), self.include, self.exclude, self.collections, self.scripts
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        write_tar_gz(str(target), sorted(source.tree.items()))
        return str(target)


def _collect(root: Path, *choice: Sequence[str]) -> Source:
    """Choose and read the files, and say what ``.gitignore`` keeps here."""
    source = collect(root, *choice)
    if source.ignored:
        log.warning(
            "ShipSource: %d file(s) or folder(s) stay here because .gitignore names them: %s. "
            "include=[…] sends them.",
            len(source.ignored),
            ", ".join(source.ignored[:10]) + (", …" if len(source.ignored) > 10 else ""),
        )
    return source


def _scripts(task: Partial | Script, root: Path) -> Iterator[str]:
    """The scripts of the task that are in the tree, relative to the root."""
    paths: list[str] = []
    modules: list[str] = []
    if not isinstance(task, Script):
        modules = list(_modules(task))
    elif task.inline:
        paths = re.findall(r"[\w./-]+\.py\b", task.inline)
        modules = re.findall(r"(?<!\S)-m\s+([\w.]+)", task.inline)
    else:
        (modules if task.m else paths).append(task.path)
    places = [_in_tree(path, root) for path in paths]
    places += [find_module(root, module) for module in modules if module]
    yield from filter(None, places)


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


def _into_environment(
    source: Source, task: Partial | Script, executor: LeptonExecutor | DGXCloudExecutor
) -> None:
    older = json.loads(executor.env_vars.get(_SPEC, "{}"))  # of another task of the same group
    variables = {
        name: value
        for name, value in executor.env_vars.items()
        if not name.startswith(OUR_PREFIX) and name != _TREE  # as a shipped driver has it
    }
    # The scripts of DGX Cloud would set a PYTHONPATH of the user's anew, without the tree.
    path = variables.pop("PYTHONPATH", older.get("path"))
    if isinstance(task, Script):
        task.env.pop(_TREE, None)
        path = task.env.pop("PYTHONPATH", path)
    is_lepton = isinstance(executor, LeptonExecutor)
    shared = executor.nemo_run_dir if is_lepton else executor.pvc_nemo_run_dir
    job = executor.lepton_job_dir if is_lepton else executor.pvc_job_dir
    for folder in (shared, job):
        if not re.fullmatch(r"/[\w@%+=:,./-]*", folder, re.ASCII):
            raise TransportError(
                f"ShipSource: the folder {folder!r} on the cluster must be absolute, of letters, "
                "digits and @%+=:,./- only, because NeMo-Run writes it unquoted into its scripts."
            )
    digest, text = encode(source.tree)
    size = LEPTON_CHARS if is_lepton else DGXCLOUD_CHARS
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    tree = f"{shared.rstrip('/')}/.source/src-{digest[:40]}"
    spec = {
        "digest": digest,
        "count": len(pieces),
        "tree": tree,
        "code": f"{job}/code",
        "root": os.path.normpath(f"{tree}/{source.base}"),
        **({} if path is None else {"path": path}),
    }
    carriers = {f"{OUR_PREFIX}{number}": piece for number, piece in enumerate(pieces)}
    carriers[_SPEC] = json.dumps(spec, separators=(",", ":"))
    carriers[_BOOT] = Path(__file__).with_name("pod.py").read_text(encoding="utf-8")
    # run:ai keeps the variables of a distributed workload twice: for the master and the workers.
    copies = 2 if not is_lepton and executor.nodes > 1 else 1
    platform = "Lepton" if is_lepton else "DGX Cloud"
    check_limits(platform, copies, {**variables, **carriers}, source.tree)
    if is_lepton:
        others = [command for command in executor.pre_launch_commands if command != _LEPTON_LINE]
        executor.pre_launch_commands = [_LEPTON_LINE, *others]
    else:
        _wrap_command(executor)
    executor.env_vars = {**variables, **carriers}


def encode(tree: Mapping[str, Entry]) -> tuple[str, str]:
    """The digest of a tree, and its files as compressed text.

    The text is ASCII without quotes, backslashes, ``$``, ``<``, ``>`` and ``&``; ``pod.py`` undoes
    it. The same tree gives the same digest.
    """
    raw = io.BytesIO()
    write_tar(raw, sorted(tree.items()))
    packed = raw.getvalue()
    parts = [packed[start : start + _PART_BYTES] for start in range(0, len(packed), _PART_BYTES)]
    with ThreadPoolExecutor() as pool:  # compressing takes seconds, and lets other threads run
        compressed = b"".join(pool.map(lzma.compress, parts))
    text = base64.b85encode(compressed).decode("ascii").translate(_TO_SAFE)
    return hashlib.sha256(packed).hexdigest(), text


def check_limits(
    platform: str, copies: int, variables: Mapping[str, str], tree: Mapping[str, Entry]
) -> None:
    """Refuse what the platform would refuse, or break on.

    Args:
        platform: its name.
        copies: how often the workload's description repeats the variables.
        variables: of the job.
        tree: the source code that they carry.

    Raises:
        SourceTooLarge: a limit is exceeded; the message has the limit, the size and the files.
    """
    process = sum(len(f"{name}={value}".encode()) + 9 for name, value in variables.items())
    listed = json.dumps([{"name": name, "value": value} for name, value in variables.items()])
    described = copies * (len(listed) + _MANAGED_BYTES * len(variables))
    repeated = f", which repeats the variables {copies} times," if copies > 1 else ""
    for what, size, limit in (
        ("a process's variables", process, _PROCESS_BYTES),
        (f"the workload's description{repeated}", described, _OBJECT_BYTES),
    ):
        if size > limit:
            files = {n: len(entry.content) for n, entry in tree.items() if isinstance(entry, File)}
            raise too_large(platform, what, size, limit, files)


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
