"""Pictures of results: a file for some axes, and the figure that most benches draw: lines with bands, in panels.

Pages show a picture about 900 pixels wide. So none is wider than `WIDTH` inches, and its words are readable there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WIDTH = 9.6  # inches, at 100 dots each
COLUMNS = 3  # panels side by side


@contextlib.contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure and its axes, `[row][column]`; in the end it is the PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    yield made, axes
    made.savefig(path, dpi=100)
    pyplot.close(made)


def band(axis: Any, points: Sequence[tuple[float, float, float, float]], **style: Any) -> None:
    """A line over (x, y, low, high), with a band from low to high."""
    x, y, low, high = zip(*sorted(points), strict=True)
    axis.plot(x, y, **style)
    axis.fill_between(x, low, high, color=style["color"], alpha=0.13, linewidth=0)


def ticks(axis: Any, values: Sequence[float], text: Callable[[float], str] = "{:g}".format) -> None:
    """Ticks of a logarithmic x axis at these values alone."""
    axis.set(xscale="log", xticks=values, xticklabels=[text(value) for value in values])
    axis.minorticks_off()
    axis.margins(x=0.08)
    axis.grid(alpha=0.3)


def lines(
    axes: Sequence[Any],
    rows: Sequence[Row],
    panel: Callable[[Row], str],
    line: Callable[[Row], tuple[str, Row]],
    names: tuple[str, str, str, str],
    text: Callable[[float], str] = "{:g}".format,
) -> None:
    """A panel per `panel(row)`, which is its title, in each a line per `line(row)`: its label and style.

    `names`: of the values x, y, low and high in a row. The lines have the same style in all panels.
    """
    styles = dict(line(row) for row in rows)
    titles = dict.fromkeys(map(panel, rows))
    for axis, title in zip(axes, titles, strict=False):
        here = [row for row in rows if panel(row) == title]
        for label, style in styles.items():
            points = [tuple(row[name] for name in names) for row in here if line(row)[0] == label]
            if points:
                band(axis, points, label=label, **{"marker": "o", "markersize": 4, **style})
        ticks(axis, sorted({row[names[0]] for row in here}), text)
        axis.set_title(title, fontsize=10)


def legend(made: Any, axes: Any) -> None:
    """One legend for all panels, below them, where it hides no line."""
    found = {label: each for axis in axes.flat for each, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    made.legend(found.values(), found.keys(), loc="outside lower center", ncol=4, fontsize=9, frameon=False)


def panels(
    path: Path,
    rows: Sequence[Row],
    panel: Callable[[Row], str],
    line: Callable[[Row], tuple[str, Row]],
    names: tuple[str, str, str, str],
    labels: tuple[str, str],
    text: Callable[[float], str] = "{:g}".format,
) -> list[Path]:
    """Draws `lines` in panels, on logarithmic axes with these labels. Returns the file; none if nothing is there."""
    count = len(set(map(panel, rows)))
    if not count:
        return []
    columns = min(count, COLUMNS)
    size = (max(0.9 + 2.9 * columns, 5.0), 0.9 + 2.7 * -(-count // columns))
    with figure(path, -(-count // columns), columns, size, sharey=True) as (made, axes):
        lines(list(axes.flat), rows, panel, line, names, text)
        for axis in axes.flat[count:]:
            axis.set_axis_off()
        for axis in axes.flat[:count]:
            axis.set(yscale="log", xlabel=labels[0])
        made.supylabel(labels[1], fontsize=10)
        legend(made, axes)
    return [path]
