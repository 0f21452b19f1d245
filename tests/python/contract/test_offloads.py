"""Programs that need several times the memory of their devices, and offload what they keep for later.

Map: MEM-2 `test_a_reverse_pass_...`, MEM-3 `test_without_offloads_...`, OWN-1 `test_a_client_...`. What is chosen:
`../plan/test_offload_choice.py`.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from memory_ledgers import MiB, assert_within_budgets, bytes_of

import pathways as pw
from pathways.api.pipelines.auto_schedule import needed_bytes

LAYERS, ROWS, WIDTH = 32, 512, 256
SAVED = 4 * LAYERS * ROWS * WIDTH * 4  # bytes: each layer keeps four arrays of the size of its result


def model(slices: list[Any], form: str) -> Callable[..., Any]:
    """The loss of a deep model: with a loop, or each layer by itself; its layers are on the slices in turn."""
    layers = [
        pw.jit(
            lambda w, x: jnp.tanh(x @ jnp.tile(w, (WIDTH // 8, 1))) + x,
            devices=each,
            in_shardings=(P(), P("x")),
            out_shardings=P("x"),
            name="layer",
        )
        for each in slices
    ]
    last = pw.jit(lambda x: jnp.mean(x**2), devices=slices[-1], name="last")

    def scanned(ws: Any, x: Any) -> Any:
        for n, layer in enumerate(layers):
            part = len(ws) // len(layers)
            x, _ = jax.lax.scan(lambda x, w, layer=layer: (layer(w, x), None), x, ws[n * part : (n + 1) * part])
        return last(x)

    def plain(ws: Any, x: Any) -> Any:
        for n in range(LAYERS):
            x = layers[n * len(layers) // LAYERS](ws[n], x)
        return last(x)

    return scanned if form == "scan" else plain


def reference(ws: Any, x: Any) -> Any:
    for n in range(LAYERS):
        x = jnp.tanh(x @ jnp.tile(ws[n], (WIDTH // 8, 1))) + x
    return jnp.mean(x**2)


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    ws = draw.standard_normal((LAYERS, 8, WIDTH)).astype(np.float32) * 0.02
    return ws, draw.standard_normal((ROWS, WIDTH)).astype(np.float32)


def moves(program: Any, *args: Any) -> int:
    return int(program.lower(*args).as_text("plan").count("restore."))


@pytest.mark.slow
@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("form", ["plain", "scan"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 1), (2, 1, 2)], ids=lambda shape: "x".join(map(str, shape)))
def test_a_reverse_pass_that_needs_four_times_its_budget_finishes(
    start: Callable[..., Any], shape: tuple[int, int, int], form: str
) -> None:
    """MEM-1, MEM-2: values and gradients are right, and no device holds more than its budget. Twice, side by side."""
    each = shape[1] * shape[2]
    budget = SAVED // shape[0] // each * 10 // 46
    transfer_memory = 64 * MiB
    cluster = start(*shape, device_memory=budget, transfer_memory=transfer_memory)
    devices = pw.make_virtual_device_set(cluster)
    slices = [devices.add_slice(devices=each, island=island) for island in range(shape[0])]
    step = pw.program(jax.value_and_grad(model(slices, form)))
    ws, x = arguments()
    want, grads = jax.jit(jax.value_and_grad(reference))(ws, x)
    results = [step(ws, x) for _ in range(2)]
    for loss, found in results:
        np.testing.assert_allclose(np.asarray(loss), want, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(found), grads, rtol=1e-5, atol=1e-6)
    assert moves(step, ws, x) > 4
    if form == "plain":
        kept = pw.program(jax.value_and_grad(model(slices, form)), offload="none").lower(ws, x)
        assert min(needed_bytes(kept.bound, {}, True).values()) >= 4 * budget
    marks = assert_within_budgets(cluster, budget, transfer_memory)
    print(f"saves {SAVED // shape[0] // each} bytes on each device; budget {budget}; high water {marks}")
    client = cluster.client_id
    del results, loss, found
    while bytes_of(client, cluster.stats()) > 0:  # MEM-1: nothing is left of the runs
        time.sleep(0.01)


def test_without_offloads_the_refusal_says_what_is_needed(start: Callable[..., Any]) -> None:
    """MEM-3; and a program whose arguments alone are too big is refused as ever."""
    budget = SAVED // 4
    cluster = start(1, 1, 1, device_memory=budget, transfer_memory=64 * MiB)
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    ws, x = arguments()
    kept = pw.program(jax.value_and_grad(model([slice_], "plain")), offload="none")
    with pytest.raises(pw.errors.ResourceExhaustedError, match="can never fit"):
        kept(ws, x)[0].block_until_ready()
    big = np.zeros((LAYERS, 16 * MiB // 4 // LAYERS), np.float32)
    wide = pw.program(lambda ws, big, x: (model([slice_], "plain")(ws, x), big * 2), name="wide")
    with pytest.raises(pw.errors.ResourceExhaustedError, match=r"16\.0 MiB"):
        wide(ws, big, x)[0].block_until_ready()


def test_a_limit_of_the_users_own(cluster: Any) -> None:
    """`offload=` a number of bytes: on clusters of every kind, without a budget; and with branches beside the moves."""
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    ws, x = arguments()
    loss = model([slice_], "plain")
    scale = pw.jit(lambda y: y * 2, devices=slice_, name="scale")
    same = pw.jit(lambda y: y + 0, devices=slice_, name="same")

    def branched(loss: Any) -> Any:
        return lambda ws, x, flag: jax.lax.cond(flag, scale, same, loss(ws, x))

    step = pw.program(jax.value_and_grad(branched(loss)), offload=SAVED // 4)
    assert moves(step, ws, x, True) > 4
    for flag in (True, False):
        want, grads = jax.value_and_grad(lambda ws, x, by: reference(ws, x) * by)(ws, x, 2 if flag else 1)
        value, found = step(ws, x, flag)
        np.testing.assert_allclose(np.asarray(value), want, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(found), grads, rtol=1e-5, atol=1e-6)
    for wrong in (0, True, "all", 1.5):
        with pytest.raises(pw.errors.OptionError, match="offload"):
            pw.program(loss, offload=wrong)


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_nothing_of_what_it_offloaded(start: Callable[..., Any]) -> None:
    """OWN-1, beside another client, whose results stay right."""
    budget = SAVED // 2
    cluster = start(1, 2, 1, device_memory=budget, transfer_memory=64 * MiB)
    code = """
        import sys
        sys.path[:0] = sys.argv[2:]
        import jax, pathways as pw
        from test_offloads import arguments, model
        cluster = pw.connect(sys.argv[1])
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
        step = pw.program(jax.value_and_grad(model([slice_], "scan")), offload=8 << 20)
        ws, x = arguments()
        float(step(ws, x)[0])
        print(cluster.client_id, flush=True)
        while True:
            step(ws, x)
    """
    folder = [path for path in sys.path if "contract" in path]
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), cluster.address, *folder], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        other = int(child.stdout.readline())
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
        double = pw.jit(lambda x: x * 2, devices=slice_, in_shardings=P("x"), out_shardings=P("x"))
        x = np.arange(1024, dtype=np.float32)
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(double(x)), x * 2)
    finally:
        child.kill()
        child.communicate()
    deadline = time.monotonic() + 60
    while any(each["client"] == other for each in cluster.stats()["clients"]) or bytes_of(other, cluster.stats()):
        assert time.monotonic() < deadline, "what the client offloaded is still there"
        time.sleep(0.05)
    np.testing.assert_array_equal(np.asarray(double(x)), x * 2)
