"""The schedules by definition: the order of the forward, backward and weight steps on each stage.

A unit is what a stage does for one microbatch in one phase, for one of its chunks. There are S stages and M
microbatches. A stage has v chunks of the model, one except under Interleaved1F1B and Circular; chunk c of stage s is
part c S + s of the model. TF and TB are the times of a stage's forward and backward step, TW that of its weight
gradients if they are a step of their own (then TB is without them).

| schedule | takes | microbatches whose activations stage s keeps |
|---|---|---|
| GPipe | (M + S - 1) (TF + TB) | M |
| 1F1B | (M + S - 1) (TF + TB) | min(S - s, M) |
| Interleaved1F1B | M (TF + TB) + (S - 1) (TF + TB) / v | of min(M v, 2 (S - s - 1) + (v - 1) S + 1) chunks |
| Circular, M divisible by S | M (TF + TB) + (S - 1) (TF + TB) / v | M, of each chunk |
| ZeroBubbleH1, M >= S, TW <= TF, TB | M (TF + TB + TW) + (S - 1) (TF + TB - TW) | min(S, M) |

Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream-Flush, ICML 2021, and Megatron-LM, SC 2021
(interleaved); Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024. Circular is the name of the MPMD compiler.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from pathways.compiler.ir import Phase


class Unit(NamedTuple):
    """What a stage does for one microbatch in one phase, for one of its chunks."""

    phase: Phase
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"{self.phase.value} {self.microbatch}{chunk}"


class Order(Protocol):
    """A schedule: the order of the units on one stage. All stages have the same number of chunks."""

    def __call__(self, stage: int, stages: int, microbatches: int, chunks: int = 1) -> Sequence[Unit]:
        """`stage` is from 0 to `stages` - 1; `microbatches` and `chunks` are at least 1."""


def gpipe(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Unit]:
    """All forward steps, then all backward steps, each in the order of the microbatches. Every stage is alike."""
    del stage, stages, chunks
    return [Unit(phase, m) for phase in (Phase.FORWARD, Phase.BACKWARD) for m in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Unit]:
    """1F1B with a flush: a warm-up of as many forward steps as there are later stages, then pairs of one forward and
    one backward step, then the backward steps that are left.
    """
    del chunks
    forward, backward = ([Unit(phase, m) for m in range(microbatches)] for phase in (Phase.FORWARD, Phase.BACKWARD))
    return _paired(forward, backward, stages - stage - 1)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Unit]:
    """1F1B with several chunks per stage: the forward steps of `stages` microbatches of one chunk, then of the next
    chunk, and so on; backward steps the same with the last chunk first. The warm-up is two steps per later stage, and a
    group of `stages` steps for each chunk but one. `microbatches` must divide by `stages`.
    """
    forward, backward = _in_groups(stages, microbatches, chunks)
    return _paired(forward, backward, 2 * (stages - stage - 1) + (chunks - 1) * stages)


def circular(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Unit]:
    """The steps of the interleaved schedule, all forward steps before all backward steps. Every stage is alike.

    If `microbatches` does not divide by `stages`, the last group is smaller.
    """
    del stage
    forward, backward = _in_groups(stages, microbatches, chunks)
    return forward + backward


def zero_bubble_h1(stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Unit]:
    """1F1B in which a backward step makes the gradient of the stage's input only. The gradients of the weights follow:
    those of microbatch m directly behind backward step m + `stage`, what is left of them at the end.
    """
    order: list[Unit] = []
    for unit in one_forward_one_backward(stage, stages, microbatches, chunks):
        order.append(unit)
        if unit.phase is Phase.BACKWARD and unit.microbatch >= stage:
            order.append(Unit(Phase.WEIGHTS, unit.microbatch - stage))
    return order + [Unit(Phase.WEIGHTS, m) for m in range(max(microbatches - stage, 0), microbatches)]


def _paired(forward: Sequence[Unit], backward: Sequence[Unit], warm: int) -> list[Unit]:
    """`warm` forward steps, then pairs of one forward and one backward step, then the backward steps that are left."""
    warm = min(warm, len(forward))
    order = list(forward[:warm])
    for pair in zip(forward[warm:], backward, strict=False):
        order += pair
    return order + list(backward[len(forward) - warm :])


def _in_groups(stages: int, microbatches: int, chunks: int) -> tuple[list[Unit], list[Unit]]:
    """The forward and the backward steps of a stage in groups of `stages` microbatches."""
    forward: list[Unit] = []
    backward: list[Unit] = []
    for first in range(0, microbatches, stages):
        group = range(first, min(first + stages, microbatches))
        forward += [Unit(Phase.FORWARD, m, chunk) for chunk in range(chunks) for m in group]
        backward += [Unit(Phase.BACKWARD, m, chunk) for chunk in reversed(range(chunks)) for m in group]
    return forward, backward


class Schedule(NamedTuple):
    """A schedule that has a name."""

    order: Order
    has_chunks: bool = False  # it is for stages of several chunks
    has_weight_steps: bool = False  # weight gradients are steps of their own


#: A new schedule is a row here.
ORDERS: Mapping[str, Schedule] = {
    "GPipe": Schedule(gpipe),
    "1F1B": Schedule(one_forward_one_backward),
    "Interleaved1F1B": Schedule(interleaved, has_chunks=True),
    "ZeroBubbleH1": Schedule(zero_bubble_h1, has_weight_steps=True),
    "Circular": Schedule(circular, has_chunks=True),
}

#: The schedules for stages of several chunks.
CHUNKED = frozenset(name for name, schedule in ORDERS.items() if schedule.has_chunks)
