"""`schedule="auto"`: finds the order with the smallest bubble among those that keep few enough activations.

The candidates are the schedules by definition, and lists: each stage takes a backward step if there is one, else a
forward step if fewer than c microbatches are in flight on it. The numbers c are what a candidate chooses, stage by
stage. `model` says how long each candidate takes. Of those that take as long as the shortest, the one that keeps the
fewest activations wins.

If there are few numbers c, all are tried. Else a few families of them are tried first, and then the numbers of the best
one are changed one by one for as long as that helps.

Source of the lists: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 3. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from pathways.compiler.ir import Phase
from pathways.compiler.lengths import Lengths
from pathways.compiler.orders import Unit, gpipe, one_forward_one_backward
from pathways.compiler.schedule import model

#: The definitions that every pipeline with one chunk per slice can follow.
_DEFINITIONS = {"1F1B": one_forward_one_backward, "GPipe": gpipe}

#: What a list takes first.
_PHASES = (Phase.BACKWARD, Phase.FORWARD)

#: Up to so many lists are compared without a choice of which.
_ALL = 64

#: So often at most are the numbers of the best list changed by one.
_ROUNDS = 8

#: Times that differ by less than this share count as equal: sums of the same lengths in another order.
_EQUAL = 1e-9


@dataclasses.dataclass(frozen=True)
class Choice:
    """An order for a pipeline: `sequences[stage]`. `makespan` has the unit of the lengths.

    `in_flight[stage]` is the most microbatches whose activations the stage keeps at one time.
    """

    name: str
    sequences: tuple[tuple[Unit, ...], ...]
    makespan: float
    in_flight: tuple[int, ...]

    def is_better(self, other: Choice | None) -> bool:
        """True if it takes less time, or as long with fewer activations."""
        if other is None or abs(self.makespan - other.makespan) > _EQUAL * other.makespan:
            return other is None or self.makespan < other.makespan
        return (max(self.in_flight), sum(self.in_flight)) < (max(other.in_flight), sum(other.in_flight))


def choose(stages: int, microbatches: int, lengths: Sequence[Lengths], limits: Sequence[int] = ()) -> Choice:
    """The best order that is found.

    Args:
        stages: at least 1, one slice each.
        microbatches: at least 1.
        lengths: one item per stage.
        limits: the most microbatches that each stage may have in flight, from 1 on; () if there is no limit.
    """
    caps = [min(limit, microbatches) for limit in limits or (microbatches,) * stages]
    best: Choice | None = None
    for name, order in _DEFINITIONS.items():
        choice = _measured(name, [order(stage, stages, microbatches) for stage in range(stages)], lengths)
        if choice is not None and all(n <= cap for n, cap in zip(choice.in_flight, caps, strict=True)):
            best = choice if choice.is_better(best) else best
    tried: dict[tuple[int, ...], Choice] = {}

    def attempt(numbers: tuple[int, ...]) -> Choice:
        if numbers not in tried:
            sequences = listed(numbers, microbatches, lengths)
            choice = _measured("", sequences, lengths)
            assert choice is not None  # it was made step by step, so it can be followed
            tried[numbers] = dataclasses.replace(choice, name=f"at most {_words(choice.in_flight)} in flight")
        return tried[numbers]

    found: Choice | None = None
    start: tuple[int, ...] = ()
    for numbers in _families(caps, stages, microbatches):
        choice = attempt(numbers)
        if choice.is_better(found):
            found, start = choice, numbers
    assert found is not None
    for _ in range(_ROUNDS):
        for numbers in _neighbours(start, caps):
            choice = attempt(numbers)
            if choice.is_better(found):
                found, start = choice, numbers
                break
        else:
            break
    return found if found.is_better(best) else best or found


def listed(numbers: Sequence[int], microbatches: int, lengths: Sequence[Lengths]) -> list[list[Unit]]:
    """The sequences of the list schedule with these numbers c, one per stage, each from 1 on."""
    stages = len(numbers)
    definition = gpipe(0, stages, microbatches)  # its forward steps, then its backward steps
    units = {Phase.FORWARD: definition[:microbatches], Phase.BACKWARD: definition[microbatches:]}
    ends: dict[tuple[Phase, int], list[float]] = {(p, s): [] for p in _PHASES for s in range(stages)}
    free = [0.0] * stages
    sequences: list[list[Unit]] = [[] for _ in range(stages)]

    def options(s: int) -> Iterator[tuple[float, int]]:
        """The next steps of stage s: when each can start, and which of `_PHASES` it is."""
        forward, backward = (len(ends[phase, s]) for phase in (Phase.FORWARD, Phase.BACKWARD))
        if backward < forward:
            if s + 1 == stages:
                yield free[s], 0
            elif backward < len(ends[Phase.BACKWARD, s + 1]):
                yield max(free[s], ends[Phase.BACKWARD, s + 1][backward] + lengths[s + 1].transfer), 0
        if forward < microbatches and forward - backward < numbers[s]:
            if s == 0:
                yield free[s], 1
            elif forward < len(ends[Phase.FORWARD, s - 1]):
                yield max(free[s], ends[Phase.FORWARD, s - 1][forward] + lengths[s - 1].transfer), 1

    for _ in range(2 * stages * microbatches):
        # No later choice makes a step possible before the earliest one, because no length is below 0.
        start, which, s = min((*step, s) for s in range(stages) for step in options(s))
        phase = _PHASES[which]
        each = lengths[s]
        free[s] = start + (each.forward if phase is Phase.FORWARD else each.backward + each.weights)
        sequences[s].append(units[phase][len(ends[phase, s])])
        ends[phase, s].append(free[s])
    return sequences


def _measured(name: str, sequences: Sequence[Sequence[Unit]], lengths: Sequence[Lengths]) -> Choice | None:
    tasks = model.tasks_of(sequences, lengths)
    if tasks is None:
        return None
    return Choice(
        name,
        tuple(map(tuple, sequences)),
        model.run(tasks).makespan,
        tuple(model.in_flight(each) for each in sequences),
    )


def _families(caps: Sequence[int], stages: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """The numbers c of the lists that are compared first."""
    count = 1
    for cap in caps:
        count *= cap
    if count <= _ALL:
        yield from itertools.product(*(range(1, cap + 1) for cap in caps))
        return
    for extra in (*range(min(microbatches, 2 * stages)), microbatches):
        for slope in (0, 1, 2):  # alike; one more per later stage, as 1F1B; two more, for transfers that take long
            wanted = (1 + extra + slope * (stages - stage - 1) for stage in range(stages))
            yield tuple(min(n, cap) for n, cap in zip(wanted, caps, strict=True))


def _neighbours(numbers: tuple[int, ...], caps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for stage, cap in enumerate(caps):
        for n in (numbers[stage] - 1, numbers[stage] + 1):
            if 1 <= n <= cap:
                yield (*numbers[:stage], n, *numbers[stage + 1 :])


def _words(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else ", ".join(map(str, numbers))
