"""The private run directory of a job on a node.

Ray's working directory is a cache that all jobs with the same code share, so nothing runs in it::

    <tmp>/nemo_run_<uid>/<submission id>/     the root, for the owner only
        __main__.py                           the user's script, found there by NeMo-Run's runner
        nemo_run/                             what the task knows as /nemo_run
            code/  configs/  scripts/
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress

from ..files import own_folder, write_file

#: File in the code archive that keeps what Ray's unpacking drops: executable bits and symlinks.
MANIFEST = ".nemo_run_ray_manifest.json"
#: Folder in the job archive: a folder for each job, with its spec, ``configs`` and ``scripts``, and
#: the user's ``__main__.py``.
JOBS = "nemo_run_ray_jobs"
#: File in the folder of a job.
SPEC = "spec.json"
#: File in the archive of a dispatch.
DISPATCH = "nemo_run_ray_dispatch.json"
#: File in the archive of secrets.
SECRETS = "nemo_run_ray_secrets.json"
#: File in the same archive: the key that proves the job's end.
KEY = "nemo_run_ray_key"
#: Ray's variable with the job's configuration, from which workers of the job get its archives.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: ``/nemo_run`` as a path of its own, not the tail of another one.
_MOUNT = re.compile(r"(?<![\w./~})*?\]-])/nemo_run(?![\w.-])")


def run_dirs(tmpdir: str) -> str:
    """The folder of all run directories of this user."""
    return own_folder(f"{tmpdir}/nemo_run_{os.getuid()}")


class RunDir:
    """Paths of one run directory. Nothing is created before ``create``.

    A host of a group or an array gives a name of its own for the submission id.
    """

    def __init__(self, submission_id: str, base: str | None = None):
        self.base = base or run_dirs(tempfile.gettempdir())
        self.root = f"{self.base}/{submission_id}"
        self.mount = f"{self.root}/nemo_run"
        self.code = f"{self.mount}/code"

    def create(self, jobs: str, job: str, working_dir: str | None) -> None:
        """Make the directory and fill it with a job of the archive, and the code that Ray unpacked.

        Raises:
            PermissionError: the base is not a folder of this user.
        """
        os.makedirs(self.base, mode=0o700, exist_ok=True)
        owner = os.lstat(self.base)
        if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
            raise PermissionError(
                f"{self.base} is no folder of this user; it belongs to user id {owner.st_uid}. "
                "Remove it, or set TMPDIR on the cluster"
            )
        self.remove()  # what a dead attempt left
        os.makedirs(self.mount, 0o700)
        os.chmod(self.root, 0o700)
        if working_dir is None:
            os.mkdir(self.code)
        else:
            shutil.copytree(working_dir, self.code, symlinks=True)
            _restore_manifest(self.code)
        for kind in ("configs", "scripts"):
            os.mkdir(f"{self.mount}/{kind}")
            source = f"{jobs}/{job}/{kind}"
            if os.path.isdir(source):
                shutil.copytree(source, f"{self.mount}/{kind}", dirs_exist_ok=True)
        for name in os.listdir(f"{self.mount}/scripts"):
            path = f"{self.mount}/scripts/{name}"
            with open(path, "rb") as file:
                text = self.map(os.fsdecode(file.read()))
            write_file(path, os.fsencode(text))
            os.chmod(path, 0o700)
        main = f"{jobs}/__main__.py"
        if os.path.exists(main):
            shutil.copy(main, self.root)

    def map(self, text: str) -> str:
        """A word or a variable with ``/nemo_run/…`` in it replaced by paths of this directory."""
        return _MOUNT.sub(lambda _: self.mount, text)

    def remove(self) -> None:
        """Remove it; the base stays for other jobs."""
        shutil.rmtree(self.root, ignore_errors=True)


def _restore_manifest(code: str) -> None:
    path = f"{code}/{MANIFEST}"
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        manifest = json.load(file)
    os.remove(path)
    for name in manifest["executables"]:
        target = f"{code}/{name}"
        os.chmod(target, os.stat(target).st_mode | 0o111)
    for name, link in manifest["symlinks"].items():
        target = f"{code}/{name}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(link, target)


def take_key() -> str:
    """Read the key that proves the job's end, and remove the file that brought it.

    Its archive is also removed from the job's configuration: Ray would unpack it for workers of a
    command that is a Ray program. The key is empty when it is not on this node any more.
    """
    path = archived(KEY)
    if not path:
        return ""  # a restarted driver finds none
    uri = f"gcs://{os.path.basename(os.path.dirname(path))}.zip"
    with suppress(KeyError, ValueError):  # a Ray that says it otherwise
        config = json.loads(os.environ[JOB_CONFIG])
        config["runtime_env"]["py_modules"].remove(uri)
        os.environ[JOB_CONFIG] = json.dumps(config)
    with open(path, encoding="utf-8") as file:
        key = file.read()
    os.remove(path)
    return key


def take_secrets(names: tuple[str, ...]) -> dict[str, str]:
    """Read the values of the job's secrets and remove the file that brought them.

    Raises:
        FileNotFoundError: one of them is not on this node.
    """
    values = read_secrets(names)
    remove_secrets()
    return values


def read_secrets(names: tuple[str, ...] = ()) -> dict[str, str]:
    """The secrets that were sent along, by name; none if no archive has some.

    Their file is left for another reading, to its owner alone.

    Raises:
        FileNotFoundError: one of the names is not on this node.
    """
    values: dict[str, str] = {}
    path = archived(SECRETS)
    if path:
        os.chmod(path, 0o600)
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    missing = [name for name in names if name not in values]
    if missing:
        raise FileNotFoundError(f"the secrets {', '.join(missing)} are not on this node")
    return values


def remove_secrets() -> None:
    """Remove the file that brought the secrets, if there is one."""
    path = archived(SECRETS)
    if path:
        os.remove(path)


def jobs_folder() -> str:
    """Path of the folder ``JOBS`` that Ray unpacked for this job."""
    return archived(JOBS) or JOBS


def archived(name: str) -> str | None:
    """Path of what lies at the top of one of the archives that Ray unpacked for this job."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        path = f"{folder}/{name}"
        if folder and os.path.exists(path):
            return path
    return None
