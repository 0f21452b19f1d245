"""The most bytes of a run on one device, found by a walk over the nodes of its program in their order (MEM-2).

A branch takes the maximum over its cases. The walk goes through each case alone, from what is there before the branch,
and goes on with the larger rest. A value from outside that a case reads last counts until the end of the branch in the
other cases: there the node that is not run lets go of it, at its turn. The result of a branch is the buffer of what the
taken case gives, so the select makes nothing new if nobody else needs that buffer. What a call has taken over is gone,
even if a select behind it gives that value in another case (`pathways.plan.guarding`).

Never less than what a host holds: what counts too long or twice is said above or at its place. Pure.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

from pathways.compiler.ir import LogicalProgram, NodeKind


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch of a program: the nodes of each case, then the selects, by number. `others`: nodes in between."""

    cases: tuple[tuple[int, ...], ...]
    selects: tuple[int, ...]
    others: tuple[int, ...]


class Branches:
    """Where the branches of a program are: each has nodes of each of its cases, and selects behind them."""

    def __init__(self, program: LogicalProgram) -> None:
        groups: list[list[int]] = []  # of each branch: the predicates of its cases
        around: list[list[tuple[int, int]]] = []  # of each predicate: the branches around it and their cases
        newest: dict[tuple[int, int], int] = {}
        for number, p in enumerate(program.predicates):
            group = newest.get((p.value, p.parent), -1)
            if group < 0 or program.predicates[groups[group][-1]].case >= p.case:
                group = newest[p.value, p.parent] = len(groups)
                groups.append([])
            groups[group].append(number)
            around.append([*(around[p.parent] if p.parent >= 0 else ()), (group, p.case)])
        self.counts = [1 + max(program.predicates[n].case for n in group) for group in groups]
        self._last: dict[int, int] = {}  # the last node of each branch
        #: Of each node, outer ones first: the branches of which it is, and its case there; -1: it is a select.
        self.of: list[list[tuple[int, int]]] = []
        open_: dict[tuple[int, int], int] = {}
        for number, node in enumerate(program.nodes):
            places = list(around[node.predicate]) if node.predicate >= 0 else []
            for group, _ in places:
                first = program.predicates[groups[group][0]]
                open_[first.value, first.parent] = group
            if node.kind is NodeKind.SELECT and (node.inputs[0], node.predicate) in open_:
                places.append((open_[node.inputs[0], node.predicate], -1))
            self._last.update((group, number) for group, _ in places)
            self.of.append(places)

    def branch(self, nodes: Sequence[int], at: int, depth: int) -> tuple[Branch | None, int]:
        """The branch that begins with nodes[at], inside of `depth` others, and the index of the node behind it; None:
        the node is in no further branch.
        """
        if len(self.of[nodes[at]]) <= depth:
            return None, at + 1
        group = self.of[nodes[at]][depth][0]
        end = bisect.bisect_right(nodes, self._last[group])
        cases: list[list[int]] = [[] for _ in range(self.counts[group])]
        selects: list[int] = []
        others: list[int] = []
        for number in nodes[at:end]:
            mine, case = self.of[number][depth] if len(self.of[number]) > depth else (-1, -1)
            (others if mine != group else selects if case < 0 else cases[case]).append(number)
        return Branch(tuple(map(tuple, cases)), tuple(selects), tuple(others)), end


class Walk:
    """A walk over a program for one device, or for some that need the same."""

    def __init__(
        self,
        program: LogicalProgram,
        size: Callable[[int], int],
        taken: Callable[[int], int],
        donates: Sequence[Sequence[bool]],
        last_use: Mapping[int, int],
        transferred: Set[int],
        arriving: Mapping[int, Sequence[int]],
        nodes: Sequence[int],
    ) -> None:
        """`size(value)`: bytes on the device. `taken(node)`: bytes that a call takes while it runs. `nodes`: those that
        read or make a value on the device, in order.

        `transferred` are the outputs of transfers that take memory of the device. `arriving[node]` are those that may
        exist from a node on. The others may exist at any time; they are not counted here.
        """
        self._program = program
        self._size = size
        self._taken = taken
        self._donates = donates
        self._last_use = last_use
        self._transferred = transferred
        self._arriving = arriving
        self._nodes = nodes
        self._arrives = {v for values in arriving.values() for v in values}
        self._kept = set(program.results)
        self._stays = self._kept | transferred
        given = {v for v, donated in zip(program.arguments, program.donated_arguments, strict=True) if donated}
        made = {v for node in program.nodes for v in node.outputs}
        self._mortal = (made | given) - self._kept - (transferred - self._arrives)
        self._branches = Branches(program)

    def peak(self) -> int:
        """The most bytes at any point."""
        return self._sequence(self._nodes, 0, 0)[0]

    def _sequence(self, nodes: Sequence[int], depth: int, live: int) -> tuple[int, int]:
        """The peak of nodes that are run one after the other, `depth` branches deep, and what is left."""
        peak, at = live, 0
        while at < len(nodes):
            branch, end = self._branches.branch(nodes, at, depth)
            if branch is not None:
                highest, live = self._branch(branch, depth, live)
            else:
                highest, live = self._step(nodes[at], live)
            peak, at = max(peak, highest), end
        return peak, live

    def _branch(self, branch: Branch, depth: int, live: int) -> tuple[int, int]:
        inside = [n for case in branch.cases for n in case]
        if depth == 0:  # what may exist from a node in here on may exist whichever case is taken
            live += sum(self._size(v) for n in inside for v in self._arriving.get(n, ()))
        if branch.others:  # no pass orders nodes so; then the cases count together, which is never less
            peak, live = self._sequence(sorted((*inside, *branch.others)), depth + 1, live)
            for number in branch.selects:
                highest, live = self._step(number, live)
                peak = max(peak, highest)
            return peak, live
        peak, rest = live, []
        made = [{v for n in case for v in self._program.nodes[n].outputs} for case in branch.cases]
        dying = [self._dying_from_outside(case, own) for case, own in zip(branch.cases, made, strict=True)]
        come = [sum(map(self._size, own & self._arrives)) for own in made]
        everything = set().union(*made)
        gone = [{v for n in case for v in self._given(n)} for case in branch.cases]
        for which, case in enumerate(branch.cases):
            highest, after = self._sequence(case, depth + 1, live - sum(come) + come[which])
            for number in branch.selects:
                top, after = self._step(number, after, (everything - made[which]) | gone[which], which)
                highest = max(highest, top)
            peak = max(peak, highest)
            rest.append(after - sum(dying) + dying[which])
        return peak, max(rest)

    def _given(self, number: int) -> set[int]:
        """The inputs that a node donates and that nobody reads behind it, if it is run."""
        node = self._program.nodes[number]
        given = {v for v, gives in zip(node.inputs, self._donates[number], strict=False) if gives}
        return {v for v in given if self._last_use[v] == number or self._is_gone(v, number)}

    def _is_gone(self, value: int, number: int) -> bool:
        """Whether only selects read a value behind a node of a case, and those give it in other cases."""
        taken, at = {}, self._program.nodes[number].predicate
        while at >= 0:
            predicate = self._program.predicates[at]
            taken[predicate.value], at = predicate.case, predicate.parent
        behind = [node for node in self._program.nodes[number + 1 :] if value in node.inputs]
        return all(
            node.kind is NodeKind.SELECT
            and node.inputs[0] in taken
            and node.inputs[1 + taken[node.inputs[0]]] != value
            and node.inputs[0] != value
            for node in behind
        )

    def _dying_from_outside(self, case: Sequence[int], made: Set[int]) -> int:
        """The bytes of the values that nobody reads behind these nodes, which do not make them."""
        read = {v for n in case for v in self._program.nodes[n].inputs if self._last_use[v] == n}
        return sum(map(self._size, (read - made) & self._mortal))

    def _step(
        self, number: int, live: int, absent: Set[int] = frozenset(), which: int | None = None
    ) -> tuple[int, int]:
        """The peak of one node and what is left. `absent`: values that were not made; `which`: the case of a select."""
        node, size = self._program.nodes[number], self._size
        outputs = dict.fromkeys(node.outputs)
        made = sum(size(v) for v in outputs if v not in self._transferred)
        if node.predicate < 0:
            made += sum(map(size, self._arriving.get(number, ())))
        given = self._given(number)
        dying = ({v for v in node.inputs if self._last_use[v] == number} | given) & self._mortal
        dying -= absent
        taken = 0
        if node.kind is NodeKind.CALL:
            taken = -self._taken(number)
            taken += sum(
                size(v) for v, gives in zip(node.inputs, self._donates[number], strict=False) if gives and v in dying
            )
        elif which is not None and node.inputs[1 + which] in dying:
            taken = size(node.inputs[1 + which])
        peak = live + made - taken
        live += made - sum(map(size, dying))
        # An output that no node reads, and that is no result, is freed at once.
        unread = (v for v in outputs if v not in self._last_use and v not in self._stays)
        return peak, live - sum(map(size, unread))
