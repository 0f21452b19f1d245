"""`over_blocks`: values and derivatives are those of a Python loop over the blocks, in any order of transformations; no
block beyond the ends is computed; and the reverse pass adds nothing of the size of all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways.compiler.added_primitives.grouped_blocks import over_blocks

GROUPS, BLOCKS, ROWS, WIDTH, HIDDEN = 3, 6, 2, 5, 7
#: Of each group where its blocks end.
ENDS = {
    "all": [1, 3, BLOCKS],
    "some": [1, 3, 4],
    "a group without": [2, 2, 5],
    "one group": [0, BLOCKS, BLOCKS],
    "none": [0, 0, 0],
}
_random = np.random.default_rng(5)


def _normal(*shape: int) -> Any:
    return _random.normal(size=shape).astype(np.float32)


W = {"in": _normal(GROUPS, WIDTH, HIDDEN), "out": _normal(GROUPS, HIDDEN, WIDTH), "n": np.arange(GROUPS)}
REAL = {"in": W["in"], "out": W["out"]}
S, X = _normal(HIDDEN), _normal(BLOCKS, ROWS, WIDTH)


def in_a_loop(fun: Callable[[Any, Any], Any], ends: Any, groups: Any, blocks: Any) -> Any:
    """What `over_blocks` is, in plain JAX."""
    made = []
    for n in range(BLOCKS):
        group = jnp.minimum(jnp.sum(ends <= n), GROUPS - 1)
        row = fun(jax.tree.map(lambda leaf: jnp.asarray(leaf)[group], groups), blocks[n])  # noqa: B023
        made.append(jax.tree.map(lambda leaf: jnp.where(n < ends[-1], leaf, 0), row))  # noqa: B023
    return jax.tree.map(lambda *rows: jnp.stack(rows), *made)


def loss(over: Any) -> Callable[..., Any]:
    """Of what a function makes that reads integers of its group, and a value that no argument has."""

    def fun(w: Any, s: Any, x: Any, ends: Any) -> Any:
        def expert(mine: Any, rows: Any) -> Any:
            hidden = jnp.tanh(rows @ mine["in"]) * s
            return {"rows": hidden @ mine["out"] + mine["n"], "n": mine["n"] + jnp.arange(ROWS)}

        made = over(expert, ends, {**w, "n": W["n"]}, x)
        return jnp.sum(jnp.sin(made["rows"]) * made["n"][..., None])

    return fun


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def _square(tree: Any) -> Any:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def _along(f: Any) -> Any:
    """The derivative of f(w, s, x, ends) in a direction, as a function of the same."""
    return lambda w, s, x, ends: jax.jvp(lambda *a: f(*a, ends), (w, s, x), jax.tree.map(jnp.cos, (w, s, x)))[1]


#: Derivatives of a function of (w, s, x, ends), each another order of JAX's transformations.
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "gradient": lambda f: jax.grad(f, (0, 1, 2)),
    "gradient of the groups' alone": lambda f: jax.grad(f),
    "gradient of the blocks' alone": lambda f: jax.grad(f, 2),
    "gradient of a jit": lambda f: jax.grad(jax.jit(f), (0, 1, 2)),
    "gradient of a checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
    "forward": _along,
    "forward over forward": lambda f: _along(_along(f)),
    "forward over reverse": lambda f: _along(lambda *a: _square(jax.grad(f, (0, 1, 2))(*a))),
    "reverse over forward": lambda f: jax.grad(_along(f), (0, 1, 2)),
    "reverse over reverse": lambda f: jax.grad(lambda *a: _square(jax.grad(f, (0, 1, 2))(*a)), (0, 1, 2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives(name: str) -> None:
    mine, plain = (jax.jit(TRANSFORMS[name](loss(over))) for over in (over_blocks, in_a_loop))
    for ends in ENDS.values():
        same(mine(REAL, S, X, np.asarray(ends, np.int32)), plain(REAL, S, X, np.asarray(ends, np.int32)))


def test_no_block_beyond_the_ends_is_computed() -> None:
    calls: list[int] = []

    def expert(mine: Any, rows: Any) -> Any:
        jax.debug.callback(lambda n: calls.append(int(n)), mine["n"])
        return rows @ mine["in"]

    for ends in ENDS.values():
        calls.clear()
        jax.block_until_ready(jax.jit(over_blocks, static_argnums=0)(expert, np.asarray(ends, np.int32), W, X))
        jax.effects_barrier()
        assert sorted(calls) == [n for n in range(GROUPS) for _ in range(ends[n] - ([0, *ends])[n])]


def test_a_reverse_pass_adds_only_what_one_group_has() -> None:
    gradient = jax.jit(jax.grad(loss(over_blocks), (0, 1, 2)))
    text = gradient.lower(REAL, S, X, np.asarray(ENDS["all"], np.int32)).as_text()
    added = {line.rsplit(":", 1)[1].strip() for line in text.splitlines() if "stablehlo.add" in line}
    assert f"tensor<{WIDTH}x{HIDDEN}xf32>" in added
    assert f"tensor<{GROUPS}x{WIDTH}x{HIDDEN}xf32>" not in added
    assert f"tensor<{GROUPS}x{WIDTH}x{HIDDEN}xf32>" in text
