"""Executables of a host: a module as a primitive that `jax.jit` compiles, and the fastest call of the result.

`pathways/host/executables.py` calls these functions; any thread may.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import core, dispatch
from jax._src.interpreters import mlir as jax_mlir
from jaxlib import lapack
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pathways._jaxlib.callback_hosting import connect_callbacks
from pathways._jaxlib.mlir_modules import main_function


def initialize_lapack() -> None:
    """Initialises LAPACK: needed before a process that traced no LAPACK call loads an executable with LAPACK calls."""
    lapack._lapack.initialize()


def fast_call(compiled: Any) -> Callable[..., Any]:
    """The C++ fast path of a `jax.stages.Compiled`, which saves one Python frame per call.

    Under `jax.disable_jit` it refuses to run, before it does anything.
    """
    fast: Callable[..., Any] | None = compiled._executable.create_cpp_call(compiled._params)
    return fast or compiled


@contextlib.contextmanager
def ignore_unused_donations() -> Iterator[None]:
    """Silences JAX's warning about donated buffers that no output could take."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Dd]onat")
        yield


def module_primitive(name: str, load: Callable[[Any], ir.Module]) -> core.Primitive:
    """A primitive with parameters `key` and `out_avals`, whose lowering inlines the StableHLO module `load(key)`.

    If `key.ask` is not None, the lowering also connects the module's callbacks to it.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, key, out_avals: list(out_avals))

    def lowering(ctx: Any, *args: ir.Value, key: Any, out_avals: Any) -> Sequence[ir.Value]:
        module = load(key)
        if key.ask is not None:
            connect_callbacks(ctx, module, key.ask)
        results = main_function(module).type.results
        callee = jax_mlir.merge_mlir_modules(
            ctx.module_context.module, "computation", module, dst_symtab=ctx.module_context.symbol_table
        )
        return func.CallOp(results, ir.FlatSymbolRefAttr.get(callee), list(args)).results

    jax_mlir.register_lowering(primitive, lowering)
    return primitive


def run_alone(primitive: Any) -> None:
    """Lets a primitive that has a lowering run outside of a trace, as JAX's own do: a program of one operation."""
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
