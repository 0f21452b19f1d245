"""Programs that were compiled before: the same equations give the same program, anything else gives another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pathways.compiler import memo
from pathways.compiler.ir import LogicalProgram, MeshSpec
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import device_put, trace

ONE, TWO = MeshSpec("memo1", (("x", 2),)), MeshSpec("memo2", (("x", 2),))
X = np.ones((4, 4), np.float32)


def compiled(fun: Callable[..., Any], *args: Any, mesh: MeshSpec = ONE, name: str = "f", **options: Any) -> Any:
    return compile_traced(trace(placed(fun, mesh, name=name, **options), args or [X], name=name))


MAKERS: dict[str, Callable[[], LogicalProgram]] = {
    "plain": lambda: compiled(lambda x: x + 1),
    "another constant": lambda: compiled(lambda x: x + 2),
    "zero": lambda: compiled(lambda x: x * 0.0),
    "minus zero": lambda: compiled(lambda x: x * -0.0),
    "an array": lambda: compiled(lambda x: x + np.arange(4, dtype=np.float32)),
    "another array": lambda: compiled(lambda x: x + np.arange(4, dtype=np.float32)[::-1]),
    "a JAX array": lambda: compiled(lambda x: x + jnp.arange(3.0)[:1]),
    "a parameter": lambda: compiled(lambda x: jnp.sum(x, 0)),
    "another parameter": lambda: compiled(lambda x: jnp.sum(x, 1)),
    "another operand": lambda: compiled(lambda x, y: x - y, X, X),
    "operands swapped": lambda: compiled(lambda x, y: y - x, X, X),
    "another shape": lambda: compiled(lambda x: x + 1, X[:2]),
    "another dtype": lambda: compiled(lambda x: x + 1, X.astype(np.int32)),
    "a weak type": lambda: compiled(lambda x: x + 1, 1.0),
    "another slice": lambda: compiled(lambda x: x + 1, mesh=TWO),
    "another name": lambda: compiled(lambda x: x + 1, name="g"),
    "a sharding": lambda: compiled(lambda x: x + 1, in_shardings=P("x")),
    "another sharding": lambda: compiled(lambda x: x + 1, in_shardings=P(None, "x")),
    "a jit inside": lambda: compiled(lambda x: jax.nn.relu(x) + jax.nn.gelu(x)),
    "a loop": lambda: compiled(lambda x: jax.lax.scan(lambda c, v: (c + v, c), x[0], x)),
    "another loop": lambda: compiled(lambda x: jax.lax.scan(lambda c, v: (c - v, c), x[0], x)),
    "a branch": lambda: compiled(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: -x)),
    "another branch": lambda: compiled(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: -x, lambda: x)),
    "random numbers": lambda: compiled(lambda x: x + jax.random.normal(jax.random.key(0), x.shape)),
    "other random numbers": lambda: compiled(lambda x: x + jax.random.normal(jax.random.key(1), x.shape)),
    "a gradient": lambda: compiled(jax.grad(lambda x: jax.nn.softmax(x).max())),
    "an index": lambda: compiled(lambda x: x.at[0].set(1)),
    "another index": lambda: compiled(lambda x: x.at[1].set(1)),
    "a transfer": lambda: compile_traced(trace(lambda x: device_put(placed(lambda y: y, ONE)(x), TWO), [X])),
    "no transfer": lambda: compile_traced(trace(lambda x: device_put(placed(lambda y: y, ONE)(x), ONE), [X])),
}


def test_equal_equations_are_compiled_once_and_others_apart() -> None:
    first = {name: make() for name, make in MAKERS.items()}
    for name, make in MAKERS.items():
        assert make() is first[name], name
    assert len({id(program) for program in first.values()}) == len(first)


def test_modes_of_jax_are_part_of_it() -> None:
    def matmul() -> Any:
        return compiled(lambda x: x @ x)

    plain = matmul()
    with jax.default_matmul_precision("float32"):
        exact = matmul()
        assert exact is not plain and exact is matmul()
    assert matmul() is plain


@pytest.mark.parametrize("what", ["a big constant", "a callback"])
def test_what_cannot_be_told_by_value_has_no_key(what: str) -> None:
    big = np.ones(1 << 20, np.float32)

    def prints(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    fun = prints if what == "a callback" else lambda x: x + big
    assert memo.key_of(trace(placed(fun, ONE), [big])) is None


def test_a_program_keeps_no_function_alive() -> None:
    import gc
    import weakref

    def make() -> weakref.ref[Any]:
        def fun(x: Any) -> Any:
            return x * 3

        compiled(fun)
        return weakref.ref(fun)

    fun = make()
    jax.clear_caches()
    gc.collect()
    assert fun() is None


def test_only_the_last_are_kept() -> None:
    known = memo.Memo()
    program = compiled(lambda x: x + 1)
    for number in range(memo.KEPT + 1):
        known.put(number, program)
        assert known.get(0) is program or number == memo.KEPT
    known.put("another", program)
    assert known.get(1) is None and known.get(0) is program
