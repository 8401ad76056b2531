"""An experiment's jobs as one HTML page: pure, no clock, no network, readable without its script.

Bars are SVG with lengths in percent: attributes that a policy without inline styles permits, and
that follow the window. Foreign words reach the page through ``_text`` only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources
from string import Template

from nemo_run_ray.timeline.lanes import (
    STATES,
    Axis,
    Bar,
    Lane,
    Row,
    Span,
    axis_of,
    bars_of,
    known_state,
    lanes_of,
    span_of,
)

__all__ = ["Row", "Span", "page"]

#: Up to so many jobs all dependencies are drawn; beyond, those of the chosen job.
ALL_LINKS_MAX = 40
#: A longer message loses its middle; the log has all of it.
MESSAGE_MAX = 6000
#: So many neighbours of a job are listed in its details.
NEIGHBOURS_MAX = 25
#: In percent of the axis: the least bar, and the room that a mark or a number inside it needs.
_BAR_MIN, _MARK_MIN, _NUMBER_MIN = 0.12, 2.5, 4.5
_TICKS_MAX = 9
_DAY_S = 86400
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, _DAY_S, 2 * _DAY_S, 7 * _DAY_S),
)
#: Pixels of a row, and of its letters, up to so many jobs.
_SIZES = ((40, 30, 13), (150, 22, 12), (10**9, 17, 11))
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: What HTML or UTF-8 cannot carry.
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def page(title: str, rows: Sequence[Row], began_at: float, now: float) -> str:
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
    return Template(_asset("page.html")).substitute(
        which_links="all" if has_all_links else "chosen",
        style_hash=_sha256(style),
        script_hash=_sha256(script),
        style=style,
        script=script,
        title=_text(title) or "(no title)",
        facts=_facts(rows, axis, began_at, now),
        counts=_counts(rows),
        start_s=f"{axis.start:.3f}",
        span_s=f"{axis.span_s:.3f}",
        ticks=_ticks(axis),
        grid=_grid(axis),
        links=_links(lanes, axis) if has_all_links else "",
        rows="".join(_row(lane, axis) for lane in lanes),
        nothing_hidden=" hidden" if lanes else "",
        cards="".join(_card(lane, lanes, axis) for lane in lanes),
    )


def _facts(rows: Sequence[Row], axis: Axis, began_at: float, now: float) -> str:
    jobs = f"{len(rows)} job{'' if len(rows) == 1 else 's'}"
    took = f"{'going on for' if axis.is_live else 'took'} {_length(axis.span_s)}"
    facts = (jobs, took, f"began {_utc(began_at)}", f"page made {_utc(now)}")
    return " ".join(f"<span>{fact}</span>" for fact in facts)


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row.known for row in rows)
    return "".join(
        f"<li>{_icon(state)}<b>{counts[state]}</b> {state.lower()}</li>"
        for state in STATES
        if counts[state]
    )


def _moments(axis: Axis) -> list[float]:
    """Of the ticks, in seconds since the start."""
    step: float = next((one for one in _STEPS_S if axis.span_s / one <= _TICKS_MAX), _STEPS_S[-1])
    while axis.span_s / step > _TICKS_MAX:
        step *= 2
    return [number * step for number in range(int(axis.span_s / step) + 1)]


def _ticks(axis: Axis) -> str:
    return "".join(
        f'<text x="{_x(axis, axis.start + at)}" y="18">{_length(at) if at else "0"}'
        f"<title>{_utc(axis.start + at)}</title></text>"
        for at in _moments(axis)
    )


def _grid(axis: Axis) -> str:
    places = [_x(axis, axis.start + at) for at in _moments(axis)]
    return "".join(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>' for x in places)


def _links(lanes: Sequence[Lane], axis: Axis) -> str:
    pairs = [(lanes[number], lane) for lane in lanes for number in lane.after]
    return "".join(_arrow(source, target, len(lanes), axis) for source, target in pairs)


def _arrow(source: Lane, target: Lane, count: int, axis: Axis) -> str:
    """From the end of a job's bars along its row, then down or up to the bars of the next one."""
    is_down = target.number > source.number
    y = f"{(source.number + 0.5) / count * 100:.3f}%"
    tip = f"{(target.number + (0.2 if is_down else 0.8)) / count * 100:.3f}%"
    end, to = _x(axis, source.end_at), _x(axis, target.first_at)
    return (
        f'<line x1="{end}" y1="{y}" x2="{to}" y2="{y}"/>'
        f'<line x1="{to}" y1="{y}" x2="{to}" y2="{tip}"/>'
        f'<use href="#head-{"down" if is_down else "up"}" x="{to}" y="{tip}"/>'
    )


def _row(lane: Lane, axis: Axis) -> str:
    row, tries = lane.row, len(lane.row.attempts)
    again = f'<span title="{tries} attempts">{tries}&times;</span> ' if tries > 1 else ""
    took = _length(lane.end_at - lane.first_at) if tries else ""
    bars = "".join(_bar(bar, axis) for bar in bars_of(lane, axis))
    return (
        f'<li class="row {row.known.lower()}" data-after="{" ".join(map(str, lane.after))}" '
        f'data-from="{_x(axis, lane.first_at)}" data-to="{_x(axis, lane.end_at)}">'
        f'<a class="columns" href="#job-{lane.number}">'
        f'<span class="name" title="{_text(row.name)}">{_icon(row.known)}{_name(row.name)}</span> '
        f'<svg class="lane" aria-hidden="true">{bars}{_inside(row.attempts, axis)}'
        f"{_mark(row.known, _x(axis, lane.end_at), 9)}</svg>"
        f'<span class="outcome" title="{_text(row.said)}">{_text(row.said)}</span> '
        f'<span class="took">{again}{took}</span></a></li>\n'
    )


def _bar(bar: Bar, axis: Axis) -> str:
    left = min(axis.x(bar.start), 100 - _BAR_MIN)
    width = max(_BAR_MIN, axis.x(bar.end) - left)
    top, height = (42, 16) if bar.kind in ("early", "waiting") else (20, 60)
    kind = f"{bar.kind} {known_state(bar.outcome).lower()}" if bar.outcome else bar.kind
    tip = f"{bar.words}: {_length(bar.end - bar.start)}\n{_utc(bar.start)} to {_utc(bar.end)}\n"
    return (
        f'<rect class="{kind}" x="{left:.2f}%" width="{width:.2f}%" y="{top}%" '
        f'height="{height}%" rx="1.5"><title>{_text(tip + bar.detail)}</title></rect>'
    )


def _inside(attempts: Sequence[Span], axis: Axis) -> str:
    """The numbers of several attempts, and how all but the last ended, where there is room."""
    drawn = []
    for attempt in attempts if len(attempts) > 1 else ():
        _, running, ended = span_of(attempt, axis)
        room = axis.x(ended) - axis.x(running)
        if room >= _NUMBER_MIN:
            place = f'x="{_x(axis, running)}" y="50%" dx="5"'
            drawn.append(f"<text {place}>{attempt.number}</text>")
        if room >= _MARK_MIN and attempt is not attempts[-1]:
            drawn.append(_mark(known_state(attempt.outcome), _x(axis, ended), -9))
    return f'<g class="inside">{"".join(drawn)}</g>' if drawn else ""


def _card(lane: Lane, lanes: Sequence[Lane], axis: Axis) -> str:
    """The details of a job, which its row's link opens."""
    row = lane.row
    message = f"<pre>{_text(_shorten(row.message))}</pre>" if row.message else ""
    attempts = "".join(_attempt(attempt, axis) for attempt in row.attempts)
    waits = [f"<bdi>{_text(name)}</bdi>" for name in row.waits_for]
    after = [_link(lanes[number]) for number in lane.after]
    after += [f"<bdi>{_text(name)}</bdi>" for name in lane.strangers]
    before = [_link(lanes[number]) for number in lane.before]
    return (
        f'<section class="card {row.known.lower()}" id="job-{lane.number}" tabindex="-1" '
        f'aria-labelledby="name-{lane.number}">'
        f'<a class="close" href="#closed" aria-label="Close" title="Close (Esc)">&times;</a>'
        f'<h3 id="name-{lane.number}">{_icon(row.known)}{_name(row.name)}</h3>'
        f"<p>{_text(row.said)}</p>{message}{_list('Still waits for', waits)}"
        f"{attempts or '<p>It was never submitted.</p>'}"
        f"{_list('Runs after', after)}{_list('Needed by', before)}</section>\n"
    )


def _attempt(attempt: Span, axis: Axis) -> str:
    posted, running, ended = span_of(attempt, axis)
    is_seen, is_over = attempt.running_at is not None, attempt.ended_at is not None
    facts = {
        "posted": _utc(posted),
        "running": f"{_utc(running)}, {_length(running - posted)} later" if is_seen else "not seen",
        "ended": f"{_utc(ended)}, {_length(ended - running)} later" if is_over else "not seen",
        "submission": f"<code>{_text(attempt.submission_id)}</code>",
        "node": f"<code>{_text(attempt.node)}</code>" if attempt.node else "none",
    }
    words = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in facts.items())
    title = f"Attempt {attempt.number}: {_text(attempt.said)}"
    return f"<h4>{_icon(known_state(attempt.outcome))}{title}</h4><dl>{words}</dl>"


def _list(title: str, items: list[str]) -> str:
    more = len(items) - NEIGHBOURS_MAX
    shown = [*items[:NEIGHBOURS_MAX], *([f"and {more} more"] if more > 0 else [])]
    listed = "".join(f"<li>{item}</li>" for item in shown)
    return f"<h4>{title}</h4><ul>{listed}</ul>" if items else ""


def _link(lane: Lane) -> str:
    inside = f"{_icon(lane.row.known)}{_name(lane.row.name)}"
    return f'<a href="#job-{lane.number}">{inside}</a>'


def _name(name: str) -> str:
    return f"<bdi>{_text(name) or '(no name)'}</bdi>"


def _icon(state: str) -> str:
    mark = f'<use href="#mark-{state.lower()}"/>'
    return f'<svg class="icon" viewBox="-7 -7 14 14" aria-hidden="true">{mark}</svg>'


def _mark(state: str, x: str, beside_px: int) -> str:
    place = f'x="{x}" y="50%" transform="translate({beside_px})"'
    return f'<use href="#mark-{state.lower()}" {place}/>'


def _x(axis: Axis, at: float) -> str:
    return f"{axis.x(at):.2f}%"


def _length(seconds: float) -> str:
    """At most two units: ``3.2s``, ``1m 5s``, ``2h``, ``3d 4h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    days, hours, minutes = whole // _DAY_S, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (whole % 60, "s")]
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count)


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _shorten(message: str) -> str:
    if len(message) <= MESSAGE_MAX:
        return message
    head, tail = MESSAGE_MAX // 3, MESSAGE_MAX - MESSAGE_MAX // 3
    left_out = len(message) - MESSAGE_MAX
    return f"{message[:head]}\n[… {left_out} characters are left out …]\n{message[-tail:]}"


def _text(words: str) -> str:
    """Foreign words as text for anywhere between tags or in a quoted attribute."""
    return html.escape(_UNFIT.sub("\ufffd", _COLOUR_CODE.sub("", words)), quote=True)


def _measures(rows: Sequence[Row]) -> str:
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
