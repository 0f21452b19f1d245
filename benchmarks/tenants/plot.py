"""The picture of `python -m benchmarks.tenants`: rates over clients (the paper's Figure 8), shares (Figure 9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pathways.bench import plot


def picture(data: dict[str, Any], path: Path) -> bool:
    """Draws what was measured of the two."""
    rates, shares = data["rows"].get("rates", []), data["rows"].get("shares", [])
    lengths = sorted({row["length_ms"] for row in rates})
    columns = max(len(lengths), 4 if shares else 0)
    rows = bool(rates) + -(-len(shares) // 4)
    if not rows:
        return False
    with plot.figure(path, rows, columns, (3.4 * columns, 3.1 * rows)) as (_, axes):
        for axis in axes.flat:
            axis.set_axis_off()
        if rates:
            _rates(axes[0], rates)
        below = axes[int(bool(rates)) :]
        for axis, row in zip(below.flat, shares, strict=False):
            _shares(axis, row)
        for line in below:
            line[0].set_ylabel("share of device time in each second")
    return True


def _rates(axes: Any, rates: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["system"] for row in rates))
    ordered = sorted(rates, key=lambda row: row["length_ms"])
    lengths = list(dict.fromkeys(row["length_ms"] for row in ordered))
    plot.lines(
        axes,
        ordered,
        lambda row: f"computations of {row['length_ms']:g} ms",
        lambda row: (row["system"], {"color": f"C{names.index(row['system'])}"}),
        ("clients", "per_second", "per_second_min", "per_second_max"),
    )
    for axis, length in zip(axes, lengths, strict=False):
        axis.set_axis_on()
        axis.axhline(1000 / length, color="gray", linestyle=":", label="device never idle")
        axis.set(xlabel="clients", ylim=(0, 1150 / length))
    axes[0].set_ylabel("computations per second, all clients")
    axes[0].legend(fontsize=7, loc="lower right")


def _shares(axis: Any, row: dict[str, Any]) -> None:
    axis.set_axis_on()
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
