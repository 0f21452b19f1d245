"""How a cluster of processes starts and ends, with doubles for the native core and the driver.

What is proved here: starts that fail, and every end that a cluster can come to, are told apart, told to everybody who
waits, and clean. Clients, slices and programs meanwhile: `test_control_plane.py`; lost hosts: `test_lost_islands.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time

import psutil
import pytest
from control_clusters import SIZES, SMALL, assert_gone, eventually, is_running, program, stats_with_notes

from pathways import errors
from pathways.cluster.launcher import LocalClusterHandle, start_local_cluster
from pathways.cluster.remote import StartupEvent, connect_unix
from pathways.process import fd_passing, run_directory, supervised
from pathways.process.config import ClusterOptions

pytestmark = pytest.mark.usefixtures("surroundings")


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


def test_a_controller_that_does_not_end_is_killed(own: LocalClusterHandle) -> None:
    os.kill(own.control.controller_pid, signal.SIGSTOP)
    own.close()
    assert_gone(own)


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


def test_a_terminated_supervisor_ends_the_cluster_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `close` does it when connecting failed, however early."""
    monkeypatch.setattr(supervised, "CLOSE_GRACE_S", 60.0)
    for delay_s in (0.0, 0.05, 0.3):
        handle = LocalClusterHandle(ClusterOptions(1, 1, 1, **SMALL), "cpu")
        time.sleep(delay_s)
        started = time.monotonic()
        handle.close()
        assert time.monotonic() - started < 50.0, "not at the second try"
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
        stats = stats_with_notes(handle.control)
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


def settled(process: psutil.Process) -> set[int]:
    """The descriptors of a process that opens and closes none for a second."""
    seen: list[set[int]] = []
    while len(seen) < 20 or any(numbers != seen[-1] for numbers in seen[-20:]):
        seen.append({int(name) for name in os.listdir(f"/proc/{process.pid}/fd")})
        assert len(seen) < 600, seen[-20:]
        time.sleep(0.05)
    return seen[-1]


def limit_with_spare(taken: set[int], spare: int) -> int:
    """A limit on descriptors below which `spare` numbers are free: numbers of a process may have gaps."""
    free = itertools.filterfalse(taken.__contains__, itertools.count())
    return next(itertools.islice(free, spare, None))


def test_a_controller_without_descriptors_waits_for_some(own: LocalClusterHandle) -> None:
    """It does not spin meanwhile, keeps nothing of who came in vain, and then serves who waits."""
    controller = psutil.Process(own.control.controller_pid)
    where, limits = os.path.join(own.directory, "fds.sock"), controller.rlimit(psutil.RLIMIT_NOFILE)
    before = settled(controller)
    for spare in range(5):  # each is missing at another step
        controller.rlimit(psutil.RLIMIT_NOFILE, (limit_with_spare(before, spare), limits[1]))
        with contextlib.closing(fd_passing.connect(where)) as waits:
            began = sum(controller.cpu_times()[:2])
            time.sleep(1)
            assert sum(controller.cpu_times()[:2]) - began < 0.5
            controller.rlimit(psutil.RLIMIT_NOFILE, limits)
            if spare == 0:
                message, descriptors = fd_passing.receive(waits, 30)
                assert message["kind"] == "hello"
                for descriptor in descriptors:
                    os.close(descriptor)
        eventually(lambda: controller.num_fds() == len(before), "all descriptors are closed")
