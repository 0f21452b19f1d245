"""A controller and agents that have few descriptors, little memory, a full disk, or thousands of silent callers, beside
peers that want all of it: who is in is served throughout, with right values, and afterwards others come in again.

Map from label to test:
    CERT-4  test_few_descriptors, test_silent_callers
    LINK-4  test_little_memory
    LOG-1   test_a_full_disk
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from control_clusters import eventually
from hostile_cases import Innocent
from machines import MachineCluster
from test_machine_faults import agent_process

import pathways as pw
from pathways import errors
from pathways.process.run_directory import authority_folder
from pathways.trust import Role, Tokens, dial_answered, join

pytestmark = pytest.mark.slow

_CGROUPS = pathlib.Path("/sys/fs/cgroup/memory")  # those of version 1
_MEMORY = 1 << 30


def many_descriptors() -> None:
    """For this process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


class Honest:
    """A far client that calls all the time, with its values checked."""

    def __init__(self, cluster: pw.Cluster) -> None:
        where = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=1)
        self._call = pw.jit(lambda x, n: x * 2 + n, devices=where)
        self._fault: BaseException | None = None
        self.calls = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        x = np.arange(1000, dtype=np.int32)
        try:
            while not self._over.is_set():
                result = np.asarray(self._call(x, np.int32(self.calls)))
                np.testing.assert_array_equal(result, x * 2 + self.calls)
                self.calls += 1
        except BaseException as fault:
            self._fault = fault

    def goes_on(self) -> None:
        """Waits for its next calls."""
        wanted = self.calls + 3
        eventually(lambda: self.calls >= wanted or self._fault is not None, "the honest client goes on")
        assert self._fault is None, self._fault

    def end(self) -> None:
        self.goes_on()
        self._over.set()
        self._thread.join()


class Scene:
    """Two machines, a client at the head that trains on both, and a far one that calls; and a third machine."""

    def __init__(self) -> None:
        self.machines = MachineCluster(3, 1, 1)
        self.stack = contextlib.ExitStack()
        self.stack.callback(self.machines.close)
        self.tokens = Tokens(authority_folder(self.machines.handle.directory))
        self.client = self.stack.enter_context(self.machines.connect())
        self.far = self.stack.enter_context(self.machines.connect_far())
        self.innocent, self.honest = Innocent(self.client), Honest(self.far)
        self.pid = self.client.stats()["controller"]["pid"]
        self.goes_on()

    def goes_on(self) -> None:
        self.innocent.goes_on()
        self.honest.goes_on()

    def of_machines(self) -> list[psutil.Process]:
        """All processes of the machines."""
        roots = [psutil.Process(agent._supervised.supervisor_pid) for agent in self.machines.agents.values()]
        return [each for root in roots for each in (root, *root.children(recursive=True))]

    def listening(self) -> list[int]:
        """The controller's port, and where hosts listen for streams."""
        connections = [
            connection
            for process in (psutil.Process(self.pid), *self.of_machines())
            for connection in process.net_connections("tcp")
        ]
        found = sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})
        assert len(found) >= 4
        return found

    def kill(self) -> None:
        """Kills the host of the third machine."""
        os.kill(self.client.stats()["hosts"][2]["pid"], signal.SIGKILL)

    def is_back(self) -> bool:
        host = self.client.stats()["hosts"][2]
        return host["state"] == "up" and host["restarts"] == 1

    def close(self) -> None:
        with self.stack:
            self.honest.end()
            self.innocent.check()


@pytest.mark.watchdog(240)
def test_few_descriptors() -> None:
    """256 for the controller, and for each process of a machine."""
    scene = Scene()
    with contextlib.closing(scene), contextlib.ExitStack() as held:
        for process in (psutil.Process(scene.pid), *scene.of_machines()):
            process.rlimit(psutil.RLIMIT_NOFILE, (256, 256))
        many_descriptors()
        port = scene.machines.handle.port
        with pytest.raises(errors.PathwaysError) as refused:
            for number in range(30):
                own = join(port, scene.tokens.make(Role.CLIENT, 600), f"greedy{number}")
                for _ in range(20):
                    with contextlib.suppress(errors.ResourceExhaustedError):
                        held.callback(dial_answered(port, own, "session")[0].close)
        print(f"{len(held._exit_callbacks)} sessions, then: {refused.value}")  # type: ignore[attr-defined]
        scene.goes_on()
        for there in scene.listening():
            for _ in range(300):
                with contextlib.suppress(OSError):
                    held.enter_context(socket.create_connection(("127.0.0.1", there), timeout=5))
        scene.goes_on()
        # A client of the head and a host that starts again take what is kept for those who are in.
        with pw.connect(scene.machines.handle.address) as late:
            assert late.stats()["hosts"][0]["state"] == "up"
        scene.kill()
        scene.goes_on()
        held.close()
        eventually(scene.is_back, "the host is back")
        eventually(lambda: _comes_in(scene), "somebody new comes in")
        scene.goes_on()


def _comes_in(scene: Scene) -> bool:
    try:
        join(scene.machines.handle.port, scene.tokens.make(Role.CLIENT, 600), f"late{time.monotonic_ns()}")
    except errors.PathwaysError:
        return False
    return True


class Silent:
    """Two thousand connections to each of some places, of callers who say nothing, or only begin a handshake. Half of
    them have this process's address. Who is hung up on calls again. A context manager."""

    COUNT = 2000
    #: Seconds in which each looks once whether it still has its connection. Faster callers would be a flood: they
    #: would take all places again within the second for which a caller keeps its place.
    TURN_S = 10.0

    def __init__(self, places: list[int]) -> None:
        self._places = places
        self._callers: list[socket.socket] = []
        self._over = threading.Event()
        self.again = 0

    def __enter__(self) -> Silent:
        self._callers = [self._call(number) for number in range(self.COUNT * len(self._places))]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for each in self._callers:
            each.close()

    def _call(self, number: int) -> socket.socket:
        """Calls. The number says where, from where, and how it is silent."""
        number, place = divmod(number, len(self._places))
        sock = socket.socket()
        sock.settimeout(10)
        with contextlib.suppress(OSError):  # no place in the queue; or it was hung up on
            sock.bind((f"127.0.1.{1 + number % 64}" if number % 2 else "127.0.0.1", 0))
            sock.connect(("127.0.0.1", self._places[place]))
            if number % 4 >= 2:
                sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        sock.setblocking(False)
        return sock

    def _run(self) -> None:
        while not self._over.is_set():
            for number, sock in enumerate(self._callers):
                if self._over.wait(self.TURN_S / len(self._callers)):
                    return
                try:
                    if sock.recv(1):
                        continue
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                sock.close()
                self._callers[number] = self._call(number)
                self.again += 1


#: A client on another machine: between the first machine and the third one, values go by streams.
_FAR_CLIENT = """
import sys
import numpy as np
import pathways as pw
with pw.connect(sys.argv[1], name="late") as cluster:
    cluster.wait_for(3, 120)
    first, last = (pw.make_virtual_device_set(cluster).add_slice(devices=1, island=island) for island in (0, 2))
    double, more = pw.jit(lambda x: x * 2, devices=first), pw.jit(lambda x: x + 1, devices=last)
    x = np.arange(1 << 20, dtype=np.int32)
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(double(more(double(x)))), (x * 2 + 1) * 2)
        print("right")
"""


@pytest.mark.watchdog(400)
def test_silent_callers() -> None:
    """Two thousand at the controller's port, and as many where each host listens for streams. Everybody new comes in:
    clients by their tokens, a host that starts again, and its first transfers to and from another one."""
    many_descriptors()
    scene = Scene()
    with contextlib.closing(scene):
        with Silent(scene.listening()) as silent:
            scene.goes_on()
            eventually(lambda: _comes_in(scene), "somebody new comes in")
            scene.kill()
            eventually(scene.is_back, "the host is back")
            with scene.machines.way_in(Role.CLIENT):
                command = [sys.executable, "-c", _FAR_CLIENT, scene.machines.port]
                late = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            assert late.stdout == "right\n" * 5, late.stdout + late.stderr
            print(f"{silent.again} silent callers called again")
        scene.goes_on()


@contextlib.contextmanager
def bounded(pids: list[int]) -> Iterator[pathlib.Path]:
    """Processes that have a gibibyte together from now on; what they have already does not count."""
    group = _CGROUPS / f"pathways-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(_MEMORY))
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (_CGROUPS / "cgroup.procs").write_text(pid)
        eventually(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


@pytest.mark.skipif(
    os.getuid() != 0 or not os.access(_CGROUPS / "cgroup.procs", os.W_OK), reason="needs root, and cgroups of memory"
)
@pytest.mark.watchdog(240)
@pytest.mark.parametrize("who", ["controller", "agent"])
def test_little_memory(who: str) -> None:
    """One of them has a gibibyte, and a far client puts and fetches more than that there at the same time."""
    scene = Scene()
    machine = next(each["name"] for each in scene.client.stats()["machines"] if each["island"] == 1)
    agent = agent_process(scene.machines, machine)
    with contextlib.closing(scene), bounded([scene.pid if who == "controller" else agent.pid]) as group:
        where = pw.make_virtual_device_set(scene.far).add_slice(devices=1, island=1)
        last = pw.jit(lambda x: x[-1], devices=where)
        many = pw.jit(lambda n: jnp.full(64 << 20, n), devices=where)
        x = np.arange(64 << 20, dtype=np.uint8)
        for _ in range(4):
            ends = [last(pw.device_put(x, where)) for _ in range(6)]
            made = [many(np.uint8(n)) for n in range(6)]
            for each in made:
                each.copy_to_host_async()
            assert [int(np.asarray(each)) for each in ends] == [int(x[-1])] * 6
            assert [int(np.asarray(each)[-1]) for each in made] == list(range(6))
            scene.goes_on()
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        print(f"the {who} took {peak >> 20} MiB at most")
        scene.goes_on()
        assert scene.client.stats()["controller"]["pid"] == scene.pid and agent.is_running()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Where this process's children have their files: 16 MiB."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="pw", dir="/tmp"))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=False).returncode != 0:
        folder.rmdir()
        pytest.skip("this machine lets nobody mount")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.watchdog(240)
def test_a_full_disk(small_disk: pathlib.Path) -> None:
    """That of the controller and of the machines. A host that is killed starts again, and a client comes."""
    scene = Scene()
    with contextlib.closing(scene):
        assert scene.machines.handle.directory.startswith(str(small_disk))
        with contextlib.suppress(OSError), open(small_disk / "full", "wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
        assert os.statvfs(small_disk).f_bavail == 0
        scene.goes_on()
        scene.kill()
        eventually(scene.is_back, "the host is back")
        with pw.connect(scene.machines.handle.address) as late:
            where = pw.make_virtual_device_set(late).add_slice(devices=1, island=2)
            call = pw.jit(lambda x: x + 1, devices=where)
            assert float(call(np.float32(1))) == 2
        scene.goes_on()
