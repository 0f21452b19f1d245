"""A user's program as type checkers see it; test_types.py runs them on it. It is not run.

Each line that ends with `# wrong` must be an error for each checker, and no other line.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import pathways as pw

P: Any = jax.sharding.PartitionSpec  # some versions of JAX have no types for it
Params = dict[str, jax.Array]


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def train(cluster: pw.Cluster) -> float:
    devices = pw.make_virtual_device_set(cluster)
    first = devices.add_slice(devices=4, shape=(2, 2), axis_names=("x", "y"))
    second: pw.Slice = devices.add_slice(devices=4)
    placed = pw.jit(layer, first, in_shardings=(P("x"), None), name="layer")
    assert_type(placed(jnp.ones((4, 4)), jnp.ones((4, 4))), jax.Array)
    assert_type(placed.slice, pw.Slice)
    placed(jnp.ones((4, 4)))  # wrong
    placed(jnp.ones((4, 4)), "no array")  # wrong
    placed(jnp.ones((4, 4)), y=jnp.ones((4, 4)))  # wrong
    pw.jit(layer)  # wrong
    pw.jit(layer, "a slice")  # wrong
    pw.jit(layer, devices=first, in_sharding=P("x"))  # wrong
    pw.jit(3, devices=first)  # wrong

    @pw.jit(devices=second, static_argnums=1)
    def loss(params: Params, power: int = 2) -> jax.Array:
        return jnp.sum(params["w"] ** power)

    assert_type(loss({"w": jnp.ones(3)}, power=3), jax.Array)
    loss({"w": jnp.ones(3)}, power="two")  # wrong

    @pw.program
    def step(params: Params, batch: jax.Array) -> tuple[jax.Array, Params]:
        value, gradients = jax.value_and_grad(loss)(params)
        return value, gradients

    value, params = step({"w": jnp.ones(3)}, batch=jnp.ones(3))
    assert_type(value, jax.Array)
    assert_type(params, Params)
    step(params)  # wrong
    timed = step.with_timeout(3.0)
    assert_type(timed(params, value), tuple[jax.Array, Params])
    timed(params, value, value)  # wrong
    step.with_timeout("soon")  # wrong
    text: str = step.lower(params, value).as_text("plan")

    @pw.program(name="named", schedule="auto")
    def named(x: jax.Array) -> jax.Array:
        return placed(x, x)

    assert_type(named(value), jax.Array)
    named()  # wrong

    there = pw.device_put(np.ones((4, 4), np.float32), first, P("x"))
    placed(there, there)
    gate = pw.nn.TopKGate(features=8, experts=4, k=2)
    gating = gate(gate.init(jax.random.key(0)), value)
    assert_type(gating, pw.nn.Gating)
    assert_type(gating.weights, jax.Array)
    pw.nn.TopKGate(features=8, experts=4, top=2)  # wrong
    pw.nn.NoSuchGate()  # wrong
    pw.checkpoint.no_such_function()  # wrong
    cluster.suspend(7, 8, 9)  # wrong
    return float(value) + len(text)


class Model:
    def __init__(self, slice_: pw.Slice) -> None:
        self.head = pw.jit(self.apply, devices=slice_)

    def apply(self, x: jax.Array) -> jax.Array:
        return x * 2

    @pw.program
    def forward(self, x: jax.Array) -> jax.Array:
        return self.head(x)


def use(model: Model, x: jax.Array) -> Any:
    assert_type(model.forward(x), jax.Array)
    model.forward(x, x)  # wrong
    model.head("no array")  # wrong
    try:
        return model.head(x)
    except pw.errors.HostLostError as error:
        return str(error)


with pw.connect(pw.LocalCluster(islands=2)) as one:
    train(one)
    pw.LocalCluster(island=2)  # wrong
