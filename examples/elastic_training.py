"""Training that grows from one island to all of them while it runs, and shrinks again, with the same bits.

    python examples/elastic_training.py [--cluster local|embedded|ADDRESS] [--steps N] [--compare]

A third of the steps runs on the first island. Then the training grows: it waits for all devices of the cluster
(`cluster.wait_for`; machines may join meanwhile), adds a worker on each further island, and gives the slice with the
parameters more devices (`slice.resize`). After another third it shrinks: it drains the other islands (`cluster.drain`),
so that the workers' slices move to the first one by themselves, and gives the parameters one device again. On a cluster
that somebody else has started, only they may drain; there the workers are just left out.

Why the bits are the same: a step has always six microbatches. Each is one computation on one device, whichever that is;
their gradients are added in the order of the microbatches; and the optimizer works element by element on parameters
and moments, however they are cut. `--compare` trains once more without all this, and compares.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from target import add_cluster_option, cluster_target

import pathways as pw

FEATURES, HIDDEN, MICROBATCHES, EXAMPLES = 16, 64, 6, 16
OPTIMIZER = optax.adam(1e-2)
RULES = [("w_in$", P(None, "x")), ("b_in$|w_out$", P("x"))]  # of parameters, and of their moments


def init() -> Any:
    """Parameters and the optimizer's state, the same whenever they are asked for."""
    draw = np.random.default_rng(0).standard_normal
    params = {
        "w_in": np.float32(draw((FEATURES, HIDDEN)) / FEATURES**0.5),
        "b_in": np.zeros(HIDDEN, np.float32),
        "w_out": np.float32(draw(HIDDEN) / HIDDEN**0.5),
    }
    return params, jax.tree.map(np.asarray, OPTIMIZER.init(params))


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The microbatches of a step: x[MICROBATCHES, EXAMPLES, FEATURES] and y[MICROBATCHES, EXAMPLES]."""
    x = np.random.default_rng(step).standard_normal((MICROBATCHES, EXAMPLES, FEATURES)).astype(np.float32)
    return x, np.sin(x.sum(axis=2))


def gradients(params: Any, x: jax.Array, y: jax.Array) -> Any:
    """Loss and gradients of one microbatch."""

    def loss_of(params: Any) -> jax.Array:
        hidden = jnp.tanh(x @ params["w_in"] + params["b_in"])
        return jnp.mean((hidden @ params["w_out"] - y) ** 2)

    return jax.value_and_grad(loss_of)(params)


def update(state: Any, found: Any) -> Any:
    """One step of Adam with the microbatches' losses and gradients, added in their order."""
    params, moments = state
    total = functools.reduce(lambda one, two: jax.tree.map(jnp.add, one, two), found)
    loss, grads = jax.tree.map(lambda leaf: leaf / MICROBATCHES, total)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


class Training:
    """The state on its slice, the workers, and the program of one step."""

    def __init__(self, cluster: pw.Cluster) -> None:
        self.cluster = cluster
        self.devices = pw.make_virtual_device_set(cluster)
        self.home = self.devices.add_slice(1, island=0)
        self.workers = [self.devices.add_slice(1, island=0)]
        self.state = pw.place(init(), self.home, RULES)
        shapes = pw.place(jax.eval_shape(lambda state: state, self.state), self.home, RULES)
        self.specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)  # also for more devices than these
        self.losses: list[Any] = []
        self._make_step()

    def _make_step(self) -> None:
        computes = [pw.jit(gradients, devices=worker, name="gradients") for worker in self.workers]
        updates = pw.jit(update, devices=self.home, out_shardings=(self.specs, P()), name="update")
        workers = list(self.workers)

        @functools.partial(pw.program, donate_argnums=0)
        def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
            params = [pw.device_put(state[0], worker) for worker in workers]
            found = []
            for number in range(MICROBATCHES):
                which = number % len(workers)
                one = computes[which](params[which], x[number], y[number])
                found.append(pw.device_put(one, self.home))
            return updates(state, found)

        self._step = step

    def run(self, steps: int, events: Mapping[int, Callable[[], None]]) -> Any:
        """So many steps; before a step, what `events` has for it. Returns parameters and losses."""
        for number in range(steps):
            if number in events:
                events[number]()
            self.state, loss = self._step(self.state, *batch_of(number))
            self.losses.append(loss)
        return jax.tree.map(np.asarray, (self.state[0], self.losses))

    def grow(self) -> None:
        """To all islands of the cluster, when they are there."""
        self.cluster.wait_for(len(self.cluster.devices), timeout=120)
        self.workers += [self.devices.add_slice(1, island=island) for island in range(1, len(self.cluster.islands))]
        self._make_step()
        self.home.resize((2,))
        self._say("grown")

    def shrink(self, drain: Callable[[int], None] | None = None) -> None:
        """To the first island. `drain(island)` drains another one; by default the training does it itself."""
        for island in range(1, len(self.cluster.islands)):
            try:
                drain(island) if drain is not None else self.cluster.drain(island=island)
            except pw.errors.PermissionDeniedError:  # somebody else has started the cluster
                self.workers = self.workers[:1]
                self._make_step()
                break
        self.home.resize((1,))
        self._say("shrunk")

    def _say(self, what: str) -> None:
        islands = sorted({worker.island for worker in self.workers})
        print(f"{what} after {len(self.losses)} steps: workers on islands {islands}, parameters on {self.home.size}")


def main() -> None:
    """Train, and perhaps compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cluster_option(parser, "local")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compare", action="store_true", help="train without growing, too, and compare the bits")
    options = parser.parse_args()
    with pw.connect(cluster_target(options.cluster, islands=3, hosts_per_island=1)) as cluster:
        still = Training(cluster).run(options.steps, {}) if options.compare else None
        training = Training(cluster)
        third = options.steps // 3
        params, losses = training.run(options.steps, {third: training.grow, 2 * third: training.shrink})
        print(f"{options.steps} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        if still is not None:
            same = jax.tree.map(np.array_equal, (params, losses), still)
            print("bit-equal to an undisturbed one:", all(jax.tree.leaves(same)))


if __name__ == "__main__":
    main()
