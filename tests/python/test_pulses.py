"""Hosts that are stopped, frozen or starved (pathways/process/pulses.py).

PULSE-1  a host is silent only after so many looks in a row without a beat, and not when it only waits for a core
END-1    a stopped host on the controller's machine is lost: what waits for it ends, and its island comes back
"""

from __future__ import annotations

import os
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

import pathways as pw
from pathways.process import pulses
from pathways.process.pulses import LOOK_S, LOOKS, Pulses, can_run


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits: none of its threads can run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    while can_run(process.pid):  # it has printed, and is on its way to sleep
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
    assert found == [stopped]


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


def test_who_only_waits_for_a_core_is_not_silent(asleep: Any) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert can_run(busy.pid)
        watch = Pulses(lambda segment: int(segment[0]))
        assert looks_until_silent(watch, [host(busy.pid)]) == 0
        os.kill(busy.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while psutil.Process(busy.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not can_run(busy.pid)
        assert looks_until_silent(watch, [host(busy.pid)]) > 0
    finally:
        busy.kill()
        busy.wait()
    assert not can_run(busy.pid), "it is no more"
    assert not can_run(asleep.pid)


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

        stop(processes[:1], LOOK_S * LOOKS / 2)
        stop([controller, *processes], LOOK_S * LOOKS + 1)
        assert float(here(x)) == 4
        assert [each["pid"] for each in cluster.stats()["hosts"]] == [each["pid"] for each in before]

        processes[0].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(pw.errors.HostLostError, match=rf"host 0 \(pid {processes[0].pid}\) .*{pulses.SILENT}"):
            np.asarray(here(x))
        print(f"lost after {time.monotonic() - began:.1f} s")
        assert float(there(y)) == 4
        assert float(here(np.float32(3))) == 6, "its island is back"
        after = cluster.stats()["hosts"]
        assert [each["restarts"] for each in after] == [1, 0]


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
