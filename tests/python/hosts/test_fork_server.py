"""The fork server, which starts the processes of hosts: what its children are, and what happens when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from control_clusters import SMALL, assert_gone, eventually, is_running, stats_with_notes

from pathways import errors
from pathways.cluster.launcher import LocalClusterHandle, start_local_cluster
from pathways.process.host_processes import HostProcesses

pytestmark = pytest.mark.usefixtures("surroundings")


def fork_server(controller: int) -> psutil.Process:
    (found,) = [
        child
        for child in psutil.Process(controller).children()
        if "pathways.process.fork_server" in child.cmdline() and not child.name().startswith("pathways-host")
    ]
    return found


def hosts(handle: LocalClusterHandle) -> list[dict[str, Any]]:
    return list(stats_with_notes(handle.control)["hosts"])


def kill_host(handle: LocalClusterHandle, number: int) -> None:
    """Kills a host; returns when its island is up again."""
    restarts = hosts(handle)[number]["restarts"]
    os.kill(hosts(handle)[number]["pid"], signal.SIGKILL)
    eventually(lambda: hosts(handle)[number]["restarts"] > restarts, "the island is started again")
    eventually(lambda: all(host["state"] == "up" for host in hosts(handle)), "all hosts are up")


def test_hosts_are_children_of_the_controller(own: LocalClusterHandle) -> None:
    controller = own.control.controller_pid
    found = [psutil.Process(pid) for pid in own.control.host_pids]
    assert [host.ppid() for host in found] == [controller] * 2
    assert [host.name() for host in found] == ["pathways-host0", "pathways-host1"]
    ours = set(files_of(fork_server(controller).pid))
    shared = {file for file in ours if file.startswith(("socket:", "pipe:"))}
    assert shared
    for host in found:  # of the fork server's own descriptors it has none
        assert not shared & set(files_of(host.pid))
        assert not [file for file in files_of(host.pid) if "pathways-fork" in file]


def test_what_a_host_leaves_behind_is_reaped(tmp_path: Path) -> None:
    """The controller is the parent of every orphan of a host. It reaps them, and still sees how its children end."""
    (tmp_path / "entry_of_orphans.py").write_text(
        "import os, sys\n"
        "def main(fds):\n"
        "    for _ in range(20):\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            if os.fork() == 0:\n"
        "                os._exit(0)\n"  # an orphan, which ends
        "            os._exit(0)\n"
        "        os.waitpid(child, 0)\n"
        "    os._exit(7)\n"
    )

    async def run() -> None:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}"}
        processes = HostProcesses("entry_of_orphans:main", ["entry_of_orphans"], environment, str(tmp_path / "log"))
        try:
            await processes.ready(60.0)
            with open(tmp_path / "host.log", "wb") as log:
                host = processes.fork([], {}, [log.fileno()])
            here = psutil.Process()
            for _ in range(600):
                zombies = [c.pid for c in here.children() if c.status() == psutil.STATUS_ZOMBIE]
                if host.poll() is not None and not zombies:
                    break
                await asyncio.sleep(0.05)
            assert host.returncode == 7
            assert not zombies
        finally:
            processes.end()

    asyncio.run(run())


def files_of(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.islink(f"{folder}/{fd}")]


def test_a_lost_fork_server_harms_no_host_and_is_replaced(own: LocalClusterHandle) -> None:
    server = fork_server(own.control.controller_pid)
    before = list(own.control.host_pids)
    server.kill()
    time.sleep(0.2)
    assert own.is_alive() and all(map(is_running, before))
    kill_host(own, 1)
    assert fork_server(own.control.controller_pid).pid != server.pid
    kill_host(own, 0)


def test_a_fork_server_that_is_stopped_is_replaced(own: LocalClusterHandle) -> None:
    server = fork_server(own.control.controller_pid)
    server.suspend()
    kill_host(own, 1)
    assert not is_running(server.pid)


def test_it_ends_with_the_controller(own: LocalClusterHandle) -> None:
    server = fork_server(own.control.controller_pid)
    os.kill(own.control.controller_pid, signal.SIGKILL)
    eventually(lambda: not is_running(server.pid), "the fork server is gone")
    eventually(lambda: not os.path.exists(own.directory), "the directory is removed")


def test_killed_while_it_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fork_trouble.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    with pytest.raises(errors.ConnectError, match=r"the fork server \(pid \d+\), .* was killed by SIGKILL"):
        start_local_cluster(1, 1, 1, **{**SMALL, "driver": "fork_trouble:start"})


def test_an_import_that_fails_is_the_error_of_the_host() -> None:
    with pytest.raises(errors.ConnectError, match=r"host 0 .* No module named 'no_such_driver'"):
        start_local_cluster(1, 1, 1, **{**SMALL, "driver": "no_such_driver:start"})


def test_an_import_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fork_trouble.py").write_text("import time; print('hanging', flush=True); time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    with pytest.raises(errors.ConnectError, match=r"not ready after 8 s; waiting for the fork server(.|\n)*hanging"):
        start_local_cluster(1, 1, 1, start_timeout_s=8.0, **{**SMALL, "driver": "fork_trouble:start"})


def test_more_hosts_than_descriptors_fit_one_message() -> None:
    handle = start_local_cluster(5, 4, 1, **SMALL)
    try:
        found = hosts(handle)
        assert len({host["pid"] for host in found}) == 20
        for host in found:  # each has the segments of all
            assert len(host["segments"]) == 20 and None not in host["segments"]
    finally:
        handle.close()
    assert_gone(handle)


def test_an_environment_and_arguments_of_any_size(tmp_path: Path) -> None:
    """The request is larger than a message. What the host gets is its own environment alone."""
    code = "import os, sys\ndef main(fds, *arguments):\n    print(fds, [len(a) for a in arguments], dict(os.environ))\n"
    (tmp_path / "entry_of_fork.py").write_text(code + "    sys.stdout.flush()\n    os._exit(7)\n")

    async def run() -> tuple[int | None, str]:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}"}
        processes = HostProcesses("entry_of_fork:main", ["entry_of_fork"], environment, str(tmp_path / "server.log"))
        await processes.ready()
        try:
            with open(tmp_path / "out.log", "wb") as log:
                child = processes.fork(["x" * 300_000, "y"], {"ONLY": "z" * 100_000}, [log.fileno(), log.fileno()])
            return child.wait(), (tmp_path / "out.log").read_text()
        finally:
            processes.close()

    status, output = asyncio.run(run())
    assert status == 7
    assert "[300000, 1] {'ONLY': 'zzz" in output and "PATH" not in output


def test_variables_that_imports_set_stay(tmp_path: Path) -> None:
    code = "import os\nos.environ['BY_IMPORT'] = '1'\ndef main(fds):\n    print(os.environ.get('BY_IMPORT'), "
    code += "os.environ.get('OLD'), os.environ.get('NEW'), flush=True)\n    os._exit(0)\n"
    (tmp_path / "entry_that_sets.py").write_text(code)

    async def run() -> str:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}", "OLD": "1"}
        processes = HostProcesses(
            "entry_that_sets:main", ["entry_that_sets"], environment, str(tmp_path / "server.log")
        )
        await processes.ready(60.0)
        try:
            with open(tmp_path / "out.log", "wb") as log:
                child = processes.fork([], {"NEW": "2"}, [log.fileno()])
            assert child.wait() == 0
            return (tmp_path / "out.log").read_text()
        finally:
            processes.close()

    assert asyncio.run(run()) == "1 None 2\n"


def test_a_new_fork_server_that_hangs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "entry_that_hangs.py").write_text("import time; print('hanging', flush=True); time.sleep(3600)")

    async def run() -> None:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}"}
        processes = HostProcesses("entry_that_hangs:main", ["entry_that_hangs"], environment, str(tmp_path / "log"))
        try:
            with pytest.raises(errors.ConnectError, match=r"was not ready in 2 s(.|\n)*hanging"):
                await processes.ready(2.0)
        finally:
            processes.close()

    asyncio.run(run())
