"""`python -m benchmarks.instructions`: the control path in instructions, which a busy machine cannot change.

Callgrind (valgrind) counts the instructions of `count_control` (benchmarks/cpp), a build with
`-DPATHWAYS_BUILD_BENCHMARKS=ON`. Each case runs twice, with few and with many turns; the difference is divided by the
turns between, so that the set-up does not count.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.native import find
from pathways.bench.command import NotHere, Say, as_command, option
from pathways.bench.goals import at_most, judged
from pathways.bench.report import Report, Table

METHOD = (
    "Instructions of the native control path by callgrind, on one thread and without JAX: the difference between a run "
    "of few and a run of many turns, per turn. `controller` counts the controller's passes only, `all` also client and "
    "host. Callgrind counts each byte of a long copy as an instruction."
)

TIMEOUT_S = 600.0
_CONTROLLER = "pathways::Controller::step()"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where the program is."""

    binaries: str = option("", "Folder of count_control; by default the newest build/*/benchmarks/cpp.")


@dataclasses.dataclass(frozen=True)
class Case:
    """`args` of count_control, whether only the controller's passes count, and how many turns: few and many."""

    name: str
    args: tuple[str, ...]
    counted: str = "all"
    turns: tuple[int, int] = (2_000, 10_000)


CASES = (
    Case("a run, fifo", ("dispatch", "fifo", "0"), "controller"),
    Case("a run, share", ("dispatch", "share", "0"), "controller"),
    Case("a run", ("dispatch", "fifo", "0")),
    Case("a run, traced", ("dispatch", "fifo", "1")),
    Case("a run on two hosts", ("gang", "fifo", "0")),
    Case("a run on two hosts, traced", ("gang", "fifo", "1")),
    Case("a run with a transfer between two hosts", ("transfer", "fifo", "0")),
    Case("a pass, 100 live buffers", ("idle-passes", "100", "0"), "controller"),
    Case("a pass, 100 live buffers, a client waits", ("idle-passes", "100", "1"), "controller"),
    Case("a pass, 100,000 live buffers, a client waits", ("idle-passes", "100000", "1"), "controller"),
    Case("a run, 100 live buffers, a client waits", ("beside-waiting", "100", "1"), "controller"),
    Case("a run, 100,000 live buffers, a client waits", ("beside-waiting", "100000", "1"), "controller"),
    Case("a booked run, 1 host of 1 device", ("booked", "1", "1"), "controller"),
    Case("a booked run, 2 hosts of 2 devices", ("booked", "2", "2"), "controller"),
    Case("a booked run, 256 hosts of 1 device", ("booked", "256", "1"), "controller", (20, 100)),
    Case("a booked run, 256 hosts of 4 devices", ("booked", "256", "4"), "controller", (20, 100)),
)

#: (what, numerator, denominator, the most that the ratio may be).
GOALS = (
    ("one client: share over fifo", "a run, share", "a run, fifo", 1.02),
    (
        "a pass beside 100,000 live buffers over 100",
        "a pass, 100,000 live buffers, a client waits",
        "a pass, 100 live buffers, a client waits",
        1.01,
    ),
    (
        "a run beside 100,000 live buffers over 100",
        "a run, 100,000 live buffers, a client waits",
        "a run, 100 live buffers, a client waits",
        1.01,
    ),
    (
        "a booked run on 256 hosts: 4 devices of each over 1",
        "a booked run, 256 hosts of 4 devices",
        "a booked run, 256 hosts of 1 device",
        1.01,
    ),
)

Count = Callable[[Case, int], int]


def counter(program: Path) -> Count:
    """Counts a case of `program`. Raises NotHere where valgrind is not installed."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise NotHere("valgrind is not installed, and it counts the instructions")

    def count(case: Case, turns: int) -> int:
        toggle = [f"--toggle-collect={_CONTROLLER}"] if case.counted == "controller" else []
        with tempfile.TemporaryDirectory() as folder:
            out = f"--callgrind-out-file={folder}/out"
            command = [valgrind, "--tool=callgrind", out, *toggle, str(program), *case.args, str(turns)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"{program.name} {' '.join(case.args)} ended with {done.returncode}: {done.stderr[-500:]}"
            )
        return collected(done.stderr)

    return count


def collected(said: str) -> int:
    """The number that callgrind collected, of what it said at its end."""
    found = re.search(r"Collected : (\d+)", said)
    if found is None:
        raise RuntimeError(f"callgrind did not say what it collected: {said[-500:]}")
    return int(found[1])


def per_turn(count: Count, case: Case) -> float:
    """Instructions of one turn."""
    few, many = case.turns
    return (count(case, many) - count(case, few)) / (many - few)


def judge(found: dict[str, float]) -> list[dict[str, Any]]:
    """The goals, over the instructions per turn of each case."""
    return [judged(text, at_most(most), found[above] / found[below]) for text, above, below, most in GOALS]


def measure(count: Count, say: Say = lambda words: None) -> Report:
    """Counts each case, and judges the goals."""
    rows: list[dict[str, Any]] = []
    for each in CASES:
        rows.append({"case": each.name, "counted": each.counted, "instructions": per_turn(count, each)})
        say(f"{each.name}: {rows[-1]['instructions']:,.0f}")
    goals = judge({row["case"]: row["instructions"] for row in rows})
    tables = [*Table.of("Instructions per turn", rows), *Table.of("Goals", goals)]
    return Report("instructions", METHOD, tables, {"rows": rows, "goals": goals})


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """Instructions of the control path by callgrind: with a trace, by policy, beside many live buffers."""
    (program,) = find(settings.binaries, "count_control", "count_control")
    return measure(counter(program), say)


command = as_command("instructions", Settings, run)

if __name__ == "__main__":
    command()
