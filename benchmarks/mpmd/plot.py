"""The picture of `python -m benchmarks.mpmd`: how far each figure is from its goal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.mpmd.goals import MOST_MARGIN
from pathways.bench import plot


def picture(data: dict[str, Any], path: Path) -> list[Path]:
    """Draws a line per goal and group: how many times better than asked the median is.

    What is `MOST_MARGIN` times better or more, and a time below zero, is beyond the axis: an arrow shows its side.
    """
    goals = data["goals"]
    if not goals:
        return []
    with plot.figure(path, 1, 1, (plot.WIDTH, 1.2 + 0.24 * len(goals))) as (_, axes):
        axis = axes[0][0]
        for at, row in enumerate(reversed(goals)):
            color = "C2" if row["reached"] else "C3"
            is_beyond = row["margin"] >= MOST_MARGIN
            axis.hlines(at, 1, row["margin"], color=color, alpha=0.5)
            axis.plot(row["margin"], at, ">" if is_beyond else "o", color=color)
            away = 6 if row["margin"] >= 1 else -6
            axis.annotate(
                f"{row['value']:.3g}" + (" (below zero)" if row["value"] < 0 else ""),
                (row["margin"], at),
                (away, 0),
                textcoords="offset points",
                ha="left" if away > 0 else "right",
                va="center",
                fontsize=8,
            )
        axis.axvline(1, color="black", linewidth=1)
        plot.ticks(axis, (0.03, 0.1, 0.3, 1, 3, 10), lambda at: f"{at:g}" if at < MOST_MARGIN else f"{at:g} or more")
        axis.set(xlabel="times better than asked (green: reached, red: missed)", yticks=range(len(goals)))
        axis.set(xlim=(0.03, 80), ylim=(-0.8, len(goals) - 0.2))
        axis.set_yticklabels([_name(row) for row in reversed(goals)], fontsize=8)
    return [path]


def _name(row: dict[str, Any]) -> str:
    return f"{row['goal']} ({', '.join(filter(None, (row['schedule'], row['steps'])))}): {row['bound']}"
