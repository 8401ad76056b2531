"""The command line."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from nemo_run_ray.errors import shown


class _Plain(Console):
    """Prints words as they are: they come from clusters and files, and are no markup of ours."""

    def __init__(self) -> None:
        super().__init__(soft_wrap=True, highlight=False, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


#: The console of all verbs; logs and JSON are printed without it.
out = _Plain()


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool = False) -> None:
    """Print rows: as JSON, or one line for each, however long, so that ``grep`` finds it."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    lines = [[name.replace("_", " ") for name in columns]]
    lines += [[_cell(row[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(shown("  ".join(cells).rstrip()))


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        value = [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else " ".join(str(value).split())
