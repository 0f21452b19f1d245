"""A transformer on two islands in the manner of PaLM: each island trains the whole model on its half of the batch.

    python examples/transformer_islands.py [--cluster local|embedded|ADDRESS] [--steps N]

On each island the four stages are a pipeline over four devices. When the gradients of a step are there, each island
sends its own to the other, stage by stage and as soon as a stage has them, and both apply the same sum. The step is one
program. No value passes the client but the losses, and the parameters that this example compares: both islands have
the same bits after every step. (Barham et al., "Pathways", MLSys 2022, section 5.3; Chowdhery et al., "PaLM", 2022,
section 4.)
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformer_model as model
from target import add_cluster_option, cluster_target

import pathways as pw

ISLANDS, ROWS, MICROBATCHES = 2, 32, 4


def place_on_islands(cluster: Any) -> list[list[Any]]:
    """The slices of each island, one device per stage. (An embedded cluster is one island: the halves share it.)"""
    devices = pw.make_virtual_device_set()
    islands = [number % len(cluster.islands) for number in range(ISLANDS)]
    return [[devices.add_slice(devices=1, island=island) for _ in range(model.STAGES)] for island in islands]


def make_step(islands: list[list[Any]]) -> tuple[list[Any], Any]:
    """A pipeline per island, and a step: ((parameters, moments) per island, tokens, targets) -> (new ones, loss)."""
    pipelines = []
    for number, slices in enumerate(islands):
        stages = [
            pw.jit(function, devices=slice_, name=f"stage{n}")
            for n, (function, slice_) in enumerate(zip(model.FUNCTIONS, slices, strict=True))
        ]
        pipelines.append(
            pw.pipeline(stages, microbatches=MICROBATCHES, schedule="1F1B", loss=model.loss_of, name=f"island{number}")
        )

    @pw.program(donate_argnums=0)
    def step(states: Any, tokens: Any, targets: Any) -> Any:
        losses, grads = [], []
        for number, (pipeline, (params, _)) in enumerate(zip(pipelines, states, strict=True)):
            mine = slice(number * ROWS // ISLANDS, (number + 1) * ROWS // ISLANDS)

            def loss_of(params: Any, pipeline: Any = pipeline, mine: slice = mine) -> Any:
                return pipeline(model.per_stage(params), tokens[mine], targets[mine])

            loss, own = jax.value_and_grad(loss_of)(params)
            losses.append(loss)
            grads.append(own)
        after = []
        for pipeline, (params, moments) in zip(pipelines, states, strict=True):
            # The same sum in the same order on each island: of its own gradients and of those that come from the other.
            first, second = (pipeline.place(each, per_stage=model.per_stage) for each in grads)
            mean = jax.tree.map(lambda a, b: (a + b) / ISLANDS, first, second)
            after.append(model.update(params, moments, mean))
        return after, jnp.mean(jnp.stack([pw.device_put(loss, islands[0][-1]) for loss in losses]))

    return pipelines, step


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees of arrays are equal bit by bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A transformer on two islands that exchange gradients.")
    add_cluster_option(parser, default="local")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    losses, equal = [], 0
    with pw.connect(cluster_target(options.cluster, islands=ISLANDS)) as cluster:
        islands = place_on_islands(cluster)
        pipelines, step = make_step(islands)
        starts = [pipeline.place(model.init_params(), per_stage=model.per_stage) for pipeline in pipelines]
        states = [(params, jax.tree.map(jnp.zeros_like, params)) for params in starts]
        for _, (tokens, targets) in zip(range(options.steps), model.texts(ROWS), strict=False):
            states, loss = step(states, tokens, targets)
            losses.append(float(loss))
            equal += same_bits(states[0], states[1])
    want = model.train_in_plain_jax(ROWS, options.steps)
    apart = max(abs(a - b) for a, b in zip(losses, want, strict=True))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, within {apart:.1e} of plain JAX on the whole batch")
    print(f"parameters and moments bit-equal on both islands after {equal} of {options.steps} steps")
    if equal < options.steps or apart > 1e-3 or want[-1] >= want[0]:
        raise SystemExit("expected equal bits after every step, and falling losses within 1e-3 of plain JAX's")


if __name__ == "__main__":
    main()
