"""How long the first call of a pipeline takes with 4 to 256 microbatches, as a table.

What counts is processor time, of the client and of the cluster's processes together, less that of a later call, which
only runs the program. It is the median of some rounds: `python benchmarks/compile_time.py [ROUNDS]`. It exits with 1 if
256 microbatches take more than `MOST` times what 4 take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

#: The most that the first call may take with 256 microbatches, as a multiple of that with 4.
MOST = 1.5
ROUNDS = 3
FEATURES, LENGTH, BATCH = 128, 16, 256


def block(layers: Any, x: Any) -> Any:
    """Two layers of a transformer without masks: attention of four heads, a gated feed-forward part."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    for one in layers:
        y = norm(x, one["first"])
        q, k, v = (jnp.reshape(y @ one[name], (*y.shape[:2], 4, -1)) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + jnp.reshape(jnp.einsum("bhqk,bkhd->bqhd", scores, v), x.shape) @ one["o"]
        y = norm(x, one["second"])
        x = x + (jax.nn.gelu(y @ one["gate"]) * (y @ one["up"])) @ one["down"]
    return x


def perceptron(layers: Any, x: Any) -> Any:
    """Layers with tanh."""
    import jax.numpy as jnp

    for w, b in layers:
        x = jnp.tanh(x @ w + b)
    return x


def parameters(model: str) -> Any:
    """Those of one stage."""
    import numpy as np

    rng = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32) / 16

    if model == "perceptron":
        return [(weight(256, 256), weight(256)) for _ in range(4)]
    wide = {name: weight(FEATURES, 4 * FEATURES) for name in ("gate", "up")}
    square = {name: weight(FEATURES, FEATURES) for name in "qkvo"}
    norms = {name: weight(FEATURES) for name in ("first", "second")}
    return [{**wide, **square, **norms, "down": weight(4 * FEATURES, FEATURES)} for _ in range(2)]


def seconds_of_children() -> float:
    """Processor seconds of all processes that this one has started, and of theirs."""
    parents: dict[int, tuple[int, float]] = {}
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = (
                    int(fields[1]),
                    (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
                )
    total = 0.0
    for pid, (_, seconds) in parents.items():
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above][0]
        total += seconds if above == os.getpid() and pid != above else 0.0
    return total


def measure(model: str, stages: int, microbatches: int, schedule: str) -> dict[str, float]:
    """Processor seconds of the first call, in a process of its own."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import pathways as pw

    def seconds() -> tuple[float, float]:
        return time.process_time(), seconds_of_children()

    with pw.connect(pw.LocalCluster(islands=stages, hosts_per_island=1, devices_per_host=1)):
        slices = [pw.make_virtual_device_set().add_slice(devices=1, island=n) for n in range(stages)]
        for one in slices:  # the processes have started, and XLA
            np.asarray(pw.jit(lambda x: jnp.sin(x) @ x, devices=one)(np.ones((8, 8), np.float32)))
        time.sleep(2)
        functions = [
            pw.jit({"block": block, "perceptron": perceptron}[model], devices=one, name=f"stage{n}")
            for n, one in enumerate(slices)
        ]
        pipeline = pw.pipeline(
            functions, microbatches=microbatches, schedule=schedule, loss=lambda y, t: jnp.mean((y - t) ** 2)
        )
        step = pw.program(jax.value_and_grad(pipeline))
        params = [pw.device_put(parameters(model), one) for one in slices]
        x = np.ones((BATCH, LENGTH, FEATURES) if model == "block" else (2 * BATCH, 256), np.float32)
        spent = []
        for _ in range(3):
            before = seconds()
            np.asarray(step(params, x, x)[0])
            time.sleep(0.5)
            spent.append([b - a for a, b in zip(before, seconds(), strict=True)])
    client, hosts = (first - min(second, third) for first, second, third in zip(*spent, strict=True))
    return {"client": client, "hosts": hosts, "total": client + hosts}


def apart(*case: Any) -> dict[str, float]:
    """As `measure`, in a new process."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    text = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return dict(json.loads(text.splitlines()[-1]))


def main(rounds: int) -> int:
    """Prints the table. Returns 1 if the time grows too much."""
    is_flat = True
    for kind in ("block", "perceptron"):
        for depth in (2, 4):
            rows: dict[int, list[dict[str, float]]] = {4: [], 16: [], 64: [], 256: []}
            for _ in range(rounds):
                for number, row in rows.items():
                    row.append(apart(kind, depth, number, "1F1B"))
            totals = [statistics.median(each["total"] for each in rows[number]) for number in (4, 256)]
            is_flat &= totals[1] < MOST * totals[0]
            for number, row in rows.items():
                middle = {name: statistics.median(each[name] for each in row) for name in row[0]}
                shown = ", ".join(f"{name} {value:.2f} s" for name, value in middle.items())
                print(f"{kind}, {depth} stages, {number} microbatches: {shown}", flush=True)
            print(
                f"{kind}, {depth} stages: 256 microbatches take {totals[1] / totals[0]:.2f} times what 4 take",
                flush=True,
            )
    return 0 if is_flat else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS, metavar="ROUNDS", help=f"default: {ROUNDS}")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)  # a process that measures one
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(measure(*given.case)))
    else:
        sys.exit(main(given.rounds))
