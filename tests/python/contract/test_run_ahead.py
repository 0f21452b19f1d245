"""How far a client runs ahead (ASY-1: a call waits for a credit), what that leaves for others of its own to wait for,
and that memory goes back to the machine when it is over."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest

import pathways as pw
from pathways import errors
from pathways.cluster import arena_trimming

pytestmark = pytest.mark.one_island

X = np.arange(8, dtype=np.float32)
MiB = 1 << 20


@pytest.fixture
def bound(cluster: Any) -> Iterator[Callable[[int], None]]:
    """`bound(n)` sets the client's run-ahead; afterwards it is what it was."""
    target, before = cluster._target, cluster.native.max_in_flight

    def one(most: int) -> None:
        assert pw.connect(target, max_in_flight=most) is cluster

    yield one
    one(before)


def held(slice_: Any, go: threading.Event) -> Any:
    """A function whose runs are over only when `go` is set."""

    def wait(v: Any) -> Any:
        go.wait(60)
        return np.asarray(v) + 1

    return pw.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x), devices=slice_)


@pytest.mark.parametrize("most", [1, 3])
def test_calls_wait_for_a_place_in_flight(add: Any, cluster: Any, bound: Callable[[int], None], most: int) -> None:
    go = threading.Event()
    f = held(add(1), go)
    f.lower(X).compile()
    bound(most)
    out: list[Any] = []
    caller = threading.Thread(target=lambda: out.extend(f(X) for _ in range(most + 4)))
    caller.start()
    deadline = time.monotonic() + 30
    while cluster.native.in_flight < most and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert cluster.native.in_flight == most and caller.is_alive()
    go.set()
    caller.join(60)
    assert len(out) == most + 4
    for y in out:
        np.testing.assert_array_equal(np.asarray(y), X + 1)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "3", 1 << 40])
def test_wrong_bounds_are_refused(cluster: Any, wrong: Any) -> None:
    before = cluster.native.max_in_flight
    with pytest.raises(errors.OptionError, match="max_in_flight"):
        pw.connect(cluster._target, max_in_flight=wrong)
    assert cluster.native.max_in_flight == before


def test_a_save_waits_for_what_it_saves_and_for_no_later_run(add: Any, tmp_path: pathlib.Path) -> None:
    """It is written while runs that were submitted after it are still going on."""
    go = threading.Event()
    slice_ = add(1)
    later = held(slice_, go)
    step = pw.jit(lambda x: x * 2, devices=slice_)
    later.lower(X).compile()
    saved = step(step(pw.device_put(X, slice_)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"x": saved})
        waiting = later(saved)
        behind = [step(waiting) for _ in range(5)]
        checkpointer.wait_until_finished()
        assert not waiting.is_ready()
        go.set()
        restored = checkpointer.restore(tmp_path / "step", {"x": saved})
    np.testing.assert_array_equal(np.asarray(restored["x"]), X * 4)
    np.testing.assert_array_equal(np.asarray(behind[-1]), (X * 4 + 1) * 2)


@pytest.mark.parametrize("kept", [1, 160], ids=["little stays", "much stays"])
def test_memory_goes_back_when_what_ran_ahead_is_over(local_cluster: Any, kept: int) -> None:
    """Hundreds of MiB of arguments on their way; afterwards the client's memory is about what it was. `kept`: MiB of
    an array that lies in the client's shared memory all the time."""
    slice_ = pw.make_virtual_device_set(local_cluster).add_slice(devices=1)
    stays = pw.device_put(np.ones(kept * MiB // 4, np.float32), slice_)
    f = pw.jit(lambda x: x.sum(), devices=slice_)
    go = threading.Event()
    gate = held(slice_, go)
    gate.lower(X).compile()
    np.asarray(f(np.zeros(MiB, np.float32)))
    process = psutil.Process()

    def settled(limit: int) -> int:
        deadline = time.monotonic() + 60
        while (now := process.memory_info().rss) > limit and time.monotonic() < deadline:
            time.sleep(0.1)
        return now

    before = process.memory_info().rss
    first = gate(X)
    sums = [f(np.full(MiB, n, np.float32)) for n in range(80)]  # 320 MiB wait behind it
    assert local_cluster.native.arena_in_use() >= 300 * MiB
    assert process.memory_info().rss - before > 250 * MiB
    go.set()
    jax.block_until_ready([first, *sums])
    assert settled(before + 100 * MiB) <= before + 100 * MiB
    for n, total in enumerate(sums):
        assert float(total) == n * MiB
    assert float(stays[0]) == 1


def test_nobody_looks_after_little_memory() -> None:
    class Native:
        closed = False
        used = 0
        trims = 0

        def arena_in_use(self) -> int:
            return self.used

        def trim_arena(self) -> int:
            self.trims += 1
            return 1

    def looking() -> int:
        return sum(thread.name == "pw-tidy" and thread.is_alive() for thread in threading.enumerate())

    native, others = Native(), looking()
    arena_trimmer = arena_trimming.ArenaTrimmer(native)
    native.used = arena_trimming.MUCH_BYTES - 1
    arena_trimmer.block_taken()
    assert not arena_trimmer._is_looking
    native.used = 4 * arena_trimming.MUCH_BYTES
    for _ in range(3):
        arena_trimmer.block_taken()
    assert looking() <= others + 1  # others may be over by now
    time.sleep(2 * arena_trimming.SAMPLE_S)
    native.used = arena_trimming.MUCH_BYTES
    deadline = time.monotonic() + 30
    while arena_trimmer._is_looking and time.monotonic() < deadline:
        time.sleep(0.05)
    assert native.trims == 1
