"""The picture of `pathways bench tenants`: rates over clients (the paper's Figure 8), shares over time (Figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def picture(data: dict[str, Any], path: Path) -> None:
    """Writes the picture of what was measured of the two. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates, shares = data.get("rates", []), data.get("shares", [])
    lengths = sorted({row["length_ms"] for row in rates})
    columns = max(len(lengths), 4 if shares else 0)
    rows = bool(rates) + -(-len(shares) // 4)
    if not rows:
        raise ValueError("nothing to plot: neither rates nor shares were measured")
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.4 * columns, 3.1 * rows), squeeze=False)
    for axis in axes.flat[len(lengths) : columns if rates else 0]:
        axis.set_axis_off()
    for axis, length in zip(axes[0], lengths, strict=False):
        _rates(axis, length, [row for row in rates if row["length_ms"] == length])
    for axis, row in zip(axes[int(bool(rates)) :].flat, shares, strict=False):
        _shares(axis, row)
    if lengths:
        axes[0][0].set_ylabel("computations per second, all clients")
        axes[0][0].legend(fontsize=7)
    for line in axes[int(bool(rates)) :]:
        line[0].set_ylabel("share of device time in each second")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _rates(axis: Any, length_ms: float, rows: Sequence[dict[str, Any]]) -> None:
    clients = sorted({row["clients"] for row in rows})
    for color, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
        points = sorted(
            (row["clients"], row["per_second"], row["per_second_min"], row["per_second_max"])
            for row in rows
            if row["system"] == system
        )
        x, y, low, high = zip(*points, strict=True)
        axis.plot(x, y, color=f"C{color}", marker="o", label=system)
        axis.fill_between(x, low, high, color=f"C{color}", alpha=0.15)
    axis.axhline(1000 / length_ms, color="gray", linestyle=":", label="device never idle")
    axis.set(xscale="log", xticks=clients, xticklabels=clients, xlabel="clients", ylim=(0, 1150 / length_ms))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_title(f"{length_ms:g} ms", fontsize=9)


def _shares(axis: Any, row: dict[str, Any]) -> None:
    times = [second["at"] for second in row["seconds"]]
    for color, (weight, target) in enumerate(zip(row["weights"], row["targets"], strict=True)):
        axis.axhline(target, color=f"C{color}", linestyle=":", linewidth=1)
        shares = [second["shares"][color] for second in row["seconds"]]
        axis.plot(times, shares, color=f"C{color}", marker=".", label=f"weight {weight}")
    where = "one host" if row["hosts"] == 1 else f"a gang of {row['hosts']}"
    axis.set_title(f"{':'.join(map(str, row['weights']))}, {where}, {row['mix']}", fontsize=9)
    axis.set(xlabel="seconds", ylim=(0, 1.15 * max(row["targets"])))
    axis.grid(alpha=0.3)
    if len(set(row["weights"])) > 1:
        axis.legend(fontsize=6, loc="center right")
