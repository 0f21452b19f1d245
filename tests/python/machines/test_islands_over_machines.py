"""Islands whose hosts are on several machines: values, losses, what does not fit, and where collectives listen.

Map from label to test:
    ERR-2   test_a_lost_machine_and_one_that_takes_its_place
    FAB-1   test_collectives_use_the_fabric_alone, test_machines_whose_fabric_does_not_reach
    LINK-1  test_all_machines_stand_still_and_go_on
    LINK-3  test_arrays_of_every_sharding, test_each_machine_gets_what_its_hosts_need
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import namespaces
import numpy as np
import psutil
import pytest
from control_clusters import eventually
from jax.sharding import PartitionSpec as P
from machines import MachineCluster
from namespace_cluster import NamespaceCluster

import pathways as pw
from pathways import errors
from pathways.agent.fabric import find_fabric, own_addresses
from pathways.cluster.agent_launcher import AgentHandle
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.operator import drain

pytestmark = pytest.mark.slow

FABRIC = "127.0.0.5"


@pytest.fixture
def machines() -> Iterator[MachineCluster]:
    """Two islands of two machines, each of which has one host of two devices."""
    with MachineCluster(2, 2, 2, machines_per_island=2) as cluster:
        yield cluster


def whole(cluster: Any, name: str) -> Any:
    """A slice of all devices of an island."""
    devices = pw.make_virtual_device_set(cluster)
    return devices.add_slice(shape=(2, 2), axis_names=("x", "y"), island=number_of(cluster, name))


def number_of(cluster: Any, name: str) -> int:
    """The number of an island."""
    return next(int(each["island"]) for each in cluster.stats()["machines"] if each["island_name"] == name)


def a_machine_of(cluster: Any, island: str) -> str:
    """The name of one."""
    return max(each["name"] for each in cluster.stats()["machines"] if each["island_name"] == island)


def agent_of(machines: MachineCluster, name: str) -> psutil.Process:
    supervisor = psutil.Process(machines.agents[name]._supervised.supervisor_pid)
    return next(child for child in supervisor.children() if is_agent(child))


def hosts_of(agent: psutil.Process) -> list[psutil.Process]:
    return hosts_under(agent.pid)


def hosts_under(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    return [child for child in found if child.name().startswith("pathways-host")]


def is_agent(process: psutil.Process) -> bool:
    return "pathways.agent.main" in process.cmdline()


def states(cluster: Any) -> list[str]:
    return [host["state"] for host in cluster.stats()["hosts"]]


@pytest.mark.parametrize("is_far", [False, True], ids=["near", "far"])
def test_arrays_of_every_sharding(machines: MachineCluster, is_far: bool) -> None:
    """What is put comes back, whichever machine has which part of it: small ones beside their completion, large ones
    packed, each machine its own part. A computation of all devices has the right value, too."""
    draw = np.random.default_rng(7)
    specs = [P(), P("x"), P("y"), P(("x", "y")), P(("y", "x")), P(None, "x"), P(None, ("y", "x")), P("y", "x")]
    shapes = [(4, 4), (8, 12), (64, 1028), (0, 4), (1, 8), (260, 8, 16)]
    dtypes = [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16, np.complex64]
    with machines.connect_far() if is_far else machines.connect() as cluster:
        there = whole(cluster, "pod1")
        total = pw.jit(lambda x: jnp.sum(x.astype(jnp.float32)), devices=there)
        for spec in specs:
            for shape in shapes:
                cuts = [np.prod([2 for _ in ([axes] if isinstance(axes, str) else axes or ())]) for axes in spec]
                if any(size % cut for size, cut in zip(shape, cuts, strict=False)):
                    continue
                value = draw.integers(0, 2, shape).astype(dtypes[int(draw.integers(len(dtypes)))])
                array = pw.device_put(value, there, spec)
                np.testing.assert_array_equal(np.asarray(array), value, err_msg=f"{spec} {shape} {value.dtype}")
                if value.dtype != np.complex64:
                    assert float(total(array)) == value.astype(np.float32).sum()
        square = np.arange(4096, dtype=np.float32).reshape(64, 64)
        for each in jax.device_get([pw.device_put(square, there, spec) for spec in specs]):  # asks for all at once
            np.testing.assert_array_equal(each, square)
        key = pw.jit(lambda: jax.random.key_data(jax.random.split(jax.random.key(3), 4)), devices=there)
        np.testing.assert_array_equal(np.asarray(key()), jax.random.key_data(jax.random.split(jax.random.key(3), 4)))


@pytest.mark.parametrize("is_far", [False, True])
def test_each_machine_gets_what_its_hosts_need(machines: MachineCluster, is_far: bool) -> None:
    """Of a put onto a slice of two machines, no byte goes to a machine whose hosts do not need it."""
    value = np.random.default_rng(5).random((1024, 1024), np.float32)
    with machines.connect_far() if is_far else machines.connect() as cluster:
        there = whole(cluster, "pod1")

        def sent() -> list[int]:
            return [each["bytes_out"] for each in cluster.stats()["machines"] if each["island_name"] == "pod1"]

        for spec, share in ((P(("x", "y")), 0.5), (P(None, "x"), 0.5), (P("y"), 1.0), (P(), 1.0)):
            np.testing.assert_array_equal(np.asarray(pw.device_put(value + 1, there, spec)), value + 1)
            before = sent()
            array = pw.device_put(value, there, spec).block_until_ready()
            for now, then in zip(sent(), before, strict=True):
                assert share <= (now - then) / value.nbytes < share + 0.1, spec
            np.testing.assert_array_equal(np.asarray(array), value)


def test_all_machines_stand_still_and_go_on(machines: MachineCluster) -> None:
    """As a laptop does that sleeps, or a container that is frozen: nothing is lost (LINK-1)."""
    with machines.connect() as cluster:
        double = pw.jit(lambda x: x * 2 + jnp.sum(x), devices=whole(cluster, "pod0"))
        np.testing.assert_array_equal(np.asarray(double(np.arange(8.0))), np.arange(8.0) * 2 + 28)
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            process.suspend()
        time.sleep(7)
        for process in reversed(processes):  # controller last: hosts that stand still longer than it are stopped ones
            process.resume()
        np.testing.assert_array_equal(np.asarray(double(np.arange(8.0))), np.arange(8.0) * 2 + 28)
        time.sleep(1)
        np.testing.assert_array_equal(np.asarray(double(np.arange(8.0))), np.arange(8.0) * 2 + 28)


def test_a_lost_machine_and_one_that_takes_its_place(machines: MachineCluster) -> None:
    """All hosts of its island are lost; the error names the machine; another island goes on. Another machine takes the
    place, and the island starts again."""
    with machines.connect() as cluster:
        here, there = whole(cluster, "pod0"), whole(cluster, "pod1")
        calls = [pw.jit(lambda x: x + jnp.sum(x), devices=each) for each in (here, there)]
        x = np.arange(8, dtype=np.float32)
        kept = [call(x) for call in calls]
        for each in kept:
            np.testing.assert_array_equal(np.asarray(each), x + x.sum())
        lost = a_machine_of(cluster, "pod1")
        os.kill(agent_of(machines, lost).pid, signal.SIGKILL)
        with pytest.raises(pw.errors.HostLostError, match=f"machine, {lost}"):
            while True:
                np.asarray(calls[1](x))
        np.testing.assert_array_equal(np.asarray(calls[0](kept[0])), x + x.sum() + (x + x.sum()).sum())
        eventually(lambda: sorted(states(cluster)) == ["lost", "lost", "up", "up"], "the island waits for a machine")
        machines.agents[lost].close()
        machines.start_agent("other", island="pod1", fabric="127.0.0.1").wait_joined(60)
        eventually(lambda: states(cluster) == ["up"] * 4, "the island is back")
        np.testing.assert_array_equal(np.asarray(calls[1](x)), x + x.sum())
        names = {each["name"]: each["island_name"] for each in cluster.stats()["machines"]}
        assert names["other"] == "pod1"


def test_a_killed_host(machines: MachineCluster) -> None:
    """Its machine stays, and so does the other one of the island, whose host starts again, too."""
    with machines.connect() as cluster:
        there = whole(cluster, "pod1")
        call = pw.jit(lambda x: x + jnp.sum(x), devices=there)
        x = np.arange(8, dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(call(x)), x + x.sum())
        before = {host["pid"] for host in cluster.stats()["hosts"]}
        name = a_machine_of(cluster, "pod1")
        for host in hosts_of(agent_of(machines, name)):
            host.kill()

        def is_right() -> bool:
            try:
                return bool((np.asarray(call(x)) == x + x.sum()).all())
            except pw.errors.HostLostError:
                return False

        eventually(is_right, "the island is back")
        assert len(before & {host["pid"] for host in cluster.stats()["hosts"]}) == 2
        assert len(cluster.stats()["machines"]) == 4


def test_a_machine_leaves(machines: MachineCluster) -> None:
    """`drain` of one machine moves what lies on its island, also on the other machine, whose hosts end with it."""
    with machines.connect() as cluster:
        there = whole(cluster, "pod1")
        x = pw.device_put(np.arange(8, dtype=np.float32), there, P("x"))
        there_too = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=number_of(cluster, "pod1"))
        y = pw.device_put(np.float32(7), there_too)
        name = a_machine_of(cluster, "pod1")
        drain(machines.address + "/control.sock", DrainTarget.of(machine=name), 60.0, False)
        np.testing.assert_array_equal(np.asarray(x), np.arange(8))
        assert np.asarray(y) == 7
        assert {device.island for each in (there, there_too) for device in each.devices} == {number_of(cluster, "pod0")}
        eventually(lambda: sorted(states(cluster)) == ["lost", "lost", "up", "up"], "the machine has left")
        assert len(cluster.stats()["machines"]) == 3
        machines.agents[name].close()
        machines.start_agent("next", island="pod1", fabric="127.0.0.1").wait_joined(60)
        eventually(lambda: states(cluster) == ["up"] * 4, "the island is back")


def test_collectives_use_the_fabric_alone() -> None:
    """What listens in a host's process: its port for streams, which asks for a certificate, and the fabric."""
    with MachineCluster(1, 2, 1, agents=0) as machines:
        machines._shape["hosts"] = 1
        for name in ("one", "two"):
            machines.start_agent(name, island="pod", fabric=FABRIC)
        with machines.connect() as cluster:
            both = pw.make_virtual_device_set(cluster).add_slice(devices=2)
            np.testing.assert_array_equal(np.asarray(pw.jit(jnp.sum, devices=both)(np.ones(2, np.float32))), 2)
            assert {each["fabric"] for each in cluster.stats()["machines"]} == {FABRIC}
            for name in ("one", "two"):
                for host in hosts_of(agent_of(machines, name)):
                    found = [each.laddr.ip for each in host.net_connections("tcp") if each.status == "LISTEN"]
                    assert sorted(found) == [FABRIC, "::"]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"hosts": 1}, "start it with --island NAME, the same for all of the island's machines, and --fabric"),
        ({"hosts": 1, "island": "pod"}, "start it with --island NAME"),
        ({"hosts": 1, "fabric": FABRIC}, "start it with --island NAME"),
        ({"hosts": 3, "island": "pod", "fabric": FABRIC}, "brings 3 hosts of 1 devices, but an island of this cluster"),
        ({"hosts": 1, "devices_per_host": 2, "island": "pod", "fabric": FABRIC}, "brings 1 hosts of 2 devices"),
        ({"hosts": 2, "island": "full", "fabric": FABRIC}, "has places for 1 hosts, and the agent brings 2.*full: one"),
        ({"hosts": 2, "island": "other"}, "no place is free for an island 'other'.*full: one"),
        ({"hosts": 2}, "no place is free for the agent"),
        ({"hosts": 2, "island": "7"}, r"no island 7: the cluster has islands 0\.\.0"),
        ({"hosts": 1, "island": "a/b", "fabric": FABRIC}, "a name is 1 to 64 letters"),
        ({"hosts": 1, "island": "full", "fabric": "192.0.2.1"}, "this machine has no address on the fabric 192.0.2.1"),
        ({"hosts": 1, "island": "full", "fabric": "link"}, "machine one, .* is a network, and the agent's is link"),
        (
            {"hosts": 1, "island": "full", "fabric": "nowhere0"},
            "--fabric takes an IPv4 address of this machine, an interface",
        ),
    ],
)
def test_what_does_not_fit(what: dict[str, Any], why: str, full: MachineCluster) -> None:
    with pytest.raises(errors.PathwaysError, match=why):
        agent = full.start_agent("new", **what)
        try:
            agent.wait_joined(60)
        finally:
            agent.close()


@pytest.fixture(scope="module")
def full() -> Iterator[MachineCluster]:
    """One island of two hosts, of which a machine has one."""
    with MachineCluster(1, 2, 1, agents=0) as machines:
        machines.start_agent("one", hosts=1, island="full", fabric=FABRIC).wait_joined(60)
        yield machines


def test_a_fabric_needs_encryption() -> None:
    with pytest.raises(errors.OptionError, match="needs a cluster with encryption"):
        AgentHandle("127.0.0.1:1", "", None, name="one", island="pod", fabric=FABRIC)


def test_devices_that_are_not_carried_in_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        errors.OptionError, match="carries the collectives of CPU devices, and this machine's are of cuda"
    ):
        AgentHandle("127.0.0.1:1", "", "file", name="one", platform="cuda", island="pod", fabric="link")


def test_where_a_fabric_is() -> None:
    mine = {(each.interface, each.address) for each in own_addresses()}
    assert ("lo", "127.0.0.1") in mine
    for wanted in ("lo", "127.0.0.1", "127.0.0.0/8"):
        assert find_fabric(wanted, False) == ("127.0.0.1", "lo")
    assert find_fabric("127.0.0.9", False) == ("127.0.0.9", "lo")
    for wanted in ("::1", "fe80::/10", "", "LINK", "10.1.0.0/99"):
        with pytest.raises(errors.OptionError, match="--fabric takes an IPv4 address of this machine"):
            find_fabric(wanted, False)


def test_a_public_fabric_must_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathways.agent import fabric

    public = fabric.Fabric("8.8.8.8", "eth7")
    monkeypatch.setattr(fabric, "own_addresses", lambda: [public, fabric.Fabric("10.0.0.2", "eth7")])
    with pytest.raises(errors.OptionError, match=r"8\.8\.8\.8 is a public address"):
        find_fabric("8.8.8.8", False)
    assert find_fabric("8.8.8.8", True) == public
    with pytest.raises(errors.OptionError, match="has 2 addresses on the fabric eth7"):
        find_fabric("eth7", True)


@pytest.mark.skipif(namespaces.why_not() is not None, reason=namespaces.why_not() or "")
def test_machines_whose_fabric_does_not_reach() -> None:
    """Links get through, and the fabric does not: who came last hears it, by names, before a host starts. Another
    machine gets its place."""
    with namespaces.Network(["m0", "m1", "m2"]) as network:
        cluster = NamespaceCluster(network, 1, 2, 1, machines_per_island=2, agents=0)

        def start(machine: str, fabric: str) -> Any:
            return cluster.start_agent(machine, "0", fabric, stderr=subprocess.PIPE, text=True)

        try:
            first = start("m0", network.address_of("m0"))
            assert "joined island 0" in first.stderr.readline()
            alone = start("m1", "127.0.0.1")
            _, said = alone.communicate(timeout=60)
            assert alone.returncode == 1
            assert re.search(r"from machine m\d to machine m\d: .* 127\.0\.0\.1:\d+ \(from 10|m1 to machine m0", said)
            fits = start("m2", network.address_of("m2"))
            assert "joined island 0" in fits.stderr.readline()
            eventually(lambda: hosts_under(fits.pid), "the island starts")
            agent = next(each for each in psutil.Process(first.pid).children(recursive=True) if is_agent(each))
            log = pathlib.Path(f"/proc/{agent.pid}/fd/2").read_text()
            assert "the link is over" not in log, "who fits stays in the cluster"
        finally:
            cluster.close()
