"""Effects: what has one is run or refused by name, and never dropped as dead code (EFF-1).

The table: each effect that JAX has, by its own classes, in each construct. The results of what has the effect are read
by nobody. What a reference does is in `contract/test_references.py`, what a callback does in
`contract/test_callbacks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.buffer_callback
import jax.experimental.pallas
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.interpreters import mlir

from pathways import errors
from pathways.api.programs.while_loop import while_loop
from pathways.compiler.added_primitives.exchange import exchange
from pathways.compiler.ir import LogicalProgram, MeshSpec
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, trace

LEFT, RIGHT = MeshSpec("left", (("x", 2),)), MeshSpec("right", (("y", 2),))
X = Argument((4,), np.float32, False, LEFT, ((),))

Fun = Callable[[Any], Any]
triple = placed(lambda x: x * 3, LEFT, name="triple")


def in_custom_rule(act: Fun) -> Fun:
    @jax.custom_vjp
    def ruled(x: Any) -> Any:
        act(x)
        return triple(x)

    ruled.defvjp(lambda x: (ruled(x), None), lambda _, cotangent: (cotangent * 3,))
    return ruled


def in_exchange(act: Fun) -> Fun:
    def program(x: Any) -> Any:
        sent = exchange(triple(x), jnp.zeros(4, jnp.int32), RIGHT, capacity=8)
        act(sent.rows)
        return sent.rows

    return program


def scan_of(length: int) -> Callable[[Fun], Fun]:
    return lambda act: lambda x: jax.lax.scan(lambda c, _: (act(c), (triple(c), None))[1], x, None, length=length)[0]


def in_while(act: Fun) -> Fun:
    return lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: (act(c), triple(c))[1], x)


#: How a program comes to call what has an effect.
PLACES: dict[str, Callable[[Fun], Fun]] = {
    "placed function": lambda act: placed(lambda x: (act(x), x * 2)[1], LEFT, name="f"),
    "placed function that returns its argument": lambda act: placed(lambda x: (act(x), x)[1], LEFT, name="f"),
    "placed function without results": lambda act: placed(lambda x: (act(x), None)[1], LEFT, name="f"),
    "jit in a placed function": lambda act: placed(lambda x: (jax.jit(act)(x), x * 2)[1], LEFT, name="f"),
    "program": lambda act: lambda x: (act(x), triple(x))[1],
    "program of constants": lambda act: lambda x: (act(jnp.arange(4.0)), triple(x))[1],
    "program that returns its argument": lambda act: lambda x: (act(x), x)[1],
    "jit in a program": lambda act: lambda x: (jax.jit(act)(x), triple(x))[1],
    "short scan": scan_of(3),
    "long scan": scan_of(30),
    "while": in_while,
    "while in a placed function": lambda act: placed(in_while(act), LEFT, name="f"),
    "bounded while": lambda act: (
        lambda x: while_loop(lambda c: c.sum() < 9, lambda c: (act(c), triple(c))[1], x, max_iterations=40)
    ),
    "cond": lambda act: lambda x: jax.lax.cond(x.sum() > 0, lambda v: (act(v), triple(v))[1], triple, x),
    "known cond": lambda act: lambda x: jax.lax.cond(True, lambda v: (act(v), triple(v))[1], triple, x),
    "remat": lambda act: jax.checkpoint(lambda x: (act(x), triple(x))[1]),
    "custom_vjp": in_custom_rule,
    "exchange": in_exchange,
    "pure callback": lambda act: (
        lambda x: (act(jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)), triple(x))[1]
    ),
}


def compiled(fun: Fun) -> LogicalProgram:
    return compile_traced(trace(fun, [X]))


def modules_of(program: LogicalProgram) -> Iterator[bytes]:
    """Those of its computations, and of its loops."""
    yield from (computation.module for computation in program.computations)
    for loop in program.loops:
        yield from modules_of(loop.body)


def bases(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from bases(each)


def effect_of(act: Fun) -> Any:
    return next(iter(jax.make_jaxpr(act)(jnp.zeros(4)).effects))


EFFECT = type(effect_of(lambda x: jax.debug.print("{}", x))).__mro__[-2]
KINDS = [*dict.fromkeys(kind for kind in bases(EFFECT) if kind.__module__.startswith("jax"))]
OF_INPUTS = next(kind for kind in KINDS if kind.__name__ == "JaxprInputEffect")


def instance(kind: type) -> Any:
    """An effect of a class of JAX's."""
    for arguments in ((), (0,), (ValueError, ())):
        try:
            made = kind(*arguments)
            hash(made)
            return made
        except (TypeError, AttributeError):
            continue
    raise AssertionError(f"how is a {kind} made?")


def primitive_with(effect: Any) -> Fun:
    """A function with that effect."""
    primitive = jex.core.Primitive(f"does_{type(effect).__name__}")
    primitive.def_effectful_abstract_eval(lambda x: (x, {effect}))
    mlir.register_lowering(primitive, lambda _, x: [x])
    return primitive.bind


#: What is run; the names that JAX has for it. An effect of a class that is not here must be refused.
RUN = {"IOEffect", "OrderedIOEffect", "DebugEffect", "OrderedDebugEffect", "FfiEffect", "NoDCEEffect"}
NOTHING = {"NamedAxisEffect"}


def test_the_registry_has_what_we_run() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert RUN | NOTHING | {"ErrorEffect", "WriteEffect", "AccumEffect", "BufferCallbackEffect"} <= names
    assert len(KINDS) >= 20


@pytest.mark.parametrize("place", PLACES)
def test_an_effect_that_hosts_do_not_run_is_refused(place: str) -> None:
    for kind in KINDS:
        if kind.__name__ in RUN | NOTHING or issubclass(kind, OF_INPUTS):
            continue
        act = primitive_with(instance(kind))
        with pytest.raises((errors.EffectError, NotImplementedError), match=kind.__name__):  # JAX refuses some in loops
            compiled(PLACES[place](act))


def test_an_effect_on_an_argument_is_refused() -> None:
    """As those of references are, until the references are values."""
    kinds = [kind for kind in KINDS if issubclass(kind, OF_INPUTS)]
    assert len(kinds) >= 4
    for kind in kinds:
        for place in ("placed function", "jit in a placed function", "program", "long scan", "cond"):
            with pytest.raises((errors.EffectError, NotImplementedError), match=kind.__name__):
                compiled(PLACES[place](primitive_with(kind(0))))


class Unheard(EFFECT):  # type: ignore[misc, valid-type]
    """An effect of somebody's own, which JAX lets pass everywhere."""


def test_an_effect_of_the_users_own_is_refused_with_its_place() -> None:
    with pytest.raises(errors.EffectError, match=r"'f' has the effect Unheard of does_Unheard \(.*test_effects.py:\d+"):
        compiled(PLACES["placed function"](primitive_with(Unheard())))


def checked(x: Any) -> None:
    checkify.check(x.sum() > 100, "the sum is too small")


@pytest.mark.parametrize("place", PLACES)
def test_a_check_that_is_not_functional(place: str) -> None:
    with pytest.raises(errors.EffectError, match=r"ErrorEffect\(FailedCheckError\) of check .*checkify.checkify"):
        compiled(PLACES[place](checked))
    with pytest.raises(ValueError):  # as jax.jit
        jax.jit(checked)(jnp.zeros(4))
    compiled(PLACES["program"](lambda x: checkify.debug_check(x.sum() > 100, "not checked")))  # JAX drops it, too


def side(x: Any) -> None:
    jax.ffi.ffi_call("side", jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=True)(x)


ACTS: dict[str, Fun] = {
    "debug.print": lambda x: jax.debug.print("{}", x),
    "ordered debug.print": lambda x: jax.debug.print("{}", x, ordered=True),
    "debug.callback": lambda x: jax.debug.callback(print, x),
    "io_callback": lambda x: io_callback(print, None, x),
    "ordered io_callback": lambda x: io_callback(print, None, x, ordered=True),
    "ffi_call": side,
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("place", PLACES)
def test_an_effect_that_hosts_run_is_in_the_program(place: str, act: str) -> None:
    """Or the construct that cannot have it is named."""
    try:
        program = compiled(PLACES[place](ACTS[act]))
    except errors.CallbackError as error:
        assert any(name in str(error) for name in ("jax.lax.", "pw.exchange")), error
        return
    except NotImplementedError as error:
        assert "Effects not supported" in str(error)
        return
    assert program.calls.effects > 0
    if act == "ffi_call":
        assert any(b"side" in module for module in modules_of(program))
    else:
        assert len(program.callbacks) > 0
