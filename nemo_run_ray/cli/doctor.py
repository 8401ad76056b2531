"""``nemo-run-ray doctor``: whether a cluster fits what is to run on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nemo_run_ray.cli import out
from nemo_run_ray.clusters import Cluster, Dashboard, ExistingCluster, LocalCluster, SlurmCluster
from nemo_run_ray.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from nemo_run_ray.cluster_files.preflight import CheckRow

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
    from nemo_run_ray.cluster_files.defaults import check_fields_of
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.preflight import look
    from nemo_run_ray.cluster_files.resolve import cluster_of

    if name is not None and cluster not in (None, name):
        raise ConfigError(f"Give one cluster file, not {name!r} and --cluster {cluster!r}.")
    name = name if name is not None else cluster
    if name is None:
        show(look(dashboard_of(cluster_at(address))), as_json)
    elif address is not None:
        raise ConfigError("Give a cluster file's name or an --address, not both.")
    else:
        loaded = load(name)
        check_fields_of(loaded)
        show(look(dashboard_of(cluster_of(loaded)), loaded.file), as_json)


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
    return LocalCluster() if address is None else ExistingCluster(url=address)


def dashboard_of(cluster: Cluster) -> Dashboard:
    """The dashboard of a cluster that is up.

    Raises:
        ClusterError: no embedded Ray is up, or the cluster on Slurm is not.
    """
    dashboard = cluster.find()
    if dashboard is None and isinstance(cluster, SlurmCluster):
        raise ClusterError(
            f"The cluster {cluster.name!r} has no allocation on Slurm in which Ray is up. Bring "
            "one up with: nemo-run-ray up --cluster …"
        )
    if dashboard is None:
        why = cluster.why_down()
        gap = "\n" if "\n" in why else " "  # after the lines of a log
        raise ClusterError(
            f"{why or 'No embedded Ray is up.'}{gap}Start one with: nemo-run-ray up; look at "
            "another cluster with: nemo-run-ray doctor --address http://…"
        )
    return dashboard


def show(rows: Sequence[CheckRow], as_json: bool) -> None:
    """Print what was found.

    Raises:
        typer.Exit: something is broken.
    """
    if as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        out.print(table(rows))
    if any(row.state.value == _BROKEN for row in rows):
        raise typer.Exit(1)


def table(rows: Sequence[CheckRow]) -> Group:
    """The lines for people, and how many there are of each kind."""
    grid = Table("check", "state", "what was found", box=None, pad_edge=False)
    for row in rows:
        step = f"\n-> {row.next_step}" if row.next_step else ""
        state = Text(row.state.value, _COLORS[row.state.value])
        grid.add_row(Text(row.check), state, Text(f"{row.message}{step}"))
    counts = [(name, sum(row.state.value == name for row in rows)) for name in _COLORS]
    return Group(grid, Text("\n" + ", ".join(f"{count} {name}" for name, count in counts if count)))
