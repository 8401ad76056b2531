"""The script of a Slurm job that starts Ray, and the program that it carries along.

NeMo-Run fills the templates, by their folder and with its own variables. A template cannot read a
file of another folder, so one folder is made with all of them.
"""

from __future__ import annotations

import base64
import copy
import io
import os
import re
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path

from nemo_run.config import ConfigurableMixin
from nemo_run.core.execution.slurm import SlurmExecutor

from nemo_run_ray import remote
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import Probe, strict_init
from nemo_run_ray.remote.files import LIFE
from nemo_run_ray.remote.slurm.settings import RENEW, SidecarSpec


@strict_init
@dataclass
class Sidecar(ConfigurableMixin):
    """A command that runs beside Ray as long as an allocation lasts: a code sandbox, a cache.

    No job starts before every sidecar is ready, and the allocation ends when one of them does.

    Example:
        ``Sidecar("sandbox", "./start-sandbox.sh", ready=PortProbe(6000))``

    Raises:
        ConfigError: a value is not allowed.
    """

    #: For messages and the name of its log, ``logs/ray-<name>-<host>.log``.
    name: str
    #: A line for ``bash``.
    command: str
    _: KW_ONLY
    #: On every node, or on the head's alone.
    everywhere: bool = True
    #: The probe that finds it ready, with a port's number; ``None`` means at once.
    ready: Probe | None = None
    #: Added to the environment of the executor.
    env_vars: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch("[A-Za-z0-9_-]{1,60}", self.name):
            raise ConfigError(
                f"Sidecar.name is {self.name!r}; allowed are letters, digits, '_' and '-'."
            )
        if not isinstance(self.command, str) or not self.command.strip():
            raise ConfigError(f"Sidecar.command is {self.command!r}; expected is a line for bash.")
        port = getattr(self.ready, "port", None)
        if isinstance(port, str):
            raise ConfigError(
                f"Sidecar.ready of {self.name!r} names the port {port!r}; a sidecar has no named "
                "ports: give the number."
            )

    def spec(self) -> SidecarSpec:
        """The sidecar as the node program reads it."""
        probe = None if self.ready is None else self.ready.spec()
        return SidecarSpec(self.name, self.command, self.everywhere, probe, dict(self.env_vars))


_MAIN = """\
import gc
import sys

gc.disable()  # imports make little garbage, and to look for it takes a tenth of their time

if sys.version_info < (3, 9):
    sys.exit("nemo_run_ray| Python %d.%d runs the node program; it needs 3.9 or newer: set "
             "NEMO_RUN_RAY_PYTHON" % sys.version_info[:2])

from nemo_run_ray_remote.slurm.__main__ import main

gc.freeze()
gc.enable()
sys.exit(main())
"""


@cache
def node_program() -> bytes:
    """The zip that Python runs on a node."""
    root, buffer = Path(remote.__file__).parent, io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        archive.writestr("__main__.py", _MAIN)
        patterns = ("*.py", "node/*.py", "slurm/*.py")
        for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
            archive.write(path, f"nemo_run_ray_remote/{path.relative_to(root)}")
    return buffer.getvalue()


#: Names of the templates, which are NeMo-Run's.
TEMPLATES = ("ray.sub.j2", "ray_enroot.sub.j2")


@contextmanager
def template_folder() -> Iterator[str]:
    """A folder with the templates and the program, while NeMo-Run fills them."""
    with tempfile.TemporaryDirectory(prefix="nemo-run-ray-") as folder:
        for path in Path(__file__).parent.glob("*.j2"):
            shutil.copy(path, folder)
        # Base64 with lines, since shells limit the length of one.
        Path(folder, "node.pyz.b64").write_bytes(base64.encodebytes(node_program()))
        yield folder


def job_script(
    name: str, executor: SlurmExecutor, folder: str, variables: Mapping[str, str]
) -> str:
    """The text for ``sbatch``.

    Args:
        name: of the cluster.
        executor: what NeMo-Run asks Slurm for; a copy, whose fields are set here.
        folder: of the allocation, in which all its files are.
        variables: settings of the node program, see ``remote/slurm/settings.py``.
    """
    from nemo_run.run.ray.slurm import SlurmRayRequest

    # NeMo-Run's request fills in what is missing, and writes variables as they are.
    executor.job_details = copy.deepcopy(executor.job_details)
    executor.job_details.folder = f"{folder}/logs"
    executor.env_vars = executor.env_vars | {
        key: shlex.quote(value) for key, value in {LIFE: folder, **variables}.items()
    }
    if variables[RENEW]:
        # In a container too, the nodes read the files of the allocations before.
        shared = os.path.dirname(os.path.dirname(folder))  # the cluster's
        executor.container_mounts = [*executor.container_mounts, f"{shared}:{shared}"]
    with template_folder() as templates:
        request = SlurmRayRequest(
            name=name,
            cluster_dir=folder,
            template_name=TEMPLATES[0],
            template_dir=templates,
            executor=executor,
            launch_cmd=["sbatch", "--parsable"],
        )
        return str(request.materialize())
