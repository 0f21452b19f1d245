"""Runs the C++ benchmarks (Google Benchmark programs) and reads what they measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pathways.bench.stats import Spread

_NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_TIMEOUT = 600.0


def programs(folder: Path | None) -> list[Path]:
    """The executables `bench_*` in `folder`; without one, in the newest ``build/*/benchmarks/cpp`` there is here."""
    if folder is None:
        built = sorted(Path("build").glob("*/benchmarks/cpp"), key=lambda path: path.stat().st_mtime)
        if not built:
            return []
        folder = built[-1]
    return sorted(path for path in folder.glob("bench_*") if path.is_file() and os.access(path, os.X_OK))


def parse(output: dict[str, Any]) -> dict[str, Spread]:
    """Nanoseconds of real time per iteration, by benchmark, over the repetitions.

    A counter whose name ends in ``_ns`` is a measurement of its own, under ``<benchmark> <counter>``.
    """
    times: dict[str, list[float]] = {}
    for entry in output["benchmarks"]:
        if entry.get("run_type", "iteration") == "iteration" and not entry.get("error_occurred"):
            name = entry.get("run_name", entry["name"]).removeprefix("BM_").removesuffix("/real_time")
            times.setdefault(name, []).append(entry["real_time"] * _NANOSECONDS[entry["time_unit"]])
            for counter in (key for key in entry if key.endswith("_ns")):
                times.setdefault(f"{name} {counter}", []).append(entry[counter])
    return {name: Spread.of(values) for name, values in times.items()}


def run(paths: Sequence[Path], repeats: int) -> dict[str, Spread]:
    """Runs each program with so many repetitions. Raises RuntimeError with its last words when one fails."""
    found: dict[str, Spread] = {}
    for path in paths:
        command = [str(path), "--benchmark_format=json", f"--benchmark_repetitions={repeats}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{path} ended with status {done.returncode}: {done.stderr[-500:]}")
        found.update(parse(json.loads(done.stdout)))
    return found
