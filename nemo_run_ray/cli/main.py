"""The command line: ``nemo-run-ray``, and the same verbs below ``nemo ray``."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial, wraps
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from nemo_run.core.frontend.console.api import CONSOLE
from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment
from rich.text import Text
from typer import Argument, Context, Exit, Option, Typer

from nemo_run_ray.cli.status_report import StatusReport, experiment_rows, observe, page
from nemo_run_ray.clusters import Cluster, Dashboard
from nemo_run_ray.clusters.existing import ExistingCluster
from nemo_run_ray.dashboard.jobs import JobsApi, inspect
from nemo_run_ray.errors import (
    VARIABLE,
    ClusterError,
    ConfigError,
    JobError,
    NemoRunRayError,
    shown,
)
from nemo_run_ray.experiment.dispatch import tend
from nemo_run_ray.experiment.job import (
    Element,
    RemoteJob,
    active,
    cancel_all,
    end_all,
    find,
    note_ends,
    record,
)
from nemo_run_ray.experiment.logs import last_lines, lines, only
from nemo_run_ray.experiment.store import (
    did_you_mean,
    experiments,
    store_of,
)
from nemo_run_ray.remote.spec import Json

if TYPE_CHECKING:
    from nemo_run_ray.cluster_files.check import CheckRow
    from nemo_run_ray.cluster_files.load import Document
    from nemo_run_ray.clusters.local import LocalCluster
    from nemo_run_ray.clusters.slurm import SlurmCluster


class _Plain(Console):
    """Prints words as they are: they come from clusters and files, and are no markup of ours."""

    def __init__(self, width: int | None = None):
        wide = width is not None
        super().__init__(width=width, soft_wrap=wide, highlight=False, markup=False, emoji=False)

    def render(self, *what: Any) -> Iterable[Segment]:
        for segment in super().render(*what):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


#: The console of all verbs; logs and JSON are printed without it. A row of a table is one line,
#: however long: nothing in it is cut, and ``grep`` finds it.
out = _Plain(width=100_000)


def show(rows: Sequence[Json], columns: Sequence[str], as_json: bool = False) -> None:
    """Print rows: as JSON, or one line for each."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    lines = [[name.replace("_", " ") for name in columns]]
    lines += [[_cell(row[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(shown("  ".join(map(str.ljust, line, widths)).rstrip()))


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        value = [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else " ".join(str(value).split())


def _complete(incomplete: str) -> list[str]:
    """Titles and ids of experiments, and ids of their jobs, that begin so."""
    names = set()
    for folder in experiments():
        names |= {folder.parent.name, folder.name}
        if incomplete.startswith(folder.name):
            names |= set(store_of(folder).ledger.jobs())
    return sorted(name for name in names if name.startswith(incomplete))


def _complete_job(context: Context, incomplete: str) -> list[str]:
    """Names of jobs of the experiment that is named before."""
    with suppress(NemoRunRayError):
        jobs = find("".join(context.args[:1]))
        return [job.name for job in jobs if job.name.startswith(incomplete)]
    return []


_NAME_HELP = "An experiment's id or title, a handle or a job's id."
Name = Annotated[str, Argument(help=_NAME_HELP, autocompletion=_complete)]
Experiment = Annotated[str, Argument(help="Its id or title.", autocompletion=_complete)]
Job = Annotated[str, Option(help="Only this job of an experiment.", autocompletion=_complete_job)]
AsJson = Annotated[bool, Option("--json", help="For programs.")]
ClusterFile = Annotated[
    str | None, Option(help="A cluster file of an embedded Ray, or of one on Slurm.")
]
_BROKEN = "broken"
_COLORS = {"ok": "green", "warning": "yellow", _BROKEN: "red", "unknown": "yellow"}
#: Typer's settings of a verb that hands all its arguments to another command, also ``--help``.
_AS_THEY_ARE = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def status(
    name: Name,
    as_json: AsJson = False,
    once: Annotated[
        bool, Option("--once", help="Look once, do not follow; see its exit code.")
    ] = False,
    elements: Annotated[
        str | None, Option(help="Of an array: failed, running, … or 3,7-9.")
    ] = None,
    job: Job = "",
) -> None:
    """State and reason of an experiment's jobs, or of one job; on a terminal until all ended."""
    if elements is not None:
        _show_elements(_job(name, job).select_elements(elements), as_json)
        return
    jobs = _jobs(name, job)
    report = observe(jobs)
    if as_json:
        print(report.as_json())
    elif once or not out.is_terminal:
        out.print(report.table(time.time()))
    else:
        # A table that follows is cut at the terminal's size, so the last one is printed once more.
        reports = _reports(jobs, report)
        try:
            with Live(console=_Plain(), auto_refresh=False, transient=True) as live:
                for report in reports:
                    live.update(report.table(time.time()), refresh=True)
        finally:
            out.print(report.table(time.time()))
        _copy_logs(report)
    if once:
        raise Exit(report.exit_code)


def _reports(
    jobs: Sequence[RemoteJob], report: StatusReport, deadline: float = math.inf
) -> Iterator[StatusReport]:
    """Report after report until all jobs have ended, or until a moment of the monotonic clock."""
    while True:
        yield report
        record(report.seen, report.snapshot, copy_s=0.0)
        left_s = deadline - monotonic()
        if report.is_over or left_s <= 0:
            return
        for exp_dir in {job.record.exp_dir for job in jobs}:
            tend(exp_dir)
        time.sleep(min(2.0, left_s))
        report = observe(jobs)


def _copy_logs(report: StatusReport) -> None:
    missing = [job for job, status in report.seen if status.state.is_terminal and job.misses_log]
    if missing:
        out.print(f"Copying {len(missing)} log(s); Ctrl-C leaves them on the cluster.")
    for problem in record(report.seen, report.snapshot):
        out.print(problem)


def wait(
    names: Annotated[list[str], Argument(help=_NAME_HELP, autocompletion=_complete)],
    timeout: Annotated[
        float | None, Option(help="Seconds to wait; exit code 124 after them.", min=0)
    ] = None,
) -> None:
    """Wait until jobs have ended. Exit code: 0 if all have succeeded, else the smallest of
    FAILED (3), LOST (4) and CANCELLED (6).
    """
    deadline = math.inf if timeout is None else monotonic() + timeout
    jobs = [job for name in names for job in _jobs(name)]
    ended = set()
    for report in _reports(jobs, observe(jobs), deadline):
        for job, status in report.seen:
            if status.state.is_terminal and job.id not in ended:
                ended.add(job.id)
                message = f", {status.message}" if status.reason.is_trouble else ""
                whose = f"{job.record.exp_dir.name}." if len(names) > 1 else ""
                out.print(f"{whose}{job.name}: {status.state.value}{message}")
            elif job.never_starts(status):
                raise JobError(f"The job {job.name!r} will not start. {status.message}")
    if report.is_over:
        _copy_logs(report)
    else:
        running = (job.name for job, status in report.seen if not status.state.is_terminal)
        print(
            f"nemo-run-ray: after {timeout:g} s these jobs have not ended: {', '.join(running)}. "
            "They continue.",
            file=sys.stderr,
        )
        raise Exit(124)  # as the command `timeout`
    raise Exit(report.exit_code)


def timeline(
    experiment: Experiment,
    output: Annotated[
        Path | None, Option("--output", "-o", help="The file; by default TITLE.html.")
    ] = None,
) -> None:
    """Write a page that shows when each job of an experiment waited, ran and ended."""
    jobs, now = _jobs(experiment), time.time()
    report = observe(jobs)
    report.complete()
    folder = jobs[0].record.exp_dir
    output = output or Path(f"{folder.parent.name}.html")
    began_at = store_of(folder).ledger.began_at() or now
    output.write_text(page(folder.name, report.rows, began_at, now), encoding="utf-8")
    out.print(f"The timeline of {len(jobs)} job(s) is in {output}")


def logs(
    name: Name,
    follow: Annotated[bool, Option("--follow", "-f", help="Until the job's end.")] = False,
    job: Job = "",
    role: Annotated[str, Option(help="One role of a group, or role/replica.")] = "",
    element: Annotated[int | None, Option(help="One element of an array, from 0.", min=0)] = None,
    raw: Annotated[
        bool, Option("--raw", help="With Ray's lines and the package's last one.")
    ] = False,
    tail: Annotated[int | None, Option(help="Begin with so many lines at the end.", min=0)] = None,
) -> None:
    """Print the output of a job, or of all jobs of an experiment."""

    def text(one: RemoteJob) -> Iterator[str]:
        def read(is_followed: bool) -> Iterator[str]:
            found = one.log(is_followed) if raw else one.output(is_followed)
            return only(who, lines(found)) if who else found

        return read(follow) if tail is None else last_lines(read, tail, follow)

    who = role or ("" if element is None else str(element))
    jobs = _jobs(name, job)
    if len(jobs) > 1 and not who:
        pieces = _prefixed({one.name: partial(text, one) for one in jobs}, follow)
    else:
        found = _job(name, job)
        if element is not None:
            if not found.record.is_array:
                raise JobError(f"The job {found.name!r} is no array; leave --element out.")
            array = found.elements
            if array and element >= (count := array["elements"]):
                raise JobError(f"The array {found.name!r} has the elements 0 to {count - 1}.")
        if role:
            if not found.record.has_roles:
                raise JobError(f"The job {found.name!r} is no group; leave --role out.")
            group = found.roles(found.status)
            names = [f"{row['role']}/{row['replica']}" for row in group["roles"]] if group else []
            if names and role not in names and f"{role}/0" not in names:
                raise JobError(f"The job {found.name!r} has the roles {', '.join(sorted(names))}.")
        pieces = text(found)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _prefixed(texts: Mapping[str, Callable[[], Iterator[str]]], together: bool) -> Iterator[str]:
    """The lines of several logs, each with its job's name: one log after the other, or together.

    Raises:
        NemoRunRayError, OSError: a log could not be read; all others were.
    """
    arrived: queue.Queue[str | None] = queue.Queue(1000)  # so many lines are read ahead
    errors = []

    def read(name: str) -> None:
        try:
            for line in lines(texts[name]()):
                arrived.put(f"{name}| {line}" if line.endswith("\n") else f"{name}| {line}\n")
        except JobError as error:  # it waits, and has no log yet
            print(f"{name}: {error}", file=sys.stderr)
        except (NemoRunRayError, OSError) as error:
            errors.append(error)
        finally:
            arrived.put(None)

    for group in [list(texts)] if together else [[name] for name in texts]:
        for name in group:
            threading.Thread(target=read, args=(name,), daemon=True).start()
        for _ in group:
            yield from iter(arrived.get, None)
    if errors:
        raise errors[0]


def _show_elements(elements: Sequence[Element], as_json: bool = False) -> None:
    columns = ("index", "state", "attempts", "exit_code", "values", "reason")
    show([asdict(element) for element in elements], columns, as_json)


def cancel(
    name: Name,
    job: Job = "",
    elements: Annotated[
        str | None, Option(help="Only these of an array: 3,7-9, waiting or running.")
    ] = None,
) -> None:
    """Stop the jobs of an experiment, or one job, and wait until they have ended."""
    if elements is not None:
        _show_elements(_job(name, job).cancel_elements(elements))
        return
    for line in cancel_all(_jobs(name, job)):
        out.print(line)


def list_experiments(
    everything: Annotated[bool, Option("--all", help="Also those that have ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """The experiments of this NeMo-Run home whose jobs wait or run, the newest first."""
    rows = experiment_rows(everything, time.time())
    if rows or as_json:
        show(rows, ("experiment", "jobs", "began", "cluster"), as_json)
    else:
        out.print("No experiment waits or runs; --all also shows those that have ended.")


def open_page(name: Name, job: Job = "") -> None:
    """Print the address of a job's page in Ray's dashboard, and open it if there is a browser."""
    jobs = _jobs(name, job)
    first = jobs[0]
    dashboard = first.api().dashboard
    address = f"{dashboard.url}/#/jobs"
    if len(jobs) == 1:
        address = dashboard.job_page(first.ran_as(first.status))
    print(address, flush=True)
    if "Authorization" in dashboard.headers:
        out.print(f"The page asks for Ray's token. It is in {dashboard.token_at}.")
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)
    if "host" in first.record.cluster.get("tunnel", ()):
        out.print("It is reached through SSH while this command runs; Ctrl-C ends it.")
        signal.pause()


def _jobs(name: str, job: str = "") -> list[RemoteJob]:
    """The jobs of a name, or the one of them that is named."""
    jobs = find(name)
    names = [one.name for one in jobs]
    if job and job not in names:
        raise JobError(
            f"{name!r} has no job {job!r}; it has {', '.join(names)}.{did_you_mean(job, names)}"
        )
    return [one for one in jobs if not job or one.name == job]


def _job(name: str, job: str) -> RemoteJob:
    """The only job of a name, or the one of several that is named."""
    jobs = _jobs(name, job)
    if len(jobs) != 1:
        raise JobError(
            f"{name!r} has the jobs {', '.join(one.name for one in jobs)}; name one of them with "
            "--job."
        )
    return jobs[0]


def resume(experiment: Experiment) -> None:
    """Submit what never reached the cluster, and start a dispatcher that has ended too early."""
    from nemo_run_ray import nemo
    from nemo_run_ray.nemo.scheduler import resume_experiment

    for line in resume_experiment(nemo.load_experiment(experiment)):
        out.print(line)


def up(
    num_cpus: Annotated[int | None, Option(help="CPUs that Ray may give away.")] = None,
    num_gpus: Annotated[int | None, Option(help="GPUs that Ray may give away.")] = None,
    cluster: ClusterFile = None,
) -> None:
    """Start the embedded Ray, or a cluster in an allocation of Slurm, and keep it until `down`."""
    given = (("num_cpus", num_cpus), ("num_gpus", num_gpus))
    size: Json = {name: value for name, value in given if value is not None}
    found = cluster_of_ours(cluster)
    if size and found.kind != "local":
        raise ConfigError(
            f"--num-cpus and --num-gpus are for the embedded Ray; the cluster file {cluster!r} "
            "says how large its allocation is."
        )
    dashboard = replace(found, keep=True, **size).connect()
    out.print(f"Ray is up: {dashboard.url}\nStop it with: nemo-run-ray down{_option(cluster)}")


def _option(file: str | None) -> str:
    return f" --cluster {file}" if file else ""


def down(
    force: Annotated[bool, Option("--force", help="Cancel the jobs that run on it first.")] = False,
    cluster: ClusterFile = None,
) -> None:
    """Stop such a cluster; refused while jobs run, unless they are cancelled (--force).
    How they ended is noted first.
    """
    found = cluster_of_ours(cluster)
    dashboard = found.find()
    archive = None
    if not dashboard:  # it may have died; an allocation may wait in Slurm's queue
        archive = found.archive()
    else:
        _end_jobs(found, dashboard, force, cluster)
    if found.stop() or dashboard:
        out.print(f"Ray is stopped: {found.title}")
    else:
        out.print(archive.sentence if archive else f"No Ray is up: {found.title}")


def stop_unused(state_dir: str) -> None:
    """Note how the jobs of an idle embedded Ray ended, and stop it; for ``local_watch.py``."""
    from nemo_run_ray.clusters.local import LocalCluster

    cluster = LocalCluster(state_dir=state_dir)
    dashboard = cluster.find()
    if dashboard:
        _end_jobs(cluster, dashboard, False)
        cluster.stop_unused()


def _end_jobs(cluster: Cluster, dashboard: Dashboard, force: bool, file: str | None = None) -> None:
    """Cancel what runs, if that is asked for, and note how all jobs ended.

    Raises:
        JobError: jobs run, and nobody asked to cancel them.
    """
    api = JobsApi.of(dashboard)
    try:
        busy = active(api.table(fresh=True))
        if busy and not force:
            raise JobError(
                f"{len(busy)} job(s) still run on {cluster.title}: {', '.join(busy)}. Cancel them, "
                f"or cancel all and stop it: nemo-run-ray down{_option(file)} --force"
            )
        if busy:
            out.print(f"Cancelling {len(busy)} job(s) …")
            for job in end_all(api):
                out.print(f"{job} has not ended; it is killed with the cluster.")
        for line in note_ends(api, is_forced=bool(busy)):
            out.print(line)
    except ClusterError as error:
        if not force:
            raise
        out.print(f"Its jobs' ends are not known: {error}")


def _load(name: str) -> tuple[Document, Cluster]:
    """A cluster file, all of which is right, and its cluster."""
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import check_fields_of, cluster_of

    document = check_fields_of(load(name))
    return document, cluster_of(document)


def cluster_of_ours(name: str | None) -> LocalCluster | SlurmCluster:
    """The embedded Ray, or the cluster that a cluster file describes.

    Raises:
        ConfigError: the file is wrong, or names a cluster that exists.
    """
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import cluster_of
    from nemo_run_ray.clusters.local import LocalCluster
    from nemo_run_ray.clusters.slurm import SlurmCluster

    # What a pool says may be wrong while a cluster is stopped.
    cluster = LocalCluster() if name is None else cluster_of(load(name))
    if not isinstance(cluster, (LocalCluster, SlurmCluster)):
        raise ConfigError(
            f"The cluster file {name!r} names {cluster.title}, which is not for this command to "
            "start or stop; expected a file with `cluster: {local: {}}` or `cluster: {slurm: …}`."
        )
    return cluster


def doctor(
    name: Annotated[
        str | None, Argument(help="A cluster file, for what it says must be there.")
    ] = None,
    address: Annotated[
        str | None,
        Option(help="A dashboard's address; without it and a name the embedded Ray."),
    ] = None,
    cluster: Annotated[str | None, Option(help="The same as the name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a cluster can be reached and used. Exit code 1 when something is broken."""
    from nemo_run_ray.cluster_files.check import check
    from nemo_run_ray.clusters.local import LocalCluster

    if [name, cluster, address].count(None) < 2:
        raise ConfigError("Give one of a cluster file's name, --cluster and --address.")
    document: Document | None = None
    found: Cluster = LocalCluster() if address is None else ExistingCluster(url=address)
    if file := name or cluster:
        document, found = _load(file)
    rows = list(check(inspect(dashboard_of(found, file)), document))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        out.print(checks_table(rows))
    if any(row.state.value == _BROKEN for row in rows):
        raise Exit(1)


def dashboard_of(cluster: Cluster, file: str | None = None) -> Dashboard:
    """The dashboard of a cluster that is up; ``file`` is its cluster file.

    Raises:
        ClusterError: no embedded Ray is up, or the cluster on Slurm is not.
    """
    dashboard = cluster.find()
    if not dashboard:
        archive = cluster.archive()
        why = archive.sentence if archive else f"No Ray is up: {cluster.title}."
        raise ClusterError(
            f"{why}\nStart one with: nemo-run-ray up{_option(file)}; look at another cluster with: "
            "nemo-run-ray doctor --address http://…"
        )
    return dashboard


def checks_table(rows: Sequence[CheckRow]) -> Group:
    """A line for each check, for people."""
    lines = []
    for row in rows:
        state = f"{row.state.value:8}", _COLORS[row.state.value]
        step = f"\n         -> {row.next_step}" if row.next_step else ""
        lines.append(Text.assemble(state, f" {row.check}: {row.message}{step}"))
    return Group(*lines)


def clusters(
    name: Annotated[str | None, Argument(help="Name or path of one, to see what it says.")] = None,
    as_json: AsJson = False,
) -> None:
    """The cluster files that there are, or every value of one and where it comes from."""
    if name is not None:
        _show_file(name, as_json)
        return
    from nemo_run_ray.cluster_files import load

    rows = [_row(path.stem, str(path)) for path in load.files()]
    try:
        with_profiles, profiles = load.profiles_here()
        rows += [_row(profile, f"{with_profiles}:{profile}") for profile in profiles]
    except ConfigError as error:  # the others are good all the same
        rows.append(_wrong(load.PROFILES_FILE, "", error))
    show(rows, ("name", "kind", "where", "pools", "path"), as_json)
    if not rows and not as_json:
        folders = ", ".join(map(str, load.folders())) or "any folder"
        out.print(f"There are no cluster files in {folders}. `nemo-run-ray init` writes one.")


def _row(name: str, path: str) -> Json:
    """A cluster file in the list of all; the path of a profile is ``path/env.toml:profile``."""
    from nemo_run_ray.cluster_files.load import find, is_for_others

    row = {"name": name, "path": path, "pools": [], "error": ""}
    try:
        if other := is_for_others(*find(path)):
            return row | {"kind": other, "where": "not for Ray"}
        document, cluster = _load(path)
    except ConfigError as error:
        return _wrong(name, path, error)
    pools = list(document.file.pools)
    return row | {"kind": document.format, "where": cluster.title, "pools": pools}


def _wrong(name: str, path: str, error: ConfigError) -> Json:
    first, row = str(error).partition("\n")[0], {"name": name, "kind": "wrong", "pools": []}
    return row | {"where": first, "path": path, "error": str(error)}


def _show_file(name: str, as_json: bool) -> None:
    from nemo_run_ray.cluster_files.load import dotted, leaves

    document, _ = _load(name)
    rows = []
    for path, value in leaves(document.file.model_dump(exclude_unset=True)):
        if path[:2] == ("cluster", "headers"):  # of which only names of variables may be seen
            value = " ".join(re.findall(r"\$\{\w+\}", value)) or "***"
        rows.append({"key": dotted(path), "value": value, "source": document.where(*path)})
    if as_json:
        file = {
            "path": str(document.path),
            "format": document.format,
            "values": rows,
            "ignored": [asdict(one) for one in document.ignored],
        }
        print(json.dumps(file, indent=1, default=str))
        return
    out.print(f"{document.path} ({document.format})")
    folder = f"{document.path.parent}{os.sep}"
    rows = [{**row, "source": row["source"].removeprefix(folder)} for row in rows]
    show(rows, ("key", "value", "source"))
    for one in document.ignored:
        out.print(f"ignored: {one.key} ({one.source}): {one.reason}")


def init(
    name: Annotated[str, Argument(help="Name of the new file, without a suffix.")] = "ray",
    address: Annotated[
        str | None, Option(help="A dashboard to ask for nodes, labels and resources.")
    ] = None,
) -> None:
    """Write a first cluster file, cluster_configs/NAME.yaml, with comments."""
    from nemo_run_ray.cluster_files.check import sample

    path = Path("cluster_configs", f"{name}.yaml")
    if not re.fullmatch(r"[\w-]{1,100}", name):
        raise ConfigError(
            f"The name of a cluster file is {name!r}; expected letters, digits, '_' and '-'."
        )
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name, or edit it.")
    look = None if address is None else inspect(ExistingCluster(url=address).connect())
    if look and (look.unreachable or look.unauthorised):
        raise ClusterError(look.unreachable or look.unauthorised)
    path.parent.mkdir(exist_ok=True)
    path.write_text(sample(name, address, look.nodes or () if look else ()), encoding="utf-8")
    out.print(f"{path} is written. Edit it, and look at it with:")
    out.print(f"nemo-run-ray clusters {name}\nnemo-run-ray doctor {name}")


def patches(as_json: AsJson = False) -> None:
    """The changes of NeMo-Run that there are: what each is for, and whether it is applied."""
    from nemo_run_ray import patches as known

    about = ("why", "verified", "retired_by")
    rows = [
        {"name": name, "state": state, **{one: getattr(known.patch(name), one) for one in about}}
        for name, state in known.status().items()
    ]
    show(rows, ("name", "state", "why"), as_json)
    if not as_json:
        out.print(f"Apply them with nemo_run_ray.patches.apply() or {known.VARIABLE}=…")


#: The verbs by their names.
VERBS: dict[str, Callable[..., Any]] = {
    "up": up,
    "down": down,
    "doctor": doctor,
    "list": list_experiments,
    "status": status,
    "wait": wait,
    "logs": logs,
    "open": open_page,
    "cancel": cancel,
    "resume": resume,
    "timeline": timeline,
    "patches": patches,
    "clusters": clusters,
    "init": init,
}


def ns(context: Context) -> None:
    """Run a command of NeMo-Skills (`ns generate …`), whose tasks run on Ray."""
    from nemo_run_ray import patches

    commands = entry_points(group="console_scripts", name="ns")
    command = next((one for one in commands if one.value.startswith("nemo_skills.")), None)
    if command is None:
        problem = (
            "NeMo-Skills, whose command `ns` this would run, is not installed beside nemo_run_ray "
            f"({sys.executable}). Install it there, from its source."
        )
        if context.args not in ([], ["--help"]):
            raise ConfigError(problem)
        out.print(context.get_help(), problem, sep="")
        return
    patches.apply("skills_executor")
    app = command.load()
    sys.argv = ["ns", *context.args]
    app()


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, with this package's errors as one paragraph and exit code 1.

    NeMo-Run logs and warns on standard output, where programs read what ``status --json`` prints;
    here it does so on standard error.
    """

    @wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        before, CONSOLE.stderr = CONSOLE.stderr, True
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not show every character
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            verb(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise Exit(130) from None
        except BrokenPipeError:  # of `| head`, which typer ends quietly
            raise
        except (NemoRunRayError, OSError) as error:
            if os.environ.get(VARIABLE):
                traceback.print_exc()
            print(f"nemo-run-ray: {error}", file=sys.stderr)
            raise Exit(1) from error
        finally:
            CONSOLE.stderr = before

    return run


def _global_options(
    quiet: Annotated[
        bool,
        Option("--quiet", "-q", help="No lines of NeMo-Run and this package but errors."),
    ] = False,
    version: Annotated[bool, Option("--version", help="Print the versions.")] = False,
) -> None:
    """Run NeMo-Run tasks on Ray."""
    if version:
        for package in ("nemo_run_ray", "nemo_run", "ray"):
            print(package, metadata.version(package))
        raise Exit
    if quiet:
        logging.disable(logging.WARNING)
        CONSOLE.quiet = True


def build() -> Typer:
    app = Typer(no_args_is_help=True, invoke_without_command=True, pretty_exceptions_enable=False)
    app.callback()(_global_options)
    for name, verb in VERBS.items():
        app.command(name)(guarded(verb))
    usage = "COMMAND --cluster FILE …"
    app.command(context_settings=_AS_THEY_ARE, options_metavar=usage)(guarded(ns))
    return app


def main() -> None:
    build()()
