"""The schedules by definition: the order of the forward and backward steps on each stage.

A unit is what a stage does for one microbatch in one phase. With S stages, M microbatches, and forward and backward
steps that take TF and TB on each stage, both schedules take (M + S - 1) (TF + TB). They differ in memory: between its
forward and its backward step a microbatch keeps its activations, at stage s for M microbatches under GPipe, and for
min(S - s, M) under 1F1B. Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream-Flush, ICML 2021.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pathways.compiler.ir import Phase

Unit = tuple[Phase, int]


def gpipe(stage: int, stages: int, microbatches: int) -> list[Unit]:
    """All forward steps, then all backward steps, each in the order of the microbatches. Every stage is alike."""
    del stage, stages
    return [(phase, m) for phase in (Phase.FORWARD, Phase.BACKWARD) for m in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Unit]:
    """1F1B with a flush: a warm-up of as many forward steps as there are later stages, then pairs of one forward and
    one backward step, then the backward steps that are left.
    """
    warm = min(stages - stage - 1, microbatches)
    order = [(Phase.FORWARD, m) for m in range(warm)]
    for m in range(microbatches - warm):
        order += [(Phase.FORWARD, warm + m), (Phase.BACKWARD, m)]
    return order + [(Phase.BACKWARD, m) for m in range(microbatches - warm, microbatches)]


#: For each schedule: (stage, stages, microbatches) -> the order on that stage.
ORDERS: Mapping[str, Callable[[int, int, int], Sequence[Unit]]] = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
}
