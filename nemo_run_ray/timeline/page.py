"""An experiment's jobs as one HTML page: pure, no clock, no network, readable without its script.

The markup is in ``page.html.jinja``. Its environment cleans and escapes every value that the markup
prints, so foreign words cannot reach the page in any other way.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from nemo_run_ray.errors import shown
from nemo_run_ray.timeline.lanes import STATES, Axis, Span, TimelineRow, axis_of, lanes_of
from nemo_run_ray.timeline.values import MESSAGE_MAX, arrows, job_values, length, ticks, utc

__all__ = ["ALL_LINKS_MAX", "MESSAGE_MAX", "Span", "TimelineRow", "page"]

#: Up to so many jobs all dependencies are drawn; beyond, those of the chosen job.
ALL_LINKS_MAX = 40
#: Pixels of a row, and of its letters, up to so many jobs.
_SIZES = ((40, 30, 13), (150, 22, 12), (10**9, 17, 11))


def page(title: str, rows: Sequence[TimelineRow], began_at: float, now: float) -> str:
    """The whole page.

    Args:
        title: of the experiment.
        rows: its jobs, in the order in which they are shown.
        began_at: when the experiment was handed over, in seconds since 1970.
        now: the moment that the page shows.
    """
    axis = axis_of(rows, began_at, now)
    lanes = lanes_of(rows, axis, began_at)
    style, script = _asset("page.css") + _measures(rows), _asset("page.js")
    has_all_links = len(lanes) <= ALL_LINKS_MAX
    return _template().render(
        which_links="all" if has_all_links else "chosen",
        style_hash=_sha256(style),
        script_hash=_sha256(script),
        style=style,
        script=script,
        title=title,
        facts=_facts(rows, axis, began_at, now),
        counts=_counts(rows),
        start_s=f"{axis.start:.3f}",
        span_s=f"{axis.span_s:.3f}",
        ticks=ticks(axis),
        arrows=arrows(lanes, axis) if has_all_links else (),
        jobs=job_values(lanes, axis),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("nemo_run_ray.timeline", ""),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["clean"] = _clean
    return environment.get_template("page.html.jinja")


def _clean(value: object) -> object:
    """Words as they are shown.

    Markup stays as it is: it is the page's style or script, or the result of a macro, whose parts
    were cleaned.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return shown(value)


def _facts(rows: Sequence[TimelineRow], axis: Axis, began_at: float, now: float) -> Sequence[str]:
    jobs = f"{len(rows)} job{'' if len(rows) == 1 else 's'}"
    took = f"{'going on for' if axis.is_live else 'took'} {length(axis.span_s)}"
    return jobs, took, f"began {utc(began_at)}", f"page made {utc(now)}"


def _counts(rows: Sequence[TimelineRow]) -> Sequence[tuple[str, int]]:
    counts = Counter(row.known for row in rows)
    return [(state.lower(), counts[state]) for state in STATES if counts[state]]


def _measures(rows: Sequence[TimelineRow]) -> str:
    """The rules that depend on the jobs: rows are lower where there are many."""
    _, row, letters = next(size for size in _SIZES if len(rows) <= size[0])
    lengths = sorted(len(row.name) for row in rows) or [0]
    # A few very long names shall not take the width from all bars.
    characters = min(max(10, lengths[(len(lengths) - 1) * 19 // 20]), 40)
    name = characters * letters * 0.6 + 28
    return f":root {{ --row: {row}px; --letters: {letters}px; --name: {name:.0f}px; }}\n"


def _asset(name: str) -> str:
    return resources.files("nemo_run_ray.timeline").joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
