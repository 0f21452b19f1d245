"""Memory on real hosts: what cannot be had is refused by name, and nothing else is disturbed.

Map: MEM-3, all of them. What is counted and waited for: `test_memory.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from memory_ledgers import MiB, device

import pathways as pw

pytestmark = pytest.mark.slow

GRACE_S = 0.25  # of MEM-3, see csrc/dispatch/controller_options.h
PATIENCE_S = 30.0  # with a machine that is busy


class Refusals:
    """Programs on one cluster of two islands whose sizes are told in MiB per device; `kept` is 1."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        devices = pw.make_virtual_device_set(cluster)
        self.left, self.right = (devices.add_slice(devices=2, island=island) for island in (0, 1))
        self.kept = self.put(1)
        self.add = self.compiled(self.jit(lambda x: x + 1, "add"), self.kept)

    def jit(self, fun: Any, name: str, **options: Any) -> Any:
        return pw.jit(fun, devices=self.left, in_shardings=P("x"), out_shardings=P("x"), name=name, **options)

    def compiled(self, program: Any, *args: Any) -> Any:
        program.lower(*args).compile()
        return program

    def put(self, size: int) -> Any:
        return pw.device_put(np.ones(2 * size * MiB // 4, np.float32), self.left, P("x"))

    def wide(self, size: int) -> Any:
        """A program that makes `size` MiB on each device."""
        return self.compiled(self.jit(lambda x: jnp.zeros(size * x.size, x.dtype) + 5, f"wide{size}"), self.kept)

    def refused(self, use: Callable[[], Any], *words: str, least_s: float = 0.0) -> str:
        """The words of the refusal of `use`."""
        begin = time.monotonic()
        with pytest.raises(pw.errors.ResourceExhaustedError) as caught:
            jax.block_until_ready(use())
        took = time.monotonic() - begin
        print(f"refused after {took:.3f} s")
        assert least_s <= took < PATIENCE_S, took
        for word in words:
            assert word in str(caught.value), (word, str(caught.value))
        return str(caught.value)

    def assert_undisturbed(self) -> None:
        np.testing.assert_array_equal(np.asarray(self.add(self.kept)), np.full(2 * MiB // 4, 2, np.float32))


@pytest.fixture
def refusals(start: Callable[..., Any]) -> Refusals:
    """Two islands of one host of two devices, 16 MiB each; 4 MiB of memory for transfers."""
    return Refusals(start(2, 1, 2, device_memory=16 * MiB, transfer_memory=4 * MiB))


def test_what_can_never_fit_is_refused_at_once(refusals: Refusals) -> None:
    """MEM-3: by name, with what depends on it; nothing else notices."""
    wide = refusals.wide(20)
    total = pw.jit(lambda x: x.sum(), devices=refusals.left, name="total")
    running = [refusals.add(refusals.kept) for _ in range(5)]
    refused = wide(refusals.kept)
    depending = total(refused)
    running += [refusals.add(refusals.kept) for _ in range(5)]
    words = refusals.refused(
        lambda: refused,
        "program 'wide20' needs 20.0 MiB (20971520 bytes)",
        "on device 0 of host 0",
        "budget is 16.0 MiB (16777216 bytes)",
        "its biggest buffers: float32[10485760] made by 'wide20",
        "can never fit",
    )
    assert refusals.refused(lambda: depending) == words
    assert refusals.refused(lambda: np.asarray(refused)) == words
    for each in running:
        np.testing.assert_array_equal(np.asarray(each), np.asarray(running[0]))
    refusals.refused(lambda: wide(refusals.kept), "wide20", "can never fit")
    refusals.assert_undisturbed()
    assert refusals.cluster.stats()["controller"]["refused"] == 2
    assert all(each["high_water"] <= 16 * MiB for each in device(refusals.cluster))


def test_what_live_arrays_keep_out_is_refused_after_a_grace(refusals: Refusals) -> None:
    """MEM-3: with the holders' names and sizes; goes through when they are deleted, even while it is waiting."""
    wide = refusals.wide(8)
    total = pw.jit(lambda x: x.sum(), devices=refusals.left, name="total")
    held = jax.block_until_ready(wide(refusals.kept))
    refused = wide(refusals.kept)
    depending = total(refused)
    words = refusals.refused(
        lambda: refused,
        "program 'wide8' needs 8.0 MiB",
        "budget is 16.0 MiB",
        "9.0 MiB are held there by live arrays: 8.0 MiB results of program 'wide8' by this client; 1.0 MiB put there",
        "Delete arrays, or donate",
    )
    assert refusals.refused(lambda: depending) == words
    refusals.refused(lambda: wide(refusals.kept), "results of program 'wide8'", least_s=GRACE_S / 2)
    refusals.assert_undisturbed()
    waiting = wide(refusals.kept)
    held.delete()
    assert float(total(waiting)) == 5 * 8 * 2 * MiB / 4
    del waiting
    for _ in range(5):
        assert np.asarray(wide(refusals.kept))[-1] == 5
    assert device(refusals.cluster)[0]["high_water"] <= 16 * MiB


def test_puts_are_refused_like_runs(refusals: Refusals) -> None:
    """MEM-3 of a `device_put`."""
    refusals.refused(lambda: refusals.put(20), "a buffer put needs 20.0 MiB", "budget is 16.0 MiB", "can never fit")
    held = refusals.put(10)
    total = pw.jit(lambda x: x.sum(), devices=refusals.left, name="total")
    words = ("a buffer put needs 10.0 MiB (10485760 bytes)", "11.0 MiB are held", "11.0 MiB put there by this client")
    refused = refusals.put(10)
    depending = total(refused)
    text = refusals.refused(lambda: refused, *words)
    assert refusals.refused(lambda: depending) == text
    refusals.assert_undisturbed()
    held.delete()
    np.testing.assert_array_equal(np.asarray(refusals.put(10))[-2:], [1, 1])


def test_a_transfer_bigger_than_the_memory_for_transfers_is_refused(refusals: Refusals) -> None:
    """MEM-3 of the memory that transfers land in: never, and only while others are there."""
    big, half = refusals.put(5), refusals.put(1)
    text = refusals.refused(
        lambda: pw.device_put(big, refusals.right, P("x")),
        "needs 10.0 MiB",
        "on host 1's memory for transfers, whose budget is 4.0 MiB",
        "can never fit",
    )
    assert "float32[2621440]" in text
    landed = jax.block_until_ready(pw.device_put(half, refusals.right, P("x")))
    refusals.refused(
        lambda: [pw.device_put(half, refusals.right, P("x")) for _ in range(2)],
        "on host 1's memory for transfers",
        "held there by live arrays",
        "results of program 'device_put' by this client",
    )
    refusals.assert_undisturbed()
    landed.delete()
    np.testing.assert_array_equal(np.asarray(pw.device_put(half, refusals.right, P("x")))[-2:], [1, 1])
    assert refusals.cluster.stats()["hosts"][1]["arena_high_water"] <= 4 * MiB


def test_a_refused_put_gives_back_the_clients_memory(start: Callable[..., Any]) -> None:
    cluster = start(device_memory=2 * MiB)
    slice_ = pw.make_virtual_device_set().add_slice(devices=1)
    for _ in range(3):
        too_big = pw.device_put(np.zeros(MiB, np.float32), slice_)
        with pytest.raises(pw.errors.ResourceExhaustedError, match="a buffer put needs"):
            too_big.block_until_ready()
        del too_big
    deadline = time.monotonic() + 20
    while cluster.native.arena_stats()[0] != 0 and time.monotonic() < deadline:
        cluster.native.flush()
        time.sleep(0.01)
    assert cluster.native.arena_stats()[0] == 0
