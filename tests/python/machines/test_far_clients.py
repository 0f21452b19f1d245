"""Clients and operators on other machines: they come in at the port, work, and end; each beside a client at the head.

Map from label to test:
    OWN-1    test_a_far_client_that_is_killed, test_a_far_client_whose_link_stops
    TRUST-1  test_a_far_client_may_not_operate, test_an_operator_may
    CERT-1   test_roles_that_may_not, test_the_checkpoints_of_a_far_client_follow_from_its_certificate
    LINK-1   test_a_far_client_whose_link_stops, test_the_controller_is_killed
    LINK-4   test_the_head_s_memory_bounds_the_number_of_far_clients
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
from click.testing import CliRunner
from control_clusters import eventually
from jax.sharding import PartitionSpec as P
from machines import MachineCluster

import pathways as pw
from pathways import cli
from pathways.agent.controller_session import Endpoint
from pathways.agent.link_door import FarLink
from pathways.cluster import operator
from pathways.cluster.drain_target import DrainTarget
from pathways.controller import far_clients
from pathways.controller.far_clients import FarClients, FarConnection
from pathways.process.client_terms import ClientTerms
from pathways.process.config import ClientSizes
from pathways.process.run_directory import authority_folder
from pathways.trust import Credentials, Identity, Role, Tokens, dialing

pytestmark = pytest.mark.slow

X = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def machines() -> Iterator[MachineCluster]:
    with MachineCluster(2, 1, 2) as cluster:
        cluster.connect().close()  # all devices are there: programs of the tests do not wait for them
        yield cluster


def placed(cluster: pw.Cluster, island: int = 0) -> Any:
    where = pw.make_virtual_device_set(cluster).add_slice(devices=2, island=island)
    return pw.jit(lambda x: x * 2 + 1, devices=where)


def link_process(cluster: pw.Cluster) -> psutil.Process:
    """The process that has the far client's end of the link."""
    return psutil.Process(cluster._control.controller_pid)


def clients(machines: MachineCluster) -> list[int]:
    return [each["client"] for each in machines.handle.control.cluster_stats()["clients"]]


def test_status_says_what_each_peer_can_take_at_the_head(machines: MachineCluster) -> None:
    """LINK-4: of an agent's machine and of a client, beside what waits there now."""
    with machines.connect_far(name="ann"), machines.connect(name="ben"):
        stats = machines.handle.control.cluster_stats()
        for machine in stats["machines"]:
            assert 0 <= machine["kept_bytes"] < 1 << 20 < machine["most_kept_bytes"] < 1 << 30
        assert all(host["resident_bytes"] > 10 << 20 for host in stats["hosts"]), "those of agents, too"
        (ann,), (ben,) = ([c["most_kept"] for c in stats["clients"] if c["name"] == n] for n in ("ann", "ben"))
        assert ann > ben > 1 << 20, "a far client has a link, too"
        shown = CliRunner().invoke(cli.main, ["status", machines.address], env={"COLUMNS": "160"}).output
    assert re.search(r"\bm0 .* [0-9.]+ (B|KiB) of [0-9.]+ MiB ", shown), shown


def test_it_works_as_on_the_machine_itself(machines: MachineCluster) -> None:
    with machines.connect_far(name="ann", weight=2.0) as far:
        f, g = placed(far, 0), placed(far, 1)
        y = f(X)
        for _ in range(100):
            y = g(f(y)) if float(y[0]) < 10 else f(X)
        np.testing.assert_array_equal(np.asarray(f(X)), X * 2 + 1)
        big = np.random.default_rng(1).random(3_000_000, dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(g(f(big))), (big * 2 + 1) * 2 + 1)
        where = pw.make_virtual_device_set(far).add_slice(devices=2, island=0)
        with pytest.raises(pw.errors.ResourceExhaustedError):
            np.asarray(pw.jit(lambda x: jnp.zeros(1 << 42, jnp.int8) + x, devices=where)(np.int8(1)))
        me = next(each for each in far.stats()["clients"] if each["name"] == "ann")
        assert (me["weight"], me["pid"]) == (2.0, 0)
        assert far.address == machines.port
        process = link_process(far)
        directory = json.loads(process.cmdline()[-2])["directory"]
        assert os.path.isdir(directory)
    assert not far.is_alive()
    eventually(lambda: not process.is_running(), "the link's process is gone")
    eventually(lambda: me["client"] not in clients(machines), "the client is gone")
    assert not os.path.exists(directory)


def test_nothing_of_a_client_is_kept(machines: MachineCluster) -> None:
    """A controller that runs for months must not keep a descriptor of each client that was there."""
    folder = f"/proc/{machines.handle.control.controller_pid}/fd"

    def come_and_go() -> None:
        with machines.connect_far() as far:
            assert float(placed(far)(np.float32(1))) == 3.0

    come_and_go()
    before = len(os.listdir(folder))
    for _ in range(5):
        come_and_go()
    eventually(lambda: len(os.listdir(folder)) < before + 5, "descriptors of clients that have left are closed")


def test_errors_deadlines_and_cancelling(machines: MachineCluster) -> None:
    with machines.connect_far() as far:
        where = pw.make_virtual_device_set(far).add_slice(devices=2, island=1)

        @pw.program
        def slow(x: Any) -> Any:
            return pw.jit(lambda x: jnp.linalg.matrix_power(x, 1 << 20), devices=where)(x)

        with pytest.raises(pw.errors.DeadlineExceededError):
            np.asarray(slow.with_timeout(0.05)(np.eye(700, dtype=np.float32)))
        np.testing.assert_array_equal(np.asarray(placed(far, 1)(X)), X * 2 + 1)


def test_a_local_client_is_not_disturbed(machines: MachineCluster) -> None:
    with machines.connect() as near, machines.connect_far() as far:
        one, other = placed(near), placed(far)
        a, b = one(X), other(X)
        for _ in range(200):
            a, b = one(a) - X, other(b) - X
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_caller_that_is_gone_before_it_is_served(machines: MachineCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection broke before it heard that it was let in: nothing of it stays, and a neighbour does not notice."""
    folder = f"/proc/{machines.handle.control.controller_pid}/fd"
    with machines.connect() as near, machines.way_in(Role.CLIENT):
        f = placed(near)
        np.asarray(f(X))
        endpoint = Endpoint.find(machines.port, os.environ, "client")
        own = Credentials.load(endpoint.credentials)
        before = len(os.listdir(folder))
        monkeypatch.setattr(dialing, "read_answer", lambda sock, deadline: abort(sock))
        for _ in range(20):
            with pytest.raises(pw.errors.PathwaysError):
                dialing.dial(endpoint.address, own, "session")
            np.testing.assert_array_equal(np.asarray(f(X)), X * 2 + 1)
        monkeypatch.undo()
        eventually(lambda: len(os.listdir(folder)) <= before, "what the callers had is gone")


def abort(sock: socket.socket) -> Any:
    """Resets a connection at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    raise ConnectionResetError


def test_a_second_process_uses_the_certificate(machines: MachineCluster) -> None:
    """The token is traded once; a program after it needs none."""
    code = textwrap.dedent(
        f"""
        import numpy as np, pathways as pw
        with pw.connect({machines.port!r}) as cluster:
            where = pw.make_virtual_device_set(cluster).add_slice(devices=2, island=0)
            assert float(pw.jit(lambda x: x + 1, devices=where)(np.float32(1))) == 2.0
        """
    )
    with machines.way_in(Role.CLIENT):
        environment = dict(os.environ)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    environment["PATHWAYS_TOKEN"] = ""
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("how", ["client", "link"])
def test_a_far_client_that_is_killed(machines: MachineCluster, how: str) -> None:
    """OWN-1: all that it owned is freed, whichever process ends."""
    before = clients(machines)
    code = textwrap.dedent(
        f"""
        import sys, time, numpy as np, pathways as pw
        cluster = pw.connect({machines.port!r})
        where = pw.make_virtual_device_set(cluster).add_slice(devices=2, island=0)
        kept = [pw.device_put(np.ones(1 << 20, np.float32), where) for _ in range(8)]
        np.asarray(kept[-1])
        print(cluster._control.controller_pid, flush=True)
        try:
            while True:
                kept.append(kept.pop(0) + 1)
        except pw.errors.ControllerLostError:
            sys.exit(7)
        """
    )
    with machines.way_in(Role.CLIENT):
        environment = dict(os.environ)
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    link = psutil.Process(int(process.stdout.readline()))
    with machines.connect() as near:
        f = placed(near)
        (process if how == "client" else link).kill()
        np.testing.assert_array_equal(np.asarray(f(X)), X * 2 + 1)
        assert process.wait(30) == (-signal.SIGKILL if how == "client" else 7)
        eventually(lambda: not link.is_running(), "the link's process is gone")
        own = near.client_id
        eventually(lambda: set(clients(machines)) <= {*before, own}, "the client is gone")
        eventually(lambda: max(near.stats()["controller"]["live_bytes"]) < 1 << 20, "its arrays are gone")
    process.stdout.close()


def test_a_far_client_whose_link_stops(machines: MachineCluster) -> None:
    """A machine that falls silent is lost within 5 s; when it wakes, it knows."""
    with machines.connect_far() as far:
        f = placed(far)
        y = f(X)
        np.asarray(y)
        number = far.client_id
        link = link_process(far)
        link.suspend()
        try:
            eventually(lambda: number not in clients(machines), "the client is gone", 20)
        finally:
            link.resume()
        with pytest.raises(pw.errors.PathwaysError, match="connect again"):
            for _ in range(1000):
                np.asarray(f(X))
                time.sleep(0.02)


def test_the_head_s_memory_bounds_the_number_of_far_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """LINK-4: also of those that have not joined. With doubles, because a real controller has room for hundreds."""
    monkeypatch.setattr(far_clients, "_MOST_TWINS", 2)
    identity = Identity(Role.CLIENT, "ann")
    there = [FarConnection(n, 0, f"secret {n}", None, identity=identity) for n in range(3)]
    door = FarClients.__new__(FarClients)
    door._native = door._hub = door._links = door._status = MagicMock()
    door._connections = MagicMock(of={each.token: each for each in there}.get, open=dict(enumerate(there)))
    hello = {"session": there[2].token, **vars(ClientSizes())}
    there[0].link = there[1].link = object()
    with pytest.raises(pw.errors.ResourceExhaustedError, match="enough for 2 clients on other machines"):
        door._open(identity, hello)
    there[1].link = None
    assert door._open(identity, hello)[0] is there[2].far


def test_a_call_whose_session_is_over_says_why(machines: MachineCluster) -> None:
    """The controller has lost the client, which hears of it a moment later than it calls."""
    with machines.connect_far() as far:
        far._control._token = "of a session that is over"
        threading.Timer(0.2, link_process(far).kill).start()
        with pytest.raises(pw.errors.ControllerLostError, match="connect again"):
            far._control.hosts_there()


def test_a_far_client_may_not_operate(machines: MachineCluster) -> None:
    with machines.connect_far() as far, machines.connect() as near:
        for what in (
            lambda: far._control.shutdown(),
            lambda: far._control.suspend(near.client_id, False, time.sleep),
            lambda: far._control.limit(near.client_id, {"weight": 2.0}),
            lambda: far._control.drain(DrainTarget.of("m0"), 1.0, True),
        ):
            with pytest.raises(pw.errors.PermissionDeniedError, match="token of the role operator"):
                what()
    with machines.way_in(Role.CLIENT):  # nor with a session that is no client
        with pytest.raises(pw.errors.PermissionDeniedError, match="token of the role operator"):
            operator.limit(machines.port, 1, {"weight": 2.0})
        assert operator.inspect(machines.port)["controller"]["pid"] == machines.handle.control.controller_pid


def test_an_operator_may(machines: MachineCluster) -> None:
    with machines.connect() as near, machines.way_in(Role.OPERATOR):
        assert operator.limit(machines.port, near.client_id, {"weight": 3.0})["weight"] == 3.0
        assert operator.suspend(machines.port, near.client_id) >= 0
        assert operator.resume(machines.port, near.client_id) >= 0
        with operator.record(machines.port) as recording:
            assert recording is not None
        with pytest.raises(pw.errors.ConnectError, match="no machine"):
            operator.drain(machines.port, DrainTarget.of("nobody"), 1.0, False)


def test_roles_that_may_not(machines: MachineCluster) -> None:
    with machines.way_in(Role.HOST), pytest.raises(pw.errors.PermissionDeniedError, match="has the role host"):
        pw.connect(machines.port)


def test_without_a_token(machines: MachineCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PATHWAYS_TOKEN", raising=False)
    with pytest.raises(pw.errors.PermissionDeniedError, match=r"PATHWAYS_TOKEN_FILE.*pathways token --role client"):
        pw.connect(machines.port)
    monkeypatch.setenv("PATHWAYS_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(pw.errors.OptionError, match="cannot be read"):
        pw.connect(machines.port)
    monkeypatch.setenv("PATHWAYS_TOKEN_FILE", "")
    monkeypatch.setenv("PATHWAYS_TOKEN", "nonsense")
    with pytest.raises(pw.errors.PathwaysError, match="token"):
        pw.connect(machines.port)
    token = Tokens(authority_folder(machines.handle.directory)).make(Role.CLIENT, 600.0)
    monkeypatch.setenv("PATHWAYS_TOKEN", token)
    with pytest.raises(pw.errors.ConnectError, match="nothing listens"):
        pw.connect("pathways://127.0.0.1:1")
    with pytest.raises(pw.errors.ConnectError, match="has no address"):
        pw.connect("pathways://no-such-machine.invalid:7070")


def test_a_token_file_and_the_address_of_the_environment(
    machines: MachineCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "token"
    file.write_text(Tokens(authority_folder(machines.handle.directory)).make(Role.CLIENT, 600.0) + "\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATHWAYS_TOKEN_FILE", str(file))
    monkeypatch.setenv("PATHWAYS_ADDRESS", machines.port)
    with pw.connect() as cluster:
        np.testing.assert_array_equal(np.asarray(placed(cluster)(X)), X * 2 + 1)
    (kept,) = (tmp_path / "pathways").glob("*.pem")
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_forked_child_ends_nothing(machines: MachineCluster) -> None:
    with machines.connect_far() as far:
        f = placed(far)
        y = f(X)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                np.asarray(y)
            with contextlib.suppress(BaseException):
                far.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(50):
            np.testing.assert_array_equal(np.asarray(f(X)), X * 2 + 1)


def test_without_encryption() -> None:
    with MachineCluster(1, 1, 2, insecure_plaintext=True) as machines:
        with machines.connect_far() as far:
            np.testing.assert_array_equal(np.asarray(placed(far)(X)), X * 2 + 1)
        with pytest.raises(pw.errors.PathwaysError, match=r"encrypt|TLS"), machines.way_in(Role.CLIENT):
            pw.connect(machines.handle.port)  # as if it were encrypted


def test_the_controller_is_killed() -> None:
    """The client hears of it, and can connect to the next one at that address."""
    with MachineCluster(1, 1, 2) as machines:
        far = machines.connect_far()
        f = placed(far)
        np.asarray(f(X))
        start = time.monotonic()
        os.kill(machines.handle.control.controller_pid, signal.SIGKILL)
        with pytest.raises(pw.errors.ControllerLostError, match="cannot be reached any more"):
            while True:
                np.asarray(f(X))
        assert time.monotonic() - start < 5
        far.close()


def test_the_cluster_is_closed() -> None:
    with MachineCluster(1, 1, 2) as machines:
        far = machines.connect_far()
        f = placed(far)
        np.asarray(f(X))
        machines.close()
        with pytest.raises(pw.errors.ClusterClosedError, match="closed"):
            while True:
                np.asarray(f(X))
        far.close()


def test_a_host_is_lost(machines: MachineCluster) -> None:
    """ERR-2 reaches a far client, whose futures the head does not have; its memory comes back, and it goes on."""
    with machines.connect_far() as far:
        here, there = placed(far, 0), placed(far, 1)
        kept = [here(X) for _ in range(20)]
        np.asarray(kept[-1])
        free = far.native.arena_stats()[0]
        big = np.ones(1 << 20, np.float32)
        flying = [here(big) for _ in range(4)]
        host = next(host for host in far.stats()["hosts"] if host["island"] == 0)
        os.kill(host["pid"], signal.SIGKILL)
        with pytest.raises(pw.errors.HostLostError):
            for each in [*flying, *(here(each) for each in kept)]:
                np.asarray(each)
        np.testing.assert_array_equal(np.asarray(there(X)), X * 2 + 1)

        def works() -> bool:
            try:
                return bool(np.array_equal(np.asarray(here(X)), X * 2 + 1))
            except pw.errors.HostLostError:
                return False

        eventually(works, "the island is back")
        del flying, kept
        eventually(lambda: far.native.flush() or far.native.arena_stats()[0] <= free, "no lease is left")


def test_the_checkpoints_of_a_far_client_follow_from_its_certificate(tmp_path: pathlib.Path) -> None:
    """CERT-1: one that calls itself "alice" neither reads nor replaces what alice has saved."""
    pw.checkpoint.register()

    def save(cluster: pw.Cluster, name: str) -> pathlib.Path:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
        where = tmp_path / name / "one"
        with ocp.StandardCheckpointer() as saver:
            saver.save(where, {"w": pw.device_put(X, slice_)})
            saver.wait_until_finished()
        return where

    with MachineCluster(1, 1, 1, checkpoint_root=f"{tmp_path}/{{client}}", terms=ClientTerms("starter")) as machines:
        with machines.connect(name="alice") as alice:
            kept = save(alice, "alice")
        with machines.connect_far(name="alice") as mallory:
            slice_ = pw.make_virtual_device_set(mallory).add_slice(devices=1)
            template = {"w": jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=slice_.sharding(P()))}
            refused = pytest.raises(Exception, match=f"lie in {tmp_path}/")
            with ocp.StandardCheckpointer() as reader, refused as told:
                reader.restore(kept, template)
            with pytest.raises(Exception, match=f"lie in {tmp_path}/"):
                save(mallory, "alice2")
            own = re.search(rf"lie in {tmp_path}/(\S+)", str(told.value))
            assert own is not None and own[1] != "alice"
            assert save(mallory, own[1]).is_dir()


def test_an_operator_has_not_the_folder_of_a_client_with_its_name() -> None:
    """CERT-6: names belong to keys of one role. No client has an @ in its name."""
    names = [
        FarConnection(1, 0, "secret", None, identity=Identity(role, "alice")).proven_name
        for role in (Role.CLIENT, Role.OPERATOR)
    ]
    assert names == ["alice", "alice@operator"]


def test_the_end_of_a_far_client_waits_for_nobody() -> None:
    """Nothing comes by its link any more when its end is over, whatever the process's other threads wait for."""

    async def run() -> None:
        done, closed = threading.Event(), threading.Event()
        for _ in range(64):  # such as reads of logs on a slow disk
            asyncio.get_running_loop().run_in_executor(None, done.wait)
        identity = Identity(Role.CLIENT, "alice")
        link = FarLink(types.SimpleNamespace(close=closed.set), identity, lambda why: None)
        FarConnection(1, 0, "secret", None, identity=identity, far=link).close()
        is_closed = closed.is_set()
        done.set()
        assert is_closed

    asyncio.run(run())
