"""The host's side of callbacks: connects the custom calls of a module to XLA's own callbacks.

`connect_callbacks` is called while a host compiles. XLA calls `_answer` later, on a thread of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import callback as jax_callback
from jax._src import core, ffi
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir

from pathways._jaxlib.callbacks import callback_operations
from pathways._jaxlib.mlir_modules import shape_and_dtype
from pathways.quirks import quirks_of


def connect_callbacks(ctx: Any, module: ir.Module, ask: Callable[..., Sequence[np.ndarray]]) -> None:
    """Makes each custom call `CALLBACK` of a module that is lowered in `ctx` call `ask(number, arrays, results)`.

    `results` are the shapes and dtypes that `ask` must return. As in `jax.jit`, the first device makes the call, once
    and with whole arrays; in a shard_map, each device makes a call.
    """
    for op in list(callback_operations(module)):
        number, how, tokens, count = ir.StringAttr(op.attributes["backend_config"]).value.split()
        has_side_effect = "has_side_effect" in op.attributes and ir.BoolAttr(op.attributes["has_side_effect"]).value
        inputs, outputs = (
            [core.ShapedArray(*shape_and_dtype(value.type)) for value in values]
            for values in (op.operation.operands, op.operation.results)
        )
        call = functools.partial(
            _answer, ask, int(number), int(tokens), int(count), [(o.shape, np.dtype(o.dtype)) for o in outputs]
        )
        if how == "each":
            sharding = jax_callback._get_sdy_array_list_for_callbacks(outputs)
        else:
            sharding = jax_callback._callback_op_sharding(ctx.module_context.axis_context, None, outputs)
        with ir.InsertionPoint(op), op.operation.location:
            made = _emit_callback(ctx, call, list(op.operation.operands), inputs, outputs, has_side_effect, sharding)
        for old, new in zip(op.operation.results, made, strict=True):
            old.replace_all_uses_with(new)
        op.operation.erase()


def _answer(
    ask: Callable[..., Sequence[np.ndarray]],
    number: int,
    tokens: int,
    count: int,
    results: Sequence[tuple[tuple[int, ...], np.dtype]],
    *arrays: Any,
) -> tuple[Any, ...]:
    """XLA calls this function, on a thread of XLA's."""
    arrays = tuple(np.asarray(each) for each in arrays)
    return (*arrays[:tokens], *ask(number, arrays[tokens : tokens + count], results[tokens:]))


def _emit_callback(
    ctx: Any,
    call: Callable[..., tuple[Any, ...]],
    operands: list[ir.Value],
    inputs: list[Any],
    outputs: list[Any],
    has_side_effect: bool,
    sharding: Any,
) -> Sequence[ir.Value]:
    """As `jax._src.callback.emit_python_callback`, but keeps 64-bit results on threads where 64-bit types are off."""
    target = quirks_of(ctx.module_context.platforms[0]).callback_target
    ctx = dataclasses.replace(ctx, avals_in=inputs, avals_out=outputs)
    if target is None:
        return jax_callback.emit_python_callback(
            ctx, call, None, operands, inputs, outputs, has_side_effect=has_side_effect, sharding=sharding
        )[0]
    ctx.module_context.add_host_callback(call)
    index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    made = ffi.build_ffi_lowering_function(target, has_side_effect=has_side_effect)(ctx, *operands, index=index)
    if sharding is not None:
        jax_mlir.set_sharding(ctx.module_context, made, sharding)
    return list(made.results)
