"""A folder, or a zip file, as the code of a task."""

# No postponed annotations: NeMo-Run and fiddle read the fields' types.

import os
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import ClassVar

from nemo_run.core.packaging.base import Packager

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
from nemo_run_ray.errors import ConfigError, PackagingFailed
from nemo_run_ray.fields import allow, every, strict_init
from nemo_run_ray.plan.roles import CODE_DIR

#: Folders, and files of these names, that are never code: those of version control.
_SKIPPED = (".git", ".hg", ".svn")

_FIELDS = {
    "path": allow(
        lambda value: isinstance(value, (str, os.PathLike)) and os.fspath(value),
        "the path of a folder or a zip",
    ),
    "exclude": every(
        lambda value: isinstance(value, str), "a list of patterns, such as ['data', '*.ckpt']"
    ),
}


@strict_init
@dataclass
class FolderPackager(Packager):
    """Sends a folder, or a zip file, as the code of a task.

    A folder is sent whole, committed or not, but for what its ``.gitignore`` files and ``exclude``
    keep here, folders of version control and ``__pycache__``. Of a zip all is sent but ``exclude``.

    Example:
        ``RayExecutor(address="http://ray-head:8265", packager=FolderPackager("~/recipes"))``

    Raises:
        ConfigError: a field is wrong. Whether the folder is there is checked when a job is planned,
            since a saved experiment may be looked at where it is not.
    """

    #: The folder or the zip. A relative path is one of the current folder.
    path: str
    _: KW_ONLY
    #: Patterns, relative to the folder, or of names, of what is not sent.
    exclude: list[str] = field(default_factory=list)

    #: The field or variable with the path, for messages.
    _field: ClassVar[str] = "FolderPackager.path"

    def __post_init__(self) -> None:
        for name, check in _FIELDS.items():
            check(f"FolderPackager.{name}", getattr(self, name))
        # The job may be planned, or resumed, by a process that is in another folder.
        self.path = os.path.abspath(os.path.expanduser(os.fspath(self.path)))

    def __str__(self) -> str:
        return f"{'the zip' if self._is_zip else 'the folder'} {self.path}"

    def check_path(self) -> None:
        """Check that there is something to send.

        Raises:
            ConfigError: there is neither a folder nor a zip of this path.
        """
        if os.path.isdir(self.path) or self._is_zip:
            return
        found = "is no zip" if os.path.exists(self.path) else "does not exist"
        raise ConfigError(
            f"{self._field} names {self.path}, which {found}; allowed is a folder or a zip file. "
            "Nothing was sent."
        )

    def package(self, path: Path, job_dir: str, name: str) -> str:
        """Pack it; equal contents give equal bytes.

        Raises:
            ConfigError: there is neither a folder nor a zip.
            PackagingFailed: there is nothing in it.
            TransportError: a file cannot be read, a link leaves the folder, or it is too large.
        """
        target = os.path.join(job_dir, f"{name}.tar.gz")
        if os.path.exists(target):
            return target
        self.check_path()
        if self._is_zip:
            entries = list(self._zipped())
        else:
            root = Path(self.path).resolve()
            files, _ = list_files(root, ["."], [*_SKIPPED, *self.exclude])
            entries = list(read_tree(root, files, str(self)))
        if not entries:
            raise PackagingFailed(f"There is nothing to send in {self}. Nothing was sent.")
        write_tar_gz(target, entries)
        return target

    @property
    def _is_zip(self) -> bool:
        return os.path.isfile(self.path) and zipfile.is_zipfile(self.path)

    def _zipped(self) -> Iterator[tuple[str, Entry]]:
        """The files and links of the zip, by name; of several of one name the last counts."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                infos = {
                    info.filename: info
                    for info in archive.infolist()
                    if not info.is_dir() and not matches(info.filename, self.exclude)
                }
                outside = [name for name in infos if name[0] == "/" or ".." in name.split("/")]
                if outside:
                    raise PackagingFailed(
                        f"{self} has entries outside of the task's folder: "
                        f"{', '.join(outside[:5])}. Make it anew without them, or leave them out: "
                        "exclude=[…]. Nothing was sent."
                    )
                check_source({name: info.file_size for name, info in infos.items()}, str(self))
                for name, info in sorted(infos.items()):
                    mode, content = info.external_attr >> 16, archive.read(info)
                    if stat.S_ISLNK(mode):
                        yield name, Link(os.fsdecode(content))
                    else:
                        yield name, File(content, bool(mode & stat.S_IXUSR))
        except PackagingFailed:
            raise
        except (zipfile.BadZipFile, RuntimeError) as error:
            raise PackagingFailed(
                f"{self} cannot be read ({error}); expected a zip without a password. Make it "
                "anew. Nothing was sent."
            ) from error


class CodeDir(FolderPackager):
    """The packager of the folder or zip that ``NEMO_RUN_CODE_DIR`` names."""

    _field = f"The variable {CODE_DIR}"

    def __str__(self) -> str:
        return f"{super().__str__()}, named by {CODE_DIR}"
