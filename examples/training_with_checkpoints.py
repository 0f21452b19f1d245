"""Training that survives the loss of a host: checkpoints with orbax, and the same script goes on from the last one.

    python examples/training_with_checkpoints.py [--cluster local|embedded|ADDRESS] [--steps N] [--every N]
                                                 [--folder PATH] [--kill-at STEP] [--compare]

A small network is trained data-parallel on one slice. Every few steps its state is saved: each host writes its own
shards, while the training goes on. When a host is lost (`--kill-at` has one killed, to see it), the arrays on its
island are lost with it, and what looks at them raises `HostLostError`, which names the host. The training then takes
the newest checkpoint and goes on, in this process. Batches are drawn by step number, so the parameters in the end are
those of a training without the loss, bit by bit; `--compare` trains that one too and compares.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P
from target import add_cluster_option, cluster_target

import pathways as pw

FEATURES, HIDDEN, BATCH = 16, 64, 64
MESH_SHAPE, MESH_AXES = (2, 2), ("data", "model")
RULES = [("w_in$", P(None, "model")), ("b_in$|w_out$", P("model"))]  # of parameters, and of their moments
OPTIMIZER = optax.adam(1e-2)


def init(key: jax.Array) -> Any:
    """Parameters and the optimizer's state. Placed, it writes straight into the shards on the hosts."""
    first, second = jax.random.split(key)
    params = {
        "w_in": jax.random.normal(first, (FEATURES, HIDDEN)) / FEATURES**0.5,
        "b_in": jnp.zeros(HIDDEN),
        "w_out": jax.random.normal(second, (HIDDEN,)) / HIDDEN**0.5,
        "b_out": jnp.zeros(()),
    }
    return params, OPTIMIZER.init(params)


def train_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
    """One step of Adam on the mean squared error; returns the new state and the loss before it."""
    params, moments = state

    def loss_of(params: Any) -> jax.Array:
        hidden = jnp.tanh(x @ params["w_in"] + params["b_in"])
        return jnp.mean((hidden @ params["w_out"] + params["b_out"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a step: x[BATCH, FEATURES] and y[BATCH], the same whenever it is asked for."""
    x = np.random.default_rng(step).standard_normal((BATCH, FEATURES)).astype(np.float32)
    return x, np.sin(x.sum(axis=1)).astype(np.float32)


def abstract_state(devices: pw.Slice) -> Any:
    """What to restore, and where: shapes, dtypes and shardings, without any value."""
    return pw.place(jax.eval_shape(init, jax.random.key(0)), devices, RULES)


def train(cluster: pw.Cluster, manager: ocp.CheckpointManager, steps: int, kill_at: int | None = None) -> Any:
    """Trains up to `steps` steps from the newest checkpoint, or from the start. The state, as NumPy.

    `kill_at`: before this step one host of the cluster is killed.

    Raises:
        HostLostError: a host was lost.
    """
    devices = pw.make_virtual_device_set(cluster).add_slice(shape=MESH_SHAPE, axis_names=MESH_AXES)
    there = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(devices))
    start = pw.jit(init, devices=devices, out_shardings=there)
    data = P("data")
    step = pw.jit(
        train_step,
        devices=devices,
        in_shardings=(there, data, data),
        out_shardings=(there, P()),
        donate_argnums=0,
    )
    newest = manager.latest_step()
    if newest is None:
        state, done = start(jax.random.key(0)), 0
    else:
        state = manager.restore(newest, args=ocp.args.StandardRestore(abstract_state(devices)))
        done = newest
        print(f"went on from step {done}", flush=True)
    for number in range(done, steps):
        if number == kill_at:
            kill_a_host(cluster, devices)
        state, _ = step(state, *batch_of(number))
        manager.save(number + 1, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    return jax.tree.map(np.asarray, state)


def kill_a_host(cluster: pw.Cluster, devices: pw.Slice) -> None:
    """What a machine that fails does to its host process: here, to the last one of a slice."""
    number = devices.devices[-1].host
    os.kill(cluster.stats()["hosts"][number]["pid"], signal.SIGKILL)
    print(f"killed host {number}", flush=True)


def run(target: Any, folder: pathlib.Path, steps: int, every: int, kill_at: int | None) -> Any:
    """A whole training: again from the last checkpoint, as often as a host is lost."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
    while True:
        # The one there is, or a new one when that was lost. Orbax's manager makes JAX's backend, so this comes first.
        cluster = pw.connect(target)
        try:
            with ocp.CheckpointManager(folder, options=options) as manager:
                return train(cluster, manager, steps, kill_at)
        except pw.errors.HostLostError as error:
            print(f"lost: {str(error).splitlines()[0]}", flush=True)
            kill_at = None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train with checkpoints; go on when a host is lost.")
    add_cluster_option(parser, default="local")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--folder", type=pathlib.Path, help="of the checkpoints; a temporary one if not given")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="kill a host process before this step")
    parser.add_argument("--compare", action="store_true", help="train undisturbed as well, and compare the parameters")
    options = parser.parse_args()
    if options.kill_at is not None and options.cluster == "embedded":
        parser.error("--kill-at needs a cluster of host processes; embedded, the host is this process")
    target = cluster_target(options.cluster)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or pathlib.Path(scratch, "training")).absolute()
        state = run(target, folder, options.steps, options.every, options.kill_at)
        x, y = batch_of(10**6)  # one that was not trained on
        print(f"{options.steps} steps, loss {float(np.mean((predict(state[0], x) - y) ** 2)):.4f}")
        if options.compare:
            undisturbed = run(target, pathlib.Path(scratch, "undisturbed"), options.steps, options.every, None)
            same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), state, undisturbed)
            print(f"bit-equal to an undisturbed training: {jax.tree.all(same)}")
            if not jax.tree.all(same):
                raise SystemExit(1)
    pw.connect(target).close()


def predict(params: Any, x: np.ndarray) -> np.ndarray:
    """The network on NumPy."""
    return np.tanh(x @ params["w_in"] + params["b_in"]) @ params["w_out"] + params["b_out"]


if __name__ == "__main__":
    main()
