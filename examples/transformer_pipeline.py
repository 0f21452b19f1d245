"""A decoder-only transformer in four stages, trained under every schedule; the losses are those of plain JAX.

    python examples/transformer_pipeline.py [--cluster local|embedded|ADDRESS] [--steps N] [--schedules NAME,...]

Each stage is data-parallel on a slice of its own: two devices, of one host. Interleaved1F1B and Circular take the
stages on two slices in turn, each of an island's four devices. The embedding is tied: the first stage looks tokens up
in it and the last stage makes logits of it. It is one array, at home on the first slice; the program sends it to the
last, and its gradient back, once per step.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import transformer_model as model
from jax.sharding import PartitionSpec as P
from target import add_cluster_option, cluster_target

import pathways as pw

ROWS, MICROBATCHES = 32, 4
IN_TURN = ("Interleaved1F1B", "Circular")
SCHEDULES = ("none", "GPipe", "1F1B", "ZeroBubbleH1", *IN_TURN, "auto")


class Training:
    """The model on its slices under one schedule."""

    def __init__(self, slices: list[Any], schedule: str) -> None:
        homes = [slices[n % len(slices)] for n in range(model.STAGES)]
        stages = [
            pw.jit(function, devices=home, in_shardings=(P(), P("data")), out_shardings=P("data"), name=f"stage{n}")
            for n, (function, home) in enumerate(zip(model.FUNCTIONS, homes, strict=True))
        ]
        self.pipeline = pipeline = pw.pipeline(stages, microbatches=MICROBATCHES, schedule=schedule, loss=model.loss_of)

        @pw.program(donate_argnums=(0, 1))
        def step(params: Any, moments: Any, tokens: Any, targets: Any) -> Any:
            def loss_of(params: Any) -> Any:
                return pipeline(model.per_stage(params), tokens, targets)

            loss, grads = jax.value_and_grad(loss_of)(params)
            return *model.update(params, moments, grads), loss

        self.step = step

    def run(self, steps: int) -> list[float]:
        """The loss of each step, from the same start on the same texts."""
        params = self.pipeline.place(model.init_params(), per_stage=model.per_stage)
        moments, losses = jax.tree.map(jnp.zeros_like, params), []
        for _, (tokens, targets) in zip(range(steps), model.texts(ROWS), strict=False):
            params, moments, loss = self.step(params, moments, tokens, targets)
            losses.append(loss)
        return [float(loss) for loss in losses]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A transformer in four stages under every schedule.")
    add_cluster_option(parser, default="local")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="some of: %(default)s")
    options = parser.parse_args()
    results: dict[str, list[float]] = {}
    with pw.connect(cluster_target(options.cluster, islands=2)):
        devices = pw.make_virtual_device_set()
        four = [devices.add_slice(shape=(2,), axis_names=("data",)) for _ in range(model.STAGES)]
        two = [devices.add_slice(shape=(4,), axis_names=("data",)) for _ in range(2)]
        for schedule in options.schedules.split(","):
            losses = Training(two if schedule in IN_TURN else four, schedule).run(options.steps)
            print(f"{schedule:15} loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
            results[schedule] = losses
    want = model.train_in_plain_jax(ROWS, options.steps)
    apart = max(abs(a - b) for losses in results.values() for a, b in zip(losses, want, strict=True))
    print(f"{len(results)} schedules, {options.steps} steps: all losses within {apart:.1e} of plain JAX")
    if apart > 1e-3 or want[-1] >= want[0]:
        raise SystemExit("expected falling losses, within 1e-3 of plain JAX's")


if __name__ == "__main__":
    main()
