"""From a traced program to one that can be run: compiled, and within the memory of its devices."""

from __future__ import annotations

import functools

from pathways.api.pipelines.auto_schedule import lower_within_memory
from pathways.api.programs.compiled import Lowering
from pathways.api.programs.offloading import within_memory
from pathways.api.session import Session
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.ir import MeshSpec
from pathways.compiler.options import Options
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.trace import Traced


def lower(
    traced: Traced, options: Options, home: MeshSpec, cluster: Session, used: list[Slice], *, is_placed: bool
) -> Lowering:
    """The program on slices. `home`: where that is which is bound to no slice. `is_placed`: it is one placed function.

    Raises:
        ResourceExhaustedError: it has a pipeline with schedule "auto", and no order of it fits.
        What `compile_traced` raises.
    """
    program = compile_traced(traced, options, default_mesh=home)
    if any(pipeline.is_searched for pipeline in program.pipelines):
        return lower_within_memory(traced, program, options, home, cluster, used)
    lowering = Lowering(traced, program, cluster, used)
    if is_placed:
        return lowering  # one computation keeps nothing for later
    return within_memory(lowering, options, functools.partial(compile_traced, traced, default_mesh=home))
