"""`schedule="auto"` within memory: lowers a program with fewer microbatches in flight until its devices can run it.

`pathways/compiler/schedule/search.py` finds the best order that keeps to given limits. This module knows the devices.
It computes what each one needs, as the controller does for admission (MEM-2), and lowers the limits of the stages on
devices that have too little. For the temporary memory of the computations, the hosts compile the program once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pathways import errors
from pathways.api.programs.compiled import Lowering
from pathways.api.session import Session
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.ir import LogicalProgram, MeshSpec, NodeKind
from pathways.compiler.options import Options
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.schedule import model
from pathways.compiler.trace import Traced
from pathways.plan.binding import BoundProgram, host_plan
from pathways.plan.memory_profile import Profile


def lower_within_memory(
    traced: Traced, program: LogicalProgram, options: Options, home: MeshSpec, cluster: Session, used: list[Slice]
) -> Lowering:
    """The fastest order that is found among those whose runs fit the memory of their devices.

    `program` is `traced` as compiled without limits. Its pipelines with another schedule than "auto" stay as they are.

    Raises:
        ResourceExhaustedError: none fits; the message has the smallest need.
        What `compile_traced` raises.
    """
    topology = cluster.control().topology
    temporaries: dict[str, int] | None = None
    registration = None  # holds what the hosts have compiled until the program is compiled for good
    while True:
        lowering = Lowering(traced, program, cluster, used)
        if not topology.device_bytes:
            return lowering
        on_host = lowering.slices()[0].quirks.is_host_memory
        bound = lowering.bind()
        needs = needed_bytes(bound, temporaries or {}, on_host)
        if all(need <= topology.device_bytes for need in needs.values()):
            if temporaries is not None:
                return lowering
            registration, _ = lowering.register()
            found = cluster.control().analyze(registration.number)
            temporaries = {
                program.computations[n].fingerprint: what.memory.temporary_bytes for n, what in found.items()
            }
            continue
        limits = _tighter(bound, needs, topology.device_bytes, on_host)
        program = compile_traced(traced, dataclasses.replace(options, limits=limits), default_mesh=home)


def needed_bytes(bound: BoundProgram, temporaries: Mapping[str, int], receives_on_host: bool) -> dict[int, int]:
    """The bytes that a run needs on each device, its arguments included.

    `temporaries`: of computations, on one device, by their fingerprints; 0 if one is missing.
    """
    program = bound.program
    needs: dict[int, int] = {}
    for host in bound.hosts():
        profile = Profile(bound, host, receives_on_host)
        plan = host_plan(bound, host, receives_on_host)
        sizes = [temporaries.get(program.computations[each.computation].fingerprint, 0) for each in plan.launches]
        for need in profile.memory(plan, sizes).devices:
            arguments = sum(
                profile.device_bytes(value)
                for value in dict.fromkeys(program.arguments)
                if need.device in bound.bindings[program.values[value].mesh]
            )
            needs[need.device] = arguments + need.peak + need.eager
    return needs


def _tighter(
    bound: BoundProgram, needs: Mapping[int, int], budget: int, receives_on_host: bool
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Limits for the stages under which those on devices that need too much keep fewer microbatches in flight.

    Raises:
        ResourceExhaustedError: the stages on such a device have one microbatch in flight already.
    """
    program = bound.program
    limits = model.stages_in_flight(program)
    meshes = {
        (node.label.pipeline, node.label.stage, program.computations[node.computation].mesh)
        for node in program.nodes
        if node.label is not None and node.kind is NodeKind.CALL and node.origin
    }
    tightened = [list(each) for each in limits]
    lowest: tuple[str, str, int] | None = None  # a pipeline, a slice and a device where no limit can be lower
    for pipeline, stage, mesh in sorted(meshes):
        device = max(bound.bindings[mesh], key=lambda device: needs[device])
        excess = needs[device] - budget
        if excess <= 0 or not program.pipelines[pipeline].is_searched:
            continue
        if limits[pipeline][stage] == 1:
            lowest = lowest or (program.pipelines[pipeline].title, program.meshes[mesh].name, device)
            continue
        # One microbatch less frees no more than all that is made for it there, so no order that fits is passed over.
        most = _microbatch_bytes(bound, pipeline, mesh, bound.hosts_of_mesh(mesh)[0], receives_on_host)
        fewer = max(1, math.ceil(excess / most)) if most else limits[pipeline][stage]
        limit = max(1, limits[pipeline][stage] - fewer)
        tightened[pipeline][stage] = min(tightened[pipeline][stage], limit)
    if lowest is not None and (tightened == limits or len(limits) == 1):
        title, name, device = lowest
        raise errors.ResourceExhaustedError(
            f"{title}: no order fits the memory of slice {name!r}. With one microbatch in flight there, a run still "
            f"needs {needs[device]} bytes on device {device}, its arguments included, and the device has {budget}. Use "
            "smaller microbatches, more stages, or jax.checkpoint in the stages"
        )
    if tightened == limits:  # only devices without a stage need too much: the call will say so (MEM-3)
        raise errors.ResourceExhaustedError(
            f"program {program.name!r} needs {max(needs.values())} bytes on a device that has {budget}, where no stage "
            "of a pipeline with schedule 'auto' is, so no schedule helps"
        )
    least: dict[str, tuple[int, ...]] = {}
    for info, each in zip(program.pipelines, tightened, strict=True):
        least[info.key] = tuple(map(min, each, least.get(info.key, each)))
    return tuple(least.items())


def _microbatch_bytes(bound: BoundProgram, pipeline: int, mesh: int, host: int, receives_on_host: bool) -> int:
    """The most bytes on a device of a slice that are made there, or come there, for one microbatch of a pipeline."""
    program = bound.program
    profile = Profile(bound, host, receives_on_host)
    microbatch: dict[int, int] = {}
    totals: dict[int, int] = {}
    for node in program.nodes:
        number = node.label.microbatch if node.label is not None and node.label.pipeline == pipeline else -1
        if node.kind is NodeKind.TRANSFER:
            number = microbatch.get(node.inputs[0], -1)
        for value in dict.fromkeys(node.outputs):
            microbatch[value] = number
            if number >= 0 and program.values[value].mesh == mesh:
                totals[number] = totals.get(number, 0) + profile.device_bytes(value)
    return max(totals.values(), default=0)
