"""A whole cluster of processes under the control plane, with doubles for the native core and the driver.

What is proved here: joining, slices, programs, errors, and every end that a cluster can come to, told apart and clean.
OWN-1: `test_a_client_that_dies_is_forgotten`.
TRUST-1: `test_whose_a_call_is_says_its_connection`, `test_a_segment_that_makes_no_sense_is_refused`.
ERR-2 is in `test_lost_islands.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import control_doubles
import numpy as np
import psutil
import pytest

from pathways import errors
from pathways.cluster.launcher import LocalClusterHandle, start_local_cluster
from pathways.cluster.remote import RemoteControl, StartupEvent, connect_unix, inspect
from pathways.compiler.ir import ArrayType, LogicalProgram, MeshSpec
from pathways.process import fd_passing, run_directory
from pathways.process.config import ClientSizes, ClusterOptions

SMALL = {**control_doubles.OPTIONS, "host_ring_bytes": 4096, "transfer_memory": 4096}
SIZES = ClientSizes(16, 4096, 4096)
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """Every process finds the doubles, and these tests' clusters are in a folder of their own, empty in the end."""
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(run_directory, "_bases", lambda: [folder])
        yield
        assert os.listdir(folder) == []


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


@pytest.fixture
def own() -> Iterator[LocalClusterHandle]:
    """A cluster of one's own, to destroy."""
    handle = start_local_cluster(1, 2, 1, **SMALL)
    yield handle
    handle.close()
    assert_gone(handle)


def assert_gone(handle: LocalClusterHandle) -> None:
    assert not os.path.exists(handle.directory)
    assert handle.address not in run_directory.live_clusters()
    for name, pid in handle.pids().items():
        assert not is_running(pid), f"{name} is left"


def is_running(pid: int) -> bool:
    """A zombie that nobody reaps is none."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def who(stats: dict[str, Any]) -> list[tuple[int, int]]:
    return [(client["client"], client["slices"]) for client in stats["clients"]]


def segments(pid: int, name: str = "pathways-client") -> int:
    """Clients' segments that a process holds; or segments with that in their name."""
    count = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += name in os.readlink(f"/proc/{pid}/fd/{fd}")
    return count


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def program(name: str) -> LogicalProgram:
    value = ArrayType((4,), np.dtype("float32"), 0, (("x",),))
    return LogicalProgram(name, (MeshSpec("m", (("x", 2),)),), (value,), (), (), (0,), (0,), (False,), "text", "text")


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
    stats = control.cluster_stats()
    assert [host["attached"][str(control.client_id)] for host in stats["hosts"]] == [8192] * 4
    assert f"add_client {control.client_id}" in stats["controller"]["calls"]
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
    assert f"add_group {binding.group} [2, 3]" in control.cluster_stats()["controller"]["calls"]
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
    registered = [host["registered"].get(str(number)) for host in control.cluster_stats()["hosts"]]
    assert registered == [None, None, "good ((4, 6),)", "good ((4, 6),)"]
    assert control.register_program(program("good"), ((0, 1),)) != number


def test_programs_that_fail(control: RemoteControl) -> None:
    broken = control.register_program(program("broken"), ((0, 1),))
    with pytest.raises(
        errors.ComputationError, match=f"host 0 could not compile program {broken}: XLA says no to broken"
    ):
        control.wait_compiled(broken)
    with pytest.raises(errors.PlanError, match="host 1 refused the program: ValueError: this program is refused"):
        control.register_program(program("refused"), ((2, 3),))
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
    after = shared.control.cluster_stats()
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
from pathways import errors
from pathways.cluster import remote
from pathways.process import fd_passing
from pathways.protocol import wire
from pathways.process.config import PROTOCOL_VERSION, ClientSizes
from pathways.protocol import control_pb2 as pb, control_pb2_grpc as rpc

address, other, program, slice_id, mine = sys.argv[1], *map(int, sys.argv[2:])
guest = remote.connect_unix(address, native="control_doubles", sizes=ClientSizes(16, 4096, 4096))
where = remote.Address.parse(address)
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
attempt("an operator that is a client", lambda: remote.suspend(address, other))
for method, request in (
    ("Leave", pb.LeaveRequest()),
    ("AllocateSlice", pb.AllocateSliceRequest(shape=[1], axis_names=["x"])),
    ("Shutdown", pb.ShutdownRequest()),
    ("Analyze", pb.AnalyzeRequest(program_id=program)),
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
    assert said.pop("a host") == "PERMISSION_DENIED"
    for name, answer in said.items():
        assert answer.startswith("PermissionDeniedError"), (name, answer)
    stats = control.cluster_stats()
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


# -- ends ----------------------------------------------------------------------------------------------------------


def test_closing_leaves_nothing(own: LocalClusterHandle) -> None:
    guest = connect_unix(own.address, native="control_doubles", sizes=SIZES)
    own.close()
    assert_gone(own)
    own.close()
    assert not own.is_alive()
    assert isinstance(own.control.failure(), errors.ClusterClosedError)
    failure = guest.failure()
    assert isinstance(failure, errors.ClusterClosedError) and "asked it to end" in str(failure)
    guest.close()


def test_a_lost_controller_ends_the_cluster(own: LocalClusterHandle) -> None:
    slow = own.control.register_program(program("slow"), ((0, 1),))
    threading.Timer(0.2, os.kill, (own.control.controller_pid, signal.SIGKILL)).start()
    with pytest.raises(errors.ControllerLostError, match="was killed by SIGKILL"):
        own.control.wait_compiled(slow)
    assert isinstance(own.control.failure(), errors.ControllerLostError)
    eventually(lambda: not os.path.exists(own.directory), "the directory is removed")


def test_a_lost_supervisor_ends_the_cluster(own: LocalClusterHandle) -> None:
    os.kill(own.supervisor_pid, signal.SIGKILL)
    failure = eventually(own.control.failure, "failure")
    assert isinstance(failure, errors.ClusterClosedError) and "supervisor" in str(failure)
    eventually(lambda: not os.path.exists(own.directory), "the directory is removed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_controller_told_to_end_ends_in_order(own: LocalClusterHandle, number: signal.Signals) -> None:
    os.kill(own.control.controller_pid, number)
    failure = eventually(own.control.failure, "failure")
    assert isinstance(failure, errors.ClusterClosedError) and number.name in str(failure)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("raise", ["host 1 (pid ", "ended with exit status 1: RuntimeError: no devices today"]),
        ("exit", ["host 1 (pid ", "ended with exit status 3", "the last thing it said"]),
        ("hang", ["was not ready after 12 s", "host 1 (pid ", "HOST_CONNECTED", "fake host 1 starts"]),
    ],
)
def test_a_host_that_fails_at_start_fails_connect(
    monkeypatch: pytest.MonkeyPatch, trouble: str, words: list[str]
) -> None:
    monkeypatch.setenv("FAKE_HOST_1", trouble)
    before = run_directory.live_clusters()
    with pytest.raises(errors.ConnectError) as failure:
        start_local_cluster(1, 2, 1, start_timeout_s=12.0 if trouble == "hang" else 60.0, **SMALL)
    for word in words:
        assert word in str(failure.value)
    assert run_directory.live_clusters() == before


def test_a_controller_that_fails_at_start_fails_connect() -> None:
    with pytest.raises(errors.ConnectError) as failure:
        start_local_cluster(1, 1, 1, **{**SMALL, "native": "no_such_module"})
    assert "No module named 'no_such_module'" in str(failure.value)


def test_a_failed_start_is_told_to_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HOST_0", "hang")
    guests: list[BaseException] = []
    threads: list[threading.Thread] = []

    def join_too(address: str) -> None:
        try:
            connect_unix(address, native="control_doubles", sizes=SIZES)
        except BaseException as error:
            guests.append(error)

    def tell(event: StartupEvent) -> None:
        if event.stage == StartupEvent.HOST_CONNECTED and event.host == 0:
            (address,) = [each for each in run_directory.live_clusters() if each not in before]
            threads.append(threading.Thread(target=join_too, args=(address,)))
            threads[0].start()
            threading.Timer(1.0, os.kill, (event.pid, signal.SIGKILL)).start()

    before = run_directory.live_clusters()
    with pytest.raises(errors.ConnectError, match="was killed by SIGKILL"):
        start_local_cluster(1, 1, 1, progress=tell, **SMALL)
    threads[0].join(10.0)
    assert len(guests) == 1 and isinstance(guests[0], errors.ConnectError) and "SIGKILL" in str(guests[0])


@pytest.mark.parametrize("stage", [StartupEvent.HOST_STARTED, StartupEvent.HOST_JOINED])
def test_ctrl_c_during_the_start_leaves_nothing(stage: int) -> None:
    before = run_directory.live_clusters()
    pids: list[int] = []

    def interrupt(event: StartupEvent) -> None:
        pids.append(event.pid)
        if event.stage == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_local_cluster(1, 2, 1, progress=interrupt, **SMALL)
    assert run_directory.live_clusters() == before
    assert not any(is_running(pid) for pid in pids if pid)


def test_a_terminated_supervisor_ends_the_cluster_at_any_moment() -> None:
    """As `close` does it when connecting failed, however early."""
    for delay_s in (0.0, 0.05, 0.3):
        handle = LocalClusterHandle(ClusterOptions(1, 1, 1, **SMALL), "cpu")
        time.sleep(delay_s)
        started = time.monotonic()
        handle.close()
        assert time.monotonic() - started < 7.0, "not at the second try"
        assert not os.path.exists(handle.directory) and not is_running(handle.supervisor_pid)


def scheduling_classes(pid: int) -> tuple[int, list[int]]:
    """Of a process's main thread, and of its others."""
    threads = [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    return os.sched_getscheduler(pid), [os.sched_getscheduler(thread) for thread in threads if thread != pid]


def test_real_hosts_form_their_islands() -> None:
    """JAX processes, each with its own devices; the hosts of an island sum over all of them; no open port outside."""
    wanted = {**SMALL, "driver": "control_doubles:start_driver_on_jax", "platform": "cpu"}
    handle = start_local_cluster(2, 2, 2, **wanted)
    try:
        stats = handle.control.cluster_stats()
        classes = [scheduling_classes(pid) for pid in handle.control.host_pids]
    finally:
        handle.close()
    assert_gone(handle)
    for main, others in classes:  # gloo's thread yields to who computes
        assert main == os.SCHED_OTHER and others.count(os.SCHED_BATCH) == 1
    assert [host["sum"] for host in stats["hosts"]] == [0 + 1 + 2 + 3] * 2 + [4 + 5 + 6 + 7] * 2
    assert [host["process"] for host in stats["hosts"]] == [0, 1, 0, 1]
    for host in stats["hosts"]:
        assert len(host["local"]) == 2 and len(host["all"]) == 4 and host["x64"] is True
        assert host["local"] == host["all"][2 * host["process"] :][:2]
        assert set(host["connections"]) <= {"127.0.0.1"}


def test_sizes_are_checked_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="islands must be a positive int, got 0"):
        start_local_cluster(0, 1, 1)
    with pytest.raises(ValueError, match=r"devices_per_host must be a positive int, got 1\.5"):
        start_local_cluster(1, 1, 1.5)  # type: ignore[arg-type]


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
