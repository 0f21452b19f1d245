"""What the records of a trace say happened: computations on devices, transfers, waits, runs. Pure.

XLA says when a value is ready, and not when its computation began. So a computation begins when it was launched, or
when its devices were free, whichever is later. A host may notice the ends of several computations together. Then only
the last of them has a known end, and the others are marked as estimated. A device computes in the order of the
launches, so the time is divided among them in that order, by how long the same computations take whose ends were
noticed alone; what is left goes in equal parts to those of which nothing is known. Each of them gets at least a quarter
of an equal part of the whole, since the machine may have been busier when the others were noticed alone.

All records have the times of one clock, the controller's (pathways/cluster/recording.py).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pathways.cluster.recording import Recorded
from pathways.protocol import control_pb2 as pb
from pathways.protocol import trace_records
from pathways.protocol.trace_records import ORDER_WAITS, THROTTLES, WAITED_FOR, Kind, Outcome, reasons

_UNKNOWN, _NO_NODE = pb.TracedProgram(), pb.TracedProgram.Node(maker=-1)
#: Shorter waits are not shown, in nanoseconds.
SHORTEST_WAIT_NS = 10_000


@dataclasses.dataclass(slots=True)
class Computation:
    """One computation on the devices of one host. Times in nanoseconds, also below."""

    host: int
    devices: tuple[int, ...]  # global numbers
    client: int
    order: int
    program: str
    name: str
    dispatched_ns: int
    ready_ns: int
    launched_ns: int
    start_ns: int
    end_ns: int
    is_estimated: bool
    is_over: bool
    has_failed: bool
    node: int  # of its host's plan
    usual_ns: float  # how long the same computation takes alone, the median; 0: not known


@dataclasses.dataclass(slots=True)
class Transfer:
    """One transfer from the devices of a host to those of the same or another one."""

    host: int
    peer: int
    devices: tuple[int, ...]
    peer_devices: tuple[int, ...]  # empty: the other host's record is missing
    client: int
    order: int
    program: str
    name: str
    bytes: int  # on each device
    start_ns: int
    end_ns: int
    has_failed: bool
    maker: int  # node of the host's plan that makes what is transferred; -1: none, or not known
    readers: tuple[int, ...]  # nodes of the peer's plan that read it


@dataclasses.dataclass(slots=True)
class Wait:
    """A node of a run waits on a host."""

    host: int
    client: int
    order: int
    program: str
    name: str
    reason: str
    start_ns: int
    end_ns: int


@dataclasses.dataclass(slots=True)
class Run:
    """A run of a client, from its submission to its end on all hosts. 0: it did not happen, or is not known."""

    client: int
    order: int
    program: str
    waits: str
    outcome: Outcome
    submitted_ns: int
    next_ns: int
    ordered_ns: int
    granted_ns: int
    dispatched_ns: int
    end_ns: int
    is_over: bool


class Timeline:
    """What happened, from what was recorded."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.about = recorded.about
        self.begin_ns = recorded.begin_ns
        self.remarks = [*recorded.remarks, *_losses(recorded)]
        self.computations: list[Computation] = []
        self.transfers: list[Transfer] = []
        self.waits: list[Wait] = []
        self._plans = recorded.plans
        self._each: int = self.about.devices_per_host or 1
        self._over: dict[int, tuple[int, int, int]] = {}  # by order: first dispatch, last end, hosts that are not over
        records = {host: _rows(chunks, trace_records.RUN) for host, chunks in sorted(recorded.runs.items())}
        orders = _rows(recorded.orders, trace_records.ORDER)
        # Hosts and the controller record until they hear that the trace ends. What is not over ends with the trace.
        self.end_ns = max([recorded.end_ns, *map(_latest, itertools.chain(orders, *records.values()))])
        for host, rows in records.items():
            self._take_runs(host, rows)
        self._take_calls({host: [row for row in rows if row["kind"] == Kind.CALL] for host, rows in records.items()})
        self._take_transfers(records)
        self.runs = [self._run(row) for row in orders]
        # Hosts begin one after the other: some have recorded before the last one did.
        known = (at for run in self.runs for at in (run.submitted_ns, run.next_ns, run.ordered_ns) if at)
        seen = (at for at, _, _ in self._over.values() if at)
        self.begin_ns = min([self.begin_ns, *known, *seen])
        if recorded.failure is not None:
            self.remarks.append(f"the recording ended early: {recorded.failure}")

    def label(self, client: int) -> str:
        """The client, for people. Perfetto colours by a slice's name without digits, so the label has a letter too."""
        name = self.about.clients.get(client, "")
        return f"{name} (client {client})" if name else f"client {client} ({_letters(client)})"

    def program_of(self, plan: int, host: int | None = None) -> str:
        """The name of a program; one that the trace does not name is called by its number."""
        tables = self._plans.values() if host is None else [self._plans.get(host, {})]
        return next((table[plan].name for table in tables if plan in table and table[plan].name), "a program")

    def _node(self, host: int, row: dict[str, Any]) -> pb.TracedProgram.Node:
        """What the host says of the record's node."""
        program = self._plans.get(host, {}).get(row["plan"], _UNKNOWN)
        return program.nodes[row["node"]] if row["node"] < len(program.nodes) else _NO_NODE

    def _name(self, host: int, row: dict[str, Any]) -> str:
        return self._node(host, row).name or Kind(row["kind"]).name.lower()

    def _computation(self, host: int, row: dict[str, Any]) -> Hashable:
        """Which computation of which program it is; None: the trace does not say."""
        node = self._node(host, row)
        return None if node is _NO_NODE else (self.program_of(row["plan"], host), node.computation)

    def _devices(self, host: int, mask: int) -> tuple[int, ...]:
        return tuple(host * self._each + bit for bit in range(self._each) if mask >> bit & 1)

    def _take_runs(self, host: int, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["kind"] != Kind.RUN:
                continue
            first, last, missing = self._over.get(row["order"], (row["dispatched_ns"], 0, 0))
            self._over[row["order"]] = (
                min(first, row["dispatched_ns"]),
                max(last, row["ended_ns"]),
                missing + (row["ended_ns"] == 0),
            )

    def _take_calls(self, calls: Mapping[int, list[dict[str, Any]]]) -> None:
        together: dict[int, list[list[dict[str, Any]]]] = {}
        alone: dict[Hashable, list[int]] = collections.defaultdict(list)
        for host, rows in calls.items():
            for row in rows:
                self._add_wait(host, row, "dispatched_ns", "ready_ns", WAITED_FOR[row["waited_for"]])
                self._add_wait(host, row, "ready_ns", "launched_ns", reasons(row["throttled_by"], THROTTLES))
            together[host] = _noticed([row for row in rows if row["launched_ns"]], self.end_ns)
            for row, nanoseconds in _alone(together[host]):
                alone[self._computation(host, row)].append(nanoseconds)
        alone.pop(None, None)
        usual = {which: statistics.median(times) for which, times in alone.items()}
        for host, groups in together.items():

            def usual_of(row: dict[str, Any], host: int = host) -> float:
                return usual.get(self._computation(host, row), 0.0)

            for row, start, end, is_estimated in _divided(groups, usual_of):
                self._add_computation(host, row, start, end, is_estimated, usual_of(row))

    def _add_computation(
        self, host: int, row: dict[str, Any], start: int, end: int, is_estimated: bool, usual_ns: float
    ) -> None:
        self.computations.append(
            Computation(
                host,
                self._devices(host, row["devices"]),
                row["client"],
                row["order"],
                self.program_of(row["plan"], host),
                self._name(host, row),
                row["dispatched_ns"],
                row["ready_ns"],
                row["launched_ns"],
                start,
                end,
                is_estimated,
                row["ended_ns"] != 0,
                bool(row["has_failed"]),
                row["node"],
                usual_ns,
            )
        )

    def _add_wait(self, host: int, row: dict[str, Any], since: str, until: str, reason: str) -> None:
        is_over = row["ended_ns"] != 0
        start, end = row[since], row[until] or (0 if is_over else self.end_ns)
        if start and end - start >= SHORTEST_WAIT_NS and reason:
            program, name = self.program_of(row["plan"], host), self._name(host, row)
            self.waits.append(Wait(host, row["client"], row["order"], program, name, reason, start, end))

    def _take_transfers(self, records: dict[int, list[dict[str, Any]]]) -> None:
        # Nodes have other numbers on other hosts, but the same order. So the n-th transfer of a run from one host to
        # another is the n-th one on both.
        receives: dict[tuple[int, int, int], list[dict[str, Any]]] = collections.defaultdict(list)
        for host, rows in records.items():
            for row in sorted((row for row in rows if row["kind"] == Kind.RECEIVE), key=lambda row: row["node"]):
                receives[row["order"], row["peer"], host].append(row)
                self._add_wait(host, row, "dispatched_ns", "ready_ns", reasons(row["throttled_by"], THROTTLES))
                self._add_wait(host, row, "ready_ns", "ended_ns", f"a transfer from host {row['peer']}")
        for host, rows in records.items():
            nth: dict[tuple[int, int], int] = collections.defaultdict(int)
            for row in sorted(rows, key=lambda row: row["node"]):
                if row["kind"] == Kind.SEND:
                    self._add_wait(host, row, "ready_ns", "launched_ns", f"room on host {row['peer']}")
                    position = nth[row["order"], row["peer"]]
                    nth[row["order"], row["peer"]] += 1
                    there = receives.get((row["order"], host, row["peer"]), [])
                    end = there[position] if position < len(there) else None
                    self._add_transfer(host, row, row["peer"], row["devices"], end)
                elif row["kind"] == Kind.MOVE and row["launched_ns"]:
                    self._add_wait(host, row, "ready_ns", "launched_ns", reasons(row["throttled_by"], THROTTLES))
                    self._add_transfer(host, row, host, self._node(host, row).input_devices, row)

    def _add_transfer(
        self, host: int, row: dict[str, Any], peer: int, source: int, there: dict[str, Any] | None
    ) -> None:
        """`there`: the record of the transfer's end at the peer; None: it is missing."""
        if not row["launched_ns"]:  # nothing was sent: its value failed
            return
        self.transfers.append(
            Transfer(
                host,
                peer,
                self._devices(host, source),
                self._devices(peer, there["devices"] if there else 0),
                row["client"],
                row["order"],
                self.program_of(row["plan"], host),
                self._name(host, row),
                row["bytes"],
                row["launched_ns"],
                row["ended_ns"] or self.end_ns,
                bool(row["has_failed"]),
                self._node(host, row).maker,
                tuple(self._node(peer, there).readers) if there else (),
            )
        )

    def _run(self, row: dict[str, Any]) -> Run:
        outcome = Outcome(row["outcome"])
        dispatched, end, missing = self._over.get(row["order"], (0, 0, 0)) if row["order"] else (0, 0, 0)
        is_over = outcome == Outcome.DROPPED or (dispatched != 0 and missing == 0)
        return Run(
            row["client"],
            row["order"],
            self.program_of(row["plan"]),
            reasons(row["waits"], ORDER_WAITS),
            outcome,
            row["submitted_ns"],
            row["next_ns"],
            row["ordered_ns"],
            row["granted_ns"],
            dispatched,
            max(end, row["ordered_ns"]) if is_over else self.end_ns,
            is_over,
        )


def _losses(recorded: Recorded) -> Iterator[str]:
    for host, count in sorted(recorded.dropped.items()):
        who = "the controller" if host < 0 else f"host {host}"
        yield f"{count} records of {who} were dropped, the oldest first: it recorded faster than they were taken"


def _rows(chunks: Iterable[bytes], dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    """The records of all chunks, with Python's numbers."""
    names = dtype.names or ()
    table = np.frombuffer(b"".join(chunks), dtype)
    return [dict(zip(names, row, strict=True)) for row in table.tolist()]


def _latest(row: dict[str, Any]) -> int:
    """The latest time in a record."""
    return max(value for name, value in row.items() if name.endswith("_ns"))


def _noticed(rows: list[dict[str, Any]], now_ns: int) -> list[list[dict[str, Any]]]:
    """Launched calls of one host: those together whose ends were noticed together, in the order of their launches."""
    for row in rows:
        row["at"] = row["ended_ns"] or now_ns
    rows.sort(key=lambda row: (row["at"], row["launched_ns"], row["order"], row["node"]))
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["at"])]


def _alone(groups: list[list[dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], int]]:
    """The calls whose ends were noticed alone, and how long each took."""
    single = {id(together[0]) for together in groups if len(together) == 1}
    for row, start, end, _ in _divided(groups, lambda _: 0.0):
        if id(row) in single and row["ended_ns"]:
            yield row, end - start


def _divided(
    groups: list[list[dict[str, Any]]], usual_of: Callable[[dict[str, Any]], float]
) -> Iterator[tuple[dict[str, Any], int, int, bool]]:
    """Calls of one host with their start and end, and whether these are estimated; see above."""
    free: dict[int, int] = collections.defaultdict(int)  # by device
    for together in groups:
        left: dict[int, list[float]] = collections.defaultdict(list)  # by device: the usual times, last launch first
        for row in reversed(together):
            for bit in _bits(row["devices"]):
                left[bit].append(usual_of(row))
        for row in together:
            bits, usual = _bits(row["devices"]), usual_of(row)
            start = max([row["launched_ns"], *(free[bit] for bit in bits)])
            room = max(0, row["at"] - start)
            if all(len(left[bit]) == 1 for bit in bits):
                end = start + room
            else:
                end = start + int(min((_part(usual, room, left[bit]) for bit in bits), default=room))
            for bit in bits:
                left[bit].pop()
                free[bit] = end
            yield row, start, end, len(together) > 1 and not row["is_end_seen"]


def _part(usual: float, room: int, left: list[float]) -> float:
    """The part of a time that the next call of a device gets. `left`: the usual times of those that share it, 0: not
    known."""
    known, unknown = sum(left), left.count(0.0)
    rest = max(room - known, room * unknown / len(left) / 4)
    return usual * min(1.0, (room - rest) / known) if usual else rest / unknown


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _letters(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text
