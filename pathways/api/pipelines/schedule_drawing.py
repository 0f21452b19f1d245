"""Draws a `SchedulePlot`: as text for a terminal, and as SVG. Pure."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

from pathways import errors
from pathways.api.pipelines.schedule_data import PlotData, Row, Span

#: For each kind of computation: its letter, what fills its columns in a text, its colour, and what it is called.
_KINDS = {
    "forward": ("F", ">", "#5b9bd5", "forward"),
    "backward": ("B", "<", "#f2a65a", "backward"),
    "weights": ("W", "=", "#7bb77b", "weight gradient"),
    "sum": ("s", "s", "#a58bc9", "sum of gradients"),
    "other": ("#", "#", "#9aa3ad", "not of the pipeline"),
}
_NUMBERED = ("forward", "backward", "weights")
_IDLE = "."
_SENT = "-"
_NARROWEST = 40
_LONGEST_NAME = 24

# Of the SVG, in pixels.
_WIDTH, _LEFT, _RIGHT, _TOP = 1080, 150, 24, 74
_ROW, _GAP = 28, 16
_FONT = "font-family=\"'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif\""
_BUBBLE, _ARROW, _INK, _FAINT = "#eef0f3", "#6b7684", "#22303c", "#c8ced6"


def text(plot: PlotData, width: int) -> str:
    """See `SchedulePlot.text`."""
    if isinstance(width, bool) or not isinstance(width, int) or width < _NARROWEST:
        raise errors.OptionError(f"a plot is at least {_NARROWEST} columns wide, got width={width!r}")
    names = [_name(row) for row in plot.rows]
    left = max(map(len, names), default=0)
    columns = width - left - 3
    lines = [*_wrapped(_title(plot).split(), width), *_wrapped(_sentence(plot).split(), width)]
    for number, row in enumerate(plot.rows):
        lines.append(f"{names[number]:<{left}} |{_computations(row.spans, plot.end, columns)}|")
        sent = _sent(plot, number, columns)
        if _SENT in sent:
            lines.append(f"{'  sends':<{left}} |{sent}|")
    end = quantity(plot.end, plot.unit)
    lines.append(f"{'':<{left}} 0{end:>{columns + 1}}")
    kinds = [
        kind
        for kind in _KINDS
        if any(span.kind == kind and span.end > span.start for row in plot.rows for span in row.spans)
    ]
    legend = [f"{_KINDS[kind][0]} {_KINDS[kind][3]}" for kind in kinds] + [f"{_IDLE} bubble"]
    if any(line.startswith("  sends") for line in lines):
        legend.append(f"{_SENT} transfer")
    return "\n".join([*lines, *_wrapped(legend, width, ", ")])


def quantity(value: float, unit: str) -> str:
    """A number with its unit: `12.3 ms`, `4.5 Gflops`, `33 forward steps`."""
    if unit == "forward steps":
        return f"{value:.4g} {unit}"
    names = ("ns", "us", "ms", "s") if unit == "s" else (unit, f"K{unit}", f"M{unit}", f"G{unit}", f"T{unit}")
    scaled = value * 1e9 if unit == "s" else value
    step = 0
    while scaled >= 999.5 and step + 1 < len(names):
        scaled /= 1000
        step += 1
    return f"{scaled:.3g} {names[step]}"


def _title(plot: PlotData) -> str:
    how = "in the order of its text" if plot.schedule == "none" else plot.schedule
    return f"{plot.program}: {how} ({plot.source})"


def _sentence(plot: PlotData) -> str:
    if plot.bound is None:
        return f"bubble {plot.bubble:.1f} %; without a schedule it has no bound"
    return f"bubble {plot.bubble:.1f} %; the schedule's own bound is {plot.bound:.1f} %"


def _name(row: Row) -> str:
    devices = row.devices
    if len(devices) > 1 and devices == tuple(range(devices[0], devices[-1] + 1)):
        span = f"{devices[0]}-{devices[-1]}"
    else:
        span = ",".join(map(str, devices[:4])) + (",.." if len(devices) > 4 else "")
    slices = " ".join(row.slices)
    if len(slices) > _LONGEST_NAME:
        slices = slices[: _LONGEST_NAME - 2] + ".."
    return f"device {span} {slices}" if len(devices) == 1 else f"devices {span} {slices}"


def _wrapped(words: Sequence[str], width: int, between: str = " ") -> list[str]:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(between) + len(word) > width and lines[-1]:
            lines.append("")
        lines[-1] += (between if lines[-1] else "") + word
    return lines


def _joined(spans: Sequence[Span], gap: float) -> list[Span]:
    """The spans of a row; those of one step that stand together become one, with less than `gap` between them."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else span
        if (
            joined
            and span.microbatch >= 0
            and (span.kind, span.microbatch, span.chunk) == (last.kind, last.microbatch, last.chunk)
            and span.start - last.end < gap
        ):
            joined[-1] = dataclasses.replace(last, name=f"{last.name} + {span.name}", end=span.end)
        else:
            joined.append(span)
    return joined


def _computations(spans: Sequence[Span], end: float, columns: int) -> str:
    cells = [_IDLE] * columns
    for span in _joined(spans, end / columns / 2):
        first, last = _cells(span.start, span.end, end, columns)
        letter, filler, _, _ = _KINDS[span.kind]
        label = f"{letter}{span.microbatch}" if span.microbatch >= 0 and span.kind in _NUMBERED else letter
        if len(label) > last - first:
            label = letter
        for n in range(first, last):
            cells[n] = label[n - first] if n - first < len(label) else filler
    return "".join(cells)


def _sent(plot: PlotData, row: int, columns: int) -> str:
    cells = [" "] * columns
    for arrow in plot.transfers:
        if arrow.source == row and arrow.end > arrow.start:
            first, last = _cells(arrow.start, arrow.end, plot.end, columns)
            cells[first:last] = _SENT * (last - first)
    return "".join(cells)


def _cells(start: float, stop: float, end: float, columns: int) -> tuple[int, int]:
    """The columns of a span; what takes less than half a column may have none."""
    scale = columns / end if end else 0.0
    # Sums of the same lengths in another order differ in the last bits; they must not fall into different columns.
    first, last = (math.floor(round(at * scale, 6) + 0.5) for at in (start, stop))
    return max(0, first), min(columns, last)


def svg(plot: PlotData) -> str:
    """See `SchedulePlot.svg`."""
    height = _TOP + len(plot.rows) * (_ROW + _GAP) + 64
    scale = (_WIDTH - _LEFT - _RIGHT) / plot.end if plot.end else 0.0
    tops = [_TOP + n * (_ROW + _GAP) for n in range(len(plot.rows))]
    title = html.escape(_title(plot))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" {_FONT} font-size="13" fill="{_INK}">',
        f"<title>{title}. {html.escape(_sentence(plot))}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="15" font-weight="bold">{title}</text>',
        f'<text x="16" y="48">{html.escape(_sentence(plot))}</text>',
    ]
    for row, top in zip(plot.rows, tops, strict=True):
        parts.append(f'<text x="16" y="{top + 12}" font-size="12">{html.escape(_name(row).rpartition(" ")[0])}</text>')
        parts.append(
            f'<text x="16" y="{top + 26}" font-size="11" fill="{_ARROW}">{html.escape(" ".join(row.slices))}</text>'
        )
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}" fill="{_BUBBLE}"/>'
        )
    parts += _axis(plot, scale, height - 58)
    for row, top in zip(plot.rows, tops, strict=True):
        parts += [_box(span, top, scale) for span in _joined(row.spans, 0.5 / scale if scale else 0.0)]
    for arrow in plot.transfers:
        down = arrow.target > arrow.source
        y = tops[arrow.source] + (_ROW if down else 0), tops[arrow.target] + (0 if down else _ROW)
        x = _LEFT + arrow.start * scale, _LEFT + arrow.end * scale
        parts.append(
            f'<line x1="{x[0]:.1f}" y1="{y[0]}" x2="{x[1]:.1f}" y2="{y[1]}" stroke="{_ARROW}" stroke-width="1"/>'
            f'<circle cx="{x[1]:.1f}" cy="{y[1]}" r="1.6" fill="{_ARROW}"/>'
        )
    parts += _legend(plot, height - 16)
    return "\n".join([*parts, "</svg>\n"])


def _box(span: Span, top: float, scale: float) -> str:
    x, width = _LEFT + span.start * scale, max(0.4, (span.end - span.start) * scale)
    letter, _, colour, called = _KINDS[span.kind]
    number = str(span.microbatch) if span.microbatch >= 0 and span.kind in _NUMBERED else ""
    about = f"{span.name}: {called}" + (f", microbatch {span.microbatch}" if span.microbatch >= 0 else "")
    about += f", chunk {span.chunk}" if span.chunk else ""
    edge = ' stroke="white" stroke-width="0.8"' if width > 3 else ""
    parts = [
        f'<g><title>{html.escape(about)}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}" '
        f'fill="{colour}"{" fill-opacity=" + chr(34) + "0.72" + chr(34) if span.chunk % 2 else ""}{edge}/>'
    ]
    for label, size in ((letter + number, 13), (number, 13), (number, 9)):
        if label and span.kind in _NUMBERED and width >= 0.62 * size * len(label) + 2:
            y = top + _ROW / 2 + 0.35 * size
            at = f'x="{x + width / 2:.2f}" y="{y:.1f}" font-size="{size}" text-anchor="middle"'
            parts.append(f"<text {at}>{label}</text>")
            break
    return "".join(parts) + "</g>"


def _axis(plot: PlotData, scale: float, y: float) -> list[str]:
    if not plot.end:
        return []
    rough = plot.end / 8
    step = next(m for m in (1, 2, 5, 10) if m * 10 ** math.floor(math.log10(rough)) >= rough)
    step = step * 10 ** math.floor(math.log10(rough))
    parts = [f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="{_FAINT}"/>']
    for n in range(int(plot.end / step + 1e-9) + 1):
        x = _LEFT + n * step * scale
        label = "0" if n == 0 else quantity(n * step, plot.unit).replace(" forward steps", "")
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{y + 4}" stroke="{_FAINT}" stroke-opacity="0.6"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle" font-size="11">{label}</text>')
    return parts


def _legend(plot: PlotData, y: float) -> list[str]:
    parts = []
    x = float(_LEFT)
    shown = [
        kind
        for kind in _KINDS
        if any(span.kind == kind and span.end > span.start for row in plot.rows for span in row.spans)
    ]
    for colour, called in [*(_KINDS[kind][2:] for kind in shown), (_BUBBLE, "bubble"), (_ARROW, "transfer")]:
        if called == "transfer" and not plot.transfers:
            continue
        if called == "transfer":
            parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 14}" y2="{y - 4}" stroke="{colour}"/>')
        else:
            parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{colour}" stroke="{_FAINT}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}" font-size="12">{called}</text>')
        x += 40 + 7.4 * len(called)
    return parts
