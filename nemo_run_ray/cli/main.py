"""The command line: ``nemo-run-ray``, and the same verbs below ``nemo ray``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from nemo_run.core.frontend.console.api import CONSOLE
from rich.console import Console
from rich.live import Live

from nemo_run_ray.clusters import Cluster, ExistingCluster, LocalCluster
from nemo_run_ray.errors import ClusterError, JobError, NemoRunRayError
from nemo_run_ray.nemo import registry
from nemo_run_ray.remote.states import is_active

Name = Annotated[str, typer.Argument(help="An experiment's id or title, a handle or a job's id.")]
Address = Annotated[str, typer.Option(help="A dashboard's address; without it the embedded Ray.")]
#: Seconds between two looks of a table that follows.
_REFRESH_S = 2.0
_out = Console(soft_wrap=True, highlight=False)


def up(
    num_cpus: Annotated[int | None, typer.Option(help="CPUs that Ray may give away.")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs that Ray may give away.")] = None,
) -> None:
    """Start the embedded Ray and keep it."""
    dashboard = LocalCluster(num_cpus=num_cpus, num_gpus=num_gpus, keep=True).connect()
    _out.print(f"The embedded Ray is up: {dashboard.url}")
    _out.print("Stop it with: nemo-run-ray down")


def down(
    force: Annotated[
        bool, typer.Option("--force", help="Cancel the jobs that run on it first.")
    ] = False,
) -> None:
    """Stop the embedded Ray, when its jobs have ended; how they ended is noted first."""
    from nemo_run_ray.dashboard.jobs_api import JobsApi
    from nemo_run_ray.jobs.before_stop import active, end_all, note_ends

    cluster = LocalCluster()
    dashboard = cluster.find()
    if dashboard is None:
        _out.print("No embedded Ray is up.")
        return
    api = JobsApi.of(dashboard)
    try:
        busy = active(api.table(fresh=True))
        if busy and not force:
            raise JobError(
                f"{len(busy)} job(s) still run on the embedded Ray: {', '.join(busy)}. Cancel "
                "them, or cancel all and stop it: nemo-run-ray down --force"
            )
        if busy:
            _out.print(f"Cancelling {len(busy)} job(s) …")
            for name in end_all(api):
                _out.print(f"{name} has not ended; it is killed with the cluster.", markup=False)
        for line in note_ends(api, cluster, is_forced=bool(busy)):
            _out.print(line, markup=False)
    except ClusterError as error:
        if not force:
            raise
        _out.print(f"Its jobs' ends are not known: {error}", markup=False)
    cluster.stop()
    _out.print("The embedded Ray is stopped.")


def doctor(address: Address = "") -> None:
    """Check that a cluster can be reached and used."""
    from nemo_run_ray.dashboard.jobs_api import JobsApi

    cluster: Cluster = ExistingCluster(url=address) if address else LocalCluster()
    dashboard = cluster.find()
    if dashboard is None:
        raise ClusterError(
            "No embedded Ray is up. Start one with: nemo-run-ray up; look at another cluster with: "
            "nemo-run-ray doctor --address http://…"
        )
    api = JobsApi.of(dashboard)
    version = api.version()
    jobs = api.table()
    active = sum(is_active(row) for row in jobs.values())
    _out.print(f"dashboard  {dashboard.url} answers, and takes these credentials")
    _out.print(f"Ray        {version['ray_version']} ({version['session_name']})")
    _out.print(f"jobs       {len(jobs)} known, {active} pending or running")


def status(
    name: Name,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once, do not follow.")] = False,
) -> None:
    """State and reason of an experiment's jobs, or of one job; on a terminal until all ended."""
    from nemo_run_ray.cli.status_report import StatusReport
    from nemo_run_ray.jobs.find import find
    from nemo_run_ray.jobs.tend import tend

    jobs = find(name)
    report = StatusReport(jobs)
    if as_json:
        print(report.as_json())
        return
    if once or report.is_over or not _out.is_terminal:
        _out.print(report.table(time.time()))
        return
    with Live(report.table(time.time()), console=_out, auto_refresh=False) as live:
        while not report.is_over:
            for exp_dir in {job.record.exp_dir for job in jobs}:
                tend(exp_dir)
            time.sleep(_REFRESH_S)
            report = StatusReport(jobs)
            live.update(report.table(time.time()), refresh=True)


def timeline(
    experiment: Annotated[str, typer.Argument(help="Its id or title.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")],
) -> None:
    """Write a page that shows when each job of an experiment waited, ran and ended."""
    from nemo_run_ray.cli.status_report import timeline_page
    from nemo_run_ray.jobs.find import find

    jobs = find(experiment)
    folder = jobs[0].record.exp_dir
    page = timeline_page(folder.name, folder, jobs, time.time())
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise JobError(
            f"The page cannot be written to {output}: {error.strerror}. Give another --output."
        ) from error
    _out.print(f"The timeline of {len(jobs)} job(s) is in {output}", markup=False)


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job's end.")] = False,
    job: Annotated[str, typer.Option(help="Which job of an experiment.")] = "",
    role: Annotated[str, typer.Option(help="One role of a group, or role/replica.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="With Ray's lines and the package's last one.")
    ] = False,
) -> None:
    """What a job has printed."""
    from nemo_run_ray.jobs.find import find
    from nemo_run_ray.jobs.follow import lines, only

    jobs = find(name)
    found = [remote_job for remote_job in jobs if not job or remote_job.name == job]
    if len(found) != 1:
        names = ", ".join(remote_job.name for remote_job in jobs)
        raise JobError(f"{name!r} has the jobs {names}; name one of them with --job.")
    if role:
        _must_have_role(found[0], role)
    text = (found[0].log if raw else found[0].output)(follow)
    for piece in only(role, lines(text)) if role else text:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _must_have_role(job: Any, role: str) -> None:
    from nemo_run_ray.jobs.explanations import roles

    if not job.record.has_roles:
        raise JobError(f"The job {job.name!r} is no group and has no roles; leave --role out.")
    found = roles(job, job.status)
    rows = found["roles"] if found else []
    names = {row["role"] for row in rows}
    replicas = {f"{row['role']}/{row['replica']}" for row in rows}
    if rows and role not in names | replicas:
        raise JobError(
            f"The job {job.name!r} has no role {role!r}; it has {', '.join(sorted(replicas))}."
        )


def cancel(
    name: Name, job: Annotated[str, typer.Option(help="Only this job of an experiment.")] = ""
) -> None:
    """Stop the jobs of an experiment, or one job, and wait until they have ended."""
    from nemo_run_ray.jobs.cancel import cancel_all
    from nemo_run_ray.jobs.find import find

    jobs = find(name)
    if job:
        names = ", ".join(remote_job.name for remote_job in jobs)
        jobs = [remote_job for remote_job in jobs if remote_job.name == job]
        if not jobs:
            raise JobError(f"{name!r} has no job {job!r}; it has {names}.")
    for line in cancel_all(jobs):
        _out.print(line, markup=False)


def resume(experiment: Annotated[str, typer.Argument(help="Its id or title.")]) -> None:
    """Hand over what never reached the cluster, and start a dispatcher that has ended too early."""
    from nemo_run_ray.nemo.resume import resume_experiment

    for line in resume_experiment(_experiment(experiment)):
        _out.print(line, markup=False)


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
        for name, patch in known.PATCHES.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        _out.print(f"{row['name']}: {row['state']}", markup=False)
        _out.print(f"  {row['why']}", markup=False)
        _out.print(
            f"  Verified on NeMo-Run {' to '.join(row['verified'])}; retired by "
            f"{row['retired_by']}.",
            markup=False,
        )
    _out.print(f"Apply them with nemo_run_ray.patches.apply() or {known.VARIABLE}=…", markup=False)


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
)


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, with this package's errors as one paragraph and exit code 1."""
    import functools

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with _nemo_run_on_stderr():
                verb(*args, **kwargs)
        except NemoRunRayError as error:
            print(f"nemo-run-ray: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (
            BrokenPipeError
        ):  # `… | head`: the reader is gone, and nothing may be flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None

    return run


@contextlib.contextmanager
def _nemo_run_on_stderr() -> Iterator[None]:
    """NeMo-Run logs and warns on stdout, where programs read what ``status --json`` prints."""
    before = CONSOLE.stderr
    CONSOLE.stderr = True
    try:
        yield
    finally:
        CONSOLE.stderr = before


def build() -> typer.Typer:
    app = typer.Typer(
        help="Run NeMo-Run tasks on Ray.", no_args_is_help=True, pretty_exceptions_enable=False
    )
    for verb in VERBS:
        app.command()(guarded(verb))
    return app


def main() -> None:
    build()()


def _experiment(name: str) -> Any:
    try:
        return registry.load_experiment(name)
    except FileNotFoundError as error:
        raise JobError(
            f"There is no experiment {name!r} in NeMo-Run's home. `nemo experiment list <title>` "
            "lists those of a title; NEMORUN_HOME names another home."
        ) from error
