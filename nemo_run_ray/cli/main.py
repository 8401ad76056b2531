"""The command line: ``nemo-run-ray``, and the same verbs below ``nemo ray``."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemo_run.core.frontend.console.api import CONSOLE
from rich.live import Live

from nemo_run_ray.cli import out, show
from nemo_run_ray.cli.clusters import clusters, doctor, down, init, up
from nemo_run_ray.errors import NO_SPACE, ConfigError, JobError, NemoRunRayError

if TYPE_CHECKING:
    from nemo_run_ray.cli.status_report import StatusReport
    from nemo_run_ray.experiment.elements import Element
    from nemo_run_ray.experiment.job import RemoteJob

Name = Annotated[str, typer.Argument(help="An experiment's id or title, a handle or a job's id.")]
Experiment = Annotated[str, typer.Argument(help="Its id or title.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
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
