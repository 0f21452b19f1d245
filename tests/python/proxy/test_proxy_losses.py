"""What a stock JAX client sees of losses: of hosts, islands, machines, the controller, the proxy.

What lay there fails as DATA_LOSS, and at once while the island is down; the rest goes on; when the island is back, the
same process computes there again (ERR-2). Whatever ends, what the client had is freed (OWN-1).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from control_clusters import eventually
from machines import MachineCluster
from stock_clients import StockClient, proxy_process, serving

import pathways as pw
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.launcher import start_local_cluster
from pathways.cluster.operator import drain, look, undrain
from pathways.plan.topology import Topology
from pathways.proxy.islands import Islands
from pathways.proxy.waiter import Waiter

#: On two islands with two devices each: arrays a0 and a1, what f makes of them, and a program that runs for minutes.
BEGIN = """
d = jax.devices()
f = jax.jit(lambda v: v * 2 + v.sum())
x = np.arange(8, dtype=np.float32)
a0 = jax.device_put(x, on(d[:2]))
slow = jax.jit(lambda v: jax.lax.fori_loop(0, 2_000_000_000, lambda _, v: jnp.sin(v), v))
out = [(each.id, each.slice_index) for each in d]
"""
DEVICES = [[0, 0], [1, 0], [2, 1], [3, 1]]
X = [float(value) for value in range(8)]
F = [2 * value + 28 for value in X]

#: Each needs island 1.
STARTS = (
    "jax.device_put(x, on(d[2:]))",
    "f(jax.device_put(x, on(d[2:])))",
    "jax.device_put(a0, on(d[2:]))",
    "jax.pmap(lambda v: v + 1, devices=d[2:])(x.reshape(2, 4))",
)


def is_up(address: str) -> bool:
    return all(host.state == "up" for host in look(address).hosts)


def in_use(address: str) -> int:
    return sum(look(address).controller.live_bytes)


def jax_clients(address: str) -> int:
    return sum(client.name.startswith("JAX at") for client in look(address).clients)


def works_on_both(client: StockClient) -> None:
    """Programs that were compiled before, and new ones."""
    code = """
    b = [jax.device_put(x, on(devices)) for devices in (d[:2], d[2:])]
    n = globals().get("n", 0) + 1
    out = [[np.asarray(g(each)).tolist() for each in b] for g in (f, jax.jit(lambda v: v + n - n))]
    out.append(np.asarray(jax.device_put(b[0], on(d[2:]))).tolist())
    """
    assert client.out(code) == [[F, F], [X, X], X]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("host", [2, 3])
def test_a_killed_host(cluster: Any, host: int) -> None:
    address = cluster.address
    before = in_use(address)
    with serving(address) as variables, StockClient(variables) as client:
        assert client.out(BEGIN) == DEVICES
        works_on_both(client)
        client.out("big = [jax.device_put(np.ones(1 << 20, np.float32), on(each)) for each in (d[:2], d[2:])]")
        client.out(
            "a1 = jax.device_put(x, on(d[2:])); kept = f.lower(a1).compile(); jax.block_until_ready(slow.lower(a1))"
        )
        client.out("late = f(slow(a1)); elsewhere = f(a0)")
        client.send("late.block_until_ready()")
        pid = look(address).hosts[host].pid
        os.kill(pid, signal.SIGKILL)
        text = client.answer_error()
        assert "DATA_LOSS" in text and f"host {host} (pid {pid}) was killed by SIGKILL" in text
        for code in ("np.asarray(late)", "np.asarray(a1)", "np.asarray(f(a1))", "jax.block_until_ready(f(late) + 1)"):
            text = client.error(code)
            assert "DATA_LOSS" in text and ("island 1 is down" in text or f"host {host} (pid {pid})" in text)
        assert client.out("out = np.asarray(elsewhere).tolist()") == F
        assert client.out("out = np.asarray(f(a0)).tolist()") == F
        eventually(lambda: is_up(address), "island 1 is back")
        works_on_both(client)
        assert client.out("out = np.asarray(kept(jax.device_put(x, on(d[2:])))).tolist()") == F
        assert "DATA_LOSS" in client.error("np.asarray(f(a1))")  # what was lost stays so
        assert client.out("out = [(each.id, each.slice_index) for each in jax.devices()]") == DEVICES
        client.out("del big")
        eventually(lambda: in_use(address) < before + (1 << 20), "large arrays are gone")
    eventually(lambda: jax_clients(address) == 0, "the client is gone")
    eventually(lambda: in_use(address) <= before, "all arrays are gone")


@pytest.mark.slow
def test_an_island_that_nobody_brings() -> None:
    """It is listed from the start. What needs it fails at once, when it is waited for: not when it is started, so that
    a program can ask all islands. Nothing else waits behind it."""

    def fails_there() -> None:
        for start in STARTS:
            client.out(f"made = {start}")
            assert "DATA_LOSS: island 1 is down: its hosts [1] are lost, or" in client.error("np.asarray(made)")
            assert client.out("out = np.asarray(f(a0)).tolist()") == F

    with MachineCluster(2, 1, 2, agents=1) as machines:
        address = machines.handle.address
        with serving(machines.address) as variables, StockClient(variables) as client:
            assert client.out(BEGIN) == DEVICES
            fails_there()
            for _ in range(2):
                machines.start_agent("m1")
                eventually(lambda: is_up(address), "island 1 is there")
                works_on_both(client)
                client.out("a1 = jax.device_put(x, on(d[2:])).block_until_ready(); late = f(slow(a1))")
                client.send("late.block_until_ready()")
                machines.agents.pop("m1").close()
                assert "DATA_LOSS" in client.answer_error()
                eventually(lambda: not is_up(address), "island 1 is lost")
                fails_there()


@pytest.mark.slow
def test_the_controller_ends() -> None:
    with (
        contextlib.closing(start_local_cluster(1, 1, 2)) as handle,
        proxy_process(handle.address) as (_, variables),
        StockClient(variables) as client,
    ):
        client.out(BEGIN)
        client.send("slow(a0).block_until_ready()")
        eventually(lambda: any(each.runs for each in look(handle.address).clients), "its run is under way")
        os.kill(handle.pids()["controller"], signal.SIGKILL)
        assert "UNAVAILABLE" in client.answer_error()
        for code in ("np.asarray(f(a0))", "jax.device_put(x, d[0]).block_until_ready()"):
            assert "UNAVAILABLE" in client.error(code)
        assert client.ends() == 0


@pytest.mark.slow
def test_the_proxy_ends(cluster: Any) -> None:
    before = in_use(cluster.address)
    with proxy_process(cluster.address) as (process, variables), StockClient(variables) as client:
        client.out(BEGIN)
        client.send(
            "jax.jit(lambda v: jax.lax.fori_loop(0, 20_000_000, lambda _, v: jnp.sin(v), v))(a0).block_until_ready()"
        )
        eventually(lambda: any(each.runs for each in look(cluster.address).clients), "its run is under way")
        process.kill()
        assert "UNAVAILABLE" in client.answer_error()
        assert "UNAVAILABLE" in client.error("np.asarray(f(a0))")
        assert client.ends() == 0
    eventually(lambda: jax_clients(cluster.address) == 0, "the client is gone")
    eventually(lambda: in_use(cluster.address) <= before, "its arrays are gone")


@pytest.mark.slow
def test_hosts_are_not_drained_under_a_jax_program(cluster: Any) -> None:
    """Its slices do not move. Whoever drains is told why; what runs goes on, right, and new devices of the host are
    refused meanwhile."""
    address, host = cluster.address, DrainTarget("host", 0)
    with serving(address) as variables:
        with StockClient(variables) as client:
            client.out(BEGIN + "\nnp.asarray(f(a0))")
            client.send("out = [np.asarray(f(a0)).tolist() for _ in range(200)]")
            with pytest.raises(pw.errors.SliceError, match="its program keeps the devices that it has chosen"):
                drain(address, host, timeout_s=1.0, force=False)
            assert client.answer_out() == [F] * 200
            client.out("one = jax.device_put(x, d[0])")
            assert client.out("out = np.asarray(one + one).tolist()") == [2 * value for value in X]
        eventually(lambda: jax_clients(address) == 0, "the client is gone")
        drain(address, host, timeout_s=30.0, force=False)
        try:
            with StockClient(variables) as client:
                assert "FAILED_PRECONDITION: devices [0, 1] lie on drained hosts [0]" in client.error(
                    BEGIN + "\nnp.asarray(a0)"
                )
                assert client.out("out = np.asarray(jax.device_put(x, on(d[2:]))).tolist()") == X
        finally:
            undrain(address, host)


class Session:
    """A session of two islands of one host with two devices each, of which host 1 may be away."""

    def __init__(self) -> None:
        self.topology = Topology.grid(2, 1, 2)
        self.losses, self.looks, self.there = 0, 0, (0, 1)
        self.native = self

    def control(self) -> Any:
        return self

    def hosts_there(self) -> tuple[int, ...]:
        self.looks += 1
        return self.there

    def pause(self, seconds: float) -> None:
        """Hears of losses."""

    def state(self, array: object) -> str:
        return "pending"

    def wait_raw(self, handle: int, timeout: float) -> str:
        return "pending"


def test_the_controller_is_asked_after_a_loss_only() -> None:
    session = Session()
    islands = Islands(session)  # type: ignore[arg-type]
    for _ in range(3):
        islands.check((2, 3))
    assert session.looks == 1
    session.there, session.losses = (0,), 1
    for _ in range(3):
        islands.check((0, 1))
        with pytest.raises(pw.errors.HostLostError, match=r"island 1 is down: its hosts \[1\]"):
            islands.check((1, 3))
    assert islands.stand_in((2, 3)) == islands.stand_in((0, 1)) == (0, 1)
    assert islands.stand_in((3,)) == (0,)
    looks = session.looks
    for _ in range(3):
        assert islands.loss_of((3,), age_s=60.0) is not None
    assert session.looks == looks
    session.there = (0, 1)
    for _ in range(3):  # nobody is refused by what was seen before
        islands.check((3,))
    assert session.looks == looks + 1
    session.there, session.losses = (), 2
    with pytest.raises(pw.errors.HostLostError, match="island 0 is down"):
        islands.stand_in((0, 1))


def test_who_waits_is_told_when_the_island_is_down() -> None:
    session = Session()
    waiter = Waiter(session, Islands(session))  # type: ignore[arg-type]
    told: dict[int, Any] = {}
    for device in (0, 2):
        lies = SimpleNamespace(binding=SimpleNamespace(devices=(device,)))
        waiter.add([SimpleNamespace(raw_handle=1, slice=lies)], lambda error, at=device: told.update({at: error}))
    session.there, session.losses = (0,), 1
    eventually(lambda: told, "one is told")
    assert list(told) == [2] and isinstance(told[2], pw.errors.HostLostError)
    waiter.close()
