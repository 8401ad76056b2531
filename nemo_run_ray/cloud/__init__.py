"""``ShipSource``: the plug-in of NeMo-Run that sends a task's source code with it.

It packs the code into the environment of Lepton and DGX Cloud pods.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fiddle import daglish
from nemo_run.config import Partial, Script
from nemo_run.core.execution.base import Executor
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor
from nemo_run.core.execution.lepton import LeptonExecutor
from nemo_run.core.packaging.base import Packager
from nemo_run.core.packaging.git import GitArchivePackager
from nemo_run.run.plugin import ExperimentPlugin

from nemo_run_ray import patches
from nemo_run_ray.cloud.pod import INDENTS
from nemo_run_ray.cloud.source import (
    LEFT_OUT,
    Entry,
    File,
    SourcePackager,
    check_source,
    find_module,
    import_base,
)
from nemo_run_ray.errors import TransportError
from nemo_run_ray.patches.dgxcloud_exports import OUR_PREFIX

__all__ = ["LEFT_OUT", "ShipSource", "SourcePackager"]

_BOOT, _SPEC = f"{OUR_PREFIX}BOOT", f"{OUR_PREFIX}SPEC"
#: Runs what stands behind it when the source code is there. No "$(", which Kubernetes reads as a
#: variable of its own, and no single quote, between which DGX Cloud's form stands.
_UNPACK = (
    "nrr=python3; command -v python3 >/dev/null || nrr=python; command -v $nrr >/dev/null || "
    '{ echo "nemo-run-ray: the image has no python3, which unpacks the source code" >&2; '
    f'exit 127; }}; exec $nrr -I -c "${{{_BOOT}:?nemo-run-ray: the source code has not arrived}}"'
)
#: Characters of one variable. One string of a new process is at most 128 KiB with its name and end:
#: MAX_ARG_STRLEN, execve(2). run:ai answers 400 for a value of more than 10,000 characters.
LEPTON_CHARS, DGXCLOUD_CHARS = 120_000, 9_500
#: Compressing takes seconds, so larger trees are compressed in parts, by several threads.
_PART_BYTES = 5 * 2**20
#: Tuned to text: more of a character's high bits, none of its alignment. The lower depth of search
#: saves a fifth of the time and costs a thousandth of the size.
_FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 6,
        "dict_size": 2**23,
        "depth": 20,
        "lc": 4,
        "lp": 0,
        "pb": 0,
    }
]


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
        collections: names of folders with families of scripts. Only the families that the task's
            scripts belong to are sent.
    """

    root: str = "."
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    collections: Sequence[str] = ("recipes", "steps")

    def __post_init__(self) -> None:
        self.root = str(self.root)  # NeMo-Run saves plug-ins
        for name in ("include", "exclude", "collections"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])

    def setup(self, task: Partial | Script, executor: Executor) -> None:
        """Prepare a task and its executor. Nothing is sent yet.

        Raises:
            TransportError: the source code cannot be sent; see the message.
            SourceTooLarge: it exceeds a limit of the platform.
            UnsupportedNemoRun: a patch that this needs does not know this NeMo-Run.
        """
        root = Path(self.root).resolve()
        scripts, known = _scripts(task, root), executor.packager
        packager = SourcePackager(
            root=str(root),
            include=self.include,
            exclude=self.exclude,
            collections=self.collections,
            scripts=scripts,
        )
        if not isinstance(executor, (LeptonExecutor, DGXCloudExecutor)):
            if isinstance(known, SourcePackager):  # of another task of the same group
                known.scripts = [*known.scripts, *scripts] if known.scripts and scripts else []
            elif known in (Packager(), GitArchivePackager()):  # the executors' defaults
                executor.packager = packager
            return
        if type(known) is not Packager:
            raise TransportError(
                f"ShipSource: the executor has a {type(known).__name__}, which sends "
                "code too. Keep one of the two."
            )
        tree = packager.collect()
        older = json.loads(executor.env_vars.get(_SPEC, "{}"))  # of another task of the same group
        variables = {
            name: value
            for name, value in executor.env_vars.items()
            # A driver that was shipped itself has the second one.
            if not name.startswith(OUR_PREFIX) and name != "NEMO_RUN_RAY_SRC"
        }
        # The scripts of DGX Cloud would set a PYTHONPATH of the user's anew, without the tree.
        path = variables.pop("PYTHONPATH", older.get("path", "$PYTHONPATH"))
        if isinstance(task, Script):
            path = task.env.pop("PYTHONPATH", path)
        copies = 1
        if isinstance(executor, LeptonExecutor):
            platform, size, shared = "Lepton", LEPTON_CHARS, executor.nemo_run_dir
            job = executor.lepton_job_dir
            # ``pod.py`` starts the launch script again without these variables.
            line = f'if [ -n "${_SPEC}${_BOOT}" ]; then {_UNPACK} /bin/bash "$0"; fi'
            if line not in executor.pre_launch_commands:
                executor.pre_launch_commands = [line, *executor.pre_launch_commands]
        else:
            platform, size, shared = "DGX Cloud", DGXCLOUD_CHARS, executor.pvc_nemo_run_dir
            job = executor.pvc_job_dir
            if executor.nodes > 1:  # run:ai keeps the variables for the master and for the workers
                copies = 2
            given = {"command", "args", "environmentVariables"} & executor.custom_spec.keys()
            if given and _BOOT not in str(executor.custom_spec.get("args")):
                raise TransportError(
                    f"ShipSource: custom_spec has {' and '.join(sorted(given))}, which ShipSource "
                    "needs to send the source code and to unpack it before the job's script. "
                    "Remove it from custom_spec; env_vars takes variables."
                )
            executor.custom_spec = {
                **executor.custom_spec,
                "command": "/bin/bash -c",  # NeMo-Run quotes the script of its data mover so, too
                "args": f"'{_UNPACK} /bin/bash {job}/launch_script.sh'",
            }
        for folder in (shared, job):  # scripts of NeMo-Run have them without quotes
            if not re.fullmatch(r"/[\w@%+=:,./-]*", folder, re.ASCII):
                raise TransportError(
                    f"ShipSource: the folder on the cluster is {folder!r}; expected is an absolute "
                    "path without blanks and quotes. It is made of nemo_run_dir and the title."
                )
        digest, text = encode(tree)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        variables |= {f"{OUR_PREFIX}{number}": piece for number, piece in enumerate(pieces)}
        place = f"{shared.rstrip('/')}/.source/src-{digest[:40]}"
        variables[_SPEC] = json.dumps(
            {
                "digest": digest,
                "count": len(pieces),
                "tree": place,
                "code": f"{job}/code",
                "root": os.path.normpath(f"{place}/{import_base(root)}"),
                "path": path,
            }
        )
        variables[_BOOT] = Path(__file__).with_name("pod.py").read_text(encoding="utf-8")
        # An object in etcd has 1.5 MiB at most (--max-request-bytes), also the platform's own
        # variables and the object's status. A new process may have 2 MiB.
        check_source(
            {name: len(entry.content) for name, entry in tree.items() if isinstance(entry, File)},
            platform,
            "the workload's description",
            copies * len(json.dumps([{"name": n, "value": v} for n, v in variables.items()])),
            1_572_864 - 131_072,
        )
        executor.env_vars = variables
        if isinstance(task, Script) and not task.m:  # commands start in the tree
            task.path = _in_tree(task.path, root) or task.path  # or it is in the image
        patches.apply("data_mover_configs", "dgxcloud_exports", "dgxcloud_refusal")


def _scripts(task: Partial | Script, root: Path) -> list[str]:
    """The scripts of the task that are in the tree, relative to the root."""
    paths: list[str] = []
    modules: list[str] = []
    if not isinstance(task, Script):  # the function, and all that its arguments are built from
        parts = [getattr(value, "__fn_or_cls__", value) for value, _ in daglish.iterate(task)]
        modules = [getattr(part, "__module__", "") for part in parts]
    elif task.inline:
        paths = re.findall(r"[\w./-]+\.py\b", task.inline)
        modules = re.findall(r"(?<!\S)-m\s+([\w.]+)", task.inline)
    else:
        (modules if task.m else paths).append(task.path)
    places = [_in_tree(path, root) for path in paths]
    places += [find_module(root, module) for module in modules if module]
    return list(dict.fromkeys(filter(None, places)))


def _in_tree(path: str, root: Path) -> str | None:
    for base in (Path.cwd(), root):
        whole = Path(os.path.abspath(base / path))
        whole = whole.parent.resolve() / whole.name  # a link keeps its own name
        if whole.is_file() and whole.is_relative_to(root):
            return whole.relative_to(root).as_posix()
    return None


def encode(tree: Mapping[str, Entry]) -> tuple[str, str]:
    """The digest of a tree, and its files as compressed text.

    The text is ASCII without quotes, backslashes, ``$``, ``<``, ``>`` and ``&``; ``pod.py`` undoes
    it. The same tree gives the same digest.
    """
    rows, contents = [], []
    for name, entry in sorted(tree.items()):
        content = entry.content if isinstance(entry, File) else b""
        rows.append([name, entry.mode if isinstance(entry, File) else entry.target, len(content)])
        contents.append(content)
    packed = json.dumps(rows, separators=(",", ":")).encode() + b"\n" + b"".join(contents)
    marks = bytes([value for value in range(256) if value not in packed][: len(INDENTS)])
    short = packed
    for mark, indent in zip(marks, INDENTS, strict=False):
        short = short.replace(indent, bytes([mark]))
    short = marks + b"\n" + short
    size = len(short) // (1 + len(short) // _PART_BYTES) + 1
    parts = [short[start : start + size] for start in range(0, len(short), size)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compressor lets other threads run
        sent = base64.b85encode(b"".join(pool.map(partial(lzma.compress, filters=_FILTERS), parts)))
    # Kubernetes makes $ of $$ in a value, and Go writes <, > and & as six characters in JSON. Base
    # 85 has them; these four it does not have.
    text = sent.translate(bytes.maketrans(b"$<>&", b".,/:")).decode("ascii")
    return hashlib.sha256(packed).hexdigest(), text
