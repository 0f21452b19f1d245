"""Where a `pw.Variable` may not be read, set or made: each with a clear error, and without a change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from variables import ONES, same

import pathways as pw


def test_refusals(add: Any) -> None:
    here = add(1)
    v = pw.Variable(ONES, here, name="v")
    inside = pw.jit(lambda x: x + v.value, devices=here)
    x = pw.device_put(ONES, here)
    same(inside(x), ONES * 2)  # JAX has traced it now

    def set_inside(y: Any) -> Any:
        v.value = y
        return y

    def sets_then(use: Any) -> Any:
        def fun(x: Any) -> Any:
            v.value = x * 2
            return use(x)

        return fun

    def both(x: Any) -> Any:
        y = inside(x)
        v.value = y
        return y

    cases: dict[str, tuple[Any, str]] = {
        "read in a placed function": (both, "read inside a loop, a branch or a placed function"),
        "set, then read in a placed function": (sets_then(inside), "read inside"),
        "set, then read in a loop": (
            sets_then(lambda x: jax.lax.fori_loop(0, 2, lambda i, y: y + v.value, x)),
            "read inside",
        ),
        "set in a placed function": (pw.jit(set_inside, devices=here), "set inside"),
        "set in a loop": (lambda x: jax.lax.fori_loop(0, 2, lambda i, y: set_inside(y), x), "set inside"),
        "set in a derivative": (jax.grad(lambda x: set_inside(x).sum()), "set inside"),
        "set under vmap": (jax.vmap(lambda x: set_inside(jnp.stack([x] * 4))), "set inside"),
        "another shape": (lambda x: set_inside(x[:2]), r"set to float32\[2\]: expected float32\[4\]"),
        "another dtype": (lambda x: set_inside(x.astype(jnp.int32)), r"set to int32\[4\]: expected float32\[4\]"),
        "no array": (lambda x: set_inside([x]), "expected an array"),
        "made inside": (lambda x: pw.Variable(x, here).value, "made while a program is traced"),
    }
    for name, (fun, why) in cases.items():
        with pytest.raises(pw.errors.ProgramError, match=why):
            pytest.fail(f"{name}: {pw.program(fun)(x)}")
        same(v.value, ONES)
    with pytest.raises(pw.errors.ProgramError, match="set inside"):
        jax.grad(lambda x: set_inside(x).sum())(ONES)
    for outside in (
        jax.grad(lambda x: inside(x).sum()),
        lambda x: jax.eval_shape(pw.program(lambda x: v.value + x), x),
    ):
        with pytest.raises(pw.errors.ProgramError, match="is in no pw"):
            outside(ONES)
    with pytest.raises(pw.errors.ProgramError, match="set inside"):
        jax.eval_shape(pw.program(lambda x: v.set(ONES * 5)), ONES)
    with pytest.raises(pw.errors.ProgramError, match="Variable"):
        pw.program(lambda w: w)(v)
    with pytest.raises(pw.errors.SliceError, match="say on which slice"):
        pw.Variable(ONES)
    with pytest.raises(pw.errors.ProgramError, match=r"set to float32\[4\]"):
        pw.Variable(0, here).value = ONES
    same(inside(x), ONES * 2)
