"""The model of time: its makespan is each schedule's formula; and `schedule="auto"` is as good as trying all orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from pipeline_cases import compiled, inside, orders, placed_network, slices

from pathways import errors
from pathways.compiler.ir import Phase
from pathways.compiler.lengths import Lengths, per_stage
from pathways.compiler.options import Options
from pathways.compiler.orders import ORDERS
from pathways.compiler.schedule import model, search

F, B, W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS
SIZES = list(itertools.product(range(2, 9), range(1, 17)))
Sequences = list[list[tuple[Any, ...]]]


def makespan(sequences: Sequence[Sequence[Any]], lengths: Sequence[Lengths]) -> float:
    tasks = model.tasks_of(sequences, lengths)
    assert tasks is not None
    return model.run(tasks).makespan


def zero_bubble(stages: int, microbatches: int) -> Sequences:
    """ZeroBubbleH1 by definition: 1F1B with W(i) directly behind B(i + stage), the rest at the end."""
    sequences: Sequences = []
    for stage in range(stages):
        sequence: list[tuple[Any, ...]] = []
        for phase, m in (unit[:2] for unit in ORDERS["1F1B"].order(stage, stages, microbatches)):
            sequence.append((phase, m))
            if phase is B and m >= stage:
                sequence.append((W, m - stage))
        sequences.append(sequence + [(W, m) for m in range(max(0, microbatches - stage), microbatches)])
    return sequences


def circular(stages: int, microbatches: int, chunks: int) -> Sequences:
    """Groups of `stages` microbatches, chunk after chunk; all forward steps come before all backward steps."""
    groups = [range(first, min(first + stages, microbatches)) for first in range(0, microbatches, stages)]
    forward = [(F, m, c) for group in groups for c in range(chunks) for m in group]
    backward = [(B, m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    return [[*forward, *backward] for _ in range(stages)]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_with_equal_lengths_the_makespan_is_the_formula(schedule: str) -> None:
    for stages, microbatches in SIZES:
        sequences = [ORDERS[schedule].order(stage, stages, microbatches) for stage in range(stages)]
        tasks = model.tasks_of(sequences, [Lengths(1.5, 2.0)] * stages)
        assert tasks is not None
        times = model.run(tasks)
        assert times.makespan == (microbatches + stages - 1) * 3.5
        assert times.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
        kept = [min(stages - s, microbatches) if schedule == "1F1B" else microbatches for s in range(stages)]
        assert [model.in_flight(sequence) for sequence in sequences] == kept


def test_gradients_of_weights_as_steps_of_their_own() -> None:
    f, b, w = 2.0, 2.0, 1.5
    for stages, microbatches in SIZES:
        m, s = microbatches, stages
        expected = max(m * (f + b + w) + (s - 1) * (f + b - w), (m + s - 1) * (f + b) + w)
        divided = [Lengths(f, b, w)] * stages
        assert makespan(zero_bubble(stages, m), divided) == pytest.approx(expected)
        # A schedule that does not divide the backward step takes both of its parts together.
        one = [ORDERS["1F1B"].order(stage, stages, m) for stage in range(stages)]
        assert makespan(one, divided) == pytest.approx((m + s - 1) * (f + b + w))
        assert [model.in_flight(each) for each in zero_bubble(stages, m)] == [min(s, m)] * s


def test_several_chunks_per_slice() -> None:
    for stages, groups, chunks in itertools.product(range(2, 6), (1, 2, 4), (1, 2, 3)):
        m = stages * groups
        expected = m * 6.0 + (stages - 1) * 6.0 / chunks  # forward 2 and backward 4 for all chunks together
        lengths = [Lengths(2.0 / chunks, 4.0 / chunks)] * (stages * chunks)
        assert makespan(circular(stages, m, chunks), lengths) == pytest.approx(expected)


def test_transfers_delay_what_reads_them() -> None:
    sequences = [ORDERS["GPipe"].order(stage, 3, 1) for stage in range(3)]
    assert makespan(sequences, [Lengths(1, 2, 0, 0.5)] * 3) == 3 * 3 + 4 * 0.5


def test_sequences_that_wait_for_themselves_have_no_times() -> None:
    assert model.tasks_of([[(B, 0), (F, 0)]], [Lengths(1, 2)]) is None
    assert model.tasks_of([[(F, 0), (F, 1), (B, 0), (B, 1)], [(F, 1), (B, 1), (F, 0)]], [Lengths(1, 2)] * 2) is not None
    assert (
        model.tasks_of([[(F, 0), (B, 0), (F, 1), (B, 1)], [(F, 1), (F, 0), (B, 0), (B, 1)]], [Lengths(1, 2)] * 2)
        is None
    )


def test_a_gang_takes_all_of_its_rows_at_once() -> None:
    tasks = [model.Task((0,), 2.0), model.Task((0, 1), 1.0), model.Task((1,), 3.0, ((0, 5.0),)), model.Task((2,), 1.0)]
    times = model.run(tasks)
    assert times.starts == (0.0, 2.0, 7.0, 0.0) and times.ends == (2.0, 3.0, 10.0, 1.0)
    assert times.bubble == pytest.approx(1 - 8 / 30)
    assert model.run([]).makespan == model.run([]).bubble == 0


# ------------------------------------------------------------------------------------------------------------- auto


def all_orders(microbatches: int) -> list[list[tuple[Phase, int]]]:
    """All orders of a stage, with the forward steps in the order of the microbatches."""
    found = []

    def extend(order: list[tuple[Phase, int]], begun: int, live: frozenset[int]) -> None:
        if len(order) == 2 * microbatches:
            found.append(order)
            return
        if begun < microbatches:
            extend([*order, (F, begun)], begun + 1, live | {begun})
        for m in sorted(live):
            extend([*order, (B, m)], begun, live - {m})

    extend([], 0, frozenset())
    return found


def best_of_all(stages: int, microbatches: int, lengths: Sequence[Lengths], limits: Sequence[int]) -> float:
    each = [[order for order in all_orders(microbatches) if model.in_flight(order) <= limit] for limit in limits]
    spans = []
    for sequences in itertools.product(*each):
        tasks = model.tasks_of(sequences, lengths)
        if tasks is not None:
            spans.append(model.run(tasks).makespan)
    return min(spans)


def draws(count: int) -> Iterator[Callable[[float, float], float]]:
    for seed in range(count):
        yield random.Random(seed).uniform


def test_auto_against_all_orders() -> None:
    cases = equal = 0
    for stages, microbatches in itertools.product((1, 2, 3), (1, 2, 3)):
        for uniform in draws(12):
            lengths = [Lengths(uniform(0.2, 2), uniform(0.2, 4)) for _ in range(stages)]
            limits = [1 + int(uniform(0, microbatches)) for _ in range(stages)]
            choice = search.choose(stages, microbatches, lengths, limits)
            assert all(n <= limit for n, limit in zip(choice.in_flight, limits, strict=True))
            best = best_of_all(stages, microbatches, lengths, limits)
            assert choice.makespan >= best - 1e-9
            cases, equal = cases + 1, equal + (choice.makespan <= best + 1e-9)
            for numbers in itertools.product(*(range(1, limit + 1) for limit in limits)):
                assert choice.makespan <= makespan(search.listed(numbers, microbatches, lengths), lengths) + 1e-9
    assert equal >= 0.95 * cases, (equal, cases)


def test_auto_is_never_slower_than_the_definitions() -> None:
    for (stages, microbatches), uniform in zip([(4, 8), (8, 4), (5, 16), (8, 16)], draws(4), strict=True):
        lengths = [Lengths(uniform(0.2, 2), uniform(0.2, 4), 0.0, uniform(0, 1)) for _ in range(stages)]
        choice = search.choose(stages, microbatches, lengths)
        assert choice.makespan == makespan(choice.sequences, lengths)
        assert choice.in_flight == tuple(map(model.in_flight, choice.sequences))
        for order in ("GPipe", "1F1B"):
            sequences = [ORDERS[order].order(stage, stages, microbatches) for stage in range(stages)]
            assert choice.makespan <= makespan(sequences, lengths) + 1e-9


def test_of_orders_that_take_as_long_auto_takes_the_one_with_fewer_activations() -> None:
    choice = search.choose(4, 8, [Lengths(1, 2)] * 4)
    assert (choice.name, choice.makespan, choice.in_flight) == ("1F1B", 33, (4, 3, 2, 1))
    # With transfers that take as long as steps, more microbatches in flight pay.
    choice = search.choose(2, 8, [Lengths(1, 1, 0, 1)] * 2)
    assert choice.in_flight[0] > 2
    assert choice.makespan < makespan([ORDERS["1F1B"].order(s, 2, 8) for s in range(2)], [Lengths(1, 1, 0, 1)] * 2)


def test_limits_cost_time() -> None:
    lengths = [Lengths(1, 2)] * 4
    spans = [search.choose(4, 8, lengths, [limit] * 4).makespan for limit in (4, 3, 2, 1)]
    assert spans == sorted(spans) and spans[0] == 33 and spans[3] == 8 * 12


def test_auto_orders_a_program_by_its_flops_or_by_given_lengths() -> None:
    meshes = slices(3)
    fun = inside(placed_network(meshes))
    by_flops = compiled(fun, meshes, 4, "auto")
    assert by_flops.schedule == "auto (1F1B)"  # all stages alike
    given = compiled(fun, meshes, 4, "auto", lengths=[{"F": 1, "B": 2}, {"F": 4, "B": 1}, {"F": 1, "B": 1}])
    choice = search.choose(3, 4, [Lengths(1, 2), Lengths(4, 1), Lengths(1, 1)])
    assert given.schedule == f"auto ({choice.name})"
    expected = [[f"{unit[0].name[0]}{unit[1]}" for unit in sequence] for sequence in choice.sequences]
    assert list(orders(given).values()) == expected
    assert model.stages_in_flight(given) == [list(choice.in_flight)]
    with pytest.raises(errors.OptionError, match="one for each of 3 stages, got 2 items"):
        compiled(fun, meshes, 4, "auto", lengths=[{"F": 1, "B": 2}, {"F": 4, "B": 1}])


def test_the_text_s_order_and_the_schedules_have_names() -> None:
    meshes = slices(2)
    fun = inside(placed_network(meshes))
    assert [compiled(fun, meshes, 2, name).schedule for name in ("none", "GPipe")] == ["none", "GPipe"]


# ---------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "expected .* got 3"),
        ("FB", "expected .* got 'FB'"),
        ([], "or a sequence with one such per stage, got"),
        ({"F": 1}, 'the keys "F" .forward. and "B"'),
        ({"F": 1, "B": 2, "w": 1}, "got .*'w'"),
        ({"F": -1, "B": 2}, r"lengths\['F'\]: expected a number of seconds from 0 on, got -1"),
        ({"F": 1, "B": float("nan")}, r"lengths\['B'\]: .* got nan"),
        ({"F": 1, "B": True}, r"lengths\['B'\]: .* got True"),
        ({"F": 0, "B": 0}, "expected a length above 0"),
        ([{"F": 1, "B": 2}, 7], r"lengths\[1\]: expected a mapping"),
    ],
)
def test_lengths_that_make_no_sense(given: Any, words: str) -> None:
    with pytest.raises(errors.OptionError, match=words):
        Options.of({"schedule": "auto", "lengths": given})


def test_lengths() -> None:
    assert Lengths.of({"F": 1, "B": 2, "T": 0.5}) == (Lengths(1.0, 2.0, 0.0, 0.5),)
    assert Lengths.of([Lengths(1, 2), {"F": 3, "B": 4, "W": 5}]) == (Lengths(1, 2), Lengths(3, 4, 5))
    assert Lengths.of(Lengths(1, 2)) == (Lengths(1, 2),)
    assert per_stage([Lengths(1, 2)], 3) == (Lengths(1, 2),) * 3
    assert Options.of({"lengths": {"F": 1, "B": 2}}).lengths == (Lengths(1, 2),)
