"""Counts the arithmetic of a pipeline's steps, for `schedule="auto"` without given lengths.

A matrix product or convolution counts two operations per multiplication, everything else one operation per element of
its result. The count stands for a length in time, so only ratios matter. It knows nothing of memory bandwidth.

Pure: works on jaxprs only.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.flatten import Step, StepKind
from pathways.compiler.ir import MeshSpec, Phase
from pathways.compiler.lengths import Lengths
from pathways.compiler.schedule.labels import Pipeline


def counted(steps: Sequence[Step], pipeline: Pipeline) -> tuple[Lengths, ...]:
    """One item per stage of a pipeline, in operations per device, on average over the microbatches.

    Slices side by side have one stage: the slice that takes longest counts.
    """
    totals: dict[tuple[MeshSpec, Phase], float] = collections.defaultdict(float)
    memo: dict[int, float] = {}
    for step in steps:
        label = step.label
        if step.kind is StepKind.PLACED and step.mesh is not None and label and label.pipeline == pipeline.number:
            work = operations(step.eqn, memo) / step.mesh.size
            totals[step.mesh, label.phase] += work / pipeline.microbatches
    return tuple(
        Lengths(
            *(
                max(totals[mesh, phase] for mesh, stage in pipeline.stages.items() if stage == number)
                for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS)
            )
        )
        for number in range(pipeline.depth)
    )


def operations(eqn: Any, memo: dict[int, float]) -> float:
    """How many operations an equation does. `memo` has the jaxprs that were counted before, by id."""
    name, params = eqn.primitive.name, eqn.params
    elements = sum(map(_elements, eqn.outvars))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * elements * math.prod(eqn.invars[0].aval.shape[dimension] for dimension in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * elements * math.prod(kernel) / max(features, 1)
    inner = [_total(jaxpr, memo) for jaxpr in _jaxlib.sub_jaxprs(params)]
    if not inner:
        return float(elements)
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _total(jaxpr: Any, memo: dict[int, float]) -> float:
    if id(jaxpr) not in memo:
        memo[id(jaxpr)] = sum(operations(eqn, memo) for eqn in jaxpr.eqns)
    return memo[id(jaxpr)]


def _elements(v: Any) -> int:
    return math.prod(getattr(v.aval, "shape", ()))
