"""Pictures of results: `dispatch` in the style of the paper's Figure 5, rates of `transfer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MARKERS = {"OpByOp": ("o", ":"), "Chained": ("s", "-"), "Fused": ("^", "--")}


def figure5(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture of `dispatch`: one panel per (collective, devices), one line per system and workload.

    Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row["per_second"]]
    panels = sorted({(row["collective"], row["devices"]) for row in measured}, key=lambda p: (not p[0], p[1]))
    systems = list(dict.fromkeys(row["system"] for row in measured))
    if not panels:
        raise ValueError("nothing to plot: no row was measured")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.6), sharey=True, squeeze=False)
    for axis, (collective, devices) in zip(axes[0], panels, strict=True):
        for color, system in enumerate(systems):
            for workload, (marker, line) in _MARKERS.items():
                points = sorted(
                    (row["hosts"], row["per_second"], row["per_second_min"], row["per_second_max"])
                    for row in measured
                    if (row["collective"], row["devices"]) == (collective, devices)
                    and (row["system"], row["workload"]) == (system, workload)
                )
                if points:
                    x, y, low, high = zip(*points, strict=True)
                    style = {"color": f"C{color}", "marker": marker, "linestyle": line, "label": f"{system} {workload}"}
                    axis.plot(x, y, **style)
                    axis.fill_between(x, low, high, color=f"C{color}", alpha=0.12)
        hosts = sorted({row["hosts"] for row in measured})
        axis.set(xscale="log", yscale="log", xlabel="hosts", xticks=hosts, xticklabels=hosts)
        axis.minorticks_off()
        axis.set_title(f"{'AllReduce + add' if collective else 'add'}, {devices} device{'s' * (devices > 1)} per host")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("computations per second")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / figure.get_figwidth(), 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def transfers(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture: GB/s over bytes per device, one panel per (devices, sharding). Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row["devices"], row["to"]) for row in rows))
    if not panels:
        raise ValueError("nothing to plot: no row was measured")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.2), sharey=True, squeeze=False)
    for axis, (devices, to) in zip(axes[0], panels, strict=True):
        for color, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
            points = sorted(
                (row["KiB per device"], row["GB/s"], row["min"], row["max"])
                for row in rows
                if (row["devices"], row["to"], row["system"]) == (devices, to, system)
            )
            if points:
                x, y, low, high = zip(*points, strict=True)
                axis.plot(x, y, color=f"C{color}", marker="o", label=system)
                axis.fill_between(x, low, high, color=f"C{color}", alpha=0.15)
        axis.set(xscale="log", yscale="log", xlabel="KiB per device")
        axis.set_title(f"{devices} device{'s' * (devices > 1)} per host, rows to {to}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GB/s, several in flight")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
