"""The host's side of computations that no compiler of ours has made: raw modules, and views.

A raw module is compiled as it is (`_jaxlib.compile_raw`). A view shows shards of arrays that lie here as another array,
and copies nothing. The enqueue thread calls what these functions return; any thread may call them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from pathways import _jaxlib, errors
from pathways.compiler.ir import ArrayType, Computation
from pathways.host.devices import HostDevices
from pathways.host.executables import Executable, MemoryStats, cost_of, kept_bytes, memory_of
from pathways.host.own_settings import own_settings
from pathways.plan.binding import BoundProgram
from pathways.plan.viewing import viewed_here


def compile_raw(computation: Computation, devices: Sequence[jax.Device]) -> Executable:
    """Compiles a raw module. The result says what XLA says of it; `load` makes what a program calls.

    Raises:
        ComputationError: XLA refused the module; the error has XLA's message.
    """
    _jaxlib.initialize_lapack()
    try:
        raw = _jaxlib.compile_raw(computation.module, computation.options, devices)
    except (RuntimeError, ValueError) as error:
        raise errors.ComputationError(
            f"XLA could not compile computation {computation.name!r} for {len(devices)} devices: {error}"
        ) from error
    memory = memory_of(raw.get_compiled_memory_stats())
    kept = kept_bytes(computation, memory)
    return Executable(
        raw.execute_sharded, (), (), memory, functools.partial(cost_of, raw), kept, _jaxlib.form_of(raw), raw
    )


def load(
    compiled: Executable, bound: BoundProgram, computation: Computation, here: HostDevices, donates: Sequence[bool]
) -> Executable:
    """What calls a compiled raw module, in a program where inputs and outputs are of these types, and the plan lets it
    take the memory of the inputs that `donates` names.

    A program that says nothing of what a module makes is there to have it compiled; a run of it fails.

    Raises:
        PlanError: the module takes or makes other arrays than the program says: their bytes would be read by wrong
            sizes (TRUST-1).
    """
    assert compiled.form is not None
    is_right = _is_right(compiled.form, bound, computation)
    if not is_right:
        return dataclasses.replace(compiled, call=functools.partial(_not_to_run, computation.name), raw=compiled)
    outputs = [(type.shape, type.dtype, here.sharding(bound.placement(type))) for type in computation.outputs]
    copied = [number for number in compiled.form.donated if number >= len(donates) or not donates[number]]
    default = here.local[0].default_memory().kind
    moved = [number for number, kind in enumerate(compiled.form.output_memory_kinds) if kind != default]
    call = own_settings(_jaxlib.raw_call(compiled.raw, outputs, copied, moved if outputs else ()))
    return dataclasses.replace(compiled, call=call, raw=compiled)


def _is_right(form: _jaxlib.Form, bound: BoundProgram, computation: Computation) -> bool:
    """Whether the module takes and makes what the program says. No error, if the program says of no result."""
    _, parameters, results = _jaxlib.signature_of(computation.module)
    count = len(bound.bindings[computation.mesh])
    for verb, arrays, shardings, types in (
        ("takes", parameters, form.parameter_shardings, computation.inputs),
        ("makes", results, form.output_shardings, computation.outputs),
    ):
        own = []
        for number, (shape, dtype) in enumerate(arrays):
            grid: tuple[int, ...] = (1,) * len(shape)
            if shardings:
                grid, _, _ = _jaxlib.tiles_of(shardings[number], len(shape), count)
            own.append((tuple(-(-size // parts) for size, parts in zip(shape, grid, strict=True)), dtype))
        said = [(bound.placement(type).packing.cell, type.dtype) for type in types]
        if own == said and all(type.mesh == computation.mesh for type in types):
            continue
        if computation.outputs:
            raise errors.PlanError(f"computation {computation.name!r} {verb} shards {own}, and its program says {said}")
        return False
    return True


def _not_to_run(name: str, *arrays: jax.Array) -> Any:
    raise errors.PlanError(f"computation {name!r} is compiled only: its program does not say what it makes")


def view(bound: BoundProgram, computation: Computation, here: HostDevices) -> Executable:
    """What makes the arrays of a computation of views. It gets the inputs that `viewed_here` names.

    Raises:
        PlanError: a shard that is shown has another shape or element type than what shows it.
    """
    for type, each in zip(computation.outputs, computation.views, strict=True):
        for number in set(each.inputs):
            source = computation.inputs[number]
            if (bound.placement(source).packing.cell, source.dtype) != (bound.placement(type).packing.cell, type.dtype):
                raise errors.PlanError(f"computation {computation.name!r} shows shards of {source} as those of {type}")
        if type.mesh != computation.mesh:
            raise errors.PlanError(f"computation {computation.name!r} shows shards on other devices than its own")
    viewed = viewed_here(computation, bound.bindings, bound.devices_per_host, here.host)
    recipes = []
    for type, shown in zip(computation.outputs, viewed.shown, strict=True):
        sharding = here.sharding(bound.placement(type))
        recipes.append((_aval(type), sharding, shown))

    def call(*arrays: jax.Array) -> list[jax.Array]:
        shards = [_jaxlib.shards_of(array) for array in arrays]
        return [
            _jaxlib.shown(aval, sharding, [shards[number][shard] for number, shard in shown])
            for aval, sharding, shown in recipes
        ]

    return Executable(call, (), (), MemoryStats(), dict)


def _aval(type: ArrayType) -> Any:
    return _jaxlib.shaped_array(type.shape, type.dtype, False)
