"""Lowers the jaxpr of a computation to StableHLO, for devices that this process may not have.

The compiler lowers (`lower_jaxpr`). The API refuses what would be lowered to run in the client (`guard_lowering`).

Threading: `_lowering` is thread-local, so each thread lowers for slices or for this process on its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import core, dispatch, pjit, sharding_impls
from jax._src.custom_partitioning import custom_partitioning_p
from jax._src.interpreters import mlir as jax_mlir
from jax.sharding import AbstractMesh, NamedSharding
from jaxlib.mlir import ir

from pathways._jaxlib.callback_order import tokens_to_data
from pathways._jaxlib.callbacks import CALLBACK_KINDS, Callback, callback_operations, lower_callback
from pathways._jaxlib.jaxprs import jit_p
from pathways._jaxlib.mlir_modules import strip_locations
from pathways._jaxlib.physical_form import is_key
from pathways._jaxlib.slice_meshes import slice_name


def lower_jaxpr(
    closed: Any,
    platforms: Sequence[str],
    mesh: AbstractMesh | None,
    number: Callable[[Callback], int],
    name: str = "body",
) -> bytes:
    """Lowers a closed jaxpr to StableHLO bytecode for `platforms` without initialising any backend.

    Needs the context that `mlir_context` enters.
    `mesh` is the mesh whose axes sharding constraints and shard_maps inside may name. A callback becomes a custom call
    `CALLBACK` with the number that `number(callback)` returns.
    """
    size = mesh.size if mesh is not None else 1
    extra = {}
    if "out_avals" in inspect.signature(jax_mlir.lower_jaxpr_to_module).parameters:
        extra["out_avals"] = closed.out_avals
    with lowering_for_slices():
        result = _lower_in_this_context()(
            name,
            closed,
            num_const_args=0,
            in_avals=closed.in_avals,
            ordered_effects=[],
            platforms=tuple(platforms),
            backend=None,
            axis_context=sharding_impls.ShardingContext(size, None, mesh),
            donated_args=[False] * len(closed.in_avals),
            num_partitions=size,
            lowering_parameters=jax_mlir.LoweringParameters(
                hoist_constants_as_args=False,
                override_lowering_rules=(
                    *(
                        (primitive, functools.partial(lower_callback, kind, number))
                        for primitive, kind in CALLBACK_KINDS.items()
                    ),
                    (custom_partitioning_p, _whole),
                    (dispatch.device_put_p, _put_within),
                ),
            ),
            **extra,
        )
    with result.module.context, ir.Location.unknown():
        if next(callback_operations(result.module), None) is not None:
            tokens_to_data(result.module)
            strip_locations(result.module)  # the partitioner logs a remark on the call, with the user's source lines
    module = result.module
    if result.shape_poly_state.uses_dim_vars:  # it calls a function that was exported with symbolic shapes
        module = jax_mlir.refine_polymorphic_shapes(module)
    return jax_mlir.module_to_bytecode(module)


@functools.cache
def _lower_in_this_context() -> Callable[..., Any]:
    """JAX's `lower_jaxpr_to_module`, but in the context that is entered.

    JAX makes a context for each module. That takes 2 ms, and a program has several modules. The function has no
    argument for it, so this is a copy of it that finds another `ModuleContext`. JAX's own function stays as it is.
    """
    plain = jax_mlir.lower_jaxpr_to_module
    if not isinstance(plain, types.FunctionType) or "ModuleContext" not in plain.__code__.co_names:
        return plain

    def in_this_context(**fields: Any) -> Any:
        return jax_mlir.ModuleContext(**{"context": ir.Context.current, **fields})

    names = {**plain.__globals__, "ModuleContext": in_this_context}
    copy = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy


def _whole(ctx: Any, *args: Any, call: Any, **_: Any) -> Any:
    """Lowers a function with a partitioning of its own as the function itself, which the compiler then partitions.

    Its `partition` works on the shardings that a compiler in the same process has found; hosts compile in their own.
    """
    return jax_mlir.lower_fun(core.jaxpr_as_fun(call), multiple_results=True)(ctx, *args)


def _put_within(ctx: Any, *args: Any, devices: Any, **_: Any) -> Any:
    """Lowers a `jax.device_put` within one slice: a sharding constraint, if it fits. A kind of memory has no effect.

    Under `jax.vmap` it may not fit, because JAX leaves the sharding as it was.
    """

    def constrained(x: Any, device: Any, aval: Any) -> Any:
        sharding = getattr(device, "sharding", device)  # of a jax.experimental.layout.Format
        if not isinstance(sharding, NamedSharding) or is_key(aval.dtype):
            return x
        try:
            sharding.shard_shape(aval.shape)
        except ValueError:
            return x
        return jax_mlir.wrap_with_sharding_op(ctx, x, aval, sharding._to_sdy_sharding(aval.ndim))

    return [constrained(*each) for each in zip(args, devices, ctx.avals_out, strict=True)]


def forget_meshes(lowered: Any) -> Any:
    """A `jax.stages.Lowered` whose results have types without a mesh, for `jax.export`.

    It exports derivatives for the mesh of the results' types, which is the slice's, for so many devices.
    """
    given = lowered._lowering.compile_args
    given["global_out_avals"] = [
        core.ShapedArray(aval.shape, aval.dtype, aval.weak_type) if type(aval) is core.ShapedArray else aval
        for aval in given["global_out_avals"]
    ]
    return lowered


_lowering = threading.local()  # .for_slices: how many `lowering_for_slices` this thread is inside


@contextlib.contextmanager
def lowering_for_slices() -> Iterator[None]:
    """Turns off the guard of `guard_lowering` for this thread: what it lowers meanwhile runs on slices, not here."""
    depth = getattr(_lowering, "for_slices", 0)
    _lowering.for_slices = depth + 1
    try:
        yield
    finally:
        _lowering.for_slices = depth


def is_lowering_for_slices() -> bool:
    """Whether this thread is inside `lowering_for_slices`."""
    return getattr(_lowering, "for_slices", 0) > 0


def guard_lowering(refuse: Callable[[str], None]) -> None:
    """From now on, calls `refuse(name)` for each inner `jax.jit` that JAX lowers to run in this process.

    What is lowered for slices has no devices, which JAX's rule for `custom_partitioning` wants. The type of a cotangent
    may name the slice that the value came from. In the module of another slice such a type says nothing, because the
    axes are not those of that module.
    """
    plain_typed = jax_mlir.lower_with_sharding_in_types

    def typed(ctx: Any, value: Any, aval: Any) -> Any:
        held = slice_name(getattr(getattr(aval, "sharding", None), "mesh", None))
        here = slice_name(getattr(ctx.module_context.axis_context, "abstract_mesh", None))
        return plain_typed(ctx, value, aval) if held is None or here in (None, held) else value

    jax_mlir.lower_with_sharding_in_types = typed
    plain = pjit._pjit_lowering

    def rule(ctx: Any, *args: Any, name: str, **params: Any) -> Any:
        if not getattr(_lowering, "for_slices", 0):
            refuse(name)
        return plain(ctx, *args, name=name, **params)

    jax_mlir.register_lowering(jit_p, rule, cacheable=False)
    plain_partitioning = jax_mlir._lowerings[custom_partitioning_p].rule

    def partitioning(ctx: Any, *args: Any, **params: Any) -> Any:
        lower = _whole if getattr(_lowering, "for_slices", 0) else plain_partitioning
        return lower(ctx, *args, **params)

    jax_mlir.register_lowering(custom_partitioning_p, partitioning)
