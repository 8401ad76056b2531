"""A folder, or a zip file, as the code of a task."""

# No postponed annotations: NeMo-Run and fiddle read the fields' types.

import os
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from pathlib import Path

from nemo_run.core.packaging.base import Packager
from pydantic import Field, InstanceOf

from nemo_run_ray.cloud.source import (
    Entry,
    File,
    Link,
    check_source,
    list_files,
    matches,
    read_tree,
    write_tar_gz,
)
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import Allowed, Text, strict_init
from nemo_run_ray.plan import CODE_DIR

#: Folders, and files of these names, that are never code: those of version control.
_SKIPPED = (".git", ".hg", ".svn")


class _FolderFields(Allowed):
    path: Text | InstanceOf[os.PathLike[str]] = Field(
        description="allowed is the path of a folder or a zip"
    )
    exclude: list[str]


@strict_init
@dataclass
class FolderPackager(Packager):
    """Sends a folder, or a zip file, as the code of a task.

    A folder is sent whole, committed or not, but for what its ``.gitignore`` files and ``exclude``
    keep here, folders of version control and ``__pycache__``. Of a zip all is sent but ``exclude``.

    Example:
        ``RayExecutor(address="http://ray-head:8265", packager=FolderPackager("~/recipes"))``

    Raises:
        ConfigError: a field is wrong. Whether the folder is there is checked when it is packed,
            since a saved experiment may be looked at where it is not.
    """

    #: The folder or the zip. A relative path is one of the current folder.
    path: str
    _: KW_ONLY
    #: Patterns, relative to the folder, or of names, of what is not sent.
    exclude: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _FolderFields.check("FolderPackager", vars(self))
        # The job may be planned, or resumed, by a process that is in another folder.
        self.path = os.path.abspath(os.path.expanduser(os.fspath(self.path)))

    def __str__(self) -> str:
        return f"{'the zip' if self._is_zip else 'the folder'} {self.path}"

    def package(self, path: Path, job_dir: str, name: str) -> str:
        """Pack it; equal contents give equal bytes.

        Raises:
            ConfigError: there is neither a folder nor a zip.
            TransportError: a file cannot be read, a link leaves the folder, or it is too large.
        """
        target = f"{job_dir}/{name}.tar.gz"
        if not os.path.exists(target):
            root = Path(self.path).resolve()
            if self._is_zip:
                entries = self._zipped()
            elif root.is_dir():
                files, _ = list_files(root, ["."], [*_SKIPPED, *self.exclude])
                entries = read_tree(root, files, str(self))
            else:
                found = "is no zip" if root.exists() else "does not exist"
                raise ConfigError(
                    f"FolderPackager cannot send {self}: it {found}; expected is a folder or a zip "
                    "file. Nothing was sent."
                )
            write_tar_gz(target, entries)
        return target

    @property
    def _is_zip(self) -> bool:
        return os.path.isfile(self.path) and zipfile.is_zipfile(self.path)

    def _zipped(self) -> Iterator[tuple[str, Entry]]:
        """The files and links of the zip, by name."""
        with zipfile.ZipFile(self.path) as archive:
            infos = [
                info
                for info in sorted(archive.infolist(), key=attrgetter("filename"))
                if not info.is_dir() and not matches(info.filename, self.exclude)
            ]
            check_source({info.filename: info.file_size for info in infos}, str(self))
            for info in infos:
                mode, content = info.external_attr >> 16, archive.read(info)
                if stat.S_ISLNK(mode):
                    yield info.filename, Link(os.fsdecode(content))
                else:
                    yield info.filename, File(content, bool(mode & stat.S_IXUSR))


class CodeDir(FolderPackager):
    """The packager of the folder or zip that ``NEMO_RUN_CODE_DIR`` names."""

    def __str__(self) -> str:
        return f"{super().__str__()}, named by {CODE_DIR}"
