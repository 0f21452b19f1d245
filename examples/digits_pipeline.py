"""The demo: a two-stage pipeline on two islands of real host processes, against plain JAX.

    python examples/digits_pipeline.py [--cluster local|embedded|ADDRESS] [--steps N] [--no-compare]

Stage 1 lives on one island and stage 2 on the other, each on a 2 x 2 mesh that spans two hosts. Forward, backward
and the optimizer's update of both stages are ONE `pw.program`: one dispatch per step, and `jax.value_and_grad` does
the differentiation. When it is done, the same training runs in plain JAX (`digits_plain.py`), and the parameters
are compared.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import digits_model as model
import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from target import add_cluster_option, cluster_target

import pathways as pw

REPORT_EVERY = 10  # steps between two looks at the loss; looking waits for the value
LEAST_ACCURACY = 0.95
LARGEST_DIFFERENCE = 1e-5


class Pipeline:
    """Both stages on their slices, and the two programs over them."""

    def __init__(self, config: model.Config) -> None:
        device_set = pw.make_virtual_device_set()
        self.slices = [device_set.add_slice(shape=model.MESH_SHAPE, axis_names=model.MESH_AXES) for _ in range(2)]
        specs, batch, scalar = model.STAGE_SPECS, model.BATCH_SPEC, model.SCALAR_SPEC
        optimizer = config.optimizer()
        initial = model.init_params(config)

        def update(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def place(stage: int, fun: Any, ins: Any, outs: Any, name: str) -> Any:
            return pw.jit(fun, devices=self.slices[stage], in_shardings=ins, out_shardings=outs, name=name)

        encode = place(0, model.encode, (specs, batch), batch, "encode")
        classify = place(1, model.classify, (specs, batch), batch, "classify")
        classify_loss = place(1, model.classify_loss, (specs, batch, batch), scalar, "classify_loss")
        self.params = tuple(pw.place(p, s, specs) for p, s in zip(initial, self.slices, strict=True))
        self.states = tuple(pw.place(optimizer.init(p), like=p) for p in self.params)
        there = [jax.tree.map(lambda x: x.sharding, each) for each in zip(self.params, self.states, strict=True)]
        updates = [
            place(stage, update, (*there[stage], specs), there[stage], f"update_{stage + 1}") for stage in (0, 1)
        ]

        @pw.program
        def train_step(params: Any, states: Any, images: Any, labels: Any) -> Any:
            def loss_of(params: Any) -> Any:
                return classify_loss(params[1], encode(params[0], images), labels)

            loss, grads = jax.value_and_grad(loss_of)(params)
            done = [step(p, s, g) for step, p, s, g in zip(updates, params, states, grads, strict=True)]
            return tuple(p for p, _ in done), tuple(s for _, s in done), loss

        @pw.program
        def predict(params: Any, images: Any) -> Any:
            return classify(params[1], encode(params[0], images))

        self.train_step, self.predict = train_step, predict


def train(cluster: Any, config: model.Config, data: model.Digits, console: Console) -> dict[str, Any]:
    """Train under a progress bar; return what the final table shows, and the parameters as NumPy."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    pipeline = Pipeline(config)
    params, states = pipeline.params, pipeline.states
    compiling = 0.0
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=config.steps, loss=float("nan"))
        before = began = time.perf_counter()
        stats = dict(cluster.stats())
        for number, (images, labels) in enumerate(data.batches(config), start=1):
            params, states, loss = pipeline.train_step(params, states, images, labels)
            if number == 1:
                jax.block_until_ready(loss)
                began = time.perf_counter()
                compiling = began - before
            if number % REPORT_EVERY == 0 or number == config.steps:
                progress.update(task, completed=number, loss=float(np.asarray(loss)))
        jax.block_until_ready(params)
        seconds = time.perf_counter() - began
    after = dict(cluster.stats())
    logits = np.asarray(pipeline.predict(params, data.test_images))
    return {
        "params": jax.tree.map(np.asarray, params),
        "accuracy": model.accuracy(logits, data.test_labels),
        "compile_s": compiling,
        "steps_per_s": (config.steps - 1) / seconds if config.steps > 1 else float("nan"),
        "dispatches": after["dispatches"] - stats["dispatches"],
        "launches": after["launches"] - stats["launches"],
        "bytes_moved": after["bytes_moved"] - stats["bytes_moved"],
    }


def difference_from_plain_jax(config: model.Config, params: Any) -> float:
    """Train the same in a process with plain JAX; return the largest difference between any two parameters."""
    script = pathlib.Path(__file__).with_name("digits_plain.py")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "params.npz")
        command = [sys.executable, str(script), "--steps", str(config.steps), "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with np.load(out) as plain:
            names = [(stage, name) for stage in range(2) for name in params[stage]]
            return max(float(np.abs(params[stage][name] - plain[f"{stage}.{name}"]).max()) for stage, name in names)


def main() -> int:
    """Command line. Returns 1 when a full training misses its accuracy or strays from plain JAX."""
    parser = argparse.ArgumentParser(description="Train a two-stage pipeline on two islands.")
    add_cluster_option(parser, default="local")
    parser.add_argument("--steps", type=int, default=model.Config.steps)
    parser.add_argument("--no-compare", action="store_true", help="leave out the training in plain JAX")
    options = parser.parse_args()
    config, data, console = model.Config(steps=options.steps), model.load_digits(), Console()

    with pw.connect(cluster_target(options.cluster, islands=2)) as cluster:
        result = train(cluster, config, data, console)
    checks = [options.steps < model.Config.steps or result["accuracy"] >= LEAST_ACCURACY]

    table = Table(title=f"digits, two stages on two slices, cluster: {options.cluster}")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("test accuracy", f"{result['accuracy']:.4f}")
    table.add_row("steps per second", f"{result['steps_per_s']:.1f}")
    table.add_row("first step, with compilation", f"{result['compile_s']:.1f} s")
    table.add_row("dispatches", f"{result['dispatches']} for {config.steps} steps")
    table.add_row("XLA launches", f"{result['launches']}")
    table.add_row("bytes moved between slices", f"{result['bytes_moved']:,}")
    if not options.no_compare:
        with console.status("the same training in plain JAX"):
            apart = difference_from_plain_jax(config, result["params"])
        table.add_row(f"largest difference from plain JAX after {config.steps} steps", f"{apart:.1e}")
        checks.append(apart <= LARGEST_DIFFERENCE)
    console.print(table)
    if not all(checks):
        console.print(f"expected accuracy >= {LEAST_ACCURACY} and a difference <= {LARGEST_DIFFERENCE}", style="red")
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
