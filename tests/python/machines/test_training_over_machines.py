"""Trainings whose slices lie over several machines: the losses and parameters are those of plain JAX.

`examples/transformer_model.py` is the model. Each machine has one host of two devices.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from machines import MachineCluster

import pathways as pw

pytestmark = pytest.mark.slow

ROWS, STEPS, ISLANDS = 32, 8, 2
#: How the axes of an island's mesh cut the parameters of a block.
BLOCK = {"qkv": P(None, None, "model"), "out": P("model"), "up": P(None, "model"), "down": P("model")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two islands of two machines each."""
    with MachineCluster(ISLANDS, 2, 2, machines_per_island=2) as machines, machines.connect() as cluster:
        yield cluster


@pytest.fixture
def model(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's model as a module."""
    monkeypatch.syspath_prepend(root / "examples")
    return importlib.import_module("transformer_model")


def machines_under(slice_: Any) -> int:
    """On how many machines a slice lies."""
    return len({device.host for device in slice_.devices})


def test_islands_of_several_machines_exchange_gradients(cluster: Any, model: Any) -> None:
    """As PaLM was trained: each island has the whole model and half of the batch, on a mesh over both of its machines;
    both islands apply the same sum of gradients. After each step they have the same bits."""
    devices = pw.make_virtual_device_set(cluster)
    islands = [
        devices.add_slice(shape=(2, 2), axis_names=("data", "model"), island=number) for number in range(ISLANDS)
    ]
    assert all(machines_under(each) == 2 for each in islands)
    specs = {"embedding": P(), "positions": P(), "blocks": [BLOCK] * model.STAGES}

    def loss_of(params: Any, tokens: Any, targets: Any) -> Any:
        x = tokens
        for function, p in zip(model.FUNCTIONS, model.per_stage(params), strict=True):
            x = function(p, x)
        return model.loss_of(x, targets)

    gradients = [
        pw.jit(
            jax.value_and_grad(loss_of),
            devices=each,
            in_shardings=(specs, P("data"), P("data")),
            out_shardings=(P(), specs),
            name=f"gradient{number}",
        )
        for number, each in enumerate(islands)
    ]

    def put(tree: Any, to: Any) -> Any:
        return jax.tree.map(lambda leaf, spec: pw.device_put(leaf, to, spec), tree, specs)

    @pw.program(donate_argnums=0)
    def step(states: Any, tokens: Any, targets: Any) -> Any:
        losses, grads = [], []
        for number, (gradient, (params, _)) in enumerate(zip(gradients, states, strict=True)):
            mine = slice(number * ROWS // ISLANDS, (number + 1) * ROWS // ISLANDS)
            loss, own = gradient(params, tokens[mine], targets[mine])
            losses.append(pw.device_put(loss, islands[0]))
            grads.append(own)
        after = []
        for island, (params, moments) in zip(islands, states, strict=True):
            first, second = (put(each, island) for each in grads)
            mean = jax.tree.map(lambda a, b: (a + b) / ISLANDS, first, second)
            after.append(model.update(params, moments, mean))
        return after, jnp.mean(jnp.stack(losses))

    start = model.init_params()
    states = [tuple(put(each, island) for each in (start, jax.tree.map(np.zeros_like, start))) for island in islands]
    losses = []
    for _, (tokens, targets) in zip(range(STEPS), model.texts(ROWS), strict=False):
        states, loss = step(states, tokens, targets)
        losses.append(float(loss))
        for one, other in zip(*map(jax.tree.leaves, states), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
            assert (one.slice, other.slice) == tuple(islands)
    np.testing.assert_allclose(losses, model.train_in_plain_jax(ROWS, STEPS), rtol=2e-5)


@pytest.mark.parametrize("schedule", ["none", "1F1B", "ZeroBubbleH1"])
def test_stages_over_two_machines_each(cluster: Any, model: Any, schedule: str) -> None:
    """A transformer in four stages. Each lies on one device of each machine of an island."""
    training = importlib.import_module("transformer_pipeline").Training
    devices = pw.make_virtual_device_set(cluster)
    stages = [devices.add_slice(shape=(2,), axis_names=("data",), island=number // 2) for number in range(model.STAGES)]
    for number, each in enumerate(stages):
        here = [device.id for device in cluster.devices if device.island == number // 2]
        cluster.remap(each, here[number % 2 :: 2])
    assert len({device for each in stages for device in each.devices}) == 8
    assert all(machines_under(each) == 2 for each in stages)
    losses = training(stages, schedule).run(STEPS)
    np.testing.assert_allclose(losses, model.train_in_plain_jax(ROWS, STEPS), rtol=2e-5)
