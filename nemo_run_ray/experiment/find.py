"""Finding jobs that were handed over: by an experiment's id or title, a handle, or a job's id."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from nemo_run.config import get_nemorun_home

from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment.job import RemoteJob
from nemo_run_ray.experiment.store import JobRecord, store_of
from nemo_run_ray.ids import ID_MAX, LEDGER, safe_id
from nemo_run_ray.remote.files import why_untrusted, write_file

#: Digits of seconds since the epoch, until the year 2286.
_DIGITS_OF_SECONDS = 10


def find(name: str) -> list[RemoteJob]:
    """The jobs of an experiment, or one job.

    Args:
        name: an experiment's id, or its title (then its newest one); a handle of NeMo-Run's; or a
            job's id on the cluster.

    Returns:
        The jobs in the order in which they were added; one of a handle or a job's id.

    Raises:
        JobError: no such job was submitted from this NeMo-Run home.
    """
    if not isinstance(name, str):
        raise JobError(f"A job is found by the name of an experiment or its own, not by {name!r}.")
    bare = name.rpartition("/")[2]
    try:
        return [find_job(bare)]
    except JobError:
        folder = find_experiment(name)
    if folder is None:
        raise JobError(
            f"There is no experiment {name!r} in NeMo-Run's home {get_nemorun_home()}, and no job "
            f"or handle of that name.{did_you_mean(name, titles())} `nemo experiment list <title>` "
            "lists the experiments of a title; NEMORUN_HOME names another home."
        )
    found = jobs_of(folder)
    if not found:
        raise JobError(
            f"The experiment {name!r} has handed nothing over to Ray yet. If its program does not "
            f"run any more, this hands it over: nemo-run-ray resume {shlex.quote(name)}"
        )
    return found


def find_job(submission_id: str) -> RemoteJob:
    """The job of a submission id.

    Raises:
        JobError: it was not submitted from this NeMo-Run home.
    """
    record = find_record(submission_id)
    return RemoteJob(record)


def find_experiment(name: str, but: Path | None = None) -> Path | None:
    """The folder of an experiment's id, or of the newest one of a title; ``None`` without any.

    Args:
        name: the id or the title.
        but: a folder that a title does not mean.
    """
    folders = _folders()
    by_id = [folder for folder in folders if folder.name == name]
    if by_id:
        return by_id[0]
    outside = remembered(name)
    if outside is not None:
        return outside
    of_title = [folder for folder in folders if folder.parent.name == name and folder != but]
    return max(of_title, key=_began_at, default=None)


def _began_at(exp_dir: Path) -> float:
    """When an experiment was made: by the number at the end of its id, in seconds or parts of them.

    NeMo-Run's ``from_title`` goes by the folder's last change, and a look that keeps a log is one.
    """
    number = exp_dir.name.rpartition("_")[2]
    if number.isdigit() and len(number) >= _DIGITS_OF_SECONDS:
        return float(f"{number[:_DIGITS_OF_SECONDS]}.{number[_DIGITS_OF_SECONDS:]}")
    return exp_dir.stat().st_ctime


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names those most like it, with a space before it; empty without any.

    Args:
        name: what was given: a title, or an id, which begins with its title.
        known: titles.
    """
    near = difflib.get_close_matches(name, sorted(known), n=3)
    near = near or difflib.get_close_matches(name.rpartition("_")[0], sorted(known), n=3)
    return f" Did you mean {' or '.join(repr(title) for title in near)}?" if near else ""


def titles() -> set[str]:
    """The titles of all experiments in NeMo-Run's home."""
    return {folder.parent.name for folder in _folders()}


def experiments() -> list[Path]:
    """The folders of all experiments of this user that submitted jobs, the newest first."""
    found = [Path(pointer.read_text(encoding="utf-8")) for pointer in _pointers().glob("*")]
    found = [folder for folder in (*_folders(), *found) if (folder / LEDGER).exists()]
    trusted = (folder for folder in found if not why_untrusted(str(folder / LEDGER)))
    return sorted(trusted, key=_began_at, reverse=True)


def _folders() -> list[Path]:
    home = Path(get_nemorun_home()) / "experiments"
    return [folder for folder in home.glob("*/*") if folder.is_dir()]


def jobs_of(exp_dir: Path) -> list[RemoteJob]:
    """The jobs that an experiment's ledger knows, in the order in which they were added to it."""
    records = sorted(store_of(exp_dir).ledger.jobs().values(), key=lambda record: record.place)
    return [RemoteJob(record) for record in records if not record.is_dispatcher]


def find_record(submission_id: str) -> JobRecord:
    """The record of a job by its id alone, from NeMo-Run's home.

    Raises:
        JobError: no experiment in this home submitted such a job.
    """
    for exp_dir in _candidates({submission_id}):
        record = store_of(exp_dir).ledger.job(submission_id)
        if record is not None:
            return record
    raise JobError(
        f"No experiment below {get_nemorun_home()} has submitted a Ray job {submission_id}. Is the "
        "handle right, and NEMORUN_HOME that of the run?"
    )


def experiments_of(submission_ids: Set[str]) -> set[Path]:
    """Folders of this user's experiments in NeMo-Run's home that submitted one of these jobs."""
    found = set(_candidates(submission_ids))
    candidates = {folder for folder in found if not why_untrusted(str(folder / LEDGER))}
    return {
        folder for folder in candidates if submission_ids & store_of(folder).ledger.jobs().keys()
    }


def remember(exp_dir: Path, experiment_id: str) -> None:
    """Make an experiment findable that is not in its usual place in NeMo-Run's home."""
    if exp_dir.parent.parent == Path(get_nemorun_home()) / "experiments":
        return
    pointer = _pointers() / safe_id(experiment_id)[:ID_MAX]
    pointer.parent.mkdir(parents=True, exist_ok=True)
    write_file(pointer, str(exp_dir.absolute()))


def remembered(experiment_id: str) -> Path | None:
    """The folder of an experiment that ``remember`` was told of."""
    pointer = _pointers() / safe_id(experiment_id)[:ID_MAX]
    return Path(pointer.read_text(encoding="utf-8")) if pointer.is_file() else None


def _candidates(submission_ids: Set[str]) -> Iterator[Path]:
    for folder in (Path(get_nemorun_home()) / "experiments").glob("*/*"):
        if _may_hold(safe_id(folder.name), submission_ids) and (folder / LEDGER).exists():
            yield folder
    for pointer in _pointers().glob("*"):
        if _may_hold(pointer.name, submission_ids):
            yield Path(pointer.read_text(encoding="utf-8"))


def _may_hold(experiment_id: str, submission_ids: Set[str]) -> bool:
    # A shortened id may have lost the end of the experiment's.
    return any(
        submission_id.startswith(f"{experiment_id}.") or len(submission_id) >= ID_MAX
        for submission_id in submission_ids
    )


def _pointers() -> Path:
    return Path(get_nemorun_home()) / "ray_experiments"
