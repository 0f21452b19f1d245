"""What the hosts of a bound program must know of its branches: which scalar decides, who reads it, and who is told.

CTL-1: a branch never asks the client. A *choice* is a scalar of the program that says which case of a branch is taken.
Its owner, the lowest host that holds the scalar, reads it when it is computed. All other hosts are told, because copies
of a computed value need not be equal on all hosts. In the owner's island, the owner tells each host; in each other
island it tells the lowest host concerned, the relay host, which tells its island. So the hosts of a gang hear one
decision from one host (GANG-1).

A host is concerned if it has a node that depends on the choice (nobody else needs to know), or if it owns a
choice that is made in a case of this one, or hands such a choice on.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from pathways import _native
from pathways.compiler.ir import LogicalProgram, Node, NodeKind


@dataclasses.dataclass(frozen=True)
class Choice:
    """A scalar that decides.

    `value` is its number in the program. `scope` is the predicate of the node that makes it; -1: none. `first_node` is
    the node behind that one; 0 for an argument. `hosts` are those concerned, ascending. `relays` maps each island to
    the host that tells its other hosts.
    """

    value: int
    cases: int
    scope: int
    first_node: int
    owner: int
    hosts: tuple[int, ...]
    relays: dict[int, int]


class Branching:
    """The choices and predicates of a program on its hosts. Equal on all hosts."""

    def __init__(
        self,
        program: LogicalProgram,
        hosts_of_value: Callable[[int], Sequence[int]],
        hosts_of_node: Callable[[Node], Iterable[int]],
        islands: Mapping[int, int],
    ) -> None:
        """`hosts_of_node` is asked for nodes that depend on a choice. `islands`: by host, its island; empty: all
        are in one.
        """
        self.predicates = program.predicates
        self._islands = islands
        same = {(p.value, p.case, p.parent): n for n, p in reversed(list(enumerate(program.predicates)))}
        #: Of each predicate, the first one that says the same. Two branches may have one scalar.
        self.same = [same[p.value, p.case, p.parent] for p in program.predicates]
        cases: dict[int, int] = {}  # by the value of the choice, as all that follows
        first: dict[int, int] = {}
        hosts: dict[int, set[int]] = {}
        if program.decides >= 0:  # nobody but the controller needs to know, which hears it from the owner
            cases[program.decides] = 2
            first[program.decides] = len(program.nodes)
            hosts[program.decides] = set()
        for p in program.predicates:
            cases[p.value] = max(cases.get(p.value, 0), p.case + 1)
        for number, node in enumerate(program.nodes):
            for value in self.deciding(node):
                first[value] = min(first.get(value, number), number)
                hosts.setdefault(value, set()).update(hosts_of_node(node))
            if node.kind is NodeKind.SELECT:
                cases[node.inputs[0]] = max(cases.get(node.inputs[0], 0), len(node.inputs) - 1)
        makers = {v: number for number, node in enumerate(program.nodes) for v in node.outputs if v in first}
        values = sorted(first, key=lambda value: (first[value], value))
        made: list[Choice] = []
        for value in reversed(values):  # a choice that is made in a case of another comes behind that
            owner = min(hosts_of_value(value))
            concerned = hosts[value] | {owner}
            maker = makers.get(value, -1)
            scope = program.nodes[maker].predicate if maker >= 0 else -1
            for predicate in self.chain(scope):
                hosts[self.predicates[predicate].value] |= concerned
            relays = {self._island(owner): owner}
            for host in sorted(concerned):
                relays.setdefault(self._island(host), host)
            made.append(Choice(value, cases[value], scope, maker + 1, owner, tuple(sorted(concerned)), relays))
        self.choices = made[::-1]
        #: The number of the choice that a value is.
        self.number = {choice.value: number for number, choice in enumerate(self.choices)}
        #: The number of the choice that says whether a loop goes on; -1: there is none.
        self.verdict = self.number[program.decides] if program.decides >= 0 else -1
        several = [n for n in dict.fromkeys(self.same) if len(self._hosts(n)) > 1]
        #: Of predicates that several hosts follow: the bit by which the controller compares the hosts (GANG-1).
        self.bits = {n: bit for bit, n in enumerate(several[: _native.PREDICATE_BITS])}

    def _hosts(self, predicate: int) -> tuple[int, ...]:
        number = self.number.get(self.predicates[predicate].value)
        return () if number is None else self.choices[number].hosts

    def _island(self, host: int) -> int:
        return self._islands[host] if self._islands else 0

    def chain(self, predicate: int) -> list[int]:
        """A predicate and those around it, inner ones first."""
        found = []
        while predicate >= 0:
            found.append(predicate)
            predicate = self.predicates[predicate].parent
        return found

    def deciding(self, node: Node) -> list[int]:
        """The values that decide whether a node is taken, inner ones first, or what it selects."""
        found = [self.predicates[p].value for p in self.chain(node.predicate)]
        return [*found, node.inputs[0]] if node.kind is NodeKind.SELECT else found

    def source(self, choice: Choice, host: int) -> int:
        """The host that tells a host; the owner itself on the owner."""
        relay = choice.relays[self._island(host)]
        return choice.owner if host == relay else relay

    def told(self, choice: Choice, host: int) -> list[int]:
        """The hosts that a host tells."""
        return [other for other in choice.hosts if other != choice.owner and self.source(choice, other) == host]


@dataclasses.dataclass(frozen=True)
class LocalBranches:
    """The choices and predicates in the plan of one host: the index of each there, by its number in the program."""

    choices: dict[int, int]
    predicates: dict[int, int]

    def of(self, branching: Branching, node: Node) -> int:
        """The predicate of a node in the plan."""
        return _native.NO_PREDICATE if node.predicate < 0 else self.predicates[branching.same[node.predicate]]


def write(branching: Branching, host: int, builder: _native.PlanBuilder, local: Mapping[int, int]) -> LocalBranches:
    """Writes what a host must know of the branches into its plan; `local` has the plan's number of each value."""
    here = LocalBranches({}, {})
    heard = [number for number, choice in enumerate(branching.choices) if host in choice.hosts]
    here.choices.update((number, index) for index, number in enumerate(heard))
    for n in dict.fromkeys(branching.same):
        if all(branching.number.get(branching.predicates[p].value) in here.choices for p in branching.chain(n)):
            here.predicates[n] = len(here.predicates)
    for number in heard:
        choice = branching.choices[number]
        builder.choice(
            number=number,
            owner=choice.owner,
            source=branching.source(choice, host),
            value=local[choice.value] if host == choice.owner else _native.NO_VALUE,
            cases=choice.cases,
            first_node=choice.first_node,
            told=branching.told(choice, host),
            scope=_native.NO_PREDICATE if choice.scope < 0 else here.predicates[branching.same[choice.scope]],
        )
    for n in here.predicates:
        predicate = branching.predicates[n]
        parent = predicate.parent
        builder.predicate(
            choice=here.choices[branching.number[predicate.value]],
            which=predicate.case,
            parent=_native.NO_PREDICATE if parent < 0 else here.predicates[branching.same[parent]],
            bit=branching.bits.get(n, _native.NO_BIT),
        )
    if branching.verdict >= 0 and branching.choices[branching.verdict].owner == host:
        choice_here = here.choices[branching.verdict]
        builder.predicate(choice=choice_here, which=1, parent=_native.NO_PREDICATE, bit=_native.VERDICT_BIT)
    return here
