"""A whole cluster of processes under the control plane, with doubles for the native core and the driver.

What is proved here: joining, slices, programs and their errors, and clients that come and go.
OWN-1: `test_a_client_that_dies_is_forgotten`, `test_memory_of_clients_is_let_go_without_the_collector`.
TRUST-1: `test_whose_a_call_is_says_its_connection`, `test_a_segment_that_makes_no_sense_is_refused`.
How clusters start and end is in `test_control_ends.py`, ERR-2 in `test_lost_islands.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from control_clusters import SIZES, SMALL, assert_gone, eventually, is_running, program, segments, stats_with_notes

from pathways import errors
from pathways.cluster.launcher import LocalClusterHandle, start_local_cluster
from pathways.cluster.operator import inspect
from pathways.cluster.remote import RemoteControl, StartupEvent, connect_unix
from pathways.process import fd_passing
from pathways.protocol import control_pb2 as pb

HERE = pathlib.Path(__file__).parents[1]  # of the doubles

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalClusterHandle]:
    """One cluster of two islands of two hosts of two devices, for tests that leave it whole."""
    handle = start_local_cluster(2, 2, 2, **SMALL)
    yield handle
    handle.close()
    assert_gone(handle)


@pytest.fixture
def control(shared: LocalClusterHandle) -> Iterator[RemoteControl]:
    """A further client of the shared cluster."""
    client = connect_unix(shared.address, native="control_doubles", sizes=SIZES)
    yield client
    client.close()


def who(stats: dict[str, Any]) -> list[tuple[int, int]]:
    return [(client["client"], client["slices"]) for client in stats["clients"]]


# -- joining -------------------------------------------------------------------------------------------------------


def test_the_start_is_told_event_by_event(shared: LocalClusterHandle) -> None:
    events: list[StartupEvent] = []
    client = connect_unix(shared.address, native="control_doubles", sizes=SIZES, progress=events.append)
    client.close()
    stages = [event.stage for event in events]
    for stage in (1, 2, 3, 4):
        assert sorted(event.host for event in events if event.stage == stage) == [0, 1, 2, 3]
    assert stages[-1] == StartupEvent.CLUSTER_READY and {event.hosts for event in events} == {4}


def test_what_a_client_learns(shared: LocalClusterHandle, control: RemoteControl) -> None:
    topology = control.topology
    assert topology.islands == ((0, 1), (2, 3)) and topology.devices == 8 and topology.platform == "cpu"
    assert control.client_id != shared.control.client_id
    assert control.client_segment.nbytes == 8192
    assert control.status_segment.nbytes == 12288 and control.bell_segment.nbytes == 4096
    assert control.controller_pid == shared.control.controller_pid and len(set(control.host_pids)) == 4
    assert control.alive() and control.failure() is None
    control.check()


def test_only_the_user_can_open_the_sockets(shared: LocalClusterHandle) -> None:
    assert os.stat(shared.directory).st_mode & 0o777 == 0o700
    for name in ("control.sock", "fds.sock"):
        assert os.stat(os.path.join(shared.directory, name)).st_mode & 0o777 == 0o600


def test_every_host_maps_the_client_before_it_may_submit(control: RemoteControl) -> None:
    stats = stats_with_notes(control)
    assert [host["attached"][str(control.client_id)] for host in stats["hosts"]] == [8192] * 4
    assert f"add_client {control.client_id} False" in stats["controller"]["calls"]  # it is not far
    assert [host["environment"]["JAX_PLATFORMS"] for host in stats["hosts"]] == ["cpu"] * 4


def test_other_versions_are_refused(shared: LocalClusterHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    real = importlib.metadata.version
    for package in ("jax", "jaxlib"):
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name, package=package: "0.0.1" if name == package else real(name)
        )
        with pytest.raises(errors.UnsupportedVersionError) as refusal:
            connect_unix(shared.address, native="control_doubles", sizes=SIZES)
        assert f"the client runs {package} 0.0.1, the cluster's hosts {package} {real(package)}" in str(refusal.value)
    monkeypatch.setattr("pathways.cluster.remote.PROTOCOL_VERSION", 0)
    with pytest.raises(errors.UnsupportedVersionError, match="control protocol"):
        connect_unix(shared.address, native="control_doubles", sizes=SIZES)


def test_nobody_listens(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.ConnectError, match="no cluster listens"):
        connect_unix(f"unix:{tmp_path}/control.sock", native="control_doubles")


# -- slices, groups, programs --------------------------------------------------------------------------------------


def test_slices_over_the_wire(control: RemoteControl) -> None:
    binding = control.allocate_slice((2, 2), ("x", "y"), 1)
    assert binding.island == 1 and binding.devices == (4, 5, 6, 7) and binding.hosts == (2, 3)
    assert control.group((3, 2)) == binding.group and control.group((0, 1, 2, 3)) == 0
    assert f"add_group {binding.group} [2, 3]" in stats_with_notes(control)["controller"]["calls"]
    control.release_slice(binding.slice_id)
    with pytest.raises(errors.SliceError, match="no slice"):
        control.release_slice(binding.slice_id)
    with pytest.raises(errors.SliceError, match="9 devices was asked for"):
        control.allocate_slice((9,), ("x",), None)
    with pytest.raises(errors.SliceError, match="a shape of ints"):
        control.allocate_slice(("a",), ("x",), None)  # type: ignore[arg-type]


def test_programs_are_stored_by_the_hosts_concerned_and_compile_behind(control: RemoteControl) -> None:
    number = control.register_program(program("good"), ((4, 6),))
    control.wait_compiled(number, 10.0)
    registered = [host["registered"].get(str(number)) for host in stats_with_notes(control)["hosts"]]
    assert registered == [None, None, "good ((4, 6),)", "good ((4, 6),)"]
    assert control.register_program(program("good"), ((0, 1),)) != number


def test_programs_that_fail(control: RemoteControl) -> None:
    broken = control.register_program(program("broken"), ((0, 1),))
    with pytest.raises(
        errors.ComputationError, match=f"host 0 could not compile program {broken}: XLA says no to broken"
    ):
        control.wait_compiled(broken)
    with pytest.raises(errors.PlanError, match="host 1 refused the program: ValueError: this program is refused"):
        control.wait_compiled(control.register_program(program("refused"), ((2, 3),)))
    slow = control.register_program(program("slow"), ((0, 1),))
    with pytest.raises(TimeoutError):
        control.wait_compiled(slow, 0.05)
    with pytest.raises(errors.PlanError, match="no program 9999"):
        control.wait_compiled(9999)
    with pytest.raises(errors.SliceError, match=r"devices 0\.\.7"):
        control.register_program(program("good"), ((0, 8),))


def test_a_long_compiler_message_arrives(control: RemoteControl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the 8 KiB that gRPC allows metadata by default."""
    name = "long" * 5000
    with pytest.raises(errors.SliceError, match="a shape of ints"):
        control.allocate_slice((1,), (name,), name)  # type: ignore[arg-type]
    with pytest.raises(errors.SliceError, match=name):
        control.allocate_slice((1, 1), (name,), None)


# -- clients come and go -------------------------------------------------------------------------------------------


def test_leaving_frees_what_was_owned(shared: LocalClusterHandle) -> None:
    before = shared.control.cluster_stats()
    held = segments(shared.control.controller_pid)
    client = connect_unix(shared.address, native="control_doubles", sizes=SIZES)
    assert segments(shared.control.controller_pid) == held + 1
    client.allocate_slice((2,), ("x",), None)
    number = client.register_program(program("good"), ((0, 1),))
    client.wait_compiled(number)
    assert sum(shared.control.cluster_stats()["device_load"]) == sum(before["device_load"]) + 2
    client.close()
    client.close()
    after = stats_with_notes(shared.control)
    assert after["device_load"] == before["device_load"] and who(after) == who(before)
    assert f"remove_client {client.client_id}" in after["controller"]["calls"]
    eventually(lambda: segments(shared.control.controller_pid) == held, "the controller lets go of its memory")
    with pytest.raises(errors.ClusterClosedError):
        client.allocate_slice((1,), ("x",), None)
    assert isinstance(client.failure(), errors.ClusterClosedError)


def test_memory_of_clients_is_let_go_without_the_collector(own: LocalClusterHandle) -> None:
    """OWN-1: of a client that is gone the controller has no descriptor open, its doorbell page's neither."""

    pid = own.control.controller_pid
    before = segments(pid, "/memfd:")
    for _ in range(4):
        client = connect_unix(own.address, native="control_doubles", sizes=SIZES)
        assert segments(pid, "/memfd:") > before
        client.close()
        eventually(lambda: segments(pid, "/memfd:") == before, "the controller lets go of the client's memory")


GUEST = """
import json, os, sys
from pathways.cluster.remote import connect_unix
from pathways.process.config import ClientSizes, ClusterOptions
control = connect_unix(sys.argv[1], native="control_doubles", sizes=ClientSizes(16, 4096, 4096))
control.allocate_slice((2,), ("x",), None)
print(control.client_id, flush=True)
if len(sys.argv) > 2: os.fork()  # a child that keeps the socket open
sys.stdin.read()
"""


@pytest.mark.parametrize("fork", [False, True])
def test_a_client_that_dies_is_forgotten(shared: LocalClusterHandle, fork: bool) -> None:
    """OWN-1, by its process's end, and also when a forked child of it holds its socket."""
    before = shared.control.cluster_stats()
    environ = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    guest = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", GUEST, shared.address, *(["fork"] if fork else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
    )
    assert guest.stdout is not None and guest.stdin is not None
    number = int(guest.stdout.readline())
    during = shared.control.cluster_stats()
    assert [client["pid"] for client in during["clients"] if client["client"] == number] == [guest.pid]
    assert during["device_load"] != before["device_load"]
    guest.kill()
    guest.wait()
    eventually(lambda: who(shared.control.cluster_stats()) == who(before), "the client is forgotten")
    assert shared.control.cluster_stats()["device_load"] == before["device_load"]
    assert shared.control.alive()
    guest.stdin.close()
    guest.stdout.close()


def test_ctrl_c_stops_a_wait_and_nothing_else(control: RemoteControl) -> None:
    slow = control.register_program(program("slow"), ((0, 1),))
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        control.wait_compiled(slow, 30.0)
    timer.join()
    assert time.monotonic() - started < 20.0
    assert control.alive() and control.allocate_slice((1,), ("x",), None)


TRESPASSER = """
import json, os, sys
from importlib.metadata import version
import grpc
from google.protobuf.empty_pb2 import Empty
from pathways import errors
from pathways.cluster import operator, remote
from pathways.cluster.address import Address
from pathways.process import fd_passing
from pathways.protocol import wire
from pathways.process.config import PROTOCOL_VERSION, ClientSizes
from pathways.protocol import control_pb2 as pb, control_pb2_grpc as rpc

address, other, program, slice_id, mine = sys.argv[1], *map(int, sys.argv[2:])
guest = remote.connect_unix(address, native="control_doubles", sizes=ClientSizes(16, 4096, 4096))
where = Address.parse(address)
stub = rpc.ControllerStub(grpc.insecure_channel(where.control))
token = wire.bearer(guest._token)
said = {}

def attempt(name, call):
    try:
        said[name] = str(call())
    except grpc.RpcError as error:
        raised = wire.raised(error)
        said[name] = f"{type(raised).__name__}: {raised}" if raised else error.code().name
    except errors.PathwaysError as error:
        said[name] = f"{type(error).__name__}: {error}"

attempt("its own slice", lambda: guest.allocate_slice((1,), ("x",)).devices)
attempt("another's slice", lambda: guest.release_slice(slice_id))
attempt("another's slice elsewhere", lambda: guest.remap_slice(slice_id, (0,)))
attempt("another's program", lambda: guest.wait_compiled(program, 5.0))
attempt("another's program forgotten", lambda: guest.forget_programs([program]))
attempt("another suspended", lambda: guest.suspend(other, False, None))
attempt("another resumed", lambda: guest.resume(other, None))
attempt("the cluster's end", guest.shutdown)
attempt("an operator that is a client", lambda: operator.suspend(address, other))
attempt("the logs", lambda: list(stub.Logs(pb.LogsRequest(host=0, lines=9), metadata=token)))
attempt("the logs, by an operator that is a client", lambda: list(operator.logs(address, None, lines=9)))
attempt("the logs, by nobody", lambda: list(stub.Logs(pb.LogsRequest(host=0, lines=9))))
for method, request in (
    ("Leave", Empty()),
    ("AllocateSlice", pb.AllocateSliceRequest(shape=[1], axis_names=["x"])),
    ("Shutdown", Empty()),
    ("Analyze", pb.ProgramRequest(program_id=program)),
    ("Suspend", pb.SuspendRequest(client=other)),
    ("Join", pb.JoinRequest(protocol=PROTOCOL_VERSION, jax_version=version("jax"), jaxlib_version=version("jaxlib"))),
):
    attempt(f"{method} of nobody", lambda: getattr(stub, method)(request, timeout=5))
    attempt(f"{method} of a guess", lambda: getattr(stub, method)(request, timeout=5, metadata=wire.bearer("0" * 32)))
attempt("another's answers", lambda: next(stub.Callbacks(iter([]), metadata=wire.bearer("0" * 32))))
attempt("a second joining", lambda: guest._join(guest.client_segment))
report = iter([pb.HostReport(error=pb.HostError(error=pb.Error(type="HostLostError", message="a lie")))])
attempt("a host", lambda: next(rpc.HostsStub(grpc.insecure_channel(where.control)).Session(report, metadata=token)))
print(json.dumps(said))
"""


def test_whose_a_call_is_says_its_connection(shared: LocalClusterHandle, control: RemoteControl) -> None:
    """TRUST-1: another client can do nothing in this one's name, nor to it; the owner and an operator can."""
    binding = control.allocate_slice((2,), ("x",))
    number = control.register_program(program("mine"), (binding.devices,))
    control.wait_compiled(number)
    arguments = [str(n) for n in (control.client_id, number, binding.slice_id, os.getpid())]
    done = subprocess.run(
        [sys.executable, "-c", TRESPASSER, shared.address, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("its own slice").startswith("(")
    for name in ("another's slice", "another's slice elsewhere"):
        assert said.pop(name).startswith(f"SliceError: no slice {binding.slice_id} of this client"), name
    assert said.pop("another's program").startswith(f"PlanError: no program {number} of this client")
    assert said.pop("another's program forgotten") == "None"  # nothing of its own has that number
    # Who joins a second time has lost its connection by that.
    assert said.pop("a second joining").startswith("ControllerLostError")
    for name, answer in said.items():
        assert answer.startswith("PermissionDeniedError"), (name, answer)
    stats = stats_with_notes(control)
    assert (control.client_id, 1) in who(stats)
    assert not any(client["suspended"] for client in stats["clients"])
    control.wait_compiled(number)
    control.release_slice(binding.slice_id)
    # Whose runs may name a plan: told before the client knows its number.
    assert f"register_plan {number} {control.client_id} {binding.group}" in " ".join(stats["controller"]["calls"])


def test_a_segment_that_makes_no_sense_is_refused(shared: LocalClusterHandle) -> None:
    """What the native code says of it is the client's error, and nobody else's."""

    connection = fd_passing.connect(os.path.join(shared.directory, "fds.sock"))
    message, fds = fd_passing.receive(connection, 10.0)
    assert set(message) == {"kind", "token", "controller_pid"} and len(fds) == 3
    for fd in fds:
        os.close(fd)
    fd_passing.send(connection, {"kind": "segment", "client": 1}, [os.memfd_create("x")])
    with pytest.raises(fd_passing.Closed):
        fd_passing.receive(connection, 10.0)
    connection.close()
    assert shared.control.alive()


def test_a_stranger_on_the_sockets_disturbs_nobody(shared: LocalClusterHandle) -> None:
    from pathways.process import fd_passing

    stranger = fd_passing.connect(os.path.join(shared.directory, "fds.sock"))
    _, fds = fd_passing.receive(stranger, 5.0)
    fd_passing.send(stranger, {"kind": "nonsense"})
    with pytest.raises(fd_passing.Closed):
        fd_passing.receive(stranger, 5.0)
    stranger.close()
    for fd in fds:
        os.close(fd)
    assert shared.control.alive()


def test_a_cluster_can_be_looked_at_without_joining(shared: LocalClusterHandle) -> None:
    stats = inspect(shared.address)
    assert [client["owner"] for client in stats["clients"]].count(True) == 1
    assert stats["topology"] == shared.control.topology and all(host["resident_bytes"] > 0 for host in stats["hosts"])


def test_who_waits_for_hosts_asks_none_of_them(shared: LocalClusterHandle) -> None:
    assert len(shared.control.hosts_there()) == len(shared.control.cluster_stats()["hosts"])
    channel = shared.control._stub
    reply = shared.control._call(channel.Stats, pb.StatsRequest(brief=True))
    assert [(host.state, host.HasField("counts")) for host in reply.hosts] == [("up", False)] * len(reply.hosts)
    full = shared.control._call(channel.Stats, pb.StatsRequest())
    assert all(host.HasField("counts") for host in full.hosts)


def test_a_forked_child_does_not_close_its_parents_cluster(shared: LocalClusterHandle) -> None:
    code = "\n".join(
        [
            "import os, control_doubles",
            "from pathways.cluster.launcher import start_local_cluster",
            f"handle = start_local_cluster(1, 1, 1, **{SMALL!r})",
            "if os.fork() == 0:",
            "    handle.close(); raise SystemExit(0)",
            "assert os.wait()[1] == 0 and handle.is_alive()",
            "from pathways import _jaxlib; assert _jaxlib.initialized_backends() == (), 'a client seizes no device'",
            "print('alive'); import json; print(json.dumps(handle.pids()))",
        ]
    )
    environ = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environ)
    assert done.stdout.startswith("alive"), done.stderr
    for pid in json.loads(done.stdout.splitlines()[1]).values():
        assert not is_running(pid), "the interpreter's end closes the cluster"
