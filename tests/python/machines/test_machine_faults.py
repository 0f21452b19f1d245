"""Machines that are lost and come back (ERR-2, LINK-1): hosts, agents, the controller killed beside work that goes on.

Map from label to test:
    ERR-2   test_a_place_that_nobody_takes_holds_nobody_up, test_a_killed_host, test_a_killed_agent,
            test_an_agent_that_leaves, test_what_names_a_lost_array_is_told_at_once, test_a_stopped_host
    LINK-1  test_a_stopped_agent
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from control_clusters import eventually
from jax.sharding import PartitionSpec as P
from machines import MachineCluster

import pathways as pw
from pathways import cli
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.launcher import Listening, start_local_cluster
from pathways.cluster.operator import drain, look
from pathways.process.pulses import LOOK_S, STOPPED
from pathways.trust import Role

pytestmark = pytest.mark.slow

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def machines() -> Iterator[MachineCluster]:
    with MachineCluster(2, 1, 2) as cluster:
        yield cluster


def placed(cluster: pw.Cluster, island: int) -> Any:
    where = pw.make_virtual_device_set(cluster).add_slice(devices=2, island=island)
    return pw.jit(lambda x: x * 2 + 1, devices=where)


def agent_process(machines: MachineCluster, name: str) -> psutil.Process:
    supervisor = psutil.Process(machines.agents[name]._supervised.supervisor_pid)
    return next(child for child in supervisor.children() if "pathways.agent.main" in child.cmdline())


def hosts_of(agent: psutil.Process) -> list[psutil.Process]:
    return [child for child in agent.children() if child.name().startswith("pathways-host")]


def states(cluster: pw.Cluster) -> list[str]:
    return [host["state"] for host in cluster.stats()["hosts"]]


def works(call: Any) -> bool:
    try:
        return bool(np.array_equal(np.asarray(call(X)), X * 2 + 1))
    except pw.errors.HostLostError:
        return False


def test_a_place_that_nobody_takes_holds_nobody_up() -> None:
    """Clients are suspended and leave beside it, and nothing is kept for it. Whoever takes it later has missed nothing
    (ERR-2, OWN-1).
    """
    with MachineCluster(2, 1, 2, agents=1) as machines, machines.connect() as cluster:
        kept = placed(cluster, 0)(X)
        assert cluster.suspend() > 0
        assert cluster.resume() > 0
        np.testing.assert_array_equal(np.asarray(kept), X * 2 + 1)
        code = f"import pathways as pw\nfor _ in range(5): pw.connect({machines.address!r}).close()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        assert cluster.stats()["controller"]["waiting"] == 0
        machines.start_agent("m1")
        cluster.wait_for(4, 120)
        assert works(placed(cluster, 1))
        assert cluster.suspend() > 0


def check_lost_and_back(cluster: pw.Cluster, end: Any) -> None:
    """`end` ends the machine of island 1; island 0 goes on, and island 1 comes back."""
    here, there = placed(cluster, 0), placed(cluster, 1)
    kept_here, kept_there = here(X), there(X)
    np.testing.assert_array_equal(np.asarray(kept_there), X * 2 + 1)
    end()
    eventually(lambda: states(cluster)[1] != "up", "island 1 is lost")
    np.testing.assert_array_equal(np.asarray(here(kept_here)), (X * 2 + 1) * 2 + 1)
    with pytest.raises(pw.errors.HostLostError):
        np.asarray(there(kept_there) + 1)
    eventually(lambda: states(cluster) == ["up", "up"], "island 1 is back")
    assert works(there)
    assert works(here)


def test_rows_between_machines(machines: MachineCluster) -> None:
    """`pw.exchange` sends rows to shards of another machine, and again when its hosts were lost and are back."""
    with machines.connect() as cluster:
        devices = pw.make_virtual_device_set(cluster)
        source, target = devices.add_slice(devices=2, island=0), devices.add_slice(devices=2, island=1)
        send = pw.program(lambda x, to: pw.exchange(x, to, to=target, capacity=64, overflow="drop"))
        draw = np.random.default_rng(5)
        x = draw.normal(size=(64, 3)).astype(np.float32)
        to = draw.integers(0, 2, 64).astype(np.int32)
        expected = np.zeros((128, 3), np.float32)
        for shard in range(2):
            expected[64 * shard : 64 * shard + int((to == shard).sum())] = x[to == shard]

        def is_right() -> bool:
            try:
                return bool(np.array_equal(np.asarray(send(x, pw.device_put(to, source))[0]), expected))
            except pw.errors.HostLostError:
                return False

        assert is_right()
        assert sum(host["bytes_shipped"] for host in cluster.stats()["hosts"]) > x.nbytes
        for host in hosts_of(agent_process(machines, machines_of_island(cluster, machines)[1])):
            host.kill()
        eventually(lambda: states(cluster)[1] != "up", "island 1 is lost")
        eventually(lambda: states(cluster) == ["up", "up"], "island 1 is back")
        eventually(is_right, "rows go there again")


def test_a_killed_host(machines: MachineCluster) -> None:
    with machines.connect() as cluster:
        agent = agent_process(machines, machines_of_island(cluster, machines)[1])
        check_lost_and_back(cluster, lambda: [host.kill() for host in hosts_of(agent)])


def machines_of_island(cluster: pw.Cluster, machines: MachineCluster) -> list[str]:
    """The agents' names by island."""
    found = {}
    for name in machines.agents:
        for child in hosts_of(agent_process(machines, name)):
            found[next(h["host"] for h in cluster.stats()["hosts"] if h["pid"] == child.pid)] = name
    return [found[island] for island in sorted(found)]


def test_a_killed_agent(machines: MachineCluster) -> None:
    """All its hosts are gone with it, and a new agent takes the place."""
    with machines.connect() as cluster:
        name = machines_of_island(cluster, machines)[1]
        agent = agent_process(machines, name)
        left = [agent, *agent.children(recursive=True)]

        def kill() -> None:
            agent.kill()
            _, alive = psutil.wait_procs(left, timeout=10)
            assert not alive
            machines.agents[name].close()
            machines.start_agent(f"{name}-again")

        before = look(machines.handle.address).losses
        check_lost_and_back(cluster, kill)
        losses = look(machines.handle.address).losses
        assert (losses.machines - before.machines, losses.hosts - before.hosts) == (1, 1)
        assert {each.what for each in losses.last} >= {f"machine {name}", "island 1, host 1"}
        for role, are_told in ((Role.CLIENT, False), (Role.OPERATOR, True)):
            with machines.way_in(role):
                seen = look(machines.port).losses
            assert [each.what for each in seen.last] == [each.what for each in losses.last]
            assert all(bool(each.why) == are_told for each in seen.last), "reasons may have lines of logs"


def test_an_agent_that_leaves(machines: MachineCluster) -> None:
    """New slices go elsewhere while its place is free, and are refused if there is no other."""
    with machines.connect() as cluster:
        name = machines_of_island(cluster, machines)[1]
        there = placed(cluster, 1)
        assert works(there)
        machines.agents[name].close()
        eventually(lambda: states(cluster)[1] == "lost", "island 1 is lost")
        devices = pw.make_virtual_device_set(cluster)
        with pytest.raises(pw.errors.SliceError, match="wait_for"):
            devices.add_slice(devices=2, island=1)
        assert devices.add_slice(devices=2).devices[0].island == 0
        with pytest.raises(TimeoutError, match="2 of 4 devices"):
            cluster.wait_for(4, timeout=0.2)
        waiting = there(X)  # it waits in the order
        machines.start_agent("other")
        cluster.wait_for(4, timeout=60)
        np.testing.assert_array_equal(np.asarray(waiting), X * 2 + 1)


@pytest.mark.parametrize("far", [False, True], ids=["here", "far"])
def test_what_names_a_lost_array_is_told_at_once(machines: MachineCluster, far: bool) -> None:
    """Nobody brings the machine back, and yet nothing that was built on its arrays waits for it."""
    with machines.connect_far() if far else machines.connect() as cluster:
        names = machines_of_island(cluster, machines)
        devices = pw.make_virtual_device_set(cluster)
        slices = [devices.add_slice(devices=2, island=island) for island in range(2)]
        here, there = (pw.jit(lambda x: x * 2 + 1, devices=each) for each in slices)
        both = pw.program(lambda x, y: (here(x), there(y)))
        near, lost = here(X), there(X)
        jax.block_until_ready((both(near, lost), lost.sum(), pw.device_put(lost, slices[0])))  # these are compiled now
        machines.agents[names[1]].close()
        eventually(lambda: states(cluster)[1] == "lost", "island 1 is lost")
        began = time.monotonic()
        for build in (
            lambda: lost,
            lambda: there(lost),
            lambda: there(there(lost)),
            lambda: both(near, lost)[0],
            lambda: both(near, lost)[1],
            lambda: lost.sum(),
            lambda: pw.device_put(lost, slices[0]),
        ):
            with pytest.raises(pw.errors.HostLostError):
                np.asarray(build())
        assert time.monotonic() - began < 30
        np.testing.assert_array_equal(np.asarray(here(near)), (X * 2 + 1) * 2 + 1)
        waiting = there(X)  # it names nothing that is lost
        machines.start_agent("other")
        np.testing.assert_array_equal(np.asarray(waiting), X * 2 + 1)
        with pytest.raises(pw.errors.HostLostError):
            np.asarray(lost)


def test_a_stopped_agent(machines: MachineCluster) -> None:
    """An agent that says nothing for 5 s is lost; when it goes on, it joins again."""
    with machines.connect() as cluster:
        agent = agent_process(machines, machines_of_island(cluster, machines)[1])
        everything = [agent, *agent.children(recursive=True)]

        def stop() -> None:
            for process in everything:
                process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            eventually(lambda: states(cluster)[1] == "lost", "island 1 is lost")
            print(f"lost after {time.monotonic() - began:.1f} s")
            for process in everything:
                if process.is_running():
                    process.send_signal(signal.SIGCONT)

        check_lost_and_back(cluster, stop)


def test_a_stopped_host(machines: MachineCluster) -> None:
    """Nobody is told that a process is stopped. Its agent, which goes on, sees that it has no pulse (PULSE-1). A short
    stop costs nothing, nor a longer one of the whole machine: the agent counts looks, not seconds."""
    with machines.connect() as cluster:
        agent = agent_process(machines, machines_of_island(cluster, machines)[1])
        call = placed(cluster, 1)
        before = call(X)

        def stop(processes: list[psutil.Process], seconds: float) -> None:
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            for process in reversed(processes):  # the agent last: it sees that its hosts have not moved for long
                process.send_signal(signal.SIGCONT)

        (host,) = hosts_of(agent)
        stop([host], LOOK_S)
        stop([agent, *agent.children(recursive=True)], 3.0)
        np.testing.assert_array_equal(np.asarray(call(before)), (X * 2 + 1) * 2 + 1)
        assert states(cluster) == ["up", "up"] and hosts_of(agent) == [host]

        host.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(pw.errors.HostLostError, match=STOPPED):
            np.asarray(call(before))
        print(f"lost after {time.monotonic() - began:.1f} s")
        eventually(lambda: states(cluster) == ["up", "up"], "the island is back")
        assert works(call)
        assert not host.is_running()


def test_the_controller_is_killed_and_nothing_is_left() -> None:
    with MachineCluster(1, 1, 1) as machines:
        cluster = machines.connect()
        call = pw.jit(lambda x: x + 1, devices=pw.make_virtual_device_set(cluster).add_slice(devices=1))
        assert float(call(np.float32(1))) == 2
        agent = agent_process(machines, "m0")
        hosts = hosts_of(agent)
        os.kill(cluster.stats()["controller"]["pid"], signal.SIGKILL)
        with pytest.raises(pw.errors.ControllerLostError):
            eventually(lambda: np.asarray(call(np.float32(1))) is None, "the controller's end is seen")
        _, alive = psutil.wait_procs(hosts, timeout=10)
        assert not alive, "hosts end with the controller that they belong to"
        assert agent.is_running(), "the agent waits for another controller"
        cluster.close()


def test_a_restarted_controller_takes_everybody_back() -> None:
    """At the same address, with the same authority: agents by themselves, a client on another machine when it connects
    again, both with the certificates that they have."""
    with MachineCluster(2, 1, 1) as machines:
        far = machines.connect_far()
        f = pw.jit(lambda x: x * 2 + 1, devices=pw.make_virtual_device_set(far).add_slice(devices=1, island=0))
        assert works(f)
        os.kill(machines.handle.control.controller_pid, signal.SIGKILL)
        with pytest.raises(pw.errors.ControllerLostError, match="connect again"):
            while True:
                np.asarray(f(X))
        port = machines.handle.port
        listening = Listening(port.removeprefix("pathways://"), os.path.join(machines.folder, "authority"))
        machines.handle.close()
        with contextlib.closing(start_local_cluster(2, 1, 1, platform="cpu", listen=listening)) as again:
            assert again.port == port
            with pytest.MonkeyPatch.context() as patch:  # no token any more
                patch.setenv("XDG_STATE_HOME", os.path.join(machines.folder, "state-client"))
                cluster = pw.connect(port)
            assert cluster is not far
            with cluster:
                cluster.wait_for(2, 60)
                for island in range(2):
                    where = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=island)
                    assert works(pw.jit(lambda x: x * 2 + 1, devices=where))


def test_drain(machines: MachineCluster) -> None:
    """A machine leaves when its slices have moved, and not before; the last one has nowhere to go. Another machine
    takes its place, and gets slices.
    """
    with machines.connect() as cluster:
        name = machines_of_island(cluster, machines)[1]
        there = pw.make_virtual_device_set(cluster).add_slice(devices=2, island=1)
        kept = pw.device_put(X, there, P("x"))
        call = pw.jit(lambda x: x * 2 + 1, devices=there)
        assert works(call)
        with pytest.raises(pw.errors.ConnectError, match="there are: m0, m1"):
            drain(machines.handle.address, DrainTarget.of("nobody"), 0.2, force=False)
        before = look(machines.handle.address)
        assert [list(each.devices) for each in before.slices if each.island == 1] == [[2, 3]]
        assert drain(machines.handle.address, DrainTarget.of(name), 30.0, force=False) == 1
        assert states(cluster) == ["up", "lost"], "the machine has left"
        after = look(machines.handle.address).losses
        assert (after.machines, after.hosts) == (before.losses.machines, before.losses.hosts), "nothing was lost"
        shown = CliRunner().invoke(cli.main, ["status", machines.handle.address]).output
        assert name not in shown and "no machine has the places of island 1\n" in shown
        log = CliRunner().invoke(cli.main, ["logs", "controller", machines.handle.address]).output
        assert f"the agent {name} of island 1 has left\n" in log and f"machine, {name}, has left.\n" in log
        with pytest.raises(pw.errors.ClusterClosedError, match="let this machine go"):
            machines.agents[name].wait()
        assert there.island == 0
        np.testing.assert_array_equal(np.asarray(kept), X)
        assert works(call)
        other = next(agent for agent in machines.agents if agent != name)
        with pytest.raises(pw.errors.SliceError, match=f"machine {other} has still 1 slice: .*no other host"):
            cluster.drain(other, timeout=0.2)
        assert states(cluster) == ["up", "lost"]
        assert works(call), "nothing has changed"
        machines.start_agent("next")
        cluster.wait_for(4, timeout=60)
        assert works(placed(cluster, 1))
        assert not any(host["is_drained"] for host in cluster.stats()["hosts"])


def test_machines_that_do_not_fit(machines: MachineCluster) -> None:
    """Each is refused with what to do, and the cluster goes on."""
    with machines.connect() as cluster:
        here = placed(cluster, 0)
        joined = dict(machines.agents)
        for name, what, words in (
            ("m9", {}, "no place is free"),
            ("m1", {}, "another --name"),
            ("m9", {"hosts": 2}, "--hosts 1 --devices-per-host 2"),
            ("m9", {"devices_per_host": 3}, "--hosts 1 --devices-per-host 2"),
        ):
            agent = machines.start_agent(name, **what)
            with pytest.raises(pw.errors.ConnectError, match=words):
                agent.wait_joined(30)
            agent.close()
        machines.agents = joined
        assert works(here)


def test_an_agent_whose_supervisor_was_killed_ends_with_its_handle() -> None:
    """And leaves neither a process nor a folder."""
    with MachineCluster(1, devices_per_host=1) as machines:
        agent = agent_process(machines, "m0")
        family = [agent, *agent.children(recursive=True)]
        folder = pathlib.Path(f"/proc/{agent.pid}/fd/2").readlink().parents[1]
        assert folder.is_dir()
        psutil.Process(machines.agents["m0"]._supervised.supervisor_pid).kill()
        machines.agents["m0"].close()
        assert psutil.wait_procs(family, 30)[1] == []
        eventually(lambda: not folder.exists(), "the agent's folder is gone")


def test_no_token_stands_where_others_can_read_it() -> None:
    """CERT-2: without encryption the agent keeps it. A command line is for all users, and hosts run clients' code."""
    with MachineCluster(1, devices_per_host=1, insecure_plaintext=True) as machines, machines.connect():
        agent = agent_process(machines, "m0")
        family = agent.children(recursive=True)
        assert hosts_of(agent)
        for process in [psutil.Process(machines.agents["m0"]._supervised.supervisor_pid), agent, *family]:
            assert "pathways1." not in " ".join(process.cmdline())
        for process in family:
            assert "pathways1." not in str(process.environ())
