"""Runs that are dropped: what they leave behind harms nothing that came after it (FUT-3). A run that its hosts have
begun is not dropped (GANG-1)."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

#: A host is granted 256 runs at a time: of so many, some wait in the order.
MANY = 300


@pytest.mark.parametrize("timeout", [None, 0.3], ids=["cancelled", "late"])
def test_a_dropped_run_spares_what_came_after_it(add: Any, cluster: Any, timeout: float | None) -> None:
    """FUT-3: an array that got the index of a dropped run's released result stays as it is."""
    slice_ = add(1)
    slow = pw.jit(lambda m: jax.lax.fori_loop(0, 400, lambda _, a: jnp.tanh(a @ a), m)[0, :8], devices=slice_)
    quick = pw.jit(lambda x: x + 1, devices=slice_)
    two = pw.jit(lambda x: (x + 1, x - 1), devices=slice_)
    square = pw.device_put(np.full((512, 512), 0.01, np.float32), slice_)
    big = pw.device_put(np.ones(1 << 18, np.float32), slice_)
    jax.block_until_ready([quick(slow(square)), two(big)])  # all is compiled
    if timeout is not None:
        two = two.with_timeout(timeout)
    dropped = cluster.stats()["controller"]["dropped"]
    with contextlib.suppress(pw.errors.CancelledError, pw.errors.DeadlineExceededError):  # embedded it may be in time
        first = slow(square)
        runs = [quick(first) for _ in range(MANY)]
        released, named = two(big)  # waits in the order, behind them
        old = released.raw_handle & 0xFFFFFFFF
        del released
        cluster.native.flush()
        kept: list[Any] = []
        while not kept or kept[-1].raw_handle & 0xFFFFFFFF != old:
            assert len(kept) < 4000, "no array got the index of the one that was released"
            kept.append(pw.device_put(np.full(8, len(kept), np.float32), slice_))
        if timeout is None:
            pw.cancel(named)
        np.asarray(named)
    jax.block_until_ready(runs)
    assert cluster.address is None or cluster.stats()["controller"]["dropped"] == dropped + 1
    for number, array in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(array), np.full(8, number, np.float32))


@pytest.mark.parametrize("kind", ["variable", "reference"])
def test_what_a_cancelled_run_writes(add: Any, cluster: Any, kind: str) -> None:
    """GANG-1: a run that has begun writes, though its result is cancelled. One that was dropped leaves its error."""
    slice_, gate, asked = add(1), threading.Event(), threading.Event()

    def wait(v: Any) -> Any:
        asked.set()
        gate.wait(60)
        return v

    slow = pw.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), x), devices=slice_)
    quick = pw.jit(lambda x: x + 1, devices=slice_)
    one = pw.device_put(np.float32(1), slice_)
    state: Any = pw.Variable(one, slice_) if kind == "variable" else jax.new_ref(one)

    @pw.program
    def step(x: Any) -> Any:
        y = slow(x)
        if kind == "variable":
            state.value = state.value + y
        else:
            state[...] = state[...] + y
        return y * 2

    def value() -> float:
        return float(state.value if kind == "variable" else state[...])

    gate.set()
    assert (float(step(one)), value(), float(quick(one))) == (2, 2, 2)
    gate.clear()
    asked.clear()
    begun = step(one)
    assert asked.wait(60)
    pw.cancel(begun)
    with pytest.raises(pw.errors.CancelledError):
        float(begun)
    gate.set()
    assert value() == 3
    if cluster.address is None:
        return  # embedded, a run begins at once
    gate.clear()
    first = slow(one)
    runs = [quick(first) for _ in range(MANY)]
    pw.cancel(step(one))
    gate.set()
    jax.block_until_ready(runs)
    with pytest.raises(pw.errors.CancelledError):
        value()
    if kind == "variable":
        state.value = one
    else:
        state[...] = one
    assert (float(step(one)), value()) == (2, 2)
