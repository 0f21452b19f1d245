"""Executables of a host: a module as a primitive that `jax.jit` compiles, and the fastest call of the result.

`pathways/host/executables.py` calls these functions; any thread may.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import core, dispatch
from jax._src.interpreters import mlir as jax_mlir
from jax._src.interpreters import pxla
from jaxlib import lapack
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pathways._jaxlib.callback_hosting import connect_callbacks
from pathways._jaxlib.mlir_modules import main_function


def initialize_lapack() -> None:
    """Initialises LAPACK: needed before a process that traced no LAPACK call loads an executable with LAPACK calls."""
    lapack._lapack.initialize()


def direct_call(compiled: Any) -> Callable[..., Any]:
    """The fastest call of a `jax.stages.Compiled`: XLA's executable itself. It takes arrays as they lie and returns a
    list of arrays.

    `jit`'s own C++ path looks at the type, the sharding and the layout of each argument in each call. An argument here
    is a result, or was put, of the type for which this was compiled. So XLA's look at sizes and devices is enough.
    """
    launcher = compiled._executable.unsafe_call
    is_plain = (
        isinstance(launcher, pxla.ExecuteReplicated)
        and not (launcher.ordered_effects or launcher.has_unordered_effects or launcher.has_host_callbacks)
        and launcher.mut is None
        and len(launcher.kept_var_idx) == len(compiled.in_avals[0])
    )
    if not is_plain:
        call: Callable[..., Any] = compiled
        return call
    execute, handlers = launcher.xla_executable.execute_sharded, launcher.out_handler.handlers
    is_kept = [not each.donated for each in jax.tree.leaves(compiled.args_info)]

    def call_directly(*arrays: Any) -> Any:
        try:
            return execute(arrays).consume_with_handlers(handlers)
        except Exception:
            # For a deleted array of several shards, XLA says only that their number is wrong. An array that is donated
            # here tells nothing: a launch that fails for another reason has deleted it.
            for array in itertools.compress(arrays, is_kept):
                array._check_if_deleted()
            raise

    return call_directly


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
