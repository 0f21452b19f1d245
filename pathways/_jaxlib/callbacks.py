"""Callbacks in traced programs: which equations have them, how they are lowered, who waits for their effects.

A callback (`jax.pure_callback` and its kin) is lowered to the custom call `CALLBACK` with a number. The client keeps
the `Callback` of each number and calls it; a host asks the client by that number (`callback_hosting`).

Threading: tracing and lowering are on the thread that compiles; a `Callback` may be called on any thread.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import config, core, debugging, dispatch, dtypes, sharding_impls
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir

from pathways._jaxlib.effects import ORDERED_EFFECTS, has_effects
from pathways._jaxlib.jaxprs import sub_jaxprs
from pathways._jaxlib.mlir_modules import operations, tensor_type
from pathways._jaxlib.user_settings import unguarded

#: The custom call of a callback, until a host connects it to XLA's callback: see `connect_callbacks`.
CALLBACK = "pathways_callback"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of callback: its name in JAX, and how JAX calls the user's function."""

    name: str
    call: Callable[..., Any]
    effect: Any = None  # the effect of an `ordered` one


CALLBACK_KINDS: dict[core.Primitive, _Kind] = {
    jax_callback.pure_callback_p: _Kind("jax.pure_callback", jax_callback.pure_callback_impl),
    jax_callback.io_callback_p: _Kind(
        "jax.experimental.io_callback", jax_callback.io_callback_impl, jax_callback._OrderedIOEffect
    ),
    debugging.debug_callback_p: _Kind("jax.debug.callback", debugging.debug_callback_impl),
    debugging.debug_print_p: _Kind("jax.debug.print", debugging.debug_print_impl, debugging.ordered_debug_effect),
}


@dataclasses.dataclass(frozen=True)
class Callback:
    """A callback of a traced program: the function, and the results that it must give."""

    what: str  # "jax.pure_callback (sin)"
    call: Callable[..., Sequence[Any]]
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    x64: bool
    #: What `pw.host_callback` has made of the function, which hosts call. None: they ask the client to call it.
    host: Any = None

    def __call__(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Calls the user's function as JAX would, and checks its results.

        Raises:
            Whatever the function raises.
            ValueError, TypeError: the results are not what was promised.
        """
        with jax.enable_x64(self.x64), unguarded():  # JAX puts the arguments to this process's device
            given = [np.asarray(dtypes.canonicalize_value(np.asarray(each))) for each in self.call(*arguments)]
        if len(given) != len(self.results):
            raise ValueError(f"{self.what} gave {len(given)} results, but {len(self.results)} were promised")
        for number, (value, (shape, dtype)) in enumerate(zip(given, self.results, strict=True)):
            if value.shape != shape:
                raise ValueError(f"{self.what}: result {number} has shape {value.shape}, but {shape} was promised")
            if value.dtype != dtype:
                raise TypeError(f"{self.what}: result {number} has dtype {value.dtype}, but {dtype} was promised")
        return given


class CallsBack(enum.IntEnum):
    """Whether an equation has callbacks, or another effect that its host must run; and whether they are ordered."""

    NOTHING = 0
    FREELY = 1
    IN_ORDER = 2


def calls_back(eqn: Any, memo: dict[int, CallsBack]) -> CallsBack:
    """What an equation has inside, with what is inside of it. `memo` is by id() of jaxprs."""
    if any(isinstance(effect, ORDERED_EFFECTS) for effect in eqn.effects):
        return CallsBack.IN_ORDER
    if eqn.primitive in CALLBACK_KINDS or has_effects(eqn):
        return CallsBack.FREELY
    found = CallsBack.NOTHING
    for sub in sub_jaxprs(eqn.params):
        if id(sub) not in memo:
            memo[id(sub)] = max((calls_back(each, memo) for each in sub.eqns), default=CallsBack.NOTHING)
        found = max(found, memo[id(sub)])
    return found


def callback_name(eqn: Any) -> str:
    """The user's name of a callback: that of its function, or the format that it prints."""
    if "fmt" in eqn.params:
        return f"format {eqn.params['fmt']!r}"
    return _function_name(eqn.params.get("callback"))


def _function_name(callback: Any) -> str:
    callback = _users_function(callback)
    return str(getattr(callback, "__qualname__", None) or callback)


def _users_function(callback: Any, depth: int = 6) -> Any:
    """The user's function inside JAX's wrappers; if it cannot be found, the innermost wrapper that can."""
    if depth == 0 or callback is None:
        return callback
    inner = [getattr(callback, name, None) for name in ("callback_func", "func", "__wrapped__")]
    if str(getattr(callback, "__module__", "")).split(".")[0] == "jax":
        for cell in getattr(callback, "__closure__", None) or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
    found = [f for f in inner if callable(f) and not isinstance(f, type)]
    return _users_function(found[0], depth - 1) if found else callback


def lower_callback(kind: _Kind, number: Callable[[Callback], int], ctx: Any, *args: ir.Value, **params: Any) -> Any:
    axes = ctx.module_context.axis_context
    is_manual = isinstance(axes, sharding_impls.SPMDAxisContext)
    if is_manual and axes.manual_axes != frozenset(axes.mesh.axis_names):
        raise NotImplementedError(
            f"{kind.name} inside a shard_map that leaves some axes of the slice to the compiler; make all axes manual"
        )
    users = _users_function(params.get("callback"))
    host = users if getattr(type(users), "is_host_function", False) else None
    if host is not None:
        what = host.what
    elif "fmt" in params:
        what = f"{kind.name} ({params['fmt']!r})"
    else:
        what = f"{kind.name} ({_function_name(params['callback'])})"
    results = tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in ctx.avals_out)
    own = number(Callback(what, functools.partial(kind.call, **params), results, bool(config.enable_x64.value), host))
    effect = params.get("effect", kind.effect if params.get("ordered") else None)
    effect = effect if isinstance(effect, ORDERED_EFFECTS) else None
    tokens = [] if effect is None else [ctx.tokens_in.get(effect)]
    # jaxlib's partitioner repeats an operation without operands in each computation that reads it, as it does with
    # constants. A callback must be made once, so it has at least one operand.
    more = [] if tokens or args else [jax_mlir.ir_constant(np.bool_(False))]
    call = jax_mlir.custom_call(
        CALLBACK,
        result_types=[*(token.type for token in tokens), *(tensor_type(*result) for result in results)],
        operands=[*tokens, *args, *more],
        backend_config=f"{own} {'each' if is_manual else 'once'} {len(tokens)} {len(args)}",
        has_side_effect=kind.name != "jax.pure_callback",
        api_version=1,
    )
    made = list(call.results)
    if effect is not None:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(jax_mlir.TokenSet({effect: made.pop(0)})))
    return made


def callback_operations(module: ir.Module) -> Iterator[Any]:
    for op in operations(module.body):
        is_call = op.operation.name == "stablehlo.custom_call"
        if is_call and ir.StringAttr(op.attributes["call_target_name"]).value == CALLBACK:
            yield op


def callbacks_of(module: ir.Module) -> Iterator[int]:
    """The numbers of the callbacks in a module."""
    for op in callback_operations(module):
        yield int(ir.StringAttr(op.attributes["backend_config"]).value.split()[0])


def wait_for_effects_also(wait: Callable[[], None]) -> None:
    """From now on, `jax.effects_barrier` also calls `wait`."""
    plain = dispatch.runtime_tokens.block_until_ready

    def block_until_ready() -> None:
        plain()
        wait()

    dispatch.runtime_tokens.block_until_ready = block_until_ready
