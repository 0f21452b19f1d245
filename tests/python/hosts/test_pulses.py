"""Hosts that are stopped, frozen or starved (pathways/process/pulses.py).

PULSE-1  a host is silent only after so many looks in a row without a beat, and not when it only waits for a core or in
         the kernel, or a debugger holds it; one that is stopped or frozen after few looks, but not one that runs now
         and then; Ctrl-Z in the terminal of a client stops no host
END-1    a stopped host on the controller's machine is lost: what waits for it ends, and its island comes back
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from control_clusters import eventually

import pathways as pw
from pathways.process.pulses import LOOK_S, LOOKS, SILENT, STOPPED, STOPPED_LOOKS, Pulses, is_held_up, stopped_since


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits: none of its threads can run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    while is_held_up(process.pid):  # it has printed, and is on its way to sleep
        time.sleep(0.001)
    yield process
    process.kill()
    process.communicate()


def host(pid: int) -> Any:
    return types.SimpleNamespace(segment=[1], process=types.SimpleNamespace(pid=pid))


def looks_until_silent(watch: Pulses, hosts: list[Any], most: int = 50) -> int:
    for look in range(1, most + 1):
        if watch.look(hosts):
            return look
    return 0


def test_a_host_that_beats_no_more_is_silent_once(asleep: Any) -> None:
    stopped, fine = host(asleep.pid), host(asleep.pid)
    watch = Pulses(lambda segment: int(segment[0]))
    for _ in range(3):
        stopped.segment[0] += 1
        assert watch.look([stopped, fine]) == []
    found = []
    for _ in range(30):
        fine.segment[0] += 1
        found += watch.look([stopped, fine])
    assert found == [(stopped, SILENT)]


def test_it_takes_so_many_looks_in_a_row(asleep: Any) -> None:
    one = host(asleep.pid)
    watch = Pulses(lambda segment: int(segment[0]))
    for _ in range(5):  # a beat comes late each time
        for _ in range(LOOKS):
            assert watch.look([one]) == []
        one.segment[0] += 1
    assert looks_until_silent(watch, [one]) == LOOKS + 1
    successor = host(asleep.pid)  # a new host counts from its own first beat
    assert looks_until_silent(watch, [successor]) == LOOKS + 1


def test_a_host_that_has_not_begun_to_beat_is_waited_for(asleep: Any) -> None:
    one = host(asleep.pid)
    one.segment[0] = 0
    watch = Pulses(lambda segment: int(segment[0]))
    assert looks_until_silent(watch, [one]) == 0


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()
    assert not is_held_up(process.pid) and stopped_since(process.pid) is None, "it is no more"


def test_who_only_waits_for_a_core_is_not_silent(asleep: Any, busy: Any) -> None:
    assert is_held_up(busy.pid) and not is_held_up(asleep.pid)
    watch = Pulses(lambda segment: int(segment[0]))
    assert looks_until_silent(watch, [host(busy.pid)]) == 0


def test_who_waits_in_the_kernel_is_not_silent() -> None:
    """As for a page of its memory from a disk that is slow. Here it waits for a child, as in vfork."""
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    flags = 0x4000 | signal.SIGCHLD  # CLONE_VFORK
    waits = f"import ctypes, time; ctypes.CDLL(None).syscall({clone}, {flags}, 0, 0, 0, 0) or time.sleep(600)"
    process = psutil.Popen([sys.executable, "-c", waits])
    try:
        eventually(lambda: process.status() == psutil.STATUS_DISK_SLEEP, "it waits in the kernel", 10)
        assert looks_until_silent(Pulses(lambda segment: int(segment[0])), [host(process.pid)]) == 0
    finally:
        for each in (*process.children(), process):
            each.kill()
        process.wait()


def test_who_is_held_by_a_debugger_is_not_silent(asleep: Any) -> None:
    attach, detach = 16, 17
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    if ptrace(attach, asleep.pid, None, None) != 0:
        pytest.skip(f"no process may be debugged here: {os.strerror(ctypes.get_errno())}")
    try:
        eventually(lambda: psutil.Process(asleep.pid).status() == psutil.STATUS_TRACING_STOP, "it is held", 10)
        watch, one = Pulses(lambda segment: int(segment[0])), host(asleep.pid)
        assert looks_until_silent(watch, [one]) == 0
    finally:
        ptrace(detach, asleep.pid, None, None)
    eventually(lambda: not is_held_up(asleep.pid), "it sleeps again", 10)
    assert looks_until_silent(watch, [one]) > 0


def cgroup(version: int) -> Any:
    """A control group that can be frozen: `add(pid)`, `freeze(whether)`."""
    at, file, words = [
        ("/sys/fs/cgroup/freezer", "freezer.state", ("THAWED", "FROZEN")),
        ("/sys/fs/cgroup/unified", "cgroup.freeze", ("0", "1")),
    ][version - 1]
    if version == 2 and not os.path.isdir(at):
        at = "/sys/fs/cgroup"
    folder = pathlib.Path(at, f"pathways-test-{os.getpid()}")
    try:
        folder.mkdir()
        if not (folder / file).exists():
            raise OSError(f"no {file}")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group of version {version} can be made: {error}")
    return folder, lambda frozen: (folder / file).write_text(words[frozen])


def nanoseconds_on_cores(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/schedstat").read_text().split()[0])


@pytest.mark.parametrize("how", ["signal", "cgroup 1", "cgroup 2"])
def test_a_stopped_or_frozen_host_is_silent_after_few_looks(busy: Any, how: str) -> None:
    folder = None
    if how == "signal":

        def stop(is_stopped: bool) -> None:
            busy.send_signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)

    else:
        folder, stop = cgroup(int(how[-1]))
        (folder / "cgroup.procs").write_text(str(busy.pid))

    def stop_and_wait() -> None:
        stop(True)
        eventually(lambda: stopped_since(busy.pid) is not None, "it is stopped", 10)

    def run_a_moment() -> None:
        before = nanoseconds_on_cores(busy.pid)
        stop(False)
        eventually(lambda: nanoseconds_on_cores(busy.pid) > before, "it runs", 10)

    try:
        assert stopped_since(busy.pid) is None
        one = host(busy.pid)
        watch = Pulses(lambda segment: int(segment[0]))
        assert watch.look([one]) == []
        for _ in range(LOOKS - 2):  # it has run between the looks, as under cpulimit
            stop_and_wait()
            assert watch.look([one]) == []
            run_a_moment()
        one.segment[0] += 1
        stop_and_wait()
        found = [watch.look([one]) for _ in range(LOOKS * 2)]
        assert found.pop(STOPPED_LOOKS) == [(one, STOPPED)]
        assert not any(found), "it is told once"
        one.segment[0] = 0  # who starts it waits for it
        assert looks_until_silent(Pulses(lambda segment: int(segment[0])), [one]) == 0
    finally:
        stop(False)
        busy.kill()
        busy.wait()
        if folder is not None:
            eventually(lambda: not (folder / "cgroup.procs").read_text(), "its group is empty", 10)
            folder.rmdir()


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_a_stopped_host_on_the_controllers_machine() -> None:
    """A short stop costs nothing, neither does one of the whole machine; a long one costs the host, and no more."""
    with pw.connect(pw.LocalCluster(2, 1, 1)) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        here, there = (
            pw.jit(lambda x: x * 2, devices=devices.add_slice(devices=1, island=island)) for island in (0, 1)
        )
        x, y = here(np.float32(1)), there(np.float32(1))
        assert (float(x), float(y)) == (2, 2)
        before = cluster.stats()["hosts"]
        processes = [psutil.Process(each["pid"]) for each in before]
        controller = psutil.Process(cluster.stats()["controller"]["pid"])

        def stop(which: list[psutil.Process], seconds: float) -> None:
            for process in which:
                process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            for process in reversed(which):  # the controller last, as if it looked before the hosts get on
                process.send_signal(signal.SIGCONT)

        stop(processes[:1], LOOK_S / 2)
        stop([controller, *processes], LOOK_S * LOOKS + 1)
        assert float(here(x)) == 4
        assert [each["pid"] for each in cluster.stats()["hosts"]] == [each["pid"] for each in before]

        processes[0].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(pw.errors.HostLostError, match=rf"host 0 \(pid {processes[0].pid}\) .*{STOPPED}"):
            np.asarray(here(x))
        print(f"lost after {time.monotonic() - began:.1f} s")
        assert float(there(y)) == 4
        assert float(here(np.float32(3))) == 6, "its island is back"
        after = cluster.stats()["hosts"]
        assert [each["restarts"] for each in after] == [1, 0]


CLIENT = """
import os
import numpy as np
import pathways as pw
with pw.connect(pw.LocalCluster(1, 1, 1)) as cluster:
    double = pw.jit(lambda x: x * 2, devices=pw.make_virtual_device_set(cluster).add_slice(devices=1))
    x = double(np.float32(1)).block_until_ready()
    print(cluster.stats()["hosts"][0]["pid"], flush=True)
    input()
    print(float(double(x)), cluster.stats()["hosts"][0]["restarts"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_ctrl_z_in_the_terminal_of_a_client() -> None:
    """It stops the client, for as long as the user likes. The cluster that it started goes on, and loses nothing."""
    command, pipe = [sys.executable, "-c", CLIENT], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0) as client:
        try:
            assert client.stdout is not None
            host = psutil.Process(int(client.stdout.readline()))
            os.killpg(client.pid, signal.SIGTSTP)
            eventually(
                lambda: psutil.Process(client.pid).status() == psutil.STATUS_STOPPED, "the client is stopped", 10
            )
            time.sleep(LOOK_S * LOOKS + 1)
            assert host.status() != psutil.STATUS_STOPPED
            os.killpg(client.pid, signal.SIGCONT)
            output, _ = client.communicate("\n")
            assert output.split() == ["4.0", "0"]
        finally:
            client.kill()


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_a_starved_host_is_not_lost() -> None:
    """PULSE-1: one core for the host and for many others that never let go of it."""
    with pw.connect(pw.LocalCluster(1, 1, 1)) as cluster:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
        double = pw.jit(lambda x: x * 2, devices=slice_)
        assert float(double(np.float32(1))) == 2
        pid = cluster.stats()["hosts"][0]["pid"]
        core = min(os.sched_getaffinity(0))
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})
            os.setpriority(os.PRIO_PROCESS, int(thread), 19)
        spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
        crowd = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(12)]
        try:
            time.sleep(LOOK_S * LOOKS + 2)
            assert float(double(np.float32(2))) == 4
        finally:
            for process in crowd:
                process.kill()
                process.wait()
        assert [(each["pid"], each["state"]) for each in cluster.stats()["hosts"]] == [(pid, "up")]
