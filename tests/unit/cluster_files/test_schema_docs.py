"""The table of all keys in docs/clusters.md is the schema's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from nemo_run_ray.cluster_files.schema import ClusterFile
from tests.conftest import ROOT

_MARK = "compared by a test -->\n"


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"| `{prefix}{name}` | {' '.join(str(field.description).split())} |"
        for inner, mark in _models(field.annotation):
            yield from _rows(inner, f"{prefix}{name}{mark}.")


def _models(annotation: Any, mark: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, mark
    marks = {dict: ".NAME", list: "[]"}
    for argument in get_args(annotation):
        yield from _models(argument, marks.get(get_origin(annotation), mark))


def test_every_key_is_in_the_docs():
    table = "\n".join(["| key | meaning |", "|---|---|", *_rows(ClusterFile, "")])
    _, _, rest = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8").partition(_MARK)
    assert rest.startswith(table + "\n"), f"docs/clusters.md lacks this table:\n{table}"
