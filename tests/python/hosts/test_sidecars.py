"""Processes of host functions: each client has its own on each host, and none outlives its client or its host.

OWN-1  when a client goes, its process goes with all that its functions have started, and nobody else's
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import pathways as pw
from pathways import errors
from pathways.compiler.ir import HostFunction
from pathways.host import sidecars

NUMBER = jax.ShapeDtypeStruct((), np.float32)

#: A process with no parent and no session that the function's process knows.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
else:
    os.wait()
"""

GUEST = f"""
import os, subprocess, sys, time
DAEMON = {DAEMON!r}
import jax, numpy as np
import pathways as pw
cluster = pw.connect(sys.argv[1])
one = pw.make_virtual_device_set(cluster).add_slice(devices=1)
kinds = jax.ShapeDtypeStruct((), np.float32)
add = pw.jit(lambda x: pw.host_callback(lambda v: v + 1, kinds, x), devices=one)
assert float(add(np.float32(1))) == 2
def sleep(v):
    if os.fork() == 0:
        os.setsid()  # what kills the function's process does not reach this one, which holds its socket
        time.sleep(40)
        os._exit(0)
    time.sleep(600)
path = sys.argv[2]
def leave(v):
    subprocess.run([sys.executable, "-c", DAEMON, path], check=True)
    return v
pw.jit(lambda x: pw.host_callback(leave, kinds, x), devices=one)(np.float32(1)).block_until_ready()
hang = pw.jit(lambda x: pw.host_callback(sleep, kinds, x, deadline=None), devices=one)
out = hang(np.float32(1))
print("hangs", flush=True)
out.block_until_ready()
"""


def lives(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, f"not so after 30 s: {what}"
        time.sleep(0.01)


def test_it_goes_with_its_client_or_its_host(tmp_path: pathlib.Path) -> None:
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=1, devices_per_host=1)) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        slices = [devices.add_slice(devices=1, island=n) for n in range(2)]
        adds = [pw.jit(lambda x: pw.host_callback(lambda v: v + 1, NUMBER, x), devices=s) for s in slices]
        doubles = [pw.jit(lambda x: 2 * x, devices=s) for s in slices]
        assert [float(add(np.float32(1))) for add in adds] == [2, 2]

        def pids(client: int) -> list[int | None]:
            return [host.get("sidecars", {}).get(str(client)) for host in cluster.stats()["hosts"]]

        def leaves(path: str) -> Callable[[Any], Any]:
            def leave(v: Any) -> Any:
                subprocess.run([sys.executable, "-c", DAEMON, path], check=True)
                return v

            return leave

        left = [tmp_path / str(n) for n in range(2)]
        for path, each in zip(left, slices, strict=True):
            leave = leaves(str(path))
            f = pw.jit(lambda x, leave=leave: pw.host_callback(leave, NUMBER, x), devices=each)
            f(np.float32(1)).block_until_ready()
        daemons = [int(path.read_text()) for path in left]
        mine = pids(cluster.client_id)
        script = tmp_path / "guest.py"
        script.write_text(GUEST)
        other_left = tmp_path / "guest"
        command = [sys.executable, str(script), cluster.address, str(other_left)]
        guest = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert guest.stdout is not None and guest.stdout.readline() == "hangs\n"
        (other,) = (each["client"] for each in cluster.stats()["clients"] if each["client"] != cluster.client_id)
        (theirs,) = (pid for pid in pids(other) if pid is not None)
        assert theirs not in mine and lives(theirs)
        began = time.monotonic()
        guest.kill()  # while its function runs, without a deadline
        guest.wait()
        guest.stdout.close()
        until(lambda: not lives(theirs), "the process of the client that was killed is gone")
        until(lambda: not lives(int(other_left.read_text())), "and what it has started")
        assert all(map(lives, daemons))
        until(lambda: pids(other) == [None, None], "no host has it any more")
        assert pids(cluster.client_id) == mine
        assert [float(each(np.float32(3))) for each in (*adds, *doubles)] == [4, 4, 6, 6]
        assert time.monotonic() < began + 20, "the devices waited for a process that outlived the client"

        os.kill(cluster.stats()["hosts"][1]["pid"], signal.SIGKILL)
        assert mine[1] is not None
        until(lambda: not lives(mine[1]), "the process of the host that was killed is gone")
        until(lambda: not lives(daemons[1]), "and what it has started")
        assert lives(daemons[0])
        assert float(adds[0](np.float32(5))) == 6 and pids(cluster.client_id)[0] == mine[0]

        def is_back() -> bool:
            try:
                return float(adds[1](np.float32(7))) == 8
            except errors.HostLostError:
                return False

        until(is_back, "the host's successor calls functions")
        last = [daemons[0], *(pid for pid in pids(cluster.client_id) if pid is not None)]
        assert len(last) == 3
    until(lambda: not any(map(lives, last)), "the processes of a closed cluster are gone")


def test_a_call_that_begins_when_its_client_goes_fails() -> None:
    function = HostFunction(1, "f", b"", 1.0, ())
    process = sidecars._Process(1, 0)
    process.stop()
    time.sleep(0.1)
    with pytest.raises(errors.CallbackFailedError, match="client 1, whose function was to run, is gone"):
        process.ask(function, [], [])
    process.drop(1)


def test_what_a_function_started_ends_with_its_process(embedded_cluster: Any, tmp_path: pathlib.Path) -> None:
    one = pw.make_virtual_device_set(embedded_cluster).add_slice(devices=1)
    path = tmp_path / "pid"

    def die(v: Any) -> Any:
        import subprocess

        child = subprocess.Popen(["sleep", "47.11"], start_new_session=True).pid
        subprocess.run([sys.executable, "-c", DAEMON, f"{path}-daemon"], check=True)
        path.write_text(f"{child} {pathlib.Path(f'{path}-daemon').read_text()}")
        os._exit(3)

    f = pw.jit(lambda x: pw.host_callback(die, NUMBER, x), devices=one)
    with pytest.raises(errors.CallbackFailedError, match="ended with exit status 3"):
        f(np.float32(1)).block_until_ready()
    until(lambda: not any(map(lives, map(int, path.read_text().split()))), "what the function started is gone")
    with pytest.raises(errors.CallbackFailedError):
        jax.effects_barrier()


@pytest.mark.parametrize("kind", ["embedded", "local"])
def test_a_function_that_nobody_calls_any_more_is_dropped(sessions: Callable[[str], Any], kind: str) -> None:
    """With what it closes over."""
    cluster = sessions(kind)
    one = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    sizes = []
    for n in range(12):
        big = np.full(4 << 20, n, np.uint8)
        f = pw.jit(lambda x, big=big: pw.host_callback(lambda v: v + big[-1], NUMBER, x), devices=one)
        assert float(f(np.float32(1))) == 1 + n
        del f, big
        cluster.stats()  # the hosts are told of what nobody can call any more
        pids = [pid for host in cluster.stats()["hosts"] for pid in host["sidecars"].values()]
        sizes.append(sum(int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) << 12 for pid in pids))
    assert sizes[-1] - sizes[3] < 16 << 20, sizes
