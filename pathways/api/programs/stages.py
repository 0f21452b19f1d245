"""What is known of a program before it runs: the arguments and results of its stages, as `jax.stages` names them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import jax
from jax.tree_util import tree_map, tree_unflatten

from pathways import _jaxlib
from pathways.compiler.ir import LogicalProgram, Node, NodeKind
from pathways.compiler.trace import Traced
from pathways.protocol.control_pb2 import ComputationAnalysis


class Handle:
    """Something of this process's connection: a copy of it is itself, and it cannot be pickled."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: what it has compiled, and the slices that it uses, belong to this process's "
            "connection. Pickle the plain function, and place it in the other process"
        )


class Stage(Handle):
    """A traced program's arguments and results; the base of what `trace`, `lower` and `compile` give."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    @property
    def in_tree(self) -> Any:
        """Tree structure of (positional arguments, keyword arguments), without the static ones."""
        return self._traced.in_tree

    @property
    def out_tree(self) -> Any:
        """Tree structure of the result."""
        return self._traced.out_tree

    @property
    def args_info(self) -> Any:
        """A `jax.stages.ArgInfo` for each argument, as (positional arguments, keyword arguments)."""
        traced = self._traced
        return tree_unflatten(traced.in_tree, list(map(jax.stages.ArgInfo, self._avals(), traced.donated)))

    @property
    def in_avals(self) -> Any:
        """The abstract values of the arguments, as `args_info`."""
        return tree_unflatten(self._traced.in_tree, self._avals())

    def _avals(self) -> list[Any]:
        given = self._traced.arguments[: self._traced.in_tree.num_leaves]
        return [argument.aval() for argument in given]

    @property
    def out_info(self) -> Any:
        """A `jax.ShapeDtypeStruct` for each result."""
        return tree_unflatten(self._traced.out_tree, list(self._traced.returned))

    @property
    def out_avals(self) -> Any:
        """The abstract values of the results."""
        return tree_map(lambda x: _jaxlib.shaped_array(x.shape, x.dtype, bool(x.weak_type), x.sharding), self.out_info)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of donated arguments, flattened."""
        return tuple(n for n, given in enumerate(self._traced.donated) if given)


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes per device, named as XLA's `CompiledMemoryStats`: of a program, the most of any of its computations.

    `generated_code_size_in_bytes` is that of all together. `by_computation` has each by the name of its call site.
    """

    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0
    by_computation: Mapping[str, MemoryAnalysis] = dataclasses.field(default_factory=dict)


def memory_of(program: LogicalProgram, found: Mapping[int, ComputationAnalysis]) -> MemoryAnalysis:
    """What XLA says of a program's memory; `found` by number of a computation."""
    each = {}
    for node in _calls(program):
        memory = found[node.computation].memory
        each[node.name] = MemoryAnalysis(
            memory.argument_bytes,
            memory.output_bytes,
            memory.temporary_bytes,
            memory.alias_bytes,
            memory.code_bytes,
        )

    def most(name: str) -> int:
        return max((getattr(one, name) for one in each.values()), default=0)

    return MemoryAnalysis(
        most("argument_size_in_bytes"),
        most("output_size_in_bytes"),
        most("temp_size_in_bytes"),
        most("alias_size_in_bytes"),
        sum(what.memory.code_bytes for what in found.values()),
        each,
    )


def cost_of(program: LogicalProgram, found: Mapping[int, ComputationAnalysis]) -> dict[str, float]:
    """What XLA says that a run of a program costs on one device of each slice, summed over its computations."""
    total: collections.Counter[str] = collections.Counter()
    for node in _calls(program):
        total.update(found[node.computation].cost)
    return dict(total)


def _calls(program: LogicalProgram) -> list[Node]:
    return [node for node in program.nodes if node.kind is NodeKind.CALL]
