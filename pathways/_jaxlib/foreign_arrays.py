"""Teaches JAX an array type of ours: what JAX does with such an array ends in functions of the API.

`accept_arrays` replaces functions of JAX for the whole process. The API calls it once, when the first cluster is
connected. The functions that it puts there run on whatever thread calls JAX.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_util, api, core, dispatch, dtypes, pjit
from jax._src.interpreters import mlir as jax_mlir
from jax._src.interpreters import partial_eval, pxla
from jax._src.lax import lax
from jax._src.random import prng

from pathways._jaxlib.jaxprs import jit_p
from pathways._jaxlib.physical_form import is_key
from pathways._jaxlib.slice_meshes import is_of_set_mesh
from pathways._jaxlib.thread_state import NotesRecording
from pathways._jaxlib.user_settings import is_mesh_set, outside_meshes


def accept_arrays(
    array_type: type,
    fetch: Callable[[Any], Any],
    run: Callable[[Any, str, Sequence[Any]], Sequence[Any]],
    full_like: Callable[[Any, Any, Any], Any],
    elsewhere: Callable[[str], Callable[[Any, Sequence[Any]], Sequence[Any]] | None],
    pulled: Callable[[str, str, Sequence[Any]], None],
    placed_inside: Callable[[str, Any], Callable[[Any, Sequence[Any]], Sequence[Any]] | None],
) -> None:
    """Teaches JAX an array type of ours, whose instances have `aval`.

    Every `jax.jit` call with such an array, and every primitive outside of a trace, ends in one function of JAX's. That
    function is wrapped here. A function of JAX itself or of optax (`jnp.sin`, `lax.add`, the halves of a gradient) goes
    to `run(closed jaxpr, name, arguments)`. Any other function runs in this process, on `fetch`ed values, after a call
    of `pulled(name, source file and line, arrays)`. JAX's own conversions (constants of a trace, `jax.device_put` to a
    local device) also use `fetch`ed values.

    If `elsewhere(name)` returns a function for a jit's name, the jit runs by that function, whatever its arguments. So
    a placed function runs on its slice even when its gradient or its batched form is computed eagerly. The same holds
    for what `placed_inside(name, closed jaxpr)` returns for a function of JAX itself: a loop with placed functions
    inside has none of our arrays among its arguments if it starts from values of this process.

    Some functions read an array without computing with it. `jax.device_get` (of keys) goes to `fetch`. `lax.full_like`,
    in which `jnp.zeros_like` ends, and `lax.empty_like` go to `full_like(array, fill value, dtype or None)`.
    """
    plain = pjit._pjit_call_impl_python

    def is_ours(value: Any) -> bool:
        return type(value) is array_type

    def call(*args: Any, **params: Any) -> Any:
        jaxpr = params["jaxpr"]
        there = elsewhere(params["name"])
        if there is not None:
            return list(there(jaxpr, args)), None, None, []
        ours = [value for value in (*args, *jaxpr.consts) if is_ours(value)]
        if not any(map(is_ours, args)) and _is_from_library(jaxpr.debug_info.func_filename):
            there = placed_inside(params["name"], jaxpr)  # a loop, say, around placed functions
            if there is not None:
                return list(there(jaxpr, args)), None, None, []
        if not ours:
            return plain(*args, **params)
        if not any(map(is_ours, args)):
            pulled(params["name"], jaxpr.debug_info.func_src_info, ours)
            return plain(*args, **params)
        if _is_from_library(jaxpr.debug_info.func_filename):
            return list(run(jaxpr, params["name"], args)), None, None, []
        pulled(params["name"], jaxpr.debug_info.func_src_info, ours)
        fetched = [fetch(arg) if is_ours(arg) else arg for arg in args]
        return jit_p.impl(*fetched, **params), None, None, []

    pjit._pjit_call_impl_python = call
    plain_infer = pjit._infer_params

    def infer(fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A function of JAX's on our arrays runs on their slice, so it is traced without the mesh of this process.
        library = is_mesh_set() and _is_from_library(_source_file(info.fun_sourceinfo))
        ours = list(filter(is_ours, jax.tree.leaves((args, kwargs)))) if library else []
        if ours and not all(map(is_of_set_mesh, ours)):
            return outside_meshes(plain_infer)(fun, info, args, kwargs)
        return plain_infer(fun, info, args, kwargs)

    pjit._infer_params = infer

    def by_program(primitive: core.Primitive) -> None:
        plain_impl = primitive.impl

        def impl(*args: Any, **params: Any) -> Any:
            if any(map(is_ours, args)):
                return dispatch.apply_primitive(primitive, *args, **params)
            return plain_impl(*args, **params)

        primitive.def_impl(impl)

    # The eager rules of these primitives read inside a key array; in ours there is nothing, so run them as programs.
    for name in ("split", "fold_in", "bits", "unwrap", "wrap", "seed"):
        by_program(getattr(prng, f"random_{name}_p"))

    plain_get, plain_full_like = api._device_get, lax.full_like

    @functools.wraps(plain_full_like)
    def like(x: Any, fill_value: Any, dtype: Any = None, shape: Any = None, sharding: Any = None) -> Any:
        if is_ours(x) and sharding is None and shape in (None, x.shape) and not is_key(x.dtype):
            return full_like(x, fill_value, dtype)
        if is_ours(x):  # the cotangent of a loss is made in this process
            return outside_meshes(plain_full_like)(x, fill_value, dtype, shape, sharding)
        return plain_full_like(x, fill_value, dtype, shape, sharding)

    api._device_get = lambda x: fetch(x) if is_ours(x) else plain_get(x)
    lax.full_like = jax.lax.full_like = like
    if hasattr(lax, "empty_like"):  # not before JAX 0.11, where jnp.empty_like ends in lax.full_like
        plain_empty_like = lax.empty_like

        @functools.wraps(plain_empty_like)
        def empty_like(x: Any, *, dtype: Any = None, shape: Any = None, out_sharding: Any = None) -> Any:
            if is_ours(x) and out_sharding is None and shape in (None, x.shape) and not is_key(x.dtype):
                return full_like(x, 0, dtype)
            return plain_empty_like(x, dtype=dtype, shape=shape, out_sharding=out_sharding)

        lax.empty_like = empty_like

    partial_eval.trace_to_jaxpr = NotesRecording(partial_eval.trace_to_jaxpr)

    def shard(xs: Any, shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return pxla.shard_args(shardings, layouts, copy_semantics, [fetch(x) for x in xs])

    core.pytype_aval_mappings[array_type] = lambda x: x.aval
    ad_util.raw_jaxval_adders[array_type] = lax.add  # adds the cotangents of a value that is used twice
    dtypes.canonicalize_value_handlers[array_type] = lambda x: x
    pxla.shard_arg_handlers[array_type] = shard
    jax_mlir.register_constant_handler(array_type, lambda value, aval: jax_mlir.ir_constant(fetch(value)))


def users_level(package: str) -> int:
    """The `stacklevel` for the caller's `warnings.warn`: it then names the user's line.

    That is the first line on the stack that is neither in JAX nor in the folder `package`.
    """
    level, frame = 1, sys._getframe(1)
    inside = (package + os.sep, os.path.dirname(jax.__file__) + os.sep)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def _source_file(source: str | None) -> str | None:
    """The file of a function that JAX describes as "name at file:line"."""
    return source.rpartition(" at ")[2].rpartition(":")[0] if source else None


@functools.cache
def _is_from_library(filename: str | None) -> bool:
    """Whether a function of that source file belongs to JAX or optax."""
    roots = [os.path.dirname(jax.__file__)]
    if "optax" in sys.modules:
        roots += list(sys.modules["optax"].__path__)
    return filename is not None and any(filename.startswith(root + os.sep) for root in roots)
