"""A host's part in a trace of the cluster: switches it on and off, and names what its records name by number.

The native executor records (csrc/executor/run_trace.h). Control threads call everything here but `keep`, with Python's
lock, which each step of the executor holds too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pathways import _native
from pathways.host.programs import Program
from pathways.protocol import trace_records

#: Records that a host keeps until they are taken: 5 MiB.
CAPACITY = 1 << 16


class HostTrace:
    """Records runs while it is on. It is off at first."""

    def __init__(self, core: Any, programs: Mapping[int, Program]) -> None:
        """`programs`: those that there are now, by number."""
        self._core = core
        self._programs = programs
        self._is_on = False
        self._named: set[int] = set()
        self._gone: dict[int, Any] = {}  # descriptions of programs that went meanwhile

    def start(self, capacity: int = CAPACITY) -> None:
        """Records from now on. An earlier trace is forgotten."""
        self._named, self._gone = set(), {}
        self._is_on = True
        self._core.start_trace(capacity)

    def take(self) -> tuple[bytes, int, dict[int, Any]]:
        """What was recorded and not taken yet: records, how many were lost, and programs that are named first."""
        data, dropped = self._core.take_trace()
        plans: dict[int, Any] = {}
        for number in np.unique(np.frombuffer(data, trace_records.RUN)["plan"]).tolist():
            if number in self._named:
                continue
            self._named.add(number)
            if number in self._gone:
                plans[number] = self._gone.pop(number)
            elif (program := self._programs.get(number)) is not None:
                plans[number] = describe(program)
        return data, dropped, plans

    def stop(self) -> tuple[bytes, int, dict[int, Any]]:
        """Records no more. Returns the rest, as `take`. A second call returns nothing."""
        self._core.stop_trace()
        rest = self.take()
        self._is_on = False
        self._named, self._gone = set(), {}
        return rest

    def keep(self, number: int) -> None:
        """A program is about to be dropped; its records may not be taken yet. Enqueue thread."""
        if self._is_on and number not in self._named and number in self._programs:
            self._gone[number] = describe(self._programs[number])


def describe(program: Program) -> dict[str, Any]:
    """A program as a trace names it: its client, its name, and each node of this host's plan.

    A node has its name; a bit per local device on which the input of a transfer lies; and, of a transfer, the nodes of
    this host's plan between which it carries a value: the call that makes the value (-1: none here), and the calls that
    read it.
    """
    nodes = _native.describe_plan(program.plan.block)
    logical = program.bound.program
    calls = [(number, node) for number, node in enumerate(nodes) if node["kind"] == "call"]
    makers = {value: number for number, node in calls for value in node["outputs"]}
    readers: dict[int, list[int]] = {}
    for number, node in calls:
        for value in dict.fromkeys(node["inputs"]):
            readers.setdefault(value, []).append(number)
    described: list[tuple[str, int, int, list[int]]] = []
    for node in nodes:
        name = logical.nodes[node["node"]].name if node["kind"] in ("call", "transfer") else ""
        maker, its_readers = -1, []
        if node["kind"] == "transfer":
            maker = next((makers[value] for value in node["inputs"] if value in makers), -1)
            its_readers = [reader for value in node["outputs"] for reader in readers.get(value, ())]
        described.append((name, node["input_devices"], maker, its_readers))
    return {"client": program.client, "name": logical.name, "nodes": described}
