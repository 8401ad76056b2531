"""The verbs about clusters and cluster files: up, down, doctor, clusters and init."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nemo_run_ray import clusters as kinds
from nemo_run_ray.cli import out
from nemo_run_ray.clusters import Cluster, Dashboard, ExistingCluster
from nemo_run_ray.errors import ClusterError, ConfigError, JobError

if TYPE_CHECKING:
    from nemo_run_ray.cluster_files.check import CheckRow
    from nemo_run_ray.cluster_files.load import Document, KeyPath
    from nemo_run_ray.clusters import LocalCluster, SlurmCluster
    from nemo_run_ray.remote.fit import Node

_FILE = "A cluster file of an embedded Ray, or of one on Slurm."


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
    out.print(f"{_title(found)} is up: {dashboard.url}")
    out.print(f"Stop it with: {_down(cluster)}")


def down(
    force: Annotated[
        bool, typer.Option("--force", help="Cancel the jobs that run on it first.")
    ] = False,
    name: Annotated[str | None, typer.Option("--cluster", help=_FILE)] = None,
) -> None:
    """Stop such a cluster, when its jobs have ended; how they ended is noted first."""
    cluster = cluster_of_ours(name)
    title = _title(cluster)
    dashboard = cluster.find()
    if dashboard is None:
        # What an embedded Ray that has died has left is kept; a job of Slurm may wait in the queue.
        archive = cluster.archive()
        ended = archive.sentence if archive else f"No {title[4:]} is up."
        was_there = cluster.stop()
        out.print(f"{title} is stopped." if was_there else ended)
        return
    _end_jobs(cluster, dashboard, force, name)
    cluster.stop()
    out.print(f"{title} is stopped.")


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
                f"{len(busy)} job(s) still run on {_title(cluster)[:1].lower()}"
                f"{_title(cluster)[1:]}: {', '.join(busy)}. Cancel "
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
        return "The embedded Ray"
    return f"The allocation of the cluster {cluster.name!r} on Slurm"


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


_BROKEN = "broken"
_COLORS = {"ok": "green", "warning": "yellow", _BROKEN: "red", "unknown": "yellow"}


def doctor(
    name: Annotated[
        str | None, typer.Argument(help="A cluster file, for what it says must be there.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="A dashboard's address; without it and a name the embedded Ray."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The same as the name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check that a cluster can be reached and used. Exit code 1 when something is broken."""
    from nemo_run_ray.cluster_files.check import look
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import check_fields_of, cluster_of

    if name is not None and cluster not in (None, name):
        raise ConfigError(f"Give one cluster file, not {name!r} and --cluster {cluster!r}.")
    name = name if name is not None else cluster
    if name is None:
        _show_checks(look(dashboard_of(cluster_at(address))), as_json)
    elif address is not None:
        raise ConfigError("Give a cluster file's name or an --address, not both.")
    else:
        loaded = load(name)
        check_fields_of(loaded)
        _show_checks(look(dashboard_of(cluster_of(loaded)), loaded), as_json)


def cluster_at(address: str | None) -> Cluster:
    """The cluster of an address; without one the embedded Ray.

    Raises:
        ConfigError: the address is no address.
    """
    if address is not None and not address.strip():
        raise ConfigError(
            "--address is empty, as from a variable that is not set. Give the address of a "
            "dashboard, or leave it out to look at the embedded Ray."
        )
    return kinds.LocalCluster() if address is None else ExistingCluster(url=address)


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


def _show_checks(rows: Sequence[CheckRow], as_json: bool) -> None:
    """Print what was found.

    Raises:
        typer.Exit: something is broken.
    """
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        out.print(checks_table(rows))
    if any(row.state.value == _BROKEN for row in rows):
        raise typer.Exit(1)


def checks_table(rows: Sequence[CheckRow]) -> Group:
    """The lines for people, and how many there are of each kind."""
    grid = Table("check", "state", "what was found", box=None, pad_edge=False)
    for row in rows:
        step = f"\n-> {row.next_step}" if row.next_step else ""
        state = Text(row.state.value, _COLORS[row.state.value])
        grid.add_row(Text(row.check), state, Text(f"{row.message}{step}"))
    counts = [(name, sum(row.state.value == name for row in rows)) for name in _COLORS]
    return Group(grid, Text("\n" + ", ".join(f"{count} {name}" for name, count in counts if count)))


_NAME = re.compile(r"[\w-]{1,100}")
_MASKED = "***"
_VARIABLE = re.compile(r"(\$\{\w+\})")


def clusters(
    name: Annotated[
        str | None, typer.Argument(help="Name or path of one, to see what it says.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
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
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        folders = ", ".join(str(folder) for folder in load.folders())
        out.print(
            f"There are no cluster files in {folders or 'any folder'}. `nemo-run-ray init` writes "
            "one; docs/clusters.md describes them.",
        )
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("name", "kind", "where", "pools", "path"):
            table.add_column(title, overflow="fold")
        for row in rows:
            pools = ", ".join(row["pools"])
            problem = row["error"].partition("\n")[0].removeprefix(f"{row['path']}:")
            line = "line " if problem[:1].isdigit() else ""
            where = f"{line}{problem}" if problem else row["where"]
            table.add_row(row["name"], row["kind"], where, pools, row["path"])
        out.print(table)


def _row(path: str) -> dict[str, Any]:
    from nemo_run_ray.cluster_files.load import is_for_others, load
    from nemo_run_ray.cluster_files.resolve import check_fields_of, cluster_of

    file, _, profile = path.partition(".toml:")
    stem = profile or os.path.splitext(os.path.basename(file))[0]
    row = {"name": stem, "kind": "wrong", "where": "", "pools": [], "path": path, "error": ""}
    try:
        other = is_for_others(Path(f"{file}.toml" if profile else path), profile or None)
        if other:
            return row | {"kind": other, "where": "not for Ray"}
        loaded = load(path)
        check_fields_of(loaded)
        row |= {"kind": loaded.format, "pools": list(loaded.file.pools)}
        row["where"] = _address(cluster_of(loaded))
    except ConfigError as error:
        row["error"] = str(error)
    return row


def _address(cluster: Cluster) -> str:
    if isinstance(cluster, kinds.SlurmCluster):
        return f"Slurm, {cluster.executor.tunnel.key}"
    return getattr(cluster, "url", "the embedded Ray")


def _show_file(name: str, as_json: bool) -> None:
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import check_fields_of, cluster_of

    loaded = load(name)
    check_fields_of(loaded)
    cluster_of(loaded)
    rows = [
        {"key": key, "value": value, "source": source} for key, value, source in _values(loaded)
    ]
    ignored = [
        {"key": key.key, "reason": key.reason, "source": key.where} for key in loaded.ignored
    ]
    if as_json:
        found = {"path": str(loaded.path), "format": loaded.format}
        print(json.dumps({**found, "values": rows, "ignored": ignored}, indent=1, default=str))
        return
    out.print(f"{loaded.path} ({loaded.format})")
    table = Table(box=None, pad_edge=False)
    for title in ("key", "value", "from"):
        table.add_column(title, overflow="fold")
    folder = f"{loaded.path.parent}{os.sep}"
    for row in rows:
        table.add_row(row["key"], str(row["value"]), row["source"].removeprefix(folder))
    out.print(table)
    for key in ignored:
        out.print(f"ignored: {key['key']} ({key['source']}): {key['reason']}")


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
