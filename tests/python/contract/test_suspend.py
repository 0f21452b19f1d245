"""SUSP-1: a client that is suspended is off the devices, on all hosts or on none, and notices nothing but the time."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import cli
from pathways.host import offload

VALUE = np.arange(16, dtype=np.float32).reshape(4, 4)
BIG = np.arange(1 << 20, dtype=np.float32)

VICTIM = """
import sys, time
import numpy as np
import pathways as pw

cluster = pw.connect(sys.argv[1])
slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
x = pw.device_put(np.ones((1 << 18,), np.float32), slice_).block_until_ready()
print(cluster.client_id, flush=True)
f = pw.jit(lambda x: x + 1, devices=slice_)
while True:
    x = f(x).block_until_ready()
"""


@contextlib.contextmanager
def full_disk(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file of a host grows above a MiB: the kernel refuses what goes beyond, as it does when a disk is full."""
    if cluster.is_embedded:

        def refuse(*_: Any) -> int:
            raise OSError(28, os.strerror(28))

        with monkeypatch.context() as patch:
            patch.setattr(offload, "write_at", refuse)
            yield
        return
    hosts = [psutil.Process(host["pid"]) for host in cluster.stats()["hosts"]]
    before = [host.rlimit(resource.RLIMIT_FSIZE) for host in hosts]
    try:
        hosts[-1].rlimit(resource.RLIMIT_FSIZE, (1 << 20, before[-1][1]))  # of one host: the others can
        hosts[0].rlimit(resource.RLIMIT_FSIZE, (1 << 20, before[0][1]))
        yield
    finally:
        for host, limit in zip(hosts, before, strict=True):
            host.rlimit(resource.RLIMIT_FSIZE, limit)


@pytest.fixture
def resumed(cluster: Any) -> Iterator[None]:
    yield
    cluster.resume()


@pytest.mark.usefixtures("resumed")
@pytest.mark.parametrize("to", ["memory", "disk"])
def test_away_and_back_bit_by_bit(add: Any, cluster: Any, quiet: Callable[..., Any], to: str) -> None:
    slice_ = add((2, 1))
    values = [
        (VALUE, P("x")),
        (VALUE.astype(ml_dtypes.bfloat16), P(None, "x")),
        (np.array([True, False]), P("x")),
        (np.zeros((0, 2), np.int8), P()),
        (np.arange(4).astype(ml_dtypes.int4), P()),
        (np.float32(2.5), P()),
        (np.arange(8, dtype=np.complex64), P("x")),
    ]
    arrays = [pw.device_put(value, slice_, spec) for value, spec in values]
    f = pw.jit(lambda x: x * 2, devices=slice_)
    doubled = f(arrays[0])
    before = quiet()["kept"]
    moved = cluster.suspend(to=to)
    assert moved >= sum(array.nbytes for array in arrays)
    assert cluster.suspend(to=to) == 0
    if not cluster.is_embedded:
        clients = {client["client"]: client["suspended"] for client in cluster.stats()["clients"]}
        assert clients == {number: number == cluster.client_id for number in clients}
    waiting = f(doubled)  # taken after `resume`
    time.sleep(0.05)
    assert not waiting.is_ready()
    assert cluster.resume() == moved
    assert cluster.resume() == 0
    np.testing.assert_array_equal(np.asarray(waiting), VALUE * 4)
    for array, (value, _) in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(np.asarray(array), value)
    np.testing.assert_array_equal(np.asarray(doubled), VALUE * 2)
    del waiting
    quiet(back_to=before, but_arenas=True)


@pytest.mark.usefixtures("resumed")
def test_its_runs_end_first_and_readers_wait(add: Any, cluster: Any) -> None:
    slice_ = add(2)

    def heavy(x: Any) -> Any:
        square = jnp.full((256, 256), 0.001) + x[0, 0] * 0
        return x + 1 + jax.lax.fori_loop(0, 60, lambda _, m: jnp.tanh(m @ m), square)[0, 0] * 0

    slow = pw.jit(heavy, devices=slice_)
    x = jax.block_until_ready(slow(VALUE))
    before = cluster.stats()["controller"]["runs"]
    y = slow(slow(x))
    while cluster.stats()["controller"]["runs"] < before + 2:  # what the controller has taken it lets end
        time.sleep(0.001)
    assert cluster.suspend() > 0
    assert y.is_ready()
    read: list[Any] = []
    reader = threading.Thread(target=lambda: read.append(np.asarray(slow(y))))
    reader.start()
    time.sleep(0.1)
    assert not read
    cluster.resume()
    reader.join()
    np.testing.assert_array_equal(read[0], VALUE + 4)


@pytest.mark.usefixtures("resumed", "near")  # it limits the files of the hosts' processes
def test_a_full_disk_loses_nothing(add: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other hosts bring back what they had offloaded, and the client goes on."""
    every = [add(1, island) for island in range(len(cluster.islands)) for _ in range(4)]
    arrays = [pw.device_put(BIG + number, slice_) for number, slice_ in enumerate(every)]
    f = pw.jit(lambda x: x + 1, devices=every[0])
    with full_disk(cluster, monkeypatch):
        with pytest.raises(pw.errors.ResourceExhaustedError, match=r"host \d could not move client \d+'s buffers"):
            cluster.suspend(to="disk")
        np.testing.assert_array_equal(np.asarray(f(arrays[0])), BIG + 1)
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(np.asarray(array), BIG + number)
    assert cluster.suspend(to="disk") >= BIG.nbytes * len(arrays)
    cluster.resume()
    np.testing.assert_array_equal(np.asarray(f(arrays[0])), BIG + 1)


@pytest.mark.usefixtures("near")  # from elsewhere, a client may suspend none but itself
def test_a_client_that_is_not_there(cluster: Any) -> None:
    for call in (cluster.suspend, cluster.resume):
        for number in (77, -1, 1 << 40, "1"):
            with pytest.raises(pw.errors.ClusterClosedError, match=r"not.* part of|no client's number"):
                call(number)
    with pytest.raises(pw.errors.OptionError, match='"disk"'):
        cluster.suspend(to="tape")


def operate(*arguments: str) -> str:
    """The command `pathways`, as an operator has it."""
    done = CliRunner().invoke(cli.main, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
@pytest.mark.parametrize("end", ["resumed", "killed"])
def test_of_another_process(local_cluster: Any, end: str) -> None:
    """Others see nothing of it; OWN-1: when it dies while it is suspended, what it owned is freed."""

    def objects() -> list[int]:
        gc.collect()
        local_cluster.native.flush()
        return [host["objects"] for host in local_cluster.stats()["hosts"]]

    before = objects()
    slice_ = pw.make_virtual_device_set(local_cluster).add_slice(devices=4)
    f = pw.jit(lambda x: x + 1, devices=slice_)
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, local_cluster.address], stdout=subprocess.PIPE, text=True
    ) as victim:
        try:
            assert victim.stdout is not None
            number = int(victim.stdout.readline())
            time.sleep(0.2)
            assert local_cluster.suspend(number, to="disk") >= 1 << 20
            runs = local_cluster.stats()["controller"]["runs"]
            np.testing.assert_array_equal(np.asarray(f(VALUE)), VALUE + 1)
            assert local_cluster.stats()["controller"]["runs"] == runs + 1
            assert "suspended" in operate("status", local_cluster.address)
            if end == "resumed":
                assert "MiB came back" in operate("resume", local_cluster.address, str(number))
                assert local_cluster.resume(number) == 0
                operate("suspend", local_cluster.address, str(number))
                operate("resume", local_cluster.address, str(number))
                deadline = time.monotonic() + 60
                while local_cluster.stats()["controller"]["runs"] <= runs + 2:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        finally:
            victim.kill()
    deadline = time.monotonic() + 60
    while objects() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert objects() == before
    with pytest.raises(pw.errors.ClusterClosedError, match=f"client {number}"):
        local_cluster.resume(number)
