"""The digits training in plain JAX: one process, eight CPU devices, a mesh of four for each stage.

    python examples/digits_plain.py [--steps N] [--out FILE.npz]

It is what a user would write without Pathways: every stage is a `jax.jit` on its own mesh, `jax.device_put` carries
features over and `jax.grad` carries their cotangents back, and the controller is Python, one call after another.
`digits_pipeline.py` runs it beside its own training and compares the parameters.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import time
from typing import Any

import digits_model as model
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def _on(mesh: Mesh, specs: Any) -> Any:
    """The same pytree with a NamedSharding for each PartitionSpec."""
    is_spec = lambda x: isinstance(x, PartitionSpec)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def train(config: model.Config, data: model.Digits) -> tuple[Any, float, float]:
    """Train; return the parameters of both stages as NumPy, the test accuracy and the steps per second."""
    devices = np.array(jax.devices())
    mesh_1 = Mesh(devices[0:4].reshape(model.MESH_SHAPE), model.MESH_AXES)
    mesh_2 = Mesh(devices[4:8].reshape(model.MESH_SHAPE), model.MESH_AXES)
    specs, batch, scalar = model.STAGE_SPECS, model.BATCH_SPEC, model.SCALAR_SPEC
    optimizer = config.optimizer()
    params = model.init_params(config)
    state_specs = model.opt_state_specs(optimizer, params[0])

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def jit_on(mesh: Mesh, fun: Any, ins: Any, outs: Any) -> Any:
        return jax.jit(fun, in_shardings=_on(mesh, ins), out_shardings=_on(mesh, outs))

    encode = jit_on(mesh_1, model.encode, (specs, batch), batch)
    classify = jit_on(mesh_2, model.classify, (specs, batch), batch)
    classify_loss = jit_on(mesh_2, model.classify_loss, (specs, batch, batch), scalar)
    updates = [jit_on(m, update, (specs, state_specs, specs), (specs, state_specs)) for m in (mesh_1, mesh_2)]

    def loss_of(params: Any, images: Any, labels: Any) -> Any:
        features = encode(params[0], images)
        return classify_loss(params[1], jax.device_put(features, NamedSharding(mesh_2, batch)), labels)

    params = tuple(jax.device_put(p, _on(m, specs)) for p, m in zip(params, (mesh_1, mesh_2), strict=True))
    states = [
        jit_on(m, optimizer.init, (specs,), state_specs)(p) for p, m in zip(params, (mesh_1, mesh_2), strict=True)
    ]

    began = time.perf_counter()
    for images, labels in data.batches(config):
        _, grads = jax.value_and_grad(loss_of)(params, images, labels)
        done = [step(p, s, g) for step, p, s, g in zip(updates, params, states, grads, strict=True)]
        params, states = tuple(p for p, _ in done), [s for _, s in done]
    jax.block_until_ready(params)
    seconds = time.perf_counter() - began

    features = jax.device_put(encode(params[0], data.test_images), NamedSharding(mesh_2, batch))
    score = model.accuracy(np.asarray(classify(params[1], features)), data.test_labels)
    return jax.tree.map(np.asarray, params), score, config.steps / seconds


def save(path: str, params: Any) -> None:
    """Write both stages' parameters to an .npz file, named `stage.parameter`."""
    np.savez(path, **{f"{i}.{name}": value for i, stage in enumerate(params) for name, value in stage.items()})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the digits model in plain JAX on eight CPU devices.")
    parser.add_argument("--steps", type=int, default=model.Config.steps)
    parser.add_argument("--out", help="write the trained parameters to this .npz file")
    options = parser.parse_args()
    config = model.Config(steps=options.steps)
    params, score, rate = train(config, model.load_digits())
    if options.out:
        save(options.out, params)
    print(f"plain JAX: {config.steps} steps, test accuracy {score:.4f}, {rate:.1f} steps/s")


if __name__ == "__main__":
    main()
