"""Hosts on several machines, as `LocalCluster(machines=...)` models them: network transfers, stops and losses.

Map: FAR-1 `test_a_host_refuses_what_makes_no_sense`; ERR-2 `test_a_stopped_host_is_lost`,
`test_hosts_that_are_killed_while_network_transfers_are_under_way`. Which bytes go where is in
`contract/test_transfers.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from chunks import chunk
from jax.sharding import PartitionSpec as P
from stream_cases import StreamRefusedError, framed, say

import pathways as pw
from pathways.process.pulses import STOPPED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def far() -> Iterator[Any]:
    """Two islands of two hosts, each island on a machine of its own."""
    with pw.connect(pw.LocalCluster(2, 2, 1, machines=2)) as cluster:
        yield cluster


@pytest.fixture
def ends(far: Any) -> tuple[Any, Any]:
    """A slice on each machine."""
    devices = pw.make_virtual_device_set(far)
    return tuple(devices.add_slice(shape=(2,), axis_names=("x",), island=island) for island in (0, 1))  # type: ignore[return-value]


def up(cluster: Any, host: int) -> int:
    """The host's process id, once its island is up."""
    deadline = time.monotonic() + 60
    while (found := cluster.stats()["hosts"][host])["state"] != "up":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(found["pid"])


def quiet(cluster: Any) -> list[tuple[int, int]]:
    """Objects and bytes on each host, when nothing changes any more."""
    deadline, last = time.monotonic() + 60, None
    while True:
        cluster.native.flush()
        hosts = cluster.stats()["hosts"]
        now = [(host.get("objects", -1), host.get("arena_bytes", -1)) for host in hosts]
        if now == last and not any(host.get("live_runs", 1) for host in hosts):
            return now
        assert time.monotonic() < deadline, hosts
        last = now
        time.sleep(0.1)


def test_machines_must_divide_the_hosts() -> None:
    for machines in (3, 0, True):
        with pytest.raises(ValueError, match="machines"):
            pw.connect(pw.LocalCluster(2, 2, 1, machines=machines))


def test_a_stopped_host_is_lost(far: Any, ends: tuple[Any, Any]) -> None:
    """PULSE-1: a process that is stopped has no pulse. Nothing else is disturbed."""
    here, there = ends
    count = pw.jit(lambda x: x + 1, devices=here, in_shardings=P("x"), out_shardings=P("x"))
    double = pw.jit(lambda x: x * 2, devices=there, in_shardings=P("x"), out_shardings=P("x"))
    value = np.ones((2, 64), np.float32)
    near, array = count(value), double(value)
    jax.block_until_ready([near, array])
    pid = up(far, 3)
    os.kill(pid, signal.SIGSTOP)
    results = [double(array) for _ in range(5)]
    for _ in range(20):
        near = count(near)
    np.testing.assert_array_equal(np.asarray(near), 22)
    with pytest.raises(pw.errors.HostLostError, match=rf"host 3 \(pid {pid}\) .*{STOPPED}"):
        jax.block_until_ready(results)
    np.testing.assert_array_equal(np.asarray(double(count(value))), 4)
    assert up(far, 3) != pid


@pytest.mark.parametrize("host", [0, 3])
def test_hosts_that_are_killed_while_network_transfers_are_under_way(
    far: Any, ends: tuple[Any, Any], host: int
) -> None:
    here, there = ends
    back = pw.program(lambda x: pw.device_put(pw.device_put(x, there, P(None, "x")), here, P("x")))
    value = np.arange(2 << 20, dtype=np.float32).reshape(2, -1)
    np.testing.assert_array_equal(np.asarray(back(value)), value)
    before = quiet(far)
    for _ in range(3):
        start = pw.device_put(value, here, P("x"))
        arrays = [back(start) for _ in range(8)]
        jax.block_until_ready(arrays[0])
        pid = up(far, host)
        os.kill(pid, signal.SIGKILL)
        for array in arrays:
            try:
                np.testing.assert_array_equal(np.asarray(array), value)
            except pw.errors.HostLostError as error:
                assert f"host {host} (pid {pid}) was killed by SIGKILL" in str(error)
        del array, arrays, start
    while True:
        try:
            np.testing.assert_array_equal(np.asarray(back(value)), value)
            break
        except pw.errors.HostLostError:  # the last loss was heard of between its parts
            continue
    assert quiet(far) == before


def test_a_host_refuses_what_makes_no_sense(far: Any, ends: tuple[Any, Any]) -> None:
    """FAR-1: what is cut off closes its stream with an error that says so, what nobody waits for is refused."""
    here, there = ends
    folder = far.address.rpartition("/")[0]
    address = f"{folder}/stream-2-{far.stats()['hosts'][2]['restarts']}.sock"
    piece = chunk(7, 1, 0, b"12345678")

    assert say(address, None, [framed(piece)]) == ["nobody waits for it there"]
    assert say(address, None, []) == []
    for broken in (b"\nno piece", piece[:-4]):
        with pytest.raises(StreamRefusedError, match="cut off"):
            say(address, None, [framed(broken)])
    move = pw.program(lambda x: pw.device_put(x, there, P("x")))
    value = np.arange(64, dtype=np.float32).reshape(2, 32)
    np.testing.assert_array_equal(np.asarray(move(pw.device_put(value, here, P("x")))), value)
