"""A mixture of 16 experts on two islands, trained on scikit-learn's digits, with each of two gates.

    python examples/mixture_of_experts.py [--cluster embedded|local|ADDRESS] [--steps N]

The rows of a batch are on one slice; eight experts are on each island. A gate chooses experts for each row, and the
rows travel to them and back (`pw.nn.MixtureOfExperts`). Forward, backward and all updates are ONE `pw.program`. The
table says how well it learned, and how the rows were spread: by a top-k gate, whose penalty uses all experts alike, and
by DSelect-k, which is smooth and chooses as it learns.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import digits_model as model
import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from target import add_cluster_option, cluster_target

import pathways as pw

EXPERTS, VISITS, WIDTH, HIDDEN = 16, 2, 32, 64
GATES = {
    "top-k": pw.nn.TopKGate(EXPERTS, VISITS, WIDTH),
    "DSelect-k": pw.nn.DSelectKGate(EXPERTS, VISITS, WIDTH, entropy=0.002),
}


def expert(params: Any, rows: Any) -> Any:
    """Two layers, of one expert."""
    return jax.nn.relu(rows @ params["in"]) @ params["out"]


def init_expert(key: jax.Array) -> Any:
    """The parameters of one expert."""
    one, two = jax.random.split(key)
    normal = jax.random.normal
    return {"in": normal(one, (WIDTH, HIDDEN)) / WIDTH**0.5, "out": normal(two, (HIDDEN, WIDTH)) / HIDDEN**0.5}


class Classifier:
    """The network on its slices, and the two programs over them."""

    def __init__(self, gate: Any, batch: int) -> None:
        devices = pw.make_virtual_device_set()
        islands = len({device.island for device in pw.make_virtual_device_set().cluster.devices})
        places = [devices.add_slice(shape=(4,), axis_names=("x",), island=n % islands) for n in range(2)]
        home = devices.add_slice(shape=(2,), axis_names=("x",), island=0)
        mixture = pw.nn.MixtureOfExperts(
            expert, gate, home=home, slices=places, capacity=4 * batch, visits=min(EXPERTS, 2 * VISITS), block=64
        )
        optimizer = optax.adam(3e-3)

        embed = pw.jit(lambda w, x: jax.nn.relu(x @ w), devices=home, name="embed")
        classify = pw.jit(lambda w, x, mixed: (x + mixed) @ w, devices=home, name="classify")

        @pw.jit(devices=home)
        def error(logits: Any, labels: Any, penalty: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() + penalty

        def update(params: Any, state: Any, gradients: Any) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        updates = [pw.jit(update, devices=each, name="update") for each in (home, *places)]

        def logits_of(params: Any, images: Any) -> Any:
            rest, *experts = params
            x = embed(rest["embed"], images)
            mixed = mixture({"gate": rest["gate"], "experts": experts}, x)
            return classify(rest["classify"], x, mixed.results), mixed

        @pw.program
        def train_step(params: Any, states: Any, images: Any, labels: Any) -> Any:
            def loss_of(params: Any) -> Any:
                logits, mixed = logits_of(params, images)
                return error(logits, labels, mixed.penalty), mixed.dropped

            (loss, dropped), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
            done = [one(*each) for one, *each in zip(updates, params, states, gradients, strict=True)]
            return tuple(p for p, _ in done), tuple(s for _, s in done), loss, dropped

        weigh = pw.jit(lambda params, x: gate(params, x).weights, devices=home, name="weigh")

        @pw.program
        def predict(params: Any, images: Any) -> Any:
            x = embed(params[0]["embed"], images)
            return logits_of(params, images)[0], weigh(params[0]["gate"], x)

        self.train_step, self.predict = train_step, predict
        keys = jax.random.split(jax.random.key(0), 3)
        made = mixture.init(keys[0], init_expert)
        rest = {
            "gate": made["gate"],
            "embed": jax.random.normal(keys[1], (64, WIDTH)) / 8,
            "classify": jax.random.normal(keys[2], (WIDTH, 10)) / WIDTH**0.5,
        }
        self.params = (rest, *made["experts"])
        self.states = tuple(optimizer.init(each) for each in self.params)


def train(gate: Any, config: model.Config, data: model.Digits) -> list[str]:
    """Trains with one gate; returns a row of the table."""
    network = Classifier(gate, config.batch)
    params, states, losses, dropped = network.params, network.states, [], []
    for images, labels in data.batches(config):
        params, states, loss, left_out = network.train_step(params, states, images, labels)
        losses.append(loss)
        dropped.append(left_out)
    logits, weights = (np.asarray(each) for each in network.predict(params, data.test_images))
    used = weights > 1e-3
    share = used.mean(0)
    return [
        f"{float(np.asarray(losses[0])):.3f} -> {float(np.asarray(losses[-1])):.3f}",
        f"{model.accuracy(logits, data.test_labels):.3f}",
        f"{used.sum(1).mean():.2f}",
        f"{int((share > 0.005).sum())}",
        f"{share.min():.2f} to {share.max():.2f}",
        f"{sum(int(np.asarray(each)) for each in dropped)}",
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train a mixture of 16 experts on two islands.")
    add_cluster_option(parser)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    config, data = dataclasses.replace(model.Config(), steps=options.steps), model.load_digits()
    table = Table(title=f"digits, {EXPERTS} experts on two slices, cluster: {options.cluster}")
    for name in ("gate", "loss", "test accuracy", "experts per row", "experts in use", "share of rows", "left out"):
        table.add_column(name, justify="left" if name == "gate" else "right", no_wrap=name in ("gate", "loss"))
    with pw.connect(cluster_target(options.cluster, islands=2)):
        for name, gate in GATES.items():
            table.add_row(name, *train(gate, config, data))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
