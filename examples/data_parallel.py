"""Data-parallel training, SPMD on one slice: the batch is cut, the parameters are whole on every device.

    python examples/data_parallel.py [--cluster embedded|local|ADDRESS] [--steps N]

The step is an ordinary JAX function. Its shardings say that the batch is cut over "data" and everything else is not,
from which XLA derives the all-reduce of the gradients, across hosts where the slice spans several.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from target import add_cluster_option, cluster_target

import pathways as pw

FEATURES, BATCH, DEVICES = 16, 64, 4
OPTIMIZER = optax.adam(3e-2)


def loss_of(params: Any, x: Any, y: Any) -> Any:
    """Mean squared error of a linear model: x[batch, FEATURES], y[batch]."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def train_step(params: Any, state: Any, x: Any, y: Any) -> Any:
    """One step of Adam; returns the new parameters and state, and the loss before the step."""
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(step: Any, steps: int) -> tuple[Any, float]:
    """Learn a known line from noiseless points; return the parameters and the last loss."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(FEATURES).astype(np.float32)
    params: Any = {"w": np.zeros(FEATURES, np.float32), "b": np.zeros((), np.float32)}
    state = OPTIMIZER.init(params)
    for _ in range(steps):
        x = rng.standard_normal((BATCH, FEATURES)).astype(np.float32)
        params, state, loss = step(params, state, x, x @ truth + np.float32(0.5))
    return jax.tree.map(np.asarray, params), float(np.asarray(loss))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Data-parallel training on one slice.")
    add_cluster_option(parser)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with pw.connect(cluster_target(options.cluster)):
        devices = pw.make_virtual_device_set().add_slice(shape=(DEVICES,), axis_names=("data",))
        ins = (P(), P(), P("data"), P("data"))
        step = pw.jit(train_step, devices=devices, in_shardings=ins, out_shardings=P(), name="train_step")
        params, loss = train(step, options.steps)
    expected, _ = train(jax.jit(train_step), options.steps)
    apart = max(float(np.abs(params[name] - expected[name]).max()) for name in expected)
    print(f"{options.steps} steps on {DEVICES} devices: loss {loss:.2e}, within {apart:.1e} of one device")
    if apart > 1e-5:
        raise SystemExit(f"expected the parameters of a single device within 1e-5, they are {apart:.1e} away")


if __name__ == "__main__":
    main()
