"""Runs a `LogicalProgram` in this process, node by node: the meaning of a program in a page, for tests.

Every mesh is bound to this process's own devices; transfers are `jax.device_put`. Nothing here is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways import _jaxlib
from pathways.compiler import specs
from pathways.compiler.control.segments import Run, segments
from pathways.compiler.ir import ArrayType, LogicalProgram, Loop, MeshSpec, Node, NodeKind
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.trace import as_argument, trace
from pathways.host.executables import ExecutableCache

#: What a node that is not run makes.
DEAD = object()


class Reference:
    """A program bound to devices. `devices[i]` are those of mesh i, in C order of its shape."""

    def __init__(
        self,
        program: LogicalProgram,
        devices: Sequence[Sequence[jax.Device]] | None = None,
        cache: ExecutableCache | None = None,
    ) -> None:
        self.program = program
        self.cache = cache or ExecutableCache()
        if devices is None:
            devices = _spread(program)
        self.devices = devices
        self.in_segments = False
        self.launches = 0

    def sharding(self, type: ArrayType) -> NamedSharding:
        """Where a value of that type lives."""
        mesh = self.program.meshes[type.mesh]
        devices = np.empty(mesh.size, dtype=object)
        devices[:] = list(self.devices[type.mesh])
        shape = [size for _, size in mesh.axes] or [1]
        names = [name for name, _ in mesh.axes] or ["_one"]
        return NamedSharding(Mesh(devices.reshape(shape), names), specs.to_partition_spec(type.spec))

    def __call__(self, *leaves: Any) -> list[jax.Array]:
        """Flat arguments (physical: a PRNG key is its words) to flat results."""
        program = self.program
        values: dict[int, Any] = {}
        for number, leaf in zip(program.arguments, leaves, strict=True):
            type = program.values[number]
            array = np.asarray(leaf)
            if array.shape != type.shape:
                raise ValueError(f"expected shape {type.shape}, got {array.shape}")
            values[number] = jax.device_put(array.astype(type.dtype), self.sharding(type))
        return self.run_segments(values) if self.in_segments else self.run(values)

    def run(self, values: dict[int, Any], dead: bool = False) -> list[Any]:
        """The results for the values of the arguments; `dead`: some may be `DEAD`, made by a node that is not run."""
        program = self.program
        for node in program.nodes:
            if not self._is_run(node.predicate, values):
                values.update((n, DEAD) for n in node.outputs)
                continue
            inputs = [values[n] for n in node.inputs]
            if node.kind is NodeKind.SELECT:
                (result,) = node.outputs
                values[result] = inputs[1 + self._case(inputs[0], len(inputs) - 1)]
                self.check(values[result], program.values[result])
                continue
            assert not any(value is DEAD for value in inputs), f"{node.name} reads what was not made"
            if node.kind is NodeKind.LOOP:
                results = self._loop(program.loops[node.computation], inputs)
                values.update(zip(node.outputs, results, strict=True))
                continue
            if node.kind in (NodeKind.EXCHANGE, NodeKind.PERMUTE):
                arrays = [np.asarray(x) for x in inputs]
                made = _permuted(*arrays) if node.kind is NodeKind.PERMUTE else self._exchanged(node, *arrays)
                for n, array in zip(node.outputs, made, strict=True):
                    values[n] = jax.device_put(array, self.sharding(program.values[n]))
                    self.check(values[n], program.values[n])
                continue
            if node.kind is NodeKind.TRANSFER:
                values[node.outputs[0]] = jax.device_put(inputs[0], self.sharding(program.values[node.outputs[0]]))
                continue
            computation = program.computations[node.computation]
            executable = self.cache.load(computation, self.devices[computation.mesh], node.donates)
            self.launches += 1
            values.update(zip(node.outputs, executable.call(*inputs), strict=True))
        assert dead or not any(values[n] is DEAD for n in program.results)
        return [values[n] for n in program.results]

    def run_segments(self, values: dict[int, Any]) -> list[Any]:
        """As `run`, segment by segment."""
        for segment in segments(self.program):
            inputs = [values[v] for v in segment.inputs]
            if isinstance(segment, Run):
                part = Reference(segment.program, self.devices, self.cache)
                results = part.run(dict(zip(segment.program.arguments, inputs, strict=True)), dead=True)
            elif self._is_run(segment.predicate, values):
                results = self._loop(segment.loop, inputs)
            else:
                results = [DEAD] * len(segment.outputs)
            values.update(zip(segment.outputs, results, strict=True))
        return [values[n] for n in self.program.results]

    def check(self, array: Any, type: ArrayType) -> None:
        """Asserts that an array is of a type, and lives where the type says."""
        assert array is not DEAD, "a dead value is read"
        assert (array.shape, array.dtype) == (type.shape, type.dtype)
        assert array.sharding.is_equivalent_to(self.sharding(type), array.ndim), (array.sharding, type)

    def _exchanged(self, node: Node, values: np.ndarray, destinations: np.ndarray) -> list[np.ndarray]:
        """Row by row."""
        how, into = self.program.exchanges[node.computation], self.program.values[node.outputs[0]]
        shards = self.program.meshes[into.mesh].size
        of_shard = len(destinations) // self.program.meshes[self.program.values[node.inputs[0]].mesh].size
        rows, numbers = np.zeros(into.shape, into.dtype), np.full(into.shape[0], -1, np.int32)
        count, offered = np.zeros(shards, np.int32), np.zeros(shards, np.int32)
        slots = np.full(len(destinations), -1, np.int32)
        for n, shard in enumerate(destinations):
            if shard == how.unsent:
                continue
            if not 0 <= shard < shards:
                raise ValueError(f"row {n % of_shard} of source shard {n // of_shard} has destination {shard}")
            offered[shard] += 1
            if count[shard] < how.capacity:
                slots[n] = shard * how.capacity + count[shard]
                numbers[slots[n]], rows[slots[n]] = n, values[n]
                count[shard] += 1
            elif not how.drops:
                raise ValueError(f"more than {how.capacity} rows go to target shard {shard}")
        return [rows, numbers, count, offered, slots]

    def _is_run(self, number: int, values: dict[int, Any]) -> bool:
        if number < 0:
            return True
        predicate = self.program.predicates[number]
        if not self._is_run(predicate.parent, values):
            return False
        cases = [p.case for p in self.program.predicates if (p.value, p.parent) == (predicate.value, predicate.parent)]
        return self._case(values[predicate.value], 1 + max(cases)) == predicate.case

    @staticmethod
    def _case(value: Any, count: int) -> int:
        assert value is not DEAD and value.shape == ()
        assert 0 <= int(value) < count, int(value)
        return int(value)

    def _loop(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        names = [mesh.name for mesh in self.program.meshes]
        body = Reference(loop.body, [self.devices[names.index(mesh.name)] for mesh in loop.body.meshes], self.cache)
        body.in_segments = self.in_segments
        decides = int(loop.count is None)
        constants, carry = inputs[decides : decides + loop.constants], inputs[decides + loop.constants :]
        carry = [value.copy() for value in carry]  # the body may overwrite it
        going = bool(inputs[0]) if decides else loop.count != 0
        iteration = 0
        while going:
            values = dict(zip(loop.body.arguments, (*constants, *carry), strict=True))
            for number, value in values.items():
                body.check(value, loop.body.values[number])
            carry = body.run_segments(values) if self.in_segments else body.run(values)
            iteration += 1
            going = bool(carry.pop(0)) if decides else iteration < loop.count
            assert iteration < 1000, "the loop does not end"
        self.launches += body.launches
        return carry


def _permuted(x: np.ndarray, to: np.ndarray, origins: np.ndarray) -> list[np.ndarray]:
    out = np.zeros((len(origins), *x.shape[1:]), x.dtype)
    for n, slot in enumerate(to):
        if slot >= 0:
            assert origins[slot] == n
            out[slot] = x[n]
    assert np.count_nonzero(origins >= 0) == np.count_nonzero(to >= 0)
    return [out]


def _spread(program: LogicalProgram) -> list[list[jax.Device]]:
    """Disjoint devices while they last, then from the start again."""
    devices, out, start = jax.devices(), [], 0
    for mesh in program.meshes:
        if start + mesh.size > len(devices):
            start = 0
        out.append(devices[start : start + mesh.size])
        start += mesh.size
    return out


def run(
    fun: Callable[..., Any],
    *args: Any,
    at: Sequence[Any] = (),
    options: Any = None,
    default_mesh: MeshSpec | None = None,
    devices: Sequence[Sequence[jax.Device]] | None = None,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    in_segments: bool = False,
    **kwargs: Any,
) -> tuple[Any, LogicalProgram]:
    """Traces, compiles and runs `fun(*args, **kwargs)`; returns its result as a pytree, and the program.

    `at` gives, per positional argument, None or (mesh, pytree prefix of PartitionSpecs): where it lives.
    `in_segments`: a program with loops runs segment by segment.
    """
    abstract = list(args)
    for number, place in enumerate(at):
        if place is not None:
            abstract[number] = _place(args[number], *place)
    traced = trace(fun, abstract, kwargs, static_argnums=static_argnums, donate_argnums=donate_argnums)
    program = compile_traced(traced, options, default_mesh=default_mesh)
    dynamic = tuple(x for n, x in enumerate(args) if n not in static_argnums)
    leaves = [_words(leaf) for leaf in jax.tree_util.tree_leaves((dynamic, kwargs))]
    reference = Reference(program, devices)
    reference.in_segments = in_segments
    out = reference(*leaves)
    results = [_wrap(array, aval) for array, aval in zip(out, traced.results, strict=True)]
    return jax.tree_util.tree_unflatten(traced.out_tree, results), program


def _place(tree: Any, mesh: MeshSpec, prefix: Any) -> Any:
    wanted = specs.broadcast(prefix if prefix is not None else PartitionSpec(), tree, "test placement")
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    placed = []
    for leaf, spec in zip(leaves, wanted, strict=True):
        argument = as_argument(leaf, "argument")
        placed.append(
            dataclasses.replace(argument, mesh=mesh, spec=specs.normalize(spec, argument.shape, mesh, "argument"))
        )
    return jax.tree_util.tree_unflatten(treedef, placed)


def _words(leaf: Any) -> Any:
    return _jaxlib.to_physical(leaf, leaf.dtype if hasattr(leaf, "dtype") else np.result_type(type(leaf)))


def _wrap(array: jax.Array, aval: jax.ShapeDtypeStruct) -> jax.Array:
    return _jaxlib.from_physical(array, aval.dtype)
