"""Makes the nodes of all groups of a program from the first groups of their kinds, which jaxlib's compiler has seen.

`kinds` says which groups are of one kind. Each group gets the calls and transfers that the compiler has made of the
first one, with the types of their inputs and results. A value that has another type than its reader wants is moved, as
the compiler does it. So the program is right whatever the compiler chose. The nodes are in the order of the groups,
which is the schedule's (SCHED-1).

If the compiler has made something else of a group than one call or one transfer, the kinds say nothing, and the program
is compiled whole (`NotUnfolded`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pathways.compiler.building import Builder
from pathways.compiler.ir import ArrayType
from pathways.compiler.partition.emit import Emitted, Site
from pathways.compiler.partition.groups import Group
from pathways.compiler.partition.partitioned import Op, Partitioned


class NotUnfolded(Exception):
    """The compiler has made something else of a group than one call or one transfer."""


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What the compiler has made of the first group of a kind.

    `reads[i]` is the place, in the group's inputs, of the i-th input of the call, and `wanted[i]` the type that it has
    there. `results[i]` is the place of its i-th result in the group's outputs, and `types[i]` its type. `passes[i]`,
    of a group that only moves its inputs, is the input that result i is; without types, it does not even move them.
    `computation` is -1 for such a group, and for a cut.
    """

    reads: tuple[int, ...]
    wanted: tuple[ArrayType, ...]
    results: tuple[int, ...]
    types: tuple[ArrayType, ...]
    passes: list[int] | None
    computation: int


class Unfolding:
    """Appends the nodes of a program to a builder, which then knows the variables of the program."""

    def __init__(self, builder: Builder, emitted: Emitted, partitioned: Partitioned) -> None:
        """`builder` knows the arguments of the module."""
        assert emitted.kinds is not None
        self._builder = builder
        self._emitted = emitted
        self._kinds = emitted.kinds
        self._partitioned = partitioned
        self._variables: dict[int, Any] = dict(enumerate(emitted.inputs))  # by the number of a value of the module
        self._moved_from: dict[int, int] = {}  # by number, what the compiler's own transfers move
        self._recipes: dict[int, _Recipe] = {}  # by the number of the first group
        #: By what it makes: the number of a first group that the compiler has dropped.
        self._dropped: dict[Any, int] = {}
        self._copies: dict[tuple[int, ArrayType], int] = {}
        for number, v in self._variables.items():
            builder.known[v] = builder.known[number]
        firsts = [self._kinds.alone(emitted.groups[n]) for n in sorted(set(self._kinds.first))]
        self._read = {v for g in firsts for v in g.reads} | {*emitted.outputs}
        self._made = {v for g in firsts for v in g.outputs}

    def append(self) -> list[Op]:
        """Appends the nodes of all groups; returns the module's other calls, which read nothing.

        Raises:
            NotUnfolded: see there.
        """
        groups, sites, first = self._emitted.groups, self._emitted.group_sites, self._kinds.first
        written = {sites[n].name for n in set(first)}
        ops: dict[str, Op] = {}
        others: list[Op] = []
        for op in self._partitioned.ops:
            if not op.callee:
                self._moved_from[op.outputs[0]] = op.inputs[0]
            elif len(op.sites) != 1 or op.sites[0] in ops:
                raise NotUnfolded
            elif op.sites[0] in written:
                ops[op.sites[0]] = op
            elif op.inputs:
                raise NotUnfolded
            else:
                others.append(op)
        firsts = sorted(set(first))
        recipes = self._recipes
        self._dropped = {v: n for n in firsts if sites[n].name not in ops for v in self._kinds.alone(groups[n]).outputs}
        for n in firsts:
            if sites[n].name in ops:
                recipes[n] = self._recipe(self._kinds.alone(groups[n]), sites[n], ops[sites[n].name])
        for v, number in zip(self._emitted.outputs, self._partitioned.results, strict=True):
            if v in self._made and self._base(number) is not v:
                raise NotUnfolded
        moves: dict[Any, list[int]] = {}  # by what they move
        for n, g in enumerate(groups):
            recipe = recipes.get(first[n])
            if recipe is not None and recipe.passes == [0] and recipe.wanted == recipe.types:
                moves.setdefault(g.reads[recipe.reads[0]], []).append(n)
        done: set[int] = set()
        for n, g in enumerate(groups):
            recipe = recipes.get(first[n])
            if recipe is None or n in done:
                continue
            self._append(g, sites[n], recipe)
            # As the compiler does it, a value moves as soon as it is there.
            ready = [m for v in g.outputs for m in moves.get(v, ())] if g.cut is None else []
            for m in ready:
                self._append(groups[m], sites[m], recipes[first[m]])
            done.update(ready)
        return others

    def _recipe(self, g: Group, site: Site, op: Op) -> _Recipe:
        """Reads what the compiler has made of a first group."""
        builder = self._builder
        bases = [self._base(number) for number in op.inputs]
        if len(bases) == len(g.reads):
            for v, base in zip(g.reads, bases, strict=True):
                if v is not base:
                    self._pass_on(v, base)
            reads = list(range(len(bases)))
        else:  # it has dropped inputs that the call does not need, unless two of them were one value
            places = {v: n for n, v in enumerate(g.reads)}
            if any(v in self._dropped for v in g.reads) or any(v not in places for v in bases):
                raise NotUnfolded
            reads = [places[v] for v in bases]
        results = [n for n, v in enumerate(g.outputs) if v in self._read]
        if len(op.outputs) == len(g.outputs):
            results = list(range(len(g.outputs)))
        if len(op.outputs) != len(results):
            raise NotUnfolded
        self._variables.update((number, g.outputs[n]) for number, n in zip(op.outputs, results, strict=True))
        wanted = tuple(builder.type(number) for number in op.inputs)
        types = tuple(builder.type(number) for number in op.outputs)
        passes, computation = builder.passes(op), -1
        if g.cut is not None:
            if len(set(types)) > 1:
                raise NotUnfolded
        elif passes is None:
            mesh = builder.mesh_numbers[op.mesh]
            computation = builder.computation(site.origin or site.name, builder.fragment(op), mesh, wanted, types)
        return _Recipe(tuple(reads), wanted, tuple(results), types, passes, computation)

    def _base(self, number: int) -> Any:
        """The variable that a value of the module is, perhaps moved by the compiler."""
        while number in self._moved_from:
            number = self._moved_from[number]
        if number not in self._variables:
            raise NotUnfolded
        return self._variables[number]

    def _pass_on(self, v: Any, base: Any) -> None:
        """The compiler has found that a value is always an input of the group that makes it, and dropped the group."""
        n = self._dropped.get(v)
        g = self._kinds.alone(self._emitted.groups[n]) if n is not None else None
        if n is None or g is None or base not in g.reads:
            raise NotUnfolded
        result, read = g.outputs.index(v), g.reads.index(base)
        recipe = self._recipes.get(n, _Recipe((), (), (), (), [], -1))
        if result not in recipe.results:
            reads, results = (*recipe.reads, read), (*recipe.results, result)
            self._recipes[n] = _Recipe(reads, (), results, (), list(range(len(reads))), -1)

    def _append(self, g: Group, site: Site, recipe: _Recipe) -> None:
        """Appends the nodes of a group."""
        builder = self._builder
        given = [g.reads[n] for n in recipe.reads]
        if not all(builder.knows(v) for v in given):
            raise NotUnfolded
        if recipe.passes is not None:
            outputs = [builder.read(given[source]) for source in recipe.passes]
            if recipe.types:
                outputs = [builder.moved(value, type) for value, type in zip(outputs, recipe.types, strict=True)]
        else:
            inputs = [self._copy(builder.read(v), type) for v, type in zip(given, recipe.wanted, strict=True)]
            if g.cut is not None:
                builder.cut(site.name, g.cut, inputs[0], recipe.types[0], g.outputs)
                return
            outputs = builder.call(
                site.name, recipe.computation, inputs, recipe.types, site.origin, site.transposes, site.label
            )
        for n, value in zip(recipe.results, outputs, strict=True):
            builder.known[g.outputs[n]] = value

    def _copy(self, value: int, wanted: ArrayType) -> int:
        """A value as the type that its reader wants."""
        if self._builder.values[value] == wanted:
            return value
        known = self._copies.get((value, wanted))
        if known is None:
            known = self._copies[value, wanted] = self._builder.moved(value, wanted)
        return known
