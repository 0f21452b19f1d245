"""A program's stages before it is compiled: traced (`Tracing`) and lowered (`Lowered`), as `jax.stages` has them.

`Program.trace` and `Program.lower` make them, for people who look at a program without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pathways import errors
from pathways.api.programs.compiled import Compiled, Lowering
from pathways.api.programs.signature import Split
from pathways.api.programs.stages import Stage
from pathways.compiler.ir import LogicalProgram
from pathways.compiler.printing import logical_text
from pathways.compiler.trace import Traced
from pathways.plan.binding import BoundProgram, plan_text


class Tracing(Stage):
    """A program traced for given arguments. Made by `Program.trace`; the counterpart of `jax.stages.Traced`."""

    def __init__(
        self,
        traced: Traced,
        split: Split,
        partition: Callable[[], Lowering],
        lower_plainly: Callable[[tuple[str, ...], dict[str, Any]], Any],
        jaxpr: Callable[..., Any],
    ) -> None:
        """`partition` lowers the traced program for its slices; `lower_plainly(platforms, private)`, without them.
        `jaxpr(is_exported=)` gives the jaxpr to show, or the one from which `jax.export` makes derivatives."""
        super().__init__(traced)
        self._split = split
        self._partition = partition
        self._lower_plainly = lower_plainly
        self._jaxpr = jaxpr
        self._is_exported = False

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr: of a placed function the plain function's, as of `jax.jit`. In a program's, placed
        functions are `jit` equations with a mark in their names."""
        return self._jaxpr(is_exported=self._is_exported)

    @property
    def fun_name(self) -> str:
        """The program's name."""
        return self._traced.name

    def lower(self, *, lowering_platforms: Sequence[str] | None = None, **private: Any) -> Any:
        """Partitions and lowers it; runs nothing.

        Args:
            lowering_platforms: of a placed function, for which platforms to lower the plain function instead, for
                whoever runs it without a cluster. It is how `jax.export` asks, and gives a `jax.stages.Lowered`.
        """
        if lowering_platforms is not None:
            self._is_exported = True  # as the function, its derivatives are for one device
            return self._lower_plainly(tuple(lowering_platforms), private)
        return Lowered(self._split, self._partition())


class Lowered(Stage):
    """A lowered program: text at each level, and `compile()`."""

    def __init__(self, split: Split, lowering: Lowering) -> None:
        super().__init__(lowering.traced)
        self._split = split
        self._lowering = lowering

    def as_text(self, level: str = "plan") -> str:
        """The program as "mpmd" (after partitioning), "ifrt", "program" (ours, no devices yet) or "plan".

        The plan of a program with loops around placed functions has no devices: it is several plans.
        """
        program = self._lowering.program
        if level == "mpmd":
            return program.mpmd_text
        if level == "ifrt":
            return program.ifrt_text
        if level == "program" or (level == "plan" and program.loops):
            return logical_text(program)
        if level == "plan":
            return plan_text(self.bound, self._lowering.cluster.control().topology.machines)
        raise errors.ProgramError(f'expected "mpmd", "ifrt", "program" or "plan", got {level!r}')

    @property
    def logical(self) -> LogicalProgram:
        """The program, free of physical devices."""
        return self._lowering.program

    @property
    def bound(self) -> BoundProgram:
        """The program on the physical devices that its slices are bound to now."""
        return self._lowering.bind()

    def cost_analysis(self) -> dict[str, float]:
        """As `Compiled.cost_analysis`; compiles it for that."""
        return self.compile().cost_analysis()

    def compile(self) -> Compiled:
        """Registers it with the hosts and waits until they have compiled it."""
        return self._lowering.compile(self._split.tree)
