"""`python -m benchmarks.native`: single costs of the native core, from the Google Benchmark programs in `cpp/`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pathways.bench import micro
from pathways.bench.command import NotHere, Say, as_command, option
from pathways.bench.goals import at_most
from pathways.bench.report import Report
from pathways.bench.stats import Spread, Value

METHOD = "Real time per iteration of Google Benchmark programs, median of the repetitions."
GOALS = {
    "future_create_resolve_release": at_most(50),
    "byte_ring_hop_without_doorbell hop_p50_ns": at_most(100),
}
_NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    binaries: str = option("", "Folder of the programs; by default the newest build/*/benchmarks/cpp.")
    repeats: int = option(5, "How often each is measured.")


def find(folder: str, pattern: str, target: str) -> list[Path]:
    """The executables of this name in `folder`; without one, in the newest ``build/*/benchmarks/cpp`` there is here.

    Raises NotHere where there are none, with what builds `target`.
    """
    built = sorted(Path("build").glob("*/benchmarks/cpp"), key=lambda path: path.stat().st_mtime)
    for place in [Path(folder)] if folder else reversed(built):
        if found := sorted(path for path in place.glob(pattern) if path.is_file() and os.access(path, os.X_OK)):
            return found
    raise NotHere(
        f"{pattern} is not in {folder or 'build/*/benchmarks/cpp'}: build it with `cmake --preset release && "
        f"cmake --build --preset release --target {target}`"
    )


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


def measure(paths: Sequence[Path], repeats: int, say: Say) -> dict[str, Spread]:
    """Runs each program with so many repetitions. Raises RuntimeError with its last words when one fails."""
    found: dict[str, Spread] = {}
    for path in paths:
        say(path.name)
        command = [str(path), "--benchmark_format=json", f"--benchmark_repetitions={repeats}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{path} ended with status {done.returncode}: {done.stderr[-500:]}")
        found.update(parse(json.loads(done.stdout)))
    return found


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """Single costs of the native core: futures, rings, the control path."""
    found = measure(find(settings.binaries, "bench_*", "all"), settings.repeats, say)
    values = [Value(name, spread, "ns") for name, spread in found.items()]
    return micro.make(values, [], "native", METHOD, GOALS)


command = as_command("native", Settings, run)

if __name__ == "__main__":
    command()
