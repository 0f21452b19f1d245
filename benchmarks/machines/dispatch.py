"""`pathways bench dispatch --machines N`: calls on hosts that agents brought, beside the same hosts on one machine.

Two things are measured: how long one call takes until its completion is back, beside a message of as many bytes on a
bare connection; and the rate of pipelined calls (OpByOp without a collective), beside one machine. All systems take
turns, as in `far_transfer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.machines import systems as far_systems
from benchmarks.machines.transfer import OURS, RIVALS
from pathways.bench import processes, stats
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread

NEAR = "one machine"
_TIMEOUT = 60.0
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
    judged: list[dict[str, Any]] = []
    for kind, ours in OURS.items():
        whole, bare = samples.p50_us(ours), samples.p50_us(kind)
        near = samples.p50_us(NEAR)
        link = [a - b for a, b in zip(whole, near, strict=False)]
        for what, times in (("a call and its completion", whole), ("what the link adds to it", link)):
            beyond = _difference(times, bare)
            if beyond is not None:
                judged.append(_judged(f"{kind}: {what}, beyond a bare round trip, us", beyond, ADDED_US, False))
        if samples.calls.get(ours) and len(samples.calls[ours]) == len(samples.calls.get(NEAR, [])):
            ratio = stats.paired_ratio(samples.calls[NEAR], samples.calls[ours])
            judged.append(_judged(f"{kind}: OpByOp on machines, over one machine", ratio, 0.7, True))
    return judged


def _judged(goal: str, value: Spread, bound: float, is_least: bool) -> dict[str, Any]:
    reached = value.median >= bound if is_least else value.median <= bound
    sign = ">=" if is_least else "<="
    numbers = {"value": value.median, "min": value.low, "max": value.high}
    return {"goal": goal, "bound": f"{sign} {bound:g}", **numbers, "reached": reached}


def make(samples: Samples, notes: Sequence[str]) -> Report:
    """The report of all repeats."""
    parts = {"Round trips": round_trips(samples), "OpByOp": rates(samples), "Goals": judge(samples)}
    tables = [
        Table(name, tuple(rows[0]), [tuple(row.values()) for row in rows]) for name, rows in parts.items() if rows
    ]
    out, back = samples.sizes
    bytes_note = f"A call takes {out} bytes to the machine of the host, and {back} bytes back."
    data = {
        "round_trips": parts["Round trips"],
        "rates": parts["OpByOp"],
        "goals": parts["Goals"],
        "samples": {
            "p50_us": {name: samples.p50_us(name) for name in samples.trips},
            "seconds_per_call": samples.calls,
        },
    }
    return Report("dispatch-machines", METHOD, tables, data, [bytes_note, *notes])


def _link_sizes(child: Any, seconds: float) -> tuple[int, int]:
    """Bytes of one call on the link, there and back."""
    before = child.ask("link_bytes", timeout=_TIMEOUT)
    calls = len(child.ask("round_trips", 0, 0, seconds, timeout=_TIMEOUT)) + far_systems.WARM_UP
    after = child.ask("link_bytes", timeout=_TIMEOUT)
    out, back = ((b - a) / calls for a, b in zip(before, after, strict=True))
    return round(out), round(back)


def run(machines: int, rivals: Sequence[str], repeats: int, seconds: float) -> Report:
    """Measures. Raises ValueError for an unknown rival, or fewer than two machines."""
    if unknown := [name for name in rivals if name not in RIVALS]:
        raise ValueError(f"unknown rival {unknown[0]!r}: expected some of {', '.join(RIVALS)}")
    if machines < 2:
        raise ValueError(f"--machines {machines}: expected at least 2")
    notes: list[str] = []
    samples = Samples()
    names = [NEAR, *OURS.values(), *rivals]
    with processes.orphans_come_home(), far_systems.started("call", names, machines, notes) as children:
        linked = [children[name] for name in OURS.values() if name in children]
        if linked:
            samples.sizes = _link_sizes(linked[0], seconds)
        out, back = (max(1, size) for size in samples.sizes)
        for _ in range(repeats):
            for name, child in list(children.items()):
                try:
                    trips = child.ask("round_trips", out, back, seconds, timeout=_TIMEOUT)
                    per_call = child.ask("calls", seconds, timeout=_TIMEOUT) if name not in rivals else None
                except processes.ChildError as error:
                    notes.append(f"{name}: {error}")
                    children.pop(name).kill()
                    continue
                samples.trips.setdefault(name, []).append(trips)
                if per_call is not None:
                    samples.calls.setdefault(name, []).append(per_call)
    return make(samples, notes)
