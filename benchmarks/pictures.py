"""Draws the pictures of committed results again: `python -m benchmarks.pictures [FILE.json ...]`, all if none is given.

Each picture is written beside its file. A bench's own function draws it. Results of earlier commits name some values
otherwise, and the benchmark `pipeline` is gone: what that takes is here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import benchmarks.machines.transfer
import benchmarks.mpmd.plot
import benchmarks.tenants.plot
from pathways.bench import dispatch, plot, transfer
from pathways.bench.command import Picture

RESULTS = Path(__file__).parent / "results"


def goals_of_today(data: dict[str, Any], path: Path) -> list[Path]:
    """The goals of `benchmarks.mpmd`, whose values were named otherwise."""
    goals = [
        {**row, "bound": row["asked"], "value": row["median"], "reached": row["result"] == "met"}
        if "asked" in row
        else row
        for row in data["goals"]
    ]
    return benchmarks.mpmd.plot.picture({"goals": goals}, path)


def pipeline(data: dict[str, Any], path: Path) -> list[Path]:
    """How much parallel dispatch gains over sequential dispatch, where a message takes 2 ms, and what was predicted."""
    rows = [row for row in data["rows"] if row["kind"] == "sleep" and row["distance_us"] == 2000]
    lengths = sorted({row["length_us"] for row in rows} - {100, 300})  # those are as those of no length
    with plot.figure(path, 1, 1, (7.6, 4.2)) as (made, axes):
        axis = axes[0][0]
        for color, length in enumerate(lengths):
            here = sorted((row for row in rows if row["length_us"] == length), key=lambda row: row["stages"])
            points = [(row["stages"], row["ratio"], row["ratio_min"], row["ratio_max"]) for row in here]
            plot.band(axis, points, color=f"C{color}", marker="o", label=f"stages of {length / 1000:g} ms")
            x, y = zip(*[(row["stages"], row["predicted"]) for row in here], strict=True)
            axis.plot(x, y, color="black", linestyle="--", linewidth=1, label="predicted")
        plot.ticks(axis, sorted({row["stages"] for row in rows}))
        axis.set(xlabel="stages, each on a host of its own", ylabel="parallel over sequential dispatch", ylim=(0, 3.9))
        axis.set_title("Throughput of a pipeline whose hosts are 2 ms apart", fontsize=10)
        plot.legend(made, axes)
    return [path]


PICTURES: dict[str, Picture] = {
    "dispatch": dispatch.picture,
    "transfer": transfer.picture,
    "transfer-machines": benchmarks.machines.transfer.picture,
    "mpmd": goals_of_today,
    "tenants": benchmarks.tenants.plot.picture,
    "pipeline": pipeline,
}


def main(files: list[Path]) -> None:
    """Command line."""
    for file in files or sorted(RESULTS.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        draw = PICTURES.get(data["what"])
        for path in draw(data, file.with_suffix(".png")) if draw else ():
            print(path)


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
