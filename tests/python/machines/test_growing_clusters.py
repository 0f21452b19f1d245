"""A cluster without a fixed shape: machines bring islands of any shape, while clients are at work.

All machines are this one; `MachineCluster` starts their agents.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from machines import START_S, MachineCluster

import pathways as pw
from pathways import errors
from pathways.cluster import operator
from pathways.cluster.drain_target import DrainTarget
from pathways.plan.topology import Topology


@pytest.fixture
def cluster() -> Iterator[MachineCluster]:
    """Nobody has joined it."""
    with MachineCluster(1, 1, 8, max_machines=3, agents=0) as cluster:
        yield cluster


def slice_of(client: pw.Cluster, devices: int, **where: int | str) -> pw.Slice:
    return pw.make_virtual_device_set(client).add_slice(devices=devices, axis_names=("x",), **where)


def doubled_sum(x: object) -> object:
    """A function with a collective over the axis of its argument."""
    return x * 2 + x.sum()  # type: ignore[operator, attr-defined]


def check(client: pw.Cluster, where: pw.Slice) -> None:
    x = np.arange(8.0, dtype=np.float32)
    there = pw.device_put(x, where, P("x"))
    got = pw.jit(doubled_sum, devices=where)(there)
    np.testing.assert_array_equal(np.asarray(got), x * 2 + x.sum())


def joined(cluster: MachineCluster, name: str, **shape: object) -> int:
    return cluster.start_agent(name, **shape).wait_joined(START_S)  # type: ignore[arg-type]


def refused(cluster: MachineCluster, name: str, why: str, **shape: object) -> None:
    agent = cluster.start_agent(name, **shape)  # type: ignore[arg-type]
    try:
        with pytest.raises(errors.PathwaysError, match=why):
            agent.wait_joined(START_S)
    finally:
        cluster.agents.pop(name).close()


def test_machines_bring_islands_of_any_shape(cluster: MachineCluster) -> None:
    """A client that came before all of them computes on the first, then on the third, and between them."""
    with pw.connect(cluster.address) as client:
        assert client.islands == () and client.devices == () and "no islands as yet" in repr(client)
        for where in ({}, {"island": 0}, {"kind": "cpu"}):
            with pytest.raises(errors.SliceError, match=r"the cluster has no islands as yet; `cluster.wait_for"):
                slice_of(client, 1, **where)  # type: ignore[arg-type]
        for named, why in (({"host": 0}, "no host 0: .* no hosts as yet"), ({"island": 0}, "no islands as yet")):
            with pytest.raises(errors.ConnectError, match=why):
                operator.undrain(cluster.address + "/control.sock", DrainTarget.of(**named))  # type: ignore[arg-type]
        first = joined(cluster, "one", hosts=1, devices_per_host=4)
        client.wait_for(4, START_S)
        small = slice_of(client, 4)
        check(client, small)
        second = joined(cluster, "two", hosts=2, devices_per_host=1)
        client.wait_for(6, START_S)
        check(client, slice_of(client, 2, island=second))
        third = joined(cluster, "three", hosts=2, devices_per_host=4)
        client.wait_for(14, START_S)
        assert [len(hosts) for hosts in client.islands] == [1, 2, 2] and len(client.devices) == 14
        told = client.stats()["controller"]
        assert len(told["gangs"]) == 5 and len(told["live_bytes"]) == 5 * 8 + 5, "devices, then memory for transfers"
        large = slice_of(client, 8)
        assert (small.island, large.island) == (first, third)
        check(client, large)
        x = np.arange(8.0, dtype=np.float32)
        there = pw.device_put(pw.device_put(x, small, P("x")), large, P("x"))
        np.testing.assert_array_equal(np.asarray(there + there), 2 * x)
        for devices, where in ((4, first), (2, second), (8, third)):
            on = slice_of(client, devices, island=where, kind="cpu")
            assert [device.island for device in on.devices] == [where] * devices
        with pw.connect(cluster.address) as late:
            assert late.devices == client.devices
            check(late, slice_of(late, 8))


def test_a_slice_moves_to_an_island_that_came_later(cluster: MachineCluster) -> None:
    with pw.connect(cluster.address) as client:
        first = joined(cluster, "two", hosts=2, devices_per_host=1)
        client.wait_for(2, START_S)
        moved = slice_of(client, 2, island=first)
        x = pw.device_put(np.arange(8.0, dtype=np.float32), moved, P("x"))
        f = pw.jit(doubled_sum, devices=moved)
        before = np.asarray(f(x))
        number = joined(cluster, "four", hosts=1, devices_per_host=2)
        client.wait_for(4, START_S)
        later = [device for device in client.devices if device.island == number]
        client.remap(moved, later)
        assert moved.devices == tuple(later)
        np.testing.assert_array_equal(np.asarray(f(x)), before)
        client.remap(moved, [device for device in client.devices if device.island == first])
        operator.drain(cluster.address + "/control.sock", DrainTarget.of(island=first), 60.0, False)
        assert moved.island == number
        np.testing.assert_array_equal(np.asarray(f(x)), before)
        operator.undrain(cluster.address + "/control.sock", DrainTarget.of(island=first))


def test_an_island_comes_back_with_its_number(cluster: MachineCluster) -> None:
    """Its machine leaves; a machine that brings the same shape takes its place, and what waited there goes on."""
    with pw.connect(cluster.address) as client:
        number = joined(cluster, "three", hosts=2, devices_per_host=4)
        joined(cluster, "one", hosts=1, devices_per_host=4)
        client.wait_for(12, START_S)
        there = slice_of(client, 8, island=number)
        f = pw.jit(doubled_sum, devices=there)
        x = pw.device_put(np.arange(8.0, dtype=np.float32), there, P("x"))
        np.asarray(f(x))
        cluster.agents.pop("three").close()
        with pytest.raises(errors.HostLostError):
            while True:
                np.asarray(f(x))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waits = pool.submit(check, client, there)
            assert joined(cluster, "five", hosts=2, devices_per_host=4) == number
            waits.result(START_S)
        with pytest.raises(errors.HostLostError):
            np.asarray(f(x))


def test_who_does_not_fit_is_told(cluster: MachineCluster) -> None:
    with pw.connect(cluster.address) as client:
        joined(cluster, "one", hosts=1, devices_per_host=4)
        client.wait_for(4, START_S)
        before = client.islands
        refused(
            cluster, "wide", "brings 1 hosts of 9 devices, but a host of this cluster has 8 at most", devices_per_host=9
        )
        refused(cluster, "lost", "no island 99: the cluster has islands 0..0", island="99")
        pod = {"island": "pod", "fabric": "127.0.0.1"}
        refused(cluster, "few", "brings 2 hosts, and says --island-hosts 1", hosts=2, island_hosts=1, **pod)
        refused(cluster, "part", "1 of the 2 hosts of an island: start it with --island NAME", island_hosts=2)
        assert client.islands == before
        assert joined(cluster, "half", hosts=1, devices_per_host=2, island_hosts=2, **pod) == len(before)
        with pytest.raises(errors.SliceError, match="on island 1, which has not started as yet"):
            slice_of(client, 4, island=len(before))
        refused(
            cluster, "other", "hosts of 3 .*cpu.* devices, but the hosts of island 'pod'", devices_per_host=3, **pod
        )
        refused(
            cluster, "count", "says --island-hosts 3, but island 'pod' has 2", devices_per_host=2, island_hosts=3, **pod
        )
        refused(cluster, "more", "brings 3 hosts, but island 'pod' has 2", hosts=3, devices_per_host=2, **pod)
        refused(cluster, "many", "has places for 1 hosts, and the agent brings 2", hosts=2, devices_per_host=2, **pod)
        joined(cluster, "rest", devices_per_host=2, **pod)
        client.wait_for(8, START_S)
        check(client, slice_of(client, 4, island=len(before)))
        refused(cluster, "last", "3 machines have joined, which is the most")
        with pytest.raises(errors.SliceError, match="a slice of 'tpu' devices was asked for, but the cluster has: cpu"):
            slice_of(client, 1, kind="tpu")


def test_a_topology_grows() -> None:
    empty = Topology((), 8, most_hosts=64, platform="cpu")
    assert empty.may_grow and empty.is_spread and (empty.hosts, empty.devices) == (0, 0)
    grown = empty.opened(1, 4, "cpu", 1).opened(2, 8, "cuda", 2)
    assert grown.islands == ((0,), (1, 2)) and grown.machines == (1, 2, 2) and grown.devices == 20
    assert grown.island_devices(0) == (0, 1, 2, 3) and grown.island_devices(1) == tuple(range(8, 24))
    assert grown.device_numbers == (*range(4), *range(8, 24))
    assert [grown.has_device(number) for number in (-1, 3, 4, 7, 8, 23, 24)] == [
        False,
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert grown.kinds() == ("cpu", "cuda") and grown.is_of_kind(1, "gpu") and not grown.is_of_kind(0, "gpu")
    assert grown.transfer_space(2) == empty.transfer_space(2) == 64 * 8 + 2, "numbers of spaces never change"
    assert grown.describe() == "1 island x 1 host x 4 cpu devices and 1 island x 2 hosts x 8 cuda devices"
