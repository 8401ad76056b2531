"""The command line: ``nemo-run-ray``, and the same verbs below ``nemo ray``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemo_run.core.frontend.console.api import CONSOLE
from rich.live import Live

from nemo_run_ray.cli import out
from nemo_run_ray.cli.clusters import clusters, doctor, down, init, up
from nemo_run_ray.errors import NO_SPACE, ConfigError, JobError, NemoRunRayError, shown
from nemo_run_ray.nemo import registry

if TYPE_CHECKING:
    from nemo_run_ray.cli.status_report import StatusReport
    from nemo_run_ray.experiment.elements import Element
    from nemo_run_ray.experiment.job import RemoteJob

_ELEMENT_COLUMNS = ("element", "state", "attempts", "exit code", "values", "reason")
Name = Annotated[str, typer.Argument(help="An experiment's id or title, a handle or a job's id.")]
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
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
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
    from nemo_run_ray.experiment.find import find

    jobs = find(name)
    if elements is not None:
        _print_elements(_one(name, jobs, job).select_elements(elements), as_json)
        return
    jobs = _chosen(name, jobs, job)
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
    from nemo_run_ray.experiment.job import record
    from nemo_run_ray.experiment.tend import tend

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
    experiment: Annotated[str, typer.Argument(help="Its id or title.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")],
) -> None:
    """Write a page that shows when each job of an experiment waited, ran and ended."""
    from nemo_run_ray.cli.status_report import timeline_page
    from nemo_run_ray.experiment.find import find

    jobs = find(experiment)
    folder = jobs[0].record.exp_dir
    page = timeline_page(folder.name, folder, jobs, time.time())
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
    """What a job has printed."""
    from nemo_run_ray.experiment.find import find
    from nemo_run_ray.experiment.logs import lines, of_element, only

    found = _one(name, find(name), job)
    if role:
        _must_have_role(found, role)
    text = (found.log if raw else found.output)(follow)
    if element is not None:
        _must_have_element(found, element)
        text = of_element(element, lines(text))
    for piece in only(role, lines(text)) if role else text:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _print_elements(elements: Sequence[Element], as_json: bool = False) -> None:
    """Print one line for each element, however long, so that ``grep`` finds it."""
    if as_json:
        print(json.dumps([asdict(element) for element in elements], indent=1))
        return
    if not elements:
        print("There is no such element.")
        return
    rows = [_ELEMENT_COLUMNS, *map(_element_cells, elements)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(shown("  ".join(cells).rstrip()))


def _element_cells(element: Element) -> tuple[str, ...]:
    values = ", ".join(f"{field}={value}" for field, value in element.values.items())
    code = "" if element.exit_code is None else str(element.exit_code)
    reason = " ".join(element.reason.split())
    return str(element.index), element.state, str(element.attempts), code, values, reason


def _must_have_element(job: Any, element: int) -> None:
    if not job.record.is_array:
        raise JobError(f"The job {job.name!r} is no array; leave --element out.")
    found = job.elements
    if found and element >= found["elements"]:
        raise JobError(
            f"The array {job.name!r} has no element {element}; it has 0 to {found['elements'] - 1}."
        )


def _must_have_role(job: Any, role: str) -> None:
    if not job.record.has_roles:
        raise JobError(f"The job {job.name!r} is no group and has no roles; leave --role out.")
    found = job.roles(job.status)
    rows = found["roles"] if found else []
    names = {row["role"] for row in rows}
    replicas = {f"{row['role']}/{row['replica']}" for row in rows}
    if rows and role not in names | replicas:
        raise JobError(
            f"The job {job.name!r} has no role {role!r}; it has {', '.join(sorted(replicas))}."
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
    from nemo_run_ray.experiment.find import find

    if elements is not None:
        _print_elements(_one(name, find(name), job).cancel_elements(elements))
        return
    for line in cancel_all(_chosen(name, find(name), job)):
        out.print(line)


def _chosen(name: str, jobs: list[RemoteJob], job: str) -> list[RemoteJob]:
    """The job of that name, or all jobs when none is named."""
    from nemo_run_ray.experiment.find import did_you_mean

    found = [remote_job for remote_job in jobs if not job or remote_job.name == job]
    if not found:
        names = [remote_job.name for remote_job in jobs]
        near = did_you_mean(job, names)
        raise JobError(f"{name!r} has no job {job!r}; it has {', '.join(names)}.{near}")
    return found


def _one(name: str, jobs: list[RemoteJob], job: str) -> RemoteJob:
    """The only job of that name."""
    found = _chosen(name, jobs, job)
    if len(found) != 1:
        names = ", ".join(remote_job.name for remote_job in found)
        raise JobError(f"{name!r} has the jobs {names}; name one of them with --job.")
    return found[0]


def resume(experiment: Annotated[str, typer.Argument(help="Its id or title.")]) -> None:
    """Hand over what never reached the cluster, and start a dispatcher that has ended too early."""
    from nemo_run_ray.nemo.scheduler import resume_experiment

    for line in resume_experiment(_experiment(experiment)):
        out.print(line)


def patches(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """The changes of NeMo-Run that there are: what each is for, and whether it is applied."""
    from nemo_run_ray import patches as known

    states = known.status()
    rows = [
        {
            "name": name,
            "state": states[name],
            "why": patch.why,
            "verified": list(patch.verified),
            "retired_by": patch.retired_by,
        }
        for name, patch in ((name, known.patch(name)) for name in states)
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        out.print(f"{row['name']}: {row['state']}")
        out.print(f"  {row['why']}")
        out.print(
            f"  Verified on NeMo-Run {' to '.join(row['verified'])}; retired by "
            f"{row['retired_by']}.",
        )
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
    _check_skills_options(app)
    sys.argv = ["ns", *arguments]
    return app()


def _check_skills_options(app: object) -> None:
    """Refuse a typer that makes ``--server-type`` of what NeMo-Skills calls ``--server_type``."""
    if not isinstance(app, typer.Typer):
        return
    commands = getattr(typer.main.get_command(app), "commands", {}).values()
    options = [(option.name or "", option.opts) for each in commands for option in each.params]
    renamed = [f"--{name}" for name, opts in options if f"--{name.replace('_', '-')}" in opts]
    unknown = [option for option in renamed if "_" in option]
    if unknown and not any(f"--{name}" in opts for name, opts in options if "_" in name):
        raise ConfigError(
            f"typer {version('typer')} does not know NeMo-Skills' options that have an underscore, "
            f"such as {unknown[0]}. Install an older one beside it: pip install 'typer<0.27'."
        )


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
    import functools

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


def _experiment(name: str) -> Any:
    from nemo_run_ray.experiment.find import did_you_mean, find_experiment, titles

    folder = find_experiment(name)
    try:
        return registry.load_experiment(folder.name if folder else name)
    except FileNotFoundError as error:
        raise JobError(
            f"There is no experiment {name!r} in NeMo-Run's home.{did_you_mean(name, titles())} "
            "`nemo experiment list <title>` lists those of a title; NEMORUN_HOME names another "
            "home."
        ) from error
