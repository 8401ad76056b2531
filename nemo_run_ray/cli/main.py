"""The command line: ``nemo-run-ray``, and the same verbs below ``nemo ray``."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemo_run.core.frontend.console.api import CONSOLE
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nemo_run_ray import clusters as kinds
from nemo_run_ray.cli import out, show
from nemo_run_ray.clusters import Cluster, Dashboard, ExistingCluster
from nemo_run_ray.errors import NO_SPACE, ClusterError, ConfigError, JobError, NemoRunRayError

if TYPE_CHECKING:
    from nemo_run_ray.cli.status_report import StatusReport
    from nemo_run_ray.cluster_files.check import CheckRow
    from nemo_run_ray.cluster_files.load import Document, KeyPath
    from nemo_run_ray.clusters import LocalCluster, SlurmCluster
    from nemo_run_ray.experiment.job import Element, RemoteJob
    from nemo_run_ray.remote.fit import Node

Name = Annotated[str, typer.Argument(help="An experiment's id or title, a handle or a job's id.")]
Experiment = Annotated[str, typer.Argument(help="Its id or title.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
_FILE = "A cluster file of an embedded Ray, or of one on Slurm."
_BROKEN = "broken"
_COLORS = {"ok": "green", "warning": "yellow", _BROKEN: "red", "unknown": "yellow"}
_NAME = re.compile(r"[\w-]{1,100}")
_MASKED = "***"
_VARIABLE = re.compile(r"(\$\{\w+\})")
#: Seconds between two looks of a table that follows.
_REFRESH_S = 2.0
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
        bool, typer.Option("--once", help="Look once, do not follow; see its exit code.")
    ] = False,
    elements: Annotated[
        str | None, typer.Option(help="Of an array: failed, running, … or 3,7-9.")
    ] = None,
    job: Annotated[str, typer.Option(help="Only this job of an experiment.")] = "",
) -> None:
    """State and reason of an experiment's jobs, or of one job; on a terminal until all ended."""
    from nemo_run_ray.cli.status_report import observe

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
        _follow_status(jobs, report)
    if once and report.exit_code:
        raise typer.Exit(report.exit_code)


def _follow_status(jobs: list[RemoteJob], report: StatusReport) -> None:
    """Show the table anew until all jobs have ended."""
    from nemo_run_ray.cli.status_report import observe
    from nemo_run_ray.experiment.dispatch import tend
    from nemo_run_ray.experiment.job import record

    # A table that follows is cut at the terminal's width, so the last one is printed once more.
    live = Live(report.table(time.time()), console=out, auto_refresh=False, transient=True)
    try:
        with live:
            record(report.seen, report.snapshot, copy_s=0.0)
            while not report.is_over:
                for exp_dir in {job.record.exp_dir for job in jobs}:
                    tend(exp_dir)
                time.sleep(_REFRESH_S)
                report = observe(jobs)
                live.update(report.table(time.time()), refresh=True)
                record(report.seen, report.snapshot, copy_s=0.0)
    finally:
        out.print(report.table(time.time()))
    missing = [job for job, status in report.seen if status.state.is_terminal and job.misses_log]
    if missing:
        out.print(f"Copying the logs of {len(missing)} jobs; Ctrl-C leaves them on the cluster.")
    for problem in record(report.seen, report.snapshot):
        out.print(problem)


def timeline(
    experiment: Experiment,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")],
) -> None:
    """Write a page that shows when each job of an experiment waited, ran and ended."""
    from nemo_run_ray.cli.status_report import timeline_page

    jobs = _jobs(experiment)
    page = timeline_page(jobs, time.time())
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise JobError(
            f"The page cannot be written to {output}: {error.strerror}. Give another --output."
        ) from error
    out.print(f"The timeline of {len(jobs)} job(s) is in {output}")


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job's end.")] = False,
    job: Annotated[str, typer.Option(help="Which job of an experiment.")] = "",
    role: Annotated[str, typer.Option(help="One role of a group, or role/replica.")] = "",
    element: Annotated[
        int | None, typer.Option(help="One element of an array, from 0.", min=0)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="With Ray's lines and the package's last one.")
    ] = False,
) -> None:
    """Print the output of a job."""
    from nemo_run_ray.experiment.logs import lines, of_element, only

    found = _job(name, job)
    if role:
        _check_role(found, role)
    text = (found.log if raw else found.output)(follow)
    if element is not None:
        _check_element(found, element)
        text = of_element(element, lines(text))
    for piece in only(role, lines(text)) if role else text:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _show_elements(elements: Sequence[Element], as_json: bool = False) -> None:
    if elements or as_json:
        columns = ("index", "state", "attempts", "exit_code", "values", "reason")
        show([asdict(element) for element in elements], columns, as_json)
    else:
        print("There is no such element.")


def _check_element(job: RemoteJob, element: int) -> None:
    if not job.record.is_array:
        raise JobError(f"The job {job.name!r} is no array; leave --element out.")
    array = job.elements
    if array and element >= array["elements"]:
        raise JobError(
            f"The array {job.name!r} has no element {element}; it has 0 to {array['elements'] - 1}."
        )


def _check_role(job: RemoteJob, role: str) -> None:
    if not job.record.has_roles:
        raise JobError(f"The job {job.name!r} is no group and has no roles; leave --role out.")
    group = job.roles(job.status)
    names = {f"{row['role']}/{row['replica']}" for row in group["roles"]} if group else set()
    if names and not any(role in (name, name.rpartition("/")[0]) for name in names):
        raise JobError(
            f"The job {job.name!r} has no role {role!r}; it has {', '.join(sorted(names))}."
        )


def cancel(
    name: Name,
    job: Annotated[str, typer.Option(help="Only this job of an experiment.")] = "",
    elements: Annotated[
        str | None, typer.Option(help="Only these of an array: 3,7-9, waiting or running.")
    ] = None,
) -> None:
    """Stop the jobs of an experiment, or one job, and wait until they have ended."""
    from nemo_run_ray.experiment.cancel import cancel_all

    if elements is not None:
        _show_elements(_job(name, job).cancel_elements(elements))
        return
    for line in cancel_all(_jobs(name, job)):
        out.print(line)


def _jobs(name: str, job: str = "") -> list[RemoteJob]:
    """The jobs of a name, or the one of them that is named."""
    from nemo_run_ray.experiment.find import did_you_mean, find

    jobs = find(name)
    chosen = [one for one in jobs if not job or one.name == job]
    if not chosen:
        names = [one.name for one in jobs]
        near = did_you_mean(job, names)
        raise JobError(f"{name!r} has no job {job!r}; it has {', '.join(names)}.{near}")
    return chosen


def _job(name: str, job: str) -> RemoteJob:
    """The only job of a name, or the one of several that is named."""
    jobs = _jobs(name, job)
    if len(jobs) != 1:
        names = ", ".join(one.name for one in jobs)
        raise JobError(f"{name!r} has the jobs {names}; name one of them with --job.")
    return jobs[0]


def resume(experiment: Experiment) -> None:
    """Hand over what never reached the cluster, and start a dispatcher that has ended too early."""
    from nemo_run_ray.experiment.find import did_you_mean, find_experiment, titles
    from nemo_run_ray.nemo import registry
    from nemo_run_ray.nemo.scheduler import resume_experiment

    folder = find_experiment(experiment)
    try:
        loaded = registry.load_experiment(folder.name if folder else experiment)
    except FileNotFoundError as error:
        raise JobError(
            f"There is no experiment {experiment!r} in NeMo-Run's home."
            f"{did_you_mean(experiment, titles())} `nemo experiment list <title>` lists those of a "
            "title; NEMORUN_HOME names another home."
        ) from error
    for line in resume_experiment(loaded):
        out.print(line)


def up(
    num_cpus: Annotated[int | None, typer.Option(help="CPUs that Ray may give away.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs that Ray may give away.")] = None,
    cluster: Annotated[str | None, typer.Option(help=_FILE)] = None,
) -> None:
    """Start the embedded Ray, or an allocation of Slurm, and keep it."""
    found = cluster_of_ours(cluster)
    size = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    given: dict[str, Any] = {name: value for name, value in size.items() if value is not None}
    if isinstance(found, kinds.SlurmCluster) and given:
        raise ConfigError(
            f"--{next(iter(given)).replace('_', '-')} is for the embedded Ray; the cluster file "
            f"{cluster!r} says how large its allocation is."
        )
    dashboard = replace(found, keep=True, **given).connect()
    out.print(f"The {_title(found)} is up: {dashboard.url}\nStop it with: {_down(cluster)}")


def down(
    force: Annotated[
        bool, typer.Option("--force", help="Cancel the jobs that run on it first.")
    ] = False,
    name: Annotated[str | None, typer.Option("--cluster", help=_FILE)] = None,
) -> None:
    """Stop such a cluster, when its jobs have ended; how they ended is noted first."""
    cluster = cluster_of_ours(name)
    dashboard = cluster.find()
    archive = None
    if dashboard is None:  # it may have died; an allocation may wait in Slurm's queue
        archive = cluster.archive()
    else:
        _end_jobs(cluster, dashboard, force, name)
    if cluster.stop() or dashboard:
        out.print(f"The {_title(cluster)} is stopped.")
    else:
        out.print(archive.sentence if archive else f"No {_title(cluster)} is up.")


def stop_unused(state_dir: str) -> None:
    """Note how the jobs of an idle embedded Ray ended, and stop it; for ``local_watch.py``."""
    cluster = kinds.LocalCluster(state_dir=state_dir)
    dashboard = cluster.find()
    if dashboard is not None:
        _end_jobs(cluster, dashboard, False, None)
        cluster.stop_unused()


def _end_jobs(
    cluster: LocalCluster | SlurmCluster, dashboard: Dashboard, force: bool, name: str | None
) -> None:
    """Cancel what runs, if that is asked for, and note how all jobs ended.

    Raises:
        JobError: jobs run, and nobody asked to cancel them.
    """
    from nemo_run_ray.dashboard.jobs import JobsApi
    from nemo_run_ray.experiment.cancel import active, end_all, note_ends

    api = JobsApi.of(dashboard)
    try:
        busy = active(api.table(fresh=True))
        if busy and not force:
            raise JobError(
                f"{len(busy)} job(s) still run on the {_title(cluster)}: {', '.join(busy)}. Cancel "
                f"them, or cancel all and stop it: {_down(name)} --force"
            )
        if busy:
            out.print(f"Cancelling {len(busy)} job(s) …")
            for job in end_all(api):
                out.print(f"{job} has not ended; it is killed with the cluster.")
        for line in note_ends(api, cluster, is_forced=bool(busy)):
            out.print(line)
    except ClusterError as error:
        if not force:
            raise
        out.print(f"Its jobs' ends are not known: {error}")


def _title(cluster: LocalCluster | SlurmCluster) -> str:
    if isinstance(cluster, kinds.LocalCluster):
        return "embedded Ray"
    return f"allocation of the cluster {cluster.name!r} on Slurm"


def _down(name: str | None) -> str:
    return "nemo-run-ray down" + ("" if name is None else f" --cluster {name}")


def cluster_of_ours(name: str | None) -> LocalCluster | SlurmCluster:
    """The embedded Ray, or the cluster that a cluster file describes.

    Raises:
        ConfigError: the file is wrong, or names a cluster that exists.
    """
    if name is None:
        return kinds.LocalCluster()
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import cluster_of

    found = cluster_of(load(name))
    if not isinstance(found, (kinds.LocalCluster, kinds.SlurmCluster)):
        raise ConfigError(
            f"The cluster file {name!r} names {getattr(found, 'url', 'a cluster')}, which is not "
            "for this command to start or stop; expected a file with `cluster: {local: {}}` or "
            "`cluster: {slurm: …}`."
        )
    return found


def doctor(
    name: Annotated[
        str | None, typer.Argument(help="A cluster file, for what it says must be there.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="A dashboard's address; without it and a name the embedded Ray."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The same as the name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a cluster can be reached and used. Exit code 1 when something is broken."""
    from nemo_run_ray.cluster_files.check import look
    from nemo_run_ray.cluster_files.resolve import cluster_of

    if cluster not in (None, name) and name is not None:
        raise ConfigError(f"Give one cluster file, not {name!r} and --cluster {cluster!r}.")
    name = cluster if name is None else name
    if name is None:
        cluster_at = kinds.LocalCluster() if address is None else ExistingCluster(url=address)
        rows = look(dashboard_of(cluster_at))
    elif address is not None:
        raise ConfigError("Give a cluster file's name or an --address, not both.")
    else:
        loaded = _load(name)
        rows = look(dashboard_of(cluster_of(loaded)), loaded)
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        out.print(checks_table(rows))
    if any(row.state.value == _BROKEN for row in rows):
        raise typer.Exit(1)


def _load(name: str) -> Document:
    """A cluster file whose values are right."""
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import check_fields_of

    loaded = load(name)
    check_fields_of(loaded)
    return loaded


def dashboard_of(cluster: Cluster) -> Dashboard:
    """The dashboard of a cluster that is up.

    Raises:
        ClusterError: no embedded Ray is up, or the cluster on Slurm is not.
    """
    dashboard = cluster.find()
    if dashboard is None and isinstance(cluster, kinds.SlurmCluster):
        raise ClusterError(
            f"The cluster {cluster.name!r} has no allocation on Slurm in which Ray is up. Bring "
            "one up with: nemo-run-ray up --cluster …"
        )
    if dashboard is None:
        archive = cluster.archive()
        why = archive.sentence if archive else "No embedded Ray is up."
        gap = "\n" if "\n" in why else " "  # after the lines of a log
        raise ClusterError(
            f"{why}{gap}Start one with: nemo-run-ray up; look at "
            "another cluster with: nemo-run-ray doctor --address http://…"
        )
    return dashboard


def checks_table(rows: Sequence[CheckRow]) -> Group:
    """The lines for people, and how many there are of each kind."""
    grid = Table("check", "state", "what was found", box=None, pad_edge=False)
    for row in rows:
        step = f"\n-> {row.next_step}" if row.next_step else ""
        state = Text(row.state.value, _COLORS[row.state.value])
        grid.add_row(row.check, state, f"{row.message}{step}")
    counts = [(name, sum(row.state.value == name for row in rows)) for name in _COLORS]
    return Group(grid, "\n" + ", ".join(f"{count} {name}" for name, count in counts if count))


def clusters(
    name: Annotated[
        str | None, typer.Argument(help="Name or path of one, to see what it says.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The cluster files that there are, or every value of one and where it comes from."""
    if name is None:
        _list_files(as_json)
    else:
        _show_file(name, as_json)


def init(
    name: Annotated[str, typer.Argument(help="Name of the new file, without a suffix.")] = "ray",
    address: Annotated[
        str | None, typer.Option(help="A dashboard to ask for nodes, labels and resources.")
    ] = None,
) -> None:
    """Write a first cluster file, cluster_configs/NAME.yaml, with comments."""
    from nemo_run_ray.cluster_files.check import sample
    from nemo_run_ray.dashboard.jobs import inspect

    path = Path("cluster_configs", f"{name}.yaml")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"The name of a cluster file is {name!r}; expected letters, digits, '_' and '-'."
        )
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name, or edit it.")
    nodes: Sequence[Node] = ()
    if address is not None:
        found = inspect(ExistingCluster(url=address).connect())
        if found.unreachable or found.unauthorised:
            raise ClusterError(found.unreachable or found.unauthorised)
        nodes = found.nodes or ()
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(sample(name, address, nodes), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    out.print(f"{path} is written. Edit it, and look at it with:")
    out.print(f"nemo-run-ray clusters {name}\nnemo-run-ray doctor {name}")


def _list_files(as_json: bool) -> None:
    from nemo_run_ray.cluster_files import load

    rows = [_row(str(path)) for path in load.files()]
    try:
        with_profiles, profiles = load.profiles_here()
        rows += [_row(f"{with_profiles}:{profile}") for profile in profiles]
    except ConfigError as error:  # the others are good all the same
        problem = {"name": "env.toml", "kind": "wrong", "where": "", "pools": [], "path": ""}
        rows.append({**problem, "error": str(error)})
    if rows or as_json:
        columns = ("name", "kind", "where", "pools", "path")
        if not as_json:
            rows = [
                {**row, "where": row["error"].partition("\n")[0] or row["where"]} for row in rows
            ]
        show(rows, columns, as_json)
    else:
        folders = ", ".join(str(folder) for folder in load.folders())
        out.print(
            f"There are no cluster files in {folders or 'any folder'}. `nemo-run-ray init` writes "
            "one; docs/guides/cluster_files.md describes them.",
        )


def _row(path: str) -> dict[str, Any]:
    from nemo_run_ray.cluster_files.load import is_for_others
    from nemo_run_ray.cluster_files.resolve import cluster_of

    file, _, profile = path.partition(".toml:")
    stem = profile or os.path.splitext(os.path.basename(file))[0]
    row = {"name": stem, "kind": "wrong", "where": "", "pools": [], "path": path, "error": ""}
    try:
        other = is_for_others(Path(f"{file}.toml" if profile else path), profile or None)
        if other:
            return row | {"kind": other, "where": "not for Ray"}
        loaded = _load(path)
        row |= {"kind": loaded.format, "pools": list(loaded.file.pools)}
        cluster = cluster_of(loaded)
        if isinstance(cluster, kinds.SlurmCluster):
            row["where"] = f"Slurm, {cluster.executor.tunnel.key}"
        else:
            row["where"] = getattr(cluster, "url", "the embedded Ray")
    except ConfigError as error:
        row["error"] = str(error)
    return row


def _show_file(name: str, as_json: bool) -> None:
    from nemo_run_ray.cluster_files.resolve import cluster_of

    loaded = _load(name)
    cluster_of(loaded)
    folder = "" if as_json else f"{loaded.path.parent}{os.sep}"
    rows = [
        {"key": key, "value": value, "source": source.removeprefix(folder)}
        for key, value, source in _values(loaded)
    ]
    if as_json:
        ignored = [
            {"key": key.key, "reason": key.reason, "source": key.where} for key in loaded.ignored
        ]
        found = {"path": str(loaded.path), "format": loaded.format, "values": rows}
        print(json.dumps({**found, "ignored": ignored}, indent=1, default=str))
        return
    out.print(f"{loaded.path} ({loaded.format})")
    show(rows, ("key", "value", "source"))
    for key in loaded.ignored:
        out.print(f"ignored: {key.key} ({key.where}): {key.reason}")


def _values(loaded: Document) -> Iterator[tuple[str, Any, str]]:
    """Every value of a file, then the variables that tasks get of this environment."""
    from nemo_run_ray.cluster_files.load import dotted, variables_of

    said = loaded.file.model_dump(exclude_unset=True)
    for path, value in _leaves(said, ()):
        is_header = path[:2] == ("cluster", "headers")
        yield dotted(path), _masked(str(value)) if is_header else value, loaded.where(*path)
    try:
        variables, secrets = variables_of(loaded)
    except ConfigError as error:
        yield "env", str(error), "your environment"
        return
    for name, value in variables.items():
        if name not in loaded.file.env.set:
            yield f"variable {name}", value, "your environment"
    for name in secrets:
        yield f"secret {name}", _MASKED, "your environment"


def _masked(header: str) -> str:
    """A header's value, of which only the names of variables may be seen."""
    parts = [part for part in _VARIABLE.split(header) if part]
    return "".join(part if _VARIABLE.fullmatch(part) else _MASKED for part in parts)


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    inner = value.items() if isinstance(value, dict) else ()
    if not inner:
        yield path, value
    for key, below in inner:
        yield from _leaves(below, (*path, key))


def patches(as_json: AsJson = False) -> None:
    """The changes of NeMo-Run that there are: what each is for, and whether it is applied."""
    from nemo_run_ray import patches as known

    rows = [
        {
            "name": name,
            "state": state,
            "why": known.patch(name).why,
            "verified": list(known.patch(name).verified),
            "retired_by": known.patch(name).retired_by,
        }
        for name, state in known.status().items()
    ]
    show(rows, ("name", "state", "why"), as_json)
    if not as_json:
        out.print(f"Apply them with nemo_run_ray.patches.apply() or {known.VARIABLE}=…")


VERBS: tuple[Callable[..., Any], ...] = (
    up,
    down,
    doctor,
    status,
    logs,
    cancel,
    resume,
    timeline,
    patches,
    clusters,
    init,
)


def ns(context: typer.Context) -> None:
    """Run a command of NeMo-Skills (`ns generate …`), whose tasks run on Ray."""
    run_ns(context.args)


def run_ns(arguments: Sequence[str]) -> object:
    """Run NeMo-Skills' own command in this process, with its patch."""
    from nemo_run_ray import patches

    command = _skills_command()
    patches.apply("skills_executor")
    app = command.load()
    sys.argv = ["ns", *arguments]
    return app()


def _skills_command() -> EntryPoint:
    for found in entry_points(group="console_scripts", name="ns"):
        if found.value.startswith("nemo_skills."):
            return found
    raise ConfigError(
        "NeMo-Skills, whose command `ns` this would run, is not installed beside nemo_run_ray "
        f"({sys.executable}). Install it there, from its source."
    )


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, with this package's errors as one paragraph and exit code 1."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with _console():
                verb(*args, **kwargs)
        except NemoRunRayError as error:
            print(f"nemo-run-ray: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `… | head`: the reader is gone
            _flush_nothing_at_exit()
            raise typer.Exit(141) from None
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            if error.filename is None:
                _flush_nothing_at_exit()
            where = error.filename or "Standard output"
            print(f"nemo-run-ray: {where} cannot be written: {error.strerror}.", file=sys.stderr)
            raise typer.Exit(1) from error

    return run


def _flush_nothing_at_exit() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _console() -> Iterator[None]:
    """Standard output for the verbs alone, and for every text, whatever its encoding is.

    NeMo-Run logs and warns there, where programs read what ``status --json`` prints.
    """
    before = CONSOLE.stderr
    CONSOLE.stderr = True
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        CONSOLE.stderr = before
        sys.stdout.flush()


def build() -> typer.Typer:
    app = typer.Typer(
        help="Run NeMo-Run tasks on Ray.", no_args_is_help=True, pretty_exceptions_enable=False
    )
    for verb in VERBS:
        app.command()(guarded(verb))
    app.command(context_settings=_AS_THEY_ARE)(guarded(ns))
    return app


def main() -> None:
    build()()
