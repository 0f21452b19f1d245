"""`python -m benchmarks.machines.dispatch`: calls on hosts that agents brought, beside the same hosts on one machine.

Two things are measured: how long one call takes until its completion is back, beside a message of as many bytes on a
bare connection; and the rate of pipelined calls (OpByOp without a collective), beside one machine. All systems take
turns, as in `far_transfer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.machines import systems
from benchmarks.machines.transfer import OURS, RIVALS
from pathways.bench import stats
from pathways.bench.command import Say, as_command, check_names, option
from pathways.bench.goals import at_least, at_most, judged
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread
from pathways.bench.turns import Turns

NEAR = "one machine"
ADDED_US = 50.0
METHOD = (
    "Machines are agents on this machine, over loopback addresses, each with one host of one device; the "
    "controller and the client are on a machine without hosts. Round trips: one call of x + 1 on one device, from "
    "the call in Python to its completion; beside it, a message and its answer of as many bytes (as the link "
    "counted them) on a bare Python socket (TLS 1.3 with mutual certificates, or TCP) or stream of gRPC, and the "
    "pull of one number by jax.experimental.transfer. All repeats together. 'added' is the difference to the same "
    "call on one machine, paired by repeat: what the link adds. OpByOp: calls per second of x + 1 on one device "
    "per machine, the machines in turn, each machine's call on the result of its last one, at most 64 in flight each; "
    "the same hosts are on one machine or brought by agents."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    machines: int = option(2, "How many machines with hosts.", least=2)
    rivals: tuple[str, ...] = option(RIVALS, "Whom to measure beside it; may be empty.")
    repeats: int = option(5, "How often each is measured.")
    seconds: float = option(1.0, "Length of one run.", least=0.01)


@dataclasses.dataclass
class Samples:
    """What was measured, by system: nanoseconds of round trips and seconds per call, by repeat."""

    trips: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
    calls: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    sizes: tuple[int, int] = (0, 0)  # bytes of a call on the link, there and back

    def p50_us(self, name: str) -> list[float]:
        """The median of each repeat."""
        return [stats.quantile(trips, 0.5) / 1e3 for trips in self.trips.get(name, [])]


def _difference(one: Sequence[float], other: Sequence[float]) -> Spread | None:
    if not one or len(one) != len(other):
        return None
    return Spread.of([a - b for a, b in zip(one, other, strict=True)])


def round_trips(samples: Samples) -> list[dict[str, Any]]:
    """A row per system."""
    rows = []
    near = samples.p50_us(NEAR)
    for name, repeats in samples.trips.items():
        together = [ns / 1e3 for trips in repeats for ns in trips]
        medians = Spread.of(samples.p50_us(name))
        added = _difference(samples.p50_us(name), near) if name in OURS.values() else None
        rows.append(
            {
                "system": name,
                "p50, us": stats.quantile(together, 0.5),
                "min": medians.low,
                "max": medians.high,
                "p99, us": stats.quantile(together, 0.99),
                "added, us": added.median if added else None,
            }
        )
    return rows


def rates(samples: Samples) -> list[dict[str, Any]]:
    """A row per cluster."""
    rows = []
    for name, repeats in samples.calls.items():
        each = Spread.of([1 / seconds for seconds in repeats])
        near = samples.calls.get(NEAR, [])
        over = stats.paired_ratio(near, repeats) if name != NEAR and len(near) == len(repeats) else None
        rows.append(
            {
                "system": name,
                "per second": each.median,
                "min": each.low,
                "max": each.high,
                "over one machine": over.median if over else None,
            }
        )
    return rows


def judge(samples: Samples) -> list[dict[str, Any]]:
    """The goals that were measured."""
    found: list[dict[str, Any]] = []
    for kind, ours in OURS.items():
        whole, bare = samples.p50_us(ours), samples.p50_us(kind)
        link = [a - b for a, b in zip(whole, samples.p50_us(NEAR), strict=False)]
        for what, times in (("a call and its completion", whole), ("what the link adds to it", link)):
            beyond = _difference(times, bare)
            if beyond is not None:
                found.append(judged(f"{kind}: {what}, beyond a bare round trip, us", at_most(ADDED_US), beyond))
        if samples.calls.get(ours) and len(samples.calls[ours]) == len(samples.calls.get(NEAR, [])):
            ratio = stats.paired_ratio(samples.calls[NEAR], samples.calls[ours])
            found.append(judged(f"{kind}: OpByOp on machines, over one machine", at_least(0.7), ratio))
    return found


def make(samples: Samples, notes: Sequence[str]) -> Report:
    """The report of all repeats."""
    parts = {"Round trips": round_trips(samples), "OpByOp": rates(samples), "Goals": judge(samples)}
    out, back = samples.sizes
    data = {
        "round_trips": parts["Round trips"],
        "rates": parts["OpByOp"],
        "goals": parts["Goals"],
        "samples": {
            "p50_us": {name: samples.p50_us(name) for name in samples.trips},
            "seconds_per_call": samples.calls,
        },
    }
    tables = [table for name, rows in parts.items() for table in Table.of(name, rows)]
    bytes_note = f"A call takes {out} bytes to the machine of the host, and {back} bytes back."
    return Report("dispatch-machines", METHOD, tables, data, [bytes_note, *notes])


def _link_sizes(turns: Turns, name: str, seconds: float) -> tuple[int, int]:
    """Bytes of one call on the link, there and back."""
    before = turns.ask(name, "link_bytes")
    calls = len(turns.ask(name, "round_trips", 0, 0, seconds)) + systems.WARM_UP
    out, back = ((b - a) / calls for a, b in zip(before, turns.ask(name, "link_bytes"), strict=True))
    return round(out), round(back)


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """Calls on hosts of other machines, which agents on this one stand for, beside one machine and bare round trips."""
    check_names("rival", settings.rivals, RIVALS)
    notes: list[str] = []
    samples = Samples()
    names = [*systems.OURS, *settings.rivals]
    repeats, seconds = settings.repeats, settings.seconds
    with systems.turns_of(systems.CALLS) as turns:
        turns.start_all(names, settings.machines, notes=notes)
        if linked := [name for name in OURS.values() if name in turns]:
            samples.sizes = _link_sizes(turns, linked[0], seconds)
        request = ("round_trips", *(max(1, size) for size in samples.sizes), seconds)
        for name, trips in turns.rounds(names, repeats, *request, notes=notes, what=""):
            samples.trips.setdefault(name, []).append(trips)
        say("round trips: done")
        for name, taken in turns.rounds(list(systems.OURS), repeats, "calls", seconds, notes=notes, what=""):
            samples.calls.setdefault(name, []).append(taken)
    return make(samples, notes)


command = as_command("dispatch", Settings, run)

if __name__ == "__main__":
    command()
