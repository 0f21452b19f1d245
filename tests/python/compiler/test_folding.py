"""What the compiler computes when it traces: the same as XLA, and branches on it are taken then.

Map: each rule against XLA, with the ends of each type; what is not computed; loops that are unrolled; bounds of
unrolling; bounds of loops and numbers of branches.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import run

from pathways import _jaxlib, errors
from pathways.compiler.control.folding import Folder, literals
from pathways.compiler.ir import LogicalProgram, MeshSpec
from pathways.compiler.placed import TaggedFunction

A = MeshSpec("a", (("x", 1),))
X = np.eye(4, dtype=np.float32)


def add(x: Any) -> Any:
    return x + 1


def halve(x: Any) -> Any:
    return x * 0.5


PLACED_ADD, PLACED_HALVE = TaggedFunction(add, A, name="add"), TaggedFunction(halve, A, name="halve")

RULES: tuple[Callable[[Any, Any], Any], ...] = (
    lambda i, j: i % j,
    lambda i, j: i // j,
    lambda i, j: jax.lax.rem(i, j) + jax.lax.div(i, j),
    lambda i, j: jnp.sign(i) * abs(j) + i**3,
    lambda i, j: jnp.where(i > j, divmod(i, j)[1], j),
    lambda i, j: jax.lax.shift_left(i, j) ^ (i >> j),
    lambda i, j: jnp.flip(jnp.arange(2, 20, 3))[i].astype(i.dtype) - j,
    lambda i, j: jnp.array([3, 1, 2])[j] + jnp.arange(6).reshape(3, 2)[1, 1],
)


def folded(fun: Callable[..., Any], *numbers: Any) -> Any:
    """The result of a function as it is computed here; None if it is not."""
    closed = jax.make_jaxpr(fun)(*numbers)
    folder = Folder()
    for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        folder.know(v, value)
    env = {v: _jaxlib.new_literal(x, v.aval) for v, x in zip(closed.jaxpr.invars, numbers, strict=True)}
    for eqn in closed.jaxpr.eqns:
        values = folder.fold(eqn, [v if isinstance(v, _jaxlib.Literal) else env.get(v, v) for v in eqn.invars])
        if values is None:
            return None
        known = literals(eqn, values)
        env.update(zip(eqn.outvars, known or (), strict=False))
        for v, value in zip(eqn.outvars, values, strict=True):
            folder.know(v, value)
    return env[closed.jaxpr.outvars[0]].val


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_numbers_are_computed_as_xla_computes_them(dtype: Any) -> None:
    info = np.iinfo(dtype)
    numbers = [dtype(n) for n in (0, 1, 2, 5, -1, -3, info.min, info.max, 8) if info.min <= n <= info.max]
    grid = np.array(numbers)
    for fun in RULES:
        plain = np.asarray(jax.jit(jax.vmap(jax.vmap(fun, (None, 0)), (0, None)))(grid, grid))
        known = 0
        for (row, i), (column, j) in itertools.product(enumerate(numbers), repeat=2):
            value = folded(fun, i, j)
            if value is not None:
                known += 1
                assert value == plain[row, column] and np.asarray(value).dtype == plain.dtype, (fun, i, j)
        assert known > len(numbers) ** 2 // 4


def test_what_xla_leaves_open_is_not_computed() -> None:
    least = np.iinfo(np.int32).min
    for fun in (jax.lax.rem, jax.lax.div):
        assert folded(fun, np.int32(1), np.int32(0)) is None and folded(fun, np.int32(least), np.int32(-1)) is None
    assert folded(jax.lax.shift_left, np.int32(1), np.int32(32)) is None
    assert folded(lambda i: jnp.arange(1 << 13)[i], np.int32(3)) is None, "the array is too long"


def calls(program: LogicalProgram) -> list[str]:
    assert not program.predicates and not program.loops
    return [node.origin for node in program.nodes if node.origin in ("add", "halve")]


def branch(condition: Any, c: Any) -> Any:
    return jax.lax.cond(condition, PLACED_ADD, PLACED_HALVE, c)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (lambda x: jax.lax.fori_loop(0, 4, lambda i, c: branch(i % 2 == 1, c), x), (0, 1, 0, 1)),
        (lambda x: jax.lax.fori_loop(0, 4, lambda i, c: branch(i // 3 == 1, c), x), (0, 0, 0, 1)),
        (lambda x: jax.lax.scan(lambda c, i: (branch(i % 3 > 0, c), i), x, jnp.arange(4))[0], (0, 1, 1, 0)),
        (lambda x: jax.lax.scan(lambda c, i: (branch(i == 7, c), i), x, jnp.arange(9, 0, -2))[0], (0, 1, 0, 0, 0)),
        (lambda x: jax.lax.scan(lambda c, i: (branch(i, c), i), x, np.array([True, False, True]))[0], (1, 0, 1)),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: branch(jnp.array([0, 1, 1])[i] == 1, c), x), (0, 1, 1)),
        (lambda x: jax.lax.fori_loop(np.uint32(1), np.uint32(4), lambda i, c: branch(i > 2, c), x), (0, 0, 1)),
        (lambda x: jax.lax.switch(np.uint8(200), [PLACED_HALVE, PLACED_ADD], x), (1,)),
        (lambda x: jax.lax.switch(-5, [PLACED_HALVE, PLACED_ADD], x), (0,)),
    ],
)
def test_a_branch_on_a_counter_is_taken_when_the_program_is_traced(loop: Any, expected: tuple[int, ...]) -> None:
    plain = X
    for taken in expected:
        plain = add(plain) if taken else halve(plain)
    got, program = run(loop, X, at=[(A, None)])
    np.testing.assert_array_equal(got, plain)
    assert calls(program) == [("halve", "add")[taken] for taken in expected]


def test_a_counter_that_is_carried_through_a_loop_is_not_taken_for_known() -> None:
    """The loop is not unrolled, so its counter has no one value."""
    _, program = run(lambda x: jax.lax.fori_loop(0, 17, lambda i, c: branch(i % 2 == 1, c), x), X, at=[(A, None)])
    (loop,) = program.loops
    assert len(loop.body.predicates) == 2


def nested(depth: int, length: int) -> Callable[[Any], Any]:
    def once(fun: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, length, lambda _, c: fun(c), x)

    def loop(x: Any) -> Any:
        fun: Any = PLACED_ADD
        for _ in range(depth):
            fun = functools.partial(once, fun)
        return fun(x)

    return loop


def test_nested_scans_are_unrolled_to_a_bound() -> None:
    with pytest.raises(errors.ProgramError) as refusal:
        run(nested(4, 9), X, at=[(A, None)])
    assert re.search(r"scans of 9 x 9 x 9 x 9 iterations.*6561 copies.*at most 4096.*unroll=", str(refusal.value))
    _, program = run(nested(4, 3), X, at=[(A, None)])
    assert len(calls(program)) == 81
    _, program = run(lambda x: nested(2, 9)(nested(2, 9)(x)), X, at=[(A, None)])
    assert len(calls(program)) == 162, "one after the other they do not multiply"


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (lambda x, n: jax.lax.fori_loop(0, n * 1.5, lambda i, c: PLACED_ADD(c), x), "equal types, got int32 and float"),
        (lambda x, n: jax.lax.fori_loop(0, n.astype("uint32"), lambda i, c: PLACED_ADD(c), x), "int32 and uint32"),
        (lambda x, n: jax.lax.fori_loop(0, n[None], lambda i, c: PLACED_ADD(c), x), "boolean scalar"),
        (lambda x, n: jax.lax.switch(n * 1.5, [PLACED_ADD, PLACED_HALVE], x), "Index type must be an integer"),
        (lambda x, n: jax.lax.switch(n[None], [PLACED_ADD, PLACED_HALVE], x), "index must be scalar"),
        (lambda x, n: jax.lax.cond(n[None] > 0, PLACED_ADD, PLACED_HALVE, x), "Pred must be a scalar"),
    ],
)
def test_jax_refuses_bounds_and_indices_of_other_types(fun: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        run(fun, X, np.int32(3), at=[(A, None), (A, None)])


@pytest.mark.parametrize("n", [np.int32(-7), np.int32(1), np.int32(9), np.uint32(4294967295), np.uint8(255)])
def test_a_number_out_of_range_takes_the_nearest_branch_as_in_jax(n: Any) -> None:
    def fun(f: Any, g: Any) -> Any:
        return lambda x, n: jax.lax.switch(n, [f, g, lambda x: x * 3], x)

    got, program = run(fun(PLACED_ADD, PLACED_HALVE), X, n, at=[(A, None), (A, None)])
    np.testing.assert_array_equal(got, jax.jit(fun(add, halve))(X, n))
    assert len(program.predicates) == 3
