"""What the native controller is given of the cluster: groups of hosts, sets of memory spaces, memory of programs.

Every set gets its number once. Both kinds of cluster use this: the controller process on its event loop's thread, the
embedded cluster under its lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pathways import errors
from pathways._native import StepKind
from pathways.controller.resource_manager import ResourceManager
from pathways.plan.binding import Bindings
from pathways.plan.composite import Composite
from pathways.plan.memory_profile import ProgramMemory, ledger_entries
from pathways.plan.topology import SliceBinding


class NativeNumbers:
    """Sets that a native controller has been given."""

    def __init__(
        self, native: Any, resources: ResourceManager, on_group: Callable[[int, list[int]], None] | None = None
    ) -> None:
        """`on_group` is told of each new group, too."""
        self._native = native
        self._on_group = on_group
        self._resources = resources
        self._groups: set[int] = set()
        self._space_sets: dict[tuple[int, ...], int] = {}

    def group(self, hosts: Iterable[int]) -> int:
        """The number of the group of exactly these hosts; the sequencer knows the group."""
        key = tuple(sorted(set(hosts)))
        number = self._resources.group(key)
        if number not in self._groups:
            self._native.add_group(number, list(key))
            if self._on_group is not None:
                self._on_group(number, list(key))
            self._groups.add(number)
        return number

    def space_set(self, devices: Iterable[int]) -> int:
        """The native controller's number for the set of exactly these memory spaces, in any order."""
        key = tuple(sorted(set(devices)))
        if key not in self._space_sets:
            self._space_sets[key] = self._native.add_space_set(list(key))
        return self._space_sets[key]

    def bind(self, binding: SliceBinding) -> SliceBinding:
        """The binding, with the native controller's number for its devices; the controller knows its group."""
        self.group(binding.hosts)
        return dataclasses.replace(binding, space_set=self.space_set(binding.devices))

    @staticmethod
    def register_composite(
        native: Any, number: int, client: int, name: str, composite: Composite, plans: Sequence[int], group: int
    ) -> None:
        """Gives a native controller a program with loops, whose plans have these numbers.

        Raises:
            PlanError: it cannot be run; the message says why.
        """
        try:
            steps = [
                (step.kind, plans[step.number] if step.kind is StepKind.RUN else step.number, step.inputs, step.outputs)
                for step in composite.steps
            ]
            native.register_composite(
                number,
                client,
                name,
                group,
                composite.arguments,
                composite.values,
                composite.parallel,
                composite.donated,
                composite.results,
                steps,
            )
        except (ValueError, TypeError, IndexError) as error:
            raise errors.PlanError(f"program {name!r} with loops cannot be run: {error}") from None

    def admit_by(
        self, number: int, client: int, name: str, bindings: Bindings, memory: Mapping[int, ProgramMemory]
    ) -> None:
        """Gives the native controller the memory that a run of a program takes, as each host computed it (MEM-2)."""
        parts = [part for _, part in sorted(memory.items())]
        if parts:
            needs, results, arguments = ledger_entries(
                parts, bindings, list(memory), self._resources.topology, self.space_set, self.group
            )
            self._native.set_plan_memory(
                number, client, name, parts[0].biggest, needs, results, parts[0].donated, arguments
            )
