"""Pictures of results: a file for some axes, and the figure that most benches draw: lines with bands, in panels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@contextlib.contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure and its axes, `[row][column]`; in the end it is the PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    yield made, axes
    made.savefig(path, dpi=130)
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


def panels(
    path: Path,
    rows: Sequence[Row],
    panel: Callable[[Row], str],
    line: Callable[[Row], tuple[str, Row]],
    names: tuple[str, str, str, str],
    labels: tuple[str, str],
    text: Callable[[float], str] = "{:g}".format,
) -> bool:
    """Draws `lines` in panels side by side, on logarithmic axes with these labels. False: there is nothing to draw."""
    count = len(set(map(panel, rows)))
    if not count:
        return False
    with figure(path, 1, count, (3.6 * count + 1.8, 4.3), sharey=True) as (made, axes):
        lines(axes[0], rows, panel, line, names, text)
        for axis in axes[0]:
            axis.set(yscale="log", xlabel=labels[0])
        axes[0][0].set_ylabel(labels[1])
        found = {label: each for axis in axes[0] for each, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        made.legend(found.values(), found.keys(), loc="outside right center", fontsize=8, frameon=False)
    return True
