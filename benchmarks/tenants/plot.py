"""The pictures of `python -m benchmarks.tenants`: rates over clients (the paper's Figure 8), shares (Figure 9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pathways.bench import plot


def picture(data: dict[str, Any], path: Path) -> list[Path]:
    """Draws what was measured of the two: the rates at `path`, the shares beside them, in a file of their own."""
    rates, shares = data["rows"].get("rates", []), data["rows"].get("shares", [])
    written = []
    if rates:
        _rates(path, rates)
        written.append(path)
    if shares:
        written.append(path.with_stem(f"{path.stem}-shares"))
        _shares(written[-1], shares)
    return written


def _rates(path: Path, rates: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["system"] for row in rates))
    ordered = sorted(rates, key=lambda row: row["length_ms"])
    lengths = list(dict.fromkeys(row["length_ms"] for row in ordered))
    rows = -(-len(lengths) // 2)
    with plot.figure(path, rows, 2, (8.0, 0.8 + 2.6 * rows)) as (made, axes):
        plot.lines(
            list(axes.flat),
            ordered,
            lambda row: f"computations of {row['length_ms']:g} ms",
            lambda row: (row["system"], {"color": f"C{names.index(row['system'])}"}),
            ("clients", "per_second", "per_second_min", "per_second_max"),
        )
        for axis in axes.flat[len(lengths) :]:
            axis.set_axis_off()
        for axis, length in zip(axes.flat, lengths, strict=False):
            axis.axhline(1000 / length, color="gray", linestyle=":", label="device never idle")
            axis.set(xlabel="clients", ylim=(0, 1150 / length))
        made.supylabel("computations per second, all clients", fontsize=10)
        plot.legend(made, axes)


def _shares(path: Path, shares: list[dict[str, Any]]) -> None:
    rows = -(-len(shares) // 2)
    with plot.figure(path, rows, 2, (8.0, 0.5 + 2.0 * rows), sharex=True) as (made, axes):
        for axis in axes.flat[len(shares) :]:
            axis.set_axis_off()
        for axis, row in zip(axes.flat, shares, strict=False):
            _share(axis, row)
        made.supylabel("share of the device's time in each second; dotted: what the weights give", fontsize=10)
        made.supxlabel("seconds", fontsize=10)


def _share(axis: Any, row: dict[str, Any]) -> None:
    """A line per client. Its weight stands behind its end, where it hides no line."""
    times = [second["at"] for second in row["seconds"]]
    are_equal = len(set(row["weights"])) == 1
    for color, (weight, target) in enumerate(zip(row["weights"], row["targets"], strict=True)):
        axis.hlines(target, 0, times[-1], color=f"C{color}", linestyle=":", linewidth=1)
        shares = [second["shares"][color] for second in row["seconds"]]
        axis.plot(times, shares, color=f"C{color}", marker=".")
        if not are_equal or color == 0:
            words = f"{len(row['weights'])} clients" if are_equal else f"weight {weight}"
            at = (times[-1], target if not are_equal else 1.08 * target)
            axis.annotate(words, at, (8, 0), textcoords="offset points", va="center", fontsize=8)
    where = "one host" if row["hosts"] == 1 else f"a gang of {row['hosts']}"
    axis.set_title(f"{':'.join(map(str, row['weights']))}, {where}, {row['mix']}", fontsize=9)
    axis.set(xlim=(0, times[-1] * 1.22), ylim=(0, 1.2 * max(row["targets"])))
    axis.grid(alpha=0.3)
