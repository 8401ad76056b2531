"""Verbs about cluster files: which there are, and what one says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from nemo_run_ray.cli import out
from nemo_run_ray.clusters import Cluster, ExistingCluster, SlurmCluster
from nemo_run_ray.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from nemo_run_ray.cluster_files.document import KeyPath
    from nemo_run_ray.cluster_files.load import Loaded
    from nemo_run_ray.dashboard.state import ClusterNode

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
        _list(as_json)
    else:
        _show(name, as_json)


def init(
    name: Annotated[str, typer.Argument(help="Name of the new file, without a suffix.")] = "ray",
    address: Annotated[
        str | None, typer.Option(help="A dashboard to ask for nodes, labels and resources.")
    ] = None,
) -> None:
    """Write a first cluster file, cluster_configs/NAME.yaml, with comments."""
    from nemo_run_ray.cluster_files.sample import sample
    from nemo_run_ray.dashboard.state import inspect

    path = Path("cluster_configs", f"{name}.yaml")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"The name of a cluster file is {name!r}; expected letters, digits, '_' and '-'."
        )
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name, or edit it.")
    nodes: Sequence[ClusterNode] = ()
    if address is not None:
        found = inspect(ExistingCluster(url=address).connect())
        if found.unreachable or found.unauthorised:
            raise ClusterError(found.unreachable or found.unauthorised)
        nodes = found.nodes or ()
        if not found.has_label_names:
            nodes = [replace(node, labels={}) for node in nodes]
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(sample(name, address, nodes), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    out.print(f"{path} is written. Edit it, and look at it with:")
    out.print(f"nemo-run-ray clusters {name}\nnemo-run-ray doctor {name}")


def _list(as_json: bool) -> None:
    from nemo_run_ray.cluster_files import search

    rows = [_row(str(path)) for path in search.files()]
    try:
        with_profiles, profiles = search.profiles_here()
        rows += [_row(f"{with_profiles}:{profile}") for profile in profiles]
    except ConfigError as error:  # the others are good all the same
        problem = {"name": "env.toml", "kind": "wrong", "where": "", "pools": [], "path": ""}
        rows.append({**problem, "error": str(error)})
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        folders = ", ".join(str(folder) for folder in search.folders())
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
    from nemo_run_ray.cluster_files.defaults import check_fields_of
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import cluster_of

    file, _, profile = path.partition(".toml:")
    stem = profile or os.path.splitext(os.path.basename(file))[0]
    row = {"name": stem, "kind": "wrong", "where": "", "pools": [], "path": path, "error": ""}
    try:
        other = _other_format(Path(path), profile)
        if other:
            return row | {"kind": other, "where": "not for Ray"}
        loaded = load(path)
        check_fields_of(loaded)
        row |= {"kind": loaded.reading.format, "pools": list(loaded.file.pools)}
        row["where"] = _where(cluster_of(loaded))
    except ConfigError as error:
        row["error"] = str(error)
    return row


def _where(cluster: Cluster) -> str:
    if isinstance(cluster, SlurmCluster):
        return f"Slurm, {cluster.executor.tunnel.key}"
    return getattr(cluster, "url", "the embedded Ray")


def _other_format(path: Path, profile: str) -> str:
    """The format of a foreign file for another executor, such as Slurm; empty of all others."""
    from nemo_run_ray.cluster_files import env_toml, skills
    from nemo_run_ray.cluster_files.document import read

    if profile:
        document = read(path.with_name(env_toml.NAME))
        return "" if env_toml.names_ray(document, profile) else "Nemotron env.toml"
    document = read(path)
    is_for_others = skills.is_skills(document) and not skills.names_ray(document)
    return "NeMo-Skills" if is_for_others else ""


def _show(name: str, as_json: bool) -> None:
    from nemo_run_ray.cluster_files.defaults import check_fields_of
    from nemo_run_ray.cluster_files.load import load
    from nemo_run_ray.cluster_files.resolve import cluster_of

    loaded = load(name)
    check_fields_of(loaded)
    cluster_of(loaded)
    rows = [
        {"key": key, "value": value, "source": source} for key, value, source in _values(loaded)
    ]
    ignored = [
        {"key": key.key, "reason": key.reason, "source": key.where}
        for key in loaded.reading.ignored
    ]
    if as_json:
        found = {"path": str(loaded.path), "format": loaded.reading.format}
        print(json.dumps({**found, "values": rows, "ignored": ignored}, indent=1, default=str))
        return
    out.print(f"{loaded.path} ({loaded.reading.format})")
    table = Table(box=None, pad_edge=False)
    for title in ("key", "value", "from"):
        table.add_column(title, overflow="fold")
    folder = f"{loaded.path.parent}{os.sep}"
    for row in rows:
        table.add_row(row["key"], str(row["value"]), row["source"].removeprefix(folder))
    out.print(table)
    for key in ignored:
        out.print(f"ignored: {key['key']} ({key['source']}): {key['reason']}")


def _values(loaded: Loaded) -> Iterator[tuple[str, Any, str]]:
    """Every value of a file, then the variables that tasks get of this environment."""
    from nemo_run_ray.cluster_files.document import dotted
    from nemo_run_ray.cluster_files.variables import variables_of

    said = loaded.file.model_dump(exclude_unset=True)
    for path, value in _leaves(said, ()):
        is_header = path[:2] == ("cluster", "headers")
        yield dotted(path), _masked(str(value)) if is_header else value, loaded.where(*path)
    try:
        variables = variables_of(loaded.file, str(loaded.path), os.environ)
    except ConfigError as error:
        yield "env", str(error), "your environment"
        return
    for name, value in variables.clear.items():
        if name not in loaded.file.env.set:
            yield f"variable {name}", value, "your environment"
    for name in variables.secrets:
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
