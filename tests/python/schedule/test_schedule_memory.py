"""SCHED-1: the activations that each stage keeps are those that its schedule promises, read off the profile.

A stage is a layer with two residuals of the size of its input. Weights are small beside them.
"""

from __future__ import annotations

import numpy as np
import pytest
from pipeline_cases import inside, placed_network, slices

from pathways.compiler.pipeline import compile_traced
from pathways.compiler.trace import Argument, trace
from pathways.plan.binding import BoundProgram, host_plan
from pathways.plan.memory_profile import Profile

STAGES = 4
ROWS = 1 << 12
PART = ROWS * 4 * 4  # bytes of one activation


def peaks(schedule: str, microbatches: int, chunks: int) -> list[int]:
    """Per stage, each on a host of its own: the peak of its device in activations."""
    meshes = slices(STAGES) * chunks
    ws = [Argument((4, 4), np.float32, False, mesh, ((), ())) for mesh in meshes]
    xs = [Argument((ROWS, 4), np.float32, False, meshes[0], ((), ())) for _ in range(microbatches)]
    program = compile_traced(trace(inside(placed_network(meshes)), [ws, xs]), {"schedule": schedule})
    bound = BoundProgram(program, tuple((n,) for n in range(STAGES)), 1)
    found = []
    for host in bound.hosts():
        plan = host_plan(bound, host, True)
        (device,) = Profile(bound, host, True).memory(plan, [0] * len(plan.launches)).devices
        assert device.eager == 0
        found.append(device.peak // PART)
    return found


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_what_a_stage_keeps(microbatches):
    """Two residuals of each microbatch, or chunk of one, on the way, and what a step makes or reads meanwhile."""
    live = [min(STAGES - s, microbatches) for s in range(STAGES)]
    assert peaks("1F1B", microbatches, 1) == [2 * n + more for n, more in zip(live, [0, 1, 1, 1], strict=True)]

    chunks = 2
    every = microbatches * chunks
    live = [min(every, 2 * (STAGES - s - 1) + (chunks - 1) * STAGES + 1) for s in range(STAGES)]
    found = peaks("Interleaved1F1B", microbatches, chunks)
    assert found == [2 * n + more for n, more in zip(live, [1, 1, 1, 2], strict=True)]

    assert peaks("Circular", microbatches, chunks)[:3] == [2 * every + 1] * 3


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_what_a_stage_keeps_for_its_weight_steps(microbatches):
    """With a zero bubble every stage has as many microbatches on the way as the first one: some wait for their weight
    step, with two values of this size instead of the residuals.
    """
    found = peaks("ZeroBubbleH1", microbatches, 1)
    assert found == [8, 8, 7, 6]
    assert max(found) <= 2 * STAGES
