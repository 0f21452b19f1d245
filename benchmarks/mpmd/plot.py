"""The picture of `pathways bench mpmd`: how far each figure is from its goal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def picture(goals: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a line per goal and group: how many times better than asked the median is. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        f"{row['goal']} ({', '.join(filter(None, (row['schedule'], row['steps'])))}): {row['asked']}" for row in goals
    ]
    places = list(range(len(goals)))[::-1]
    figure, axis = pyplot.subplots(figsize=(10, 1 + 0.27 * len(goals)))
    for result, color in (("met", "C2"), ("missed", "C3")):
        shown = [(row["margin"], at) for row, at in zip(goals, places, strict=True) if row["result"] == result]
        if shown:
            x, y = zip(*shown, strict=True)
            axis.hlines(y, 1, x, color=color, alpha=0.5)
            axis.plot(x, y, "o", color=color, label=result)
    for row, at in zip(goals, places, strict=True):
        away = 6 if row["margin"] >= 1 else -6
        axis.annotate(
            f"{row['median']:.3g}",
            (row["margin"], at),
            (away, 0),
            textcoords="offset points",
            ha="left" if away > 0 else "right",
            va="center",
            fontsize=8,
        )
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xscale="log", xlabel="times better than asked", yticks=places, xlim=(0.03, 20))
    axis.set_yticklabels(names, fontsize=8)
    axis.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
