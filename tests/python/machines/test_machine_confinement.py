"""GUEST-1: a client's own functions run on machines of others. They find no secret there, reach no process that is not
theirs, and have bounds (`pathways/process/confinement.py`). An innocent client's values stay right meanwhile."""

from __future__ import annotations

import ctypes
import glob
import json
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from machines import MachineCluster

import pathways as pw
from pathways.host import kept_executables
from pathways.process import confinement
from pathways.process.memory import memory_bytes
from pathways.process.run_directory import secret_folders
from pathways.trust.credentials import Credentials

pytestmark = pytest.mark.slow

TOKEN = "pathways1.host.7.secret"
SEEN = 1 << 16


def can_hide() -> bool:
    """Whether this kernel lets a process hide folders: many containers do not."""
    script = [
        sys.executable,
        confinement.__file__,
        str(os.getpid()),
        '{"hide": ["/usr"], "memory": 1000000000, "processes": 4096}',
        "this",
    ]
    return "not hidden" not in subprocess.run(script, check=True, text=True, capture_output=True).stderr


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineCluster]:
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        patch.setenv("PATHWAYS_TOKEN", TOKEN)  # as an operator gives it to `pathways agent`
        (state / "pathways").mkdir(mode=0o700)
        (state / "pathways" / "kept.pem").write_text("PRIVATE")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        os.makedirs(kept_executables.root(os.environ), 0o700)
        pathlib.Path(kept_executables.root(os.environ), "kept").write_text("code")
        with MachineCluster(islands=1, devices_per_host=1) as started:
            yield started


@pytest.fixture
def run(machines: MachineCluster) -> Iterator[Callable[..., Any]]:
    """`run(function)`: what a function says that runs on the host of another machine, as JSON."""
    with machines.connect() as cluster:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
        add = pw.jit(lambda x: x + 1, devices=slice_)

        def one(function: Callable[[], Any]) -> Any:
            def told(x: Any) -> Any:
                return np.frombuffer(json.dumps(function()).encode().ljust(SEEN), np.uint8)

            kind = jax.ShapeDtypeStruct((SEEN,), np.uint8)
            call = pw.jit(lambda x: pw.host_callback(told, kind, x), devices=slice_)
            found = json.loads(np.asarray(call(np.float32(1))).tobytes())
            np.testing.assert_array_equal(np.asarray(add(np.float32(4))), 5)
            return found

        yield one


def test_no_secret_is_found(run: Callable[..., Any], machines: MachineCluster) -> None:
    """Neither in an environment, nor in a file that any process names or that lies where secrets do, nor in memory."""
    folders, known = secret_folders(), [os.path.join(machines.folder, "m0.pem")]

    def look() -> dict[str, Any]:
        found: dict[str, Any] = {"own": dict(os.environ), "environments": 0, "memories": 0, "files": [], "folders": {}}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            if int(process.name) == os.getpid():
                continue
            for what, name in (("environments", "environ"), ("memories", "mem")):
                try:
                    with open(process / name, "rb") as file:
                        found[what] += bool(file.read(1))
                except OSError as error:
                    found[what] += error.errno == 5  # it was open: nothing is mapped at 0
        for path in known:
            for place in (path, path + ".d", os.path.realpath(path)):
                try:
                    with open(place) as file:
                        found["files"].append([place, file.read()])
                except OSError:
                    pass
        for folder in folders:
            try:
                found["folders"][folder] = os.listdir(folder)
            except OSError as error:
                found["folders"][folder] = str(error)
        return found

    found = run(look)
    assert not any("TOKEN" in name for name in found["own"]) and TOKEN not in str(found["own"])
    assert found["environments"] == 0 and found["memories"] == 0
    if not can_hide():
        pytest.skip("this kernel hides no folders")
    assert folders and all(each == [] for each in found["folders"].values()), found["folders"]
    assert found["files"] == []


def test_what_hosts_will_run_is_out_of_reach(run: Callable[..., Any]) -> None:
    """KEPT-1: executables that are kept are code, which hosts load."""
    if not can_hide():
        pytest.skip("this kernel hides no folders")
    folder = kept_executables.root(os.environ)

    def change() -> list[str]:
        try:
            pathlib.Path(folder, "mine").write_text("code")
        except OSError as error:
            return [type(error).__name__, *os.listdir(folder)]
        return os.listdir(folder)

    assert run(change) == ["OSError"]  # read-only, and empty


def test_no_other_process_is_reached(run: Callable[..., Any], machines: MachineCluster) -> None:
    """Neither by a signal, nor by a debugger's call, nor by the sockets of the cluster."""
    tester = os.getpid()
    sockets = glob.glob(os.path.join(tempfile.gettempdir(), f"pathways-{os.getuid()}-*", "*.sock"))
    version = ctypes.CDLL(None).syscall(confinement._CREATE_RULESET, None, ctypes.c_size_t(0), 1)

    def reach() -> dict[str, Any]:
        found: dict[str, Any] = {"signals": [], "debugged": 0, "sockets": []}
        parent = os.getppid()  # which ends with the host
        for pid in (parent, tester):
            try:
                os.kill(pid, 0)
                found["signals"].append(pid)
            except OSError:
                pass
        word, size = ctypes.c_long(0), ctypes.c_size_t(8)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(word), 8)
        remote = (ctypes.c_void_p * 2)(1 << 16, 8)
        ctypes.CDLL(None, use_errno=True).process_vm_readv(parent, vector, 1, remote, 1, 0)
        found["debugged"] = ctypes.get_errno() != 1 and size.value  # EPERM, and not EFAULT
        for path in sockets:
            try:
                with socket.socket(socket.AF_UNIX) as caller:
                    caller.connect(path)
                    found["sockets"].append(path)
            except OSError:
                pass
        return found

    assert sockets
    found = run(reach)
    assert not found["debugged"]
    if version >= confinement._SCOPES_SINCE:
        assert found["signals"] == []
    if can_hide():
        assert found["sockets"] == []


def test_what_hides_cannot_be_taken_away(run: Callable[..., Any], machines: MachineCluster) -> None:
    if not can_hide():
        pytest.skip("this kernel hides no folders")
    folder = os.path.dirname(machines.handle.address.removeprefix("unix:"))

    def uncover() -> list[str]:
        library = ctypes.CDLL(None, use_errno=True)
        for _ in range(3):  # also from namespaces of its own, one in another, in which it has every power
            library.umount2(os.fsencode(folder), 2)
            library.unshare(0x10000000 | 0x00020000)
        return os.listdir(folder)

    assert os.listdir(folder)
    assert run(uncover) == []


def test_the_folder_where_it_starts_is_hidden_as_well(tmp_path: pathlib.Path) -> None:
    """An agent may be started where its secrets lie. A folder is known by itself, not by what lies over it."""
    if not can_hide():
        pytest.skip("this kernel hides no folders")
    secrets, code = tmp_path / "secrets", tmp_path / "code"
    for each in (secrets, secrets / "below", code):
        each.mkdir()
    (secrets / "own.pem").write_text("PRIVATE")
    (code / "looks.py").write_text("import os; print(os.getcwd(), os.listdir('.'), os.listdir('/proc/self/cwd'))")
    bounds = json.dumps({"hide": [str(secrets)], "memory": 1 << 30, "processes": 4096})
    command = [sys.executable, confinement.__file__, str(os.getpid()), bounds, "looks"]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    for where, seen in ((secrets, f"{secrets} [] []\n"), (secrets / "below", "/ ")):
        said = subprocess.run(command, cwd=where, env=environment, check=True, text=True, capture_output=True).stdout
        assert said.startswith(seen) and "pem" not in said


def test_what_it_inherits(run: Callable[..., Any]) -> None:
    """Its own socket and memory, and the log, which it can neither read nor shorten. Nothing of its host's."""

    def look() -> dict[str, Any]:
        found: dict[str, Any] = {"descriptors": [], "read": [], "cut": []}
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                found["descriptors"].append([number, os.readlink(f"/proc/self/fd/{number}")])
            except OSError:  # it was that of the list
                continue
            if number > 2:
                continue
            for kind, way in (("read", os.O_RDONLY), ("cut", os.O_WRONLY | os.O_TRUNC)):
                try:
                    own = os.open(f"/proc/self/fd/{number}", way | os.O_NONBLOCK)
                except OSError:
                    continue
                if stat.S_ISREG(os.fstat(own).st_mode):
                    found[kind].append(number)
                os.close(own)
        return found

    found = run(look)
    kinds = sorted(re.sub(r"[0-9]+", "N", where) for number, where in found["descriptors"] if number > 2)
    assert not found["read"] and not found["cut"], found
    assert set(kinds) <= {"socket:[N]", "/memfd:pathways-sidecar (deleted)", "/dev/null"} and len(kinds) <= 3, kinds


def test_memory_is_bounded(run: Callable[..., Any]) -> None:
    """And the process that takes too much is the first that the kernel would end."""

    def take() -> list[Any]:
        most = memory_bytes()
        try:
            np.empty(most * 3 // 4, np.uint8)
            refused = False
        except MemoryError:
            refused = True
        return [refused, pathlib.Path("/proc/self/oom_score_adj").read_text().strip()]

    assert run(take) == [True, "1000"]


def test_a_function_keeps_what_it_needs(run: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Files that it may write, processes of its own and signals to them, the network, its environment."""

    def work() -> list[Any]:
        path = tmp_path / "written"
        path.write_text("mine")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child.send_signal(signal.SIGTERM)
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
        descriptors = len(os.listdir("/proc/self/fd"))
        return [path.read_text(), child.wait(30), descriptors > 2, "PATH" in os.environ]

    assert run(work) == ["mine", -signal.SIGTERM, True, True]


def test_a_renewed_certificate_is_hidden_as_well(machines: MachineCluster, run: Callable[..., Any]) -> None:
    """It is another file than the one that was there when the process began."""
    if not can_hide():
        pytest.skip("this kernel hides no folders")
    path = os.path.join(machines.folder, "m0.pem")

    def read() -> str:
        try:
            return pathlib.Path(path).read_text()
        except OSError as error:
            return type(error).__name__

    assert run(read) == "FileNotFoundError"
    before = os.stat(path).st_ino
    Credentials.load(path).save(path)
    assert os.stat(path).st_ino != before
    assert run(read) == "FileNotFoundError"
