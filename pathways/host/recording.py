"""A host's part in a trace of the cluster: switches it on and off, and names what its records name by number.

The native executor records (csrc/runs/run_trace.h). Control threads call everything here but `keep`, with Python's
lock, which each step of the executor holds too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pathways import _native
from pathways.host.programs import Program
from pathways.protocol import control_pb2 as pb
from pathways.protocol import trace_records

#: Records that a host keeps until they are taken: 5 MiB.
CAPACITY = 1 << 16
#: Descriptions of dropped programs that a host keeps between two takes, the newest ones.
MOST_GONE = 1024


class HostTrace:
    """Records runs while it is on. It is off at first."""

    def __init__(self, core: Any, programs: dict[int, Program]) -> None:
        """`programs`: those that there are now, by number."""
        self._core = core
        self._programs = programs
        self._is_on = False
        self._named: set[int] = set()
        # Descriptions of programs that went since the last take, and between the two takes before. When a program goes,
        # its last record is written. So after the next take nobody asks for it, whether it had a record or not.
        self._gone: dict[int, pb.TracedProgram] = {}
        self._gone_before: dict[int, pb.TracedProgram] = {}

    def start(self, capacity: int = CAPACITY) -> None:
        """Records from now on. An earlier trace is forgotten."""
        self._forget()
        self._is_on = True
        self._core.start_trace(capacity)

    def take(self) -> tuple[bytes, int, dict[int, pb.TracedProgram]]:
        """What was recorded and not taken yet: records, how many were lost, and programs that are named first."""
        before, self._gone_before, self._gone = self._gone_before, self._gone, {}
        data, dropped = self._core.take_trace()
        plans: dict[int, pb.TracedProgram] = {}
        for number in np.unique(np.frombuffer(data, trace_records.RUN)["plan"]).tolist():
            if number in self._named:
                continue
            self._named.add(number)
            program = self._programs.get(number)
            if program is not None:
                plans[number] = describe(program)
                continue
            for gone in (before, self._gone_before, self._gone):
                if number in gone:
                    plans[number] = gone[number]
        self._named.intersection_update(self._programs.copy())  # a number is not used again
        return data, dropped, plans

    def stop(self) -> tuple[bytes, int, dict[int, pb.TracedProgram]]:
        """Records no more. Returns the rest, as `take`. A second call returns nothing."""
        self._core.stop_trace()
        rest = self.take()
        self._is_on = False
        self._forget()
        return rest

    def keep(self, number: int) -> None:
        """A program is about to be dropped; its records may not be taken yet. Enqueue thread."""
        if self._is_on and number not in self._named and number in self._programs:
            gone = self._gone
            gone[number] = describe(self._programs[number])
            if len(gone) > MOST_GONE:
                del gone[next(iter(gone))]

    def _forget(self) -> None:
        self._named, self._gone, self._gone_before = set(), {}, {}


def describe(program: Program) -> pb.TracedProgram:
    """A program as a trace names it: its client, its name, and each node of this host's plan."""
    nodes = _native.describe_plan(program.plan.block)
    logical = program.bound.program
    calls = [(number, node) for number, node in enumerate(nodes) if node["kind"] == "call"]
    makers = {value: number for number, node in calls for value in node["outputs"]}
    readers: dict[int, list[int]] = {}
    for number, node in calls:
        for value in dict.fromkeys(node["inputs"]):
            readers.setdefault(value, []).append(number)
    described = pb.TracedProgram(client=program.client, name=logical.name)
    for node in nodes:
        of = logical.nodes[node["node"]] if node["kind"] in ("call", "transfer", "select") else None
        maker, its_readers = -1, []
        if node["kind"] == "transfer":
            maker = next((makers[value] for value in node["inputs"] if value in makers), -1)
            its_readers = [reader for value in node["outputs"] for reader in readers.get(value, ())]
        described.nodes.add(
            name=of.name if of is not None else "",
            input_devices=node["input_devices"],
            maker=maker,
            readers=its_readers,
            computation=of.computation if of is not None else -1,
        )
    return described
