"""A training in unmodified JAX, on the islands that are up. `test_proxy_elastic.py` starts it; it knows no Pathways.

A step sums the gradients of four parts of its batch in their order, wherever each was computed. So losses have the same
bits on one island and on two, and in plain JAX. State is kept in this process every `KEPT` steps; after a loss the
training goes on from there, on what is up, and takes an island back when it is there again.

The first argument says who finds out which islands are up: "loop", this file, or "pathwaysutils", its elastic manager.
It prints a line of JSON per step, with step, loss and islands, and one per loss, with "lost", the error and islands.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what jaxlib prints is no answer

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

STEPS, KEPT, PARTS, WIDTH = 80, 5, 4, 32
#: So often the training looks whether an island is back.
LOOK = 10
#: Seconds after each step, so that a host is killed in time.
PAUSE_S = 0.05

Devices = Mapping[int, list[Any]]


def gradient(params: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)

    return jax.value_and_grad(loss)(params)


def update(params: Any, parts: Any) -> Any:
    losses, gradients = zip(*parts, strict=True)
    total = jax.tree.map(lambda *each: sum(each[1:], each[0]) / PARTS, *gradients)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, total), sum(losses[1:], losses[0]) / PARTS


def batch(step: int) -> tuple[Any, Any]:
    made = np.random.default_rng(step).standard_normal((2, PARTS, 8, WIDTH)).astype(np.float32)
    return made[0], np.tanh(made[0] @ np.eye(WIDTH, dtype=np.float32)[::-1])


class Training:
    """What has been kept: the next step, and the parameters before it."""

    def __init__(self) -> None:
        scale = np.random.default_rng(1).standard_normal((2, WIDTH, WIDTH)).astype(np.float32) * 0.1
        self.step, self.kept = 0, {"a": scale[0], "b": scale[1]}
        self.gradient, self.update = jax.jit(gradient), jax.jit(update)

    def run(self, islands: Devices, grown: Callable[[], bool]) -> None:
        """Trains on these islands until the end, or until there are more of them."""
        try:
            self._run(islands, grown)
        except jax.errors.JaxRuntimeError as error:
            print(json.dumps(["lost", str(error)[:200], sorted(islands)]), file=answers, flush=True)
            raise

    def _run(self, islands: Devices, grown: Callable[[], bool]) -> None:
        homes = [NamedSharding(Mesh(np.array(devices), ("x",)), P()) for devices in islands.values()]
        cuts = [NamedSharding(Mesh(np.array(devices), ("x",)), P("x")) for devices in islands.values()]
        params, step = jax.device_put(self.kept, homes[0]), self.step
        while step < STEPS:
            if step % LOOK == 0 and grown():
                return
            xs, ys = batch(step)
            copies = [jax.device_put(params, home) for home in homes]
            parts = []
            for part in range(PARTS):
                at = part * len(homes) // PARTS
                made = self.gradient(copies[at], *(jax.device_put(each[part], cuts[at]) for each in (xs, ys)))
                parts.append(jax.device_put(made, homes[0]))
            params, loss = self.update(params, parts)
            print(json.dumps([step, float(loss).hex(), sorted(islands)]), file=answers, flush=True)
            time.sleep(PAUSE_S)
            step += 1
            if step % KEPT == 0:
                self.kept, self.step = jax.tree.map(np.asarray, params), step


def by_loop(training: Training, all_islands: Devices) -> None:
    """Tries each island, as pathwaysutils does."""

    def there() -> list[int]:
        tried = {n: jax.pmap(lambda v: v + 1, devices=devices)(np.zeros(len(devices)))
                 for n, devices in all_islands.items()}  # fmt: skip
        found = []
        for n, value in tried.items():
            try:
                jax.block_until_ready(value)
                found.append(n)
            except jax.errors.JaxRuntimeError as error:
                if "DATA_LOSS" not in str(error):
                    raise
        return found

    while training.step < STEPS:
        up = there()
        if not up:
            time.sleep(0.1)
            continue
        try:
            training.run({n: all_islands[n] for n in up}, lambda up=up: len(there()) > len(up))
        except jax.errors.JaxRuntimeError as error:
            if "DATA_LOSS" not in str(error):
                raise


def by_pathwaysutils(training: Training, all_islands: Devices) -> None:
    """Its elastic manager, with a thread that looks for islands that are back."""
    from pathwaysutils.elastic import manager

    made = manager.Manager()

    @made.elastic_retry(minimum_slice_count=1, poll_interval=0.2)
    def train() -> None:
        training.run(
            {n: all_islands[n] for n in sorted(made.active_slice_indices)},
            lambda: bool(made.available_inactive_slices),
        )
        if training.step < STEPS:
            raise manager.ScaleUpSignalError

    train()


def main() -> None:
    islands: dict[int, list[Any]] = {}
    for device in jax.devices():
        islands.setdefault(getattr(device, "slice_index", 0), []).append(device)
    training = Training()
    if sys.argv[1] == "plain":  # on two devices of this process
        training.run({0: jax.devices()[:2]}, lambda: False)
    else:
        {"loop": by_loop, "pathwaysutils": by_pathwaysutils}[sys.argv[1]](training, islands)


if __name__ == "__main__":
    main()
