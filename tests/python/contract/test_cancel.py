"""Runs that are dropped: what they leave behind harms nothing that came after it (FUT-3)."""

from __future__ import annotations

import contextlib
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
