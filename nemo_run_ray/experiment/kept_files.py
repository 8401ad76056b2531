"""What an experiment's folder keeps of a job that has ended: its log, and the roles of a group."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, cast

from nemo_run_ray.clusters.left_behind import CUT
from nemo_run_ray.remote.files import replacing, write_file
from nemo_run_ray.remote.rows import ArrayRows, GroupRows

_logger = logging.getLogger(__name__)

#: Bytes in which the first line of a log's end is looked for: a longer line is kept in part.
_LINE_BYTES = 64 * 1024


class Kept:
    """The files of one job.

    Args:
        exp_dir: the experiment's folder.
        submission_id: of the job.
        copy: beginning of the path of a second file for the log; empty for none.
    """

    def __init__(self, exp_dir: Path, submission_id: str, copy: str = "") -> None:
        # Whatever a ledger says, the name's end is this one: no other file is replaced.
        self._copy = Path(f"{copy}_{submission_id}_srun.log") if copy else None
        self._log = exp_dir / "ray_logs" / f"{submission_id}.log"
        self._rows = exp_dir / "ray_logs" / f"{submission_id}.json"
        self._array = exp_dir / "ray_logs" / f"{submission_id}.array"

    @property
    def has_log(self) -> bool:
        return self._log.exists()

    @property
    def is_whole(self) -> bool:
        """Whether a log was kept from its first line on."""
        return self.has_log and not next(self.log(), "").startswith(CUT)

    def log(self) -> Iterator[str]:
        """The text, piece by piece."""
        with open(self._log, encoding="utf-8", newline="") as file:
            while text := file.read(65536):
                yield text

    def keep_log(self, texts: Iterable[str], most_bytes: int | None = None) -> None:
        """Write the log, and a second one where that belongs on this machine.

        None is left when reading or writing the first one fails.

        Args:
            texts: the log, in pieces of any size.
            most_bytes: of a longer log the end is kept, behind a line that says how much is not.
        """
        folder = self._log.parent
        folder.mkdir(parents=True, exist_ok=True)
        pieces = (text.encode(errors="replace") for text in texts)
        with replacing(self._log) as file, ExitStack() as stack:
            if most_bytes is None:
                file.writelines(pieces)
            else:
                scratches = [stack.enter_context(_scratch(folder)) for _ in range(2)]
                end = _End(*scratches)
                for piece in pieces:
                    end.add(piece, most_bytes)
                end.write_to(file, most_bytes)
        if self._copy is not None and self._copy.parent.parent.is_dir():
            self._write_copy(self._copy)

    def _write_copy(self, path: Path) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            with open(self._log, "rb") as log, replacing(path) as file:
                shutil.copyfileobj(log, file)
        except OSError as error:
            _logger.warning("The log is not written to %s too: %s", path, error)

    @property
    def has_rows(self) -> bool:
        return self._rows.exists()

    def rows(self) -> GroupRows | ArrayRows:
        """What the driver of a group or of an array told last."""
        return cast("GroupRows | ArrayRows", json.loads(self._rows.read_text(encoding="utf-8")))

    def keep_rows(self, rows: GroupRows | ArrayRows) -> None:
        self._rows.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._rows, json.dumps(rows))

    def has_array_file(self, kind: str) -> bool:
        """Whether a file that the driver of an array has written was kept."""
        return self._array.with_suffix(f".{kind}").exists()

    def array_file(self, kind: str) -> list[str]:
        """Its lines."""
        return self._array.with_suffix(f".{kind}").read_text(encoding="utf-8").splitlines()

    def keep_array_file(self, kind: str, lines: Iterable[str]) -> None:
        self._array.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._array.with_suffix(f".{kind}"), "".join(f"{line}\n" for line in lines))


class _End:
    """The last bytes of a text of any length, on the disk: two files take turns.

    Args:
        older: holds what came before the newer one.
        newer: is written to, until it is full.
    """

    def __init__(self, older: IO[bytes], newer: IO[bytes]) -> None:
        self._older, self._newer = older, newer
        self._size_bytes = 0

    def add(self, piece: bytes, most_bytes: int) -> None:
        self._size_bytes += len(piece)
        while piece:
            room = most_bytes - self._newer.tell()
            self._newer.write(piece[:room])
            piece = piece[room:]
            if piece:  # it is full
                self._older, self._newer = self._newer, self._older
                self._newer.seek(0)
                self._newer.truncate()

    def write_to(self, file: IO[bytes], most_bytes: int) -> None:
        """Write the last ``most_bytes`` at most, from the beginning of a line on."""
        missing = max(0, self._size_bytes - most_bytes)
        filled = self._newer.tell()
        self._newer.seek(0)
        if not missing:
            shutil.copyfileobj(self._newer, file)
            return
        self._older.seek(filled)
        beginning = self._older.read(_LINE_BYTES)
        if len(beginning) < _LINE_BYTES:
            beginning += self._newer.read(_LINE_BYTES)
        dropped = _to_next_line(beginning)
        file.write(
            f"{CUT}{missing + dropped} bytes of this log are not kept: "
            f"RayExecutor.keep_logs_max_bytes is {most_bytes}\n".encode()
        )
        file.write(beginning[dropped:])
        shutil.copyfileobj(self._older, file)
        shutil.copyfileobj(self._newer, file)


def _to_next_line(text: bytes) -> int:
    """Where the next line begins, or else the next character."""
    line = text.find(b"\n") + 1
    if line:
        return line
    return next((at for at, byte in enumerate(text) if byte & 0xC0 != 0x80), len(text))


def _scratch(folder: Path) -> IO[bytes]:
    """A file that vanishes when it is closed."""
    return cast(IO[bytes], tempfile.TemporaryFile(dir=folder))
