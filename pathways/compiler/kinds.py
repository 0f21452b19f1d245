"""Finds groups that do the same in the same surroundings, so that jaxlib's compiler sees each kind of group once.

A program in many microbatches has few kinds of groups: those of the first microbatches, of the last ones, and of all
between. Two groups are of one kind if they have equal bodies on one slice, and if the same holds for what makes their
inputs and for what reads their outputs, and so on for `_ROUNDS` rounds. `emit` writes the first group of each kind, and
`unfolding` makes the nodes of all groups from what the compiler has made of the first ones.

The first group of a kind reads what the first groups of other kinds make. They come earlier, because they come no later
than what the group itself reads. So the module of the first groups is a program.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.partition.groups import Group

#: How far from a group its surroundings are compared.
_ROUNDS = 2
#: Programs with fewer groups, or of which more than this share would be left, are compiled as they are.
_FEWEST = 32
_MOST_LEFT = 0.75


@dataclasses.dataclass(frozen=True)
class Kinds:
    """`first[n]` is the number of the first group of the kind of group n.

    `same` maps each variable that a group makes to that of the first group, and each argument to the first of its kind.
    `kept` are those of the first groups' results that only groups which are left out read.
    """

    first: tuple[int, ...]
    same: Mapping[Any, Any]
    kept: tuple[Any, ...]

    def alone(self, group: Group) -> Group:
        """A first group as it is written: it reads what first groups make."""
        reads = [self.same.get(v, v) for v in group.reads]
        outputs = [v for v in group.outputs if self.same[v] is v] if group.cut is not None else group.outputs
        return dataclasses.replace(group, reads=reads, outputs=outputs)


def find(
    groups: Sequence[Group],
    key_of: Callable[[Group], Hashable],
    arguments: Mapping[Any, Hashable],
    results: Sequence[Any],
) -> Kinds | None:
    """The kinds of a program's groups; None: the program has few groups, or few of one kind.

    `key_of` gives a key that only groups share which can have one body, and `arguments` one that only arguments share
    which can be in each other's place. Arguments, and the parts that a group cuts an array into, are of one kind if
    those who read them are.
    """
    if len(groups) < _FEWEST:
        return None
    readers: dict[Any, list[tuple[int, int]]] = {}
    for n, g in enumerate(groups):
        for position, v in enumerate(g.reads):
            readers.setdefault(v, []).append((n, position))
    returned: dict[Any, list[int]] = {}
    for number, v in enumerate(results):
        if not isinstance(v, _jaxlib.Literal):
            returned.setdefault(v, []).append(number)
    returns = {v: tuple(numbers) for v, numbers in returned.items()}
    of: dict[Any, int] = {v: n for n, v in enumerate(arguments)}  # values that are compared by their readers alone
    maker: dict[Any, tuple[int, int]] = {}
    for n, g in enumerate(groups):
        if g.cut is None:
            maker.update((v, (n, position)) for position, v in enumerate(g.outputs))
        else:
            of.update((v, len(of)) for v in g.outputs)
    alone = [(readers.get(v, ()), returns.get(v)) for v in of]
    shades = _numbered(
        [*arguments.values(), *[("part of", n) for n, g in enumerate(groups) if g.cut for _ in g.outputs]]
    )
    made: list[list[Any]] = [[maker.get(v) or of.get(v, v) for v in g.reads] for g in groups]
    read = [[(readers.get(v, ()), returns.get(v)) for v in g.outputs] if g.cut is None else [] for g in groups]
    colors = _numbered([(g.cut and n, key_of(g)) for n, g in enumerate(groups)])
    width = 1 + max((len(g.reads) + len(g.outputs) for g in groups), default=0)
    for _ in range(_ROUNDS):
        if len(set(colors)) > _MOST_LEFT * len(groups):
            return None
        # A number says the color of a group and a position in it.
        bases, before, tints = [color * width for color in colors], colors, shades

        def who(those: Sequence[tuple[int, int]], back: Any, bases: list[int] = bases) -> Hashable:
            """Who reads a value."""
            if len(those) == 1 and back is None:
                return bases[those[0][0]] + those[0][1]
            return frozenset([bases[m] + at for m, at in those]), back

        shades = _numbered([(shade, who(*those)) for shade, those in zip(tints, alone, strict=True)])
        colors = _numbered(
            [
                (
                    before[n],
                    tuple([bases[v[0]] + v[1] if type(v) is tuple else -1 - tints[v] for v in inputs]),
                    tuple([who(those, back) for those, back in outputs]),
                )
                for n, (inputs, outputs) in enumerate(zip(made, read, strict=True))
            ]
        )
    first_of: dict[int, int] = {}
    first = tuple([first_of.setdefault(color, n) for n, color in enumerate(colors)])
    if len(first_of) > _MOST_LEFT * len(groups):
        return None
    first_shade: dict[int, Any] = {}
    same = {v: first_shade.setdefault(shade, v) for v, shade in zip(of, shades, strict=True)}
    for n, g in enumerate(groups):
        if g.cut is None:
            same.update(zip(g.outputs, groups[first[n]].outputs, strict=True))
    firsts = [groups[n] for n in first_of.values()]
    if any(len({same.get(v, v) for v in g.reads}) < len({*g.reads}) for g in firsts):
        return None  # two inputs would become one, and the compiler would make another computation
    seen = {same.get(v, v) for g in firsts for v in g.reads}
    kept = [
        v for g in firsts for v in g.outputs if same[v] is v and v in readers and v not in seen and v not in returns
    ]
    return Kinds(first, same, tuple(kept))


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
