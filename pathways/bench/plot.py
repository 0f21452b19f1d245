"""Pictures of results: `dispatch` and `pipeline` in the style of the paper's Figures 5 and 7, rates of `transfer`."""

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


def figure7(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture of `pipeline`: above computations per second over stages, below the ratio and its prediction.

    One panel per distance and length of a step; steps that sleep, or where there are none, those that compute. Needs
    matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kind = "sleep" if any(row["kind"] == "sleep" for row in rows) else "matmul"
    shown = [row for row in rows if row["kind"] == kind]
    panels = sorted({(row["distance_us"], row["length_us"]) for row in shown})
    figure, axes = pyplot.subplots(2, len(panels), figsize=(2.5 * len(panels) + 1, 6), sharex=True, squeeze=False)
    for column, panel in enumerate(panels):
        here = [row for row in shown if (row["distance_us"], row["length_us"]) == panel]
        points = sorted(here, key=lambda row: row["stages"])
        stages = [row["stages"] for row in points]
        above, below = axes[0][column], axes[1][column]
        for mode, marker in (("parallel", "o"), ("sequential", "s")):
            above.plot(stages, [row[f"{mode}_per_second"] for row in points], marker=marker, label=mode)
            low, high = ([row[f"{mode}_per_second_{end}"] for row in points] for end in ("min", "max"))
            above.fill_between(stages, low, high, alpha=0.12)
        below.plot(stages, [row["ratio"] for row in points], marker="o", color="C2", label="measured")
        below.fill_between(
            stages, [row["ratio_min"] for row in points], [row["ratio_max"] for row in points], color="C2", alpha=0.12
        )
        below.plot(stages, [row["predicted"] for row in points], linestyle="--", color="C3", label="predicted")
        far = f", {panel[0] / 1000:g} ms apart" if panel[0] else ""
        above.set(ylim=(0, None))
        above.set_title(f"{panel[1] / 1000:g} ms{far}", fontsize=9)
        below.set(xscale="log", xlabel="stages", xticks=stages, xticklabels=stages, ylim=(0.8, None))
        below.minorticks_off()
        for axis in (above, below):
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("computations per second")
    axes[1][0].set_ylabel("parallel over sequential")
    axes[0][0].legend(fontsize=8)
    axes[1][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
