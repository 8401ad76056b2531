"""``data_mover_configs``: what Lepton's and DGX Cloud's data movers send in a command line.

YAML files that no process on the pod reads stay out of it, the tarball is reproducible, and a large
one is sent in pieces.
"""

from __future__ import annotations

import base64
import gzip
import io
import os
import re
import tarfile
from collections.abc import Sequence
from typing import Any

from nemo_run.core.execution import dgxcloud
from nemo_run.core.execution.dgxcloud import DGXCloudExecutor
from nemo_run.core.execution.lepton import LeptonExecutor

from nemo_run_ray.patches import Edit, Patch

#: Files that NeMo-Run writes for people: the executor and the task, as YAML. A ``run.Partial`` is
#: read from ``<name>_fn_or_script`` beside them, so the folder itself must be sent.
UNREAD = ("_executor.yaml", "_config.yaml")
#: A file in the job's folder on the cluster, made when all pieces have been unpacked.
MOVED = ".moved"


class DataMoverConfigsPatch(Patch):
    """Lepton and DGX Cloud: the YAML files that no process on the pod reads stay out of the
    tarball that is sent inside a command line. One that is too large for it is sent in pieces.
    """

    name = "data_mover_configs"
    retired_by = "executors of NeMo-Run that do not send a job's folder inside a command line"

    def edits(self) -> Sequence[Edit]:
        # Each with the digest of its body in NeMo-Run 0.9 to 0.12.
        command = "copy_directory_data_command"
        edits = [
            self.wrapped(LeptonExecutor, command, lambda _: _argv, "0387dea68b8764e1"),
            self.wrapped(DGXCloudExecutor, command, lambda _: _script, "a4c7e92b458bf91c"),
        ]
        if hasattr(DGXCloudExecutor, "MAX_ARGS_CHARS"):  # it sends what is longer file by file
            edits.append(
                self.wrapped(
                    DGXCloudExecutor, "move_data", lambda _: _move_data, "6b8713a91c09a29d"
                )
            )
        return edits


PATCH = DataMoverConfigsPatch()


def _argv(*args: Any) -> list[str]:
    return ["sh", "-c", _script(*args)]


def _script(self: Any, local_dir_path: str, dest_path: str) -> str:
    """The data mover's script, which NeMo-Run puts between single quotes on DGX Cloud."""
    folder, archive = quoted(dest_path), quoted(f"{dest_path}/archive.tar.gz")
    return (
        f"rm -rf {folder} && mkdir -p {folder} && echo {_encoded(self, local_dir_path)} | "
        f"base64 -d > {archive} && tar -xzf {archive} -C {folder} && rm {archive}"
    )


def _encoded(executor: Any, source: str) -> str:
    """A tar.gz of a job's folder as text: the same for the same names, contents and modes."""

    def cleaned(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        unread = [f"configs/{executor.job_name}{ending}" for ending in UNREAD]
        return None if entry.name in unread else entry

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(os.listdir(source)):
            archive.add(f"{source}/{name}", name, filter=cleaned)
    return base64.b64encode(gzip.compress(raw.getvalue(), mtime=0)).decode("ascii")


def quoted(text: str) -> str:
    """A shell word of the text that has no single quote in it itself."""
    escaped = re.sub(r'([$`"\\])', r"\\\1", text).replace("'", r'$(printf "\047")')
    return f'"{escaped}"'


def _move_data(self: Any, token: str, project_id: str, cluster_id: str, sleep: float = 10) -> None:
    """Move the job's folder by one workload, or by as many as its tarball has pieces.

    Each writes a piece to a file of its own; the last one unpacks them all. Each can run twice, as
    that of a pod does which dies before the platform knows its end.
    """
    scripts = [self.copy_directory_data_command(self.job_dir, self.pvc_job_dir)]
    if len(scripts[0]) > self.MAX_ARGS_CHARS:
        data, target = _encoded(self, self.job_dir), self.pvc_job_dir
        folder, start = quoted(target), quoted(f"{target}/archive.b64.")
        done = quoted(f"{target}/{MOVED}")
        prepare = f"rm -rf {folder} && mkdir -p {folder} && "
        size = self.MAX_ARGS_CHARS - len(f"{prepare}echo  > {start}00000")
        scripts = [
            f"echo {data[first : first + size]} > {start}{number:05d}"
            for number, first in enumerate(range(0, len(data), size))
        ]
        scripts[0] = prepare + scripts[0]
        unpack = f"cat {start}* | base64 -d | tar -xzf - -C {folder}"
        scripts.append(f"[ -e {done} ] || {{ {unpack} && : > {done}; }} && rm -f {start}*")
        dgxcloud.logger.info("Moving the job's folder in %d pieces", len(scripts))
    for script in scripts:
        self._run_workspace_and_wait(token, project_id, cluster_id, "data-mover", script, sleep)
