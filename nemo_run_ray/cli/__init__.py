"""The command line."""

from collections.abc import Iterable, Sequence

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


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one line for each row, however long, so that ``grep`` finds it."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(shown("  ".join(cells).rstrip()))
