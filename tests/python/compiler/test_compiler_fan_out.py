"""`compiler/fan_out`: it differentiates and batches as the identity and as plain additions do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways.compiler.added_primitives.fan_out import add_many, fan_out

TREE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(2), "n": np.int32(3)}


def plain(tree: Any, count: int) -> list[Any]:
    return [tree] * count


def loss(fan: Any, tree: Any) -> Any:
    """Copy 1 does not read `b`, so its cotangent there is zero."""
    one, two, three = fan(tree, 3)
    return jnp.sum(one["w"] ** 2) * one["b"] + jnp.sum(jnp.sin(two["w"])) * two["n"] + jnp.sum(three["w"]) * three["b"]


def both(function: Any, *args: Any) -> None:
    got, expected = (jax.jit(lambda *args, fan=fan: function(fan, *args))(*args) for fan in (fan_out, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


def test_derivatives_are_those_of_values_that_are_read_several_times() -> None:
    both(loss, TREE)
    both(lambda fan, tree: jax.grad(lambda t: loss(fan, t), allow_int=True)(tree)["w"], TREE)
    both(lambda fan, b: jax.grad(jax.grad(lambda b: loss(fan, {**TREE, "b": b * b})))(b), np.float32(3))
    both(lambda fan, w: jax.jvp(lambda w: loss(fan, {**TREE, "w": w}), (w,), (w,)), TREE["w"])
    both(lambda fan, w: jax.hessian(lambda w: loss(fan, {**TREE, "w": w}))(w), TREE["w"])


@pytest.mark.parametrize("axes", [{"w": 0, "b": None, "n": None}, {"w": 1, "b": None, "n": None}, 0], ids=str)
def test_it_batches_like_plain_values(axes: Any) -> None:
    many = {"w": np.stack([TREE["w"], TREE["w"] * 2], 0), "b": np.float32([1, 2]), "n": np.int32([3, 4])}
    if axes != 0:
        many = {**many, "w": np.moveaxis(many["w"], 0, axes["w"]), "b": TREE["b"], "n": TREE["n"]}

    def gradient(fan: Any, tree: Any) -> Any:
        of = lambda w, b, n: loss(fan, {"w": w, "b": b, "n": n})
        return jax.grad(of, argnums=(0, 1))(tree["w"], tree["b"], tree["n"])

    both(lambda fan, tree: jax.vmap(lambda t: gradient(fan, t), in_axes=(axes,))(tree), many)


@pytest.mark.parametrize("places", [(0, 1), (None, 0), (0, None), (1, 1), (None, None)], ids=str)
def test_sums_of_values_that_are_batched_differently(places: tuple[int | None, int | None]) -> None:
    square = np.arange(9, dtype=np.float32).reshape(3, 3)

    def sums(a: Any, b: Any, c: Any) -> Any:
        return add_many([a, c], [b, c])

    a, b = (square if at is not None else square[0] for at in places)
    got = jax.jit(jax.vmap(sums, (*places, 0)))(a, b, square)
    expected = jax.vmap(lambda a, b, c: [a + b, c + c], (*places, 0))(a, b, square)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_values_that_are_no_tracers_stay_as_they_are() -> None:
    trees = fan_out(TREE, 2)
    assert trees[0] is TREE and trees[1] is TREE


def test_loops_keep_no_copies_for_their_backward_steps() -> None:
    """What a scan saves for its backward scan is as much as without `fan_out`."""

    def saved(fan: Any) -> list[Any]:
        def body(carry: Any, x: Any) -> Any:
            return carry + loss(fan, {**TREE, "w": w * x}), None

        w = jnp.ones((2, 3))
        made = jax.make_jaxpr(jax.grad(lambda x: jax.lax.scan(body, 0.0, x)[0]))(np.ones(5, np.float32))
        scans = [eqn for eqn in made.jaxpr.eqns if eqn.primitive.name == "scan"]
        return sorted(str(v.aval) for v in scans[0].outvars)

    assert saved(fan_out) == saved(plain)


def test_a_larger_model_has_no_more_equations_per_microbatch(embedded_cluster: Any) -> None:
    devices = pw.make_virtual_device_set(embedded_cluster)
    slices = [devices.add_slice(devices=1) for _ in range(2)]

    def stage(layers: Any, x: Any) -> Any:
        for w in layers:
            x = jnp.tanh(x @ w)
        return x

    stages = [pw.jit(stage, devices=one, name=f"f{n}") for n, one in enumerate(slices)]
    step = pw.program(jax.value_and_grad(pw.pipeline(stages, microbatches=8, loss=lambda y: jnp.mean(y**2))))

    def equations(layers: int) -> int:
        params = [[np.eye(4, dtype=np.float32)] * layers] * 2
        return len(step.trace(params, np.ones((8, 4), np.float32)).jaxpr.eqns)

    assert equations(2) == equations(20) < 12 * 8
