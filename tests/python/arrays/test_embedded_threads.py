"""XLA's thread pool of an embedded cluster: large enough for collectives, or a warning that names the variable to set.

Each test runs a process of its own, on two cores, as the size of the pool follows from them and is settled once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TRAIN = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways as pw

WIDTH, HEADS, LAYERS, VOCAB, LENGTH, BATCH = 64, 4, 2, 64, 16, 8


def make(rng):
    def matrix(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    layers = [
        {
            "attend": matrix(WIDTH, 3 * WIDTH),
            "join": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"embed": matrix(VOCAB, WIDTH), "layers": layers, "out": matrix(WIDTH, VOCAB)}


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def loss(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    b, l, _ = x.shape
    for layer in params["layers"]:
        q, k, v = jnp.split((norm(x) @ layer["attend"]).reshape(b, l, HEADS, 3 * WIDTH // HEADS), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
        scores = jnp.where(jnp.tril(jnp.ones((l, l), bool)), scores, -1e9)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, l, WIDTH) @ layer["join"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    logits = jax.nn.log_softmax(norm(x) @ params["out"])
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


rng = np.random.default_rng(0)
slice_ = pw.make_virtual_device_set(pw.connect()).add_slice(devices=2)
train = pw.jit(step, slice_, in_shardings=(P(), P("x")), out_shardings=P(), donate_argnums=0)
params = pw.device_put(make(rng), slice_)
tokens = pw.device_put(rng.integers(0, VOCAB, (BATCH, LENGTH + 1)), slice_, P("x"))
losses = []
for _ in range(300):
    params, value = train(params, tokens)
    losses.append(value)
print(float(losses[0]), float(losses[-1]), "NPROC" in os.environ)
"""

CONNECT = """
import os, sys, warnings
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax
import pathways as pw
if sys.argv[1] == "late":
    jax.devices()
for _ in range(2):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pw.connect().close()
    print([(str(each.message), each.filename, each.category.__name__) for each in seen])
"""


def run(code: str, *arguments: str, devices: int = 2, **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "NPROC"}
    environ["XLA_FLAGS"] = (  # a deadlock is over soon
        f"--xla_force_host_platform_device_count={devices} --xla_cpu_collective_call_terminate_timeout_seconds=20"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.watchdog(150)
def test_data_parallel_training_on_two_devices_and_two_cores() -> None:
    first, last, is_set = run(TRAIN).split()
    assert 4 < float(first) < 5 and float(last) < float(first) - 2
    assert is_set == "False", "processes that this one starts have other devices"


def test_a_backend_that_was_there_before_is_told_of_once() -> None:
    first, second = run(CONNECT, "late").splitlines()
    assert "Set NPROC=" in first and "JAX was used before pathways.connect()" in first
    assert "'<string>'" in first and "RuntimeWarning" in first, "it names the user's line"
    assert second == "[]"


@pytest.mark.parametrize(
    ("when", "devices", "variables"),
    [("early", 2, {}), ("late", 1, {}), ("late", 2, {"NPROC": "4"})],
)
def test_nothing_is_said_where_there_are_threads_enough(when: str, devices: int, variables: dict[str, str]) -> None:
    assert run(CONNECT, when, devices=devices, **variables).splitlines() == ["[]", "[]"]


def test_what_the_user_set_is_kept_and_told_of_if_too_small() -> None:
    first, second = run(CONNECT, "early", NPROC="2").splitlines()
    assert "NPROC=2 is set" in first and "Set NPROC=" in first and second == "[]"
