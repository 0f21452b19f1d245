"""`python -m benchmarks.machines.transfer`: bytes from host to host of two machines, beside bare streams.

The machines are agents on this machine, so both ends share its cores, and the wire is the loopback. All systems take
turns, repeat by repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machines import systems
from pathways.bench import plot, stats, transfer
from pathways.bench.command import Say, as_command, check_names, option
from pathways.bench.goals import at_least, judged
from pathways.bench.report import Report, Table
from pathways.bench.transfer import Sample

RIVALS = ("tls", "tcp", "grpc", "jax_transfer")
OURS = {"tls": "machines tls", "tcp": "machines tcp"}
LARGE_KIB = 64 << 10
METHOD = (
    "One array of the given bytes goes from the host of one machine to the host of another; machines are agents "
    "on this machine, over loopback addresses. 'machines tls' and 'machines tcp' are Pathways with encryption and "
    "without, 'one machine' is Pathways with both hosts on one machine, through shared memory. 'tls N' and 'tcp "
    "N' are N bare Python sockets from process to process that share each array (TLS 1.3 with mutual "
    "certificates), 'grpc 1' is a stream of gRPC with mutual certificates in messages of 1 MiB, jax_transfer is "
    "jax.experimental.transfer, not encrypted. `one`: each awaited before the next, median. `many`: several in "
    "flight (at most 256 MiB, 32 transfers), wall time over their number; bare streams are told that an array has "
    "arrived by a byte per stream. Ratios are of rates with many in flight, of repeats that ran next to each "
    "other."
)
#: (what, of ours, over which rival, at which sizes, at least)
_GOALS = (
    ("over the best of 1 to 4 bare TLS streams", "tls", "tls", (LARGE_KIB,), 0.85),
    ("not encrypted, over the best of 1 to 4 bare TCP streams", "tcp", "tcp", (LARGE_KIB,), 0.7),
    ("over jax.experimental.transfer", "tls", "jax_transfer", (4, 1024, LARGE_KIB), 1.0),
    ("not encrypted, over jax.experimental.transfer", "tcp", "jax_transfer", (4, 1024, LARGE_KIB), 1.0),
)

Samples = dict[int, dict[str, list[Sample]]]
"""Repeats by KiB and system."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    rivals: tuple[str, ...] = option(RIVALS, "Whom to measure beside it; may be empty.")
    kib: tuple[int, ...] = option((4, 1024, LARGE_KIB), "Sizes.")
    repeats: int = option(5, "How often each is measured.")
    seconds: float = option(0.3, "Length of one run.", least=0.01)


def systems_of(rivals: Sequence[str]) -> list[str]:
    """The systems that are measured beside these rivals. Raises ValueError for an unknown one."""
    check_names("rival", rivals, RIVALS)
    return [name for name in systems.TRANSFERS if name in systems.OURS or name.partition(" ")[0] in rivals]


def best(repeats: dict[str, list[Sample]], kind: str) -> str:
    """Of a rival's systems, the one that is the fastest; "" if there is none."""
    found = [name for name in repeats if name.partition(" ")[0] == kind]
    return min(found, key=lambda name: stats.quantile([each["many"] for each in repeats[name]], 0.5), default="")


def judge(samples: Samples) -> list[dict[str, Any]]:
    """The goals that were measured."""
    found = []
    for what, kind, rival, sizes, least in _GOALS:
        for kib in sizes:
            repeats = samples.get(kib, {})
            theirs = best(repeats, rival)
            ratio = transfer.rate_over(repeats.get(OURS[kind], []), repeats.get(theirs, []))
            if ratio is not None:
                found.append(judged(f"{kib} KiB between machines, {what}", at_least(least), ratio, rival=theirs))
    return found


def make(samples: Samples, notes: Sequence[str]) -> Report:
    """The report of all repeats."""
    ours = {name: name for name in OURS.values()}
    rows = [
        row
        for kib, found in samples.items()
        for row in transfer.compared({"KiB": kib}, found, kib << 10, ours, among_ours=True)
    ]
    goals = judge(samples)
    tables = [*Table.of("Transfers between machines", rows), *Table.of("Goals", goals)]
    flat = [
        {"bytes": kib << 10, "system": name, **each}
        for kib, found in samples.items()
        for name, repeats in found.items()
        for each in repeats
    ]
    return Report("transfer-machines", METHOD, tables, {"rows": rows, "goals": goals, "samples": flat}, notes)


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """Bytes between hosts of two machines, which agents on this one stand for, beside bare streams."""
    names = systems_of(settings.rivals)
    notes: list[str] = []
    samples: Samples = {}
    with systems.turns_of(systems.TRANSFERS) as turns:
        turns.start_all(names, 1, notes=notes)
        for kib in settings.kib:
            request = ("measure", kib << 10, 1, False, settings.seconds)
            for name, taken in turns.rounds(names, settings.repeats, *request, notes=notes, what=f", {kib} KiB"):
                samples.setdefault(kib, {}).setdefault(name, []).append(taken)
            say(f"{kib:,} KiB: done")
    return make(samples, notes)


def picture(data: dict[str, Any], path: Path) -> list[Path]:
    """Draws GB/s of each system, one panel per size."""
    rows = data["rows"]
    if not rows:
        return []
    sizes = list(dict.fromkeys(row["KiB"] for row in rows))
    names = list(dict.fromkeys(row["system"] for row in rows))[::-1]
    size = (plot.WIDTH, 1 + 0.3 * len(names))
    with plot.figure(path, 1, len(sizes), size, sharey=True) as (_, axes):
        for axis, kib in zip(axes[0], sizes, strict=True):
            for row in (each for each in rows if each["KiB"] == kib):
                ends = [[row["GB/s"] - row["min"]], [row["max"] - row["GB/s"]]]
                color = "C0" if row["system"] in systems.OURS else "C7"
                axis.barh(names.index(row["system"]), row["GB/s"], xerr=ends, color=color, alpha=0.8, ecolor="0.3")
            axis.set(title=f"{kib:,} KiB", xlabel="GB/s, several in flight", yticks=range(len(names)))
            axis.set_yticklabels(names)
            axis.grid(axis="x", alpha=0.3)
    return [path]


command = as_command("transfer", Settings, run, picture)

if __name__ == "__main__":
    command()
