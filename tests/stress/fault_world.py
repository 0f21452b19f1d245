"""A cluster on machines of its own (network namespaces), with clients that work all the time. Needs root.

The controller is in the namespace of the switch, islands 0, 1 and 2 are on the machines m0, m1 and m2, and a client is
on the machine `laptop`. Two more clients are on the controller's machine: one trains on island 0, which no fault hits,
and one works on islands 1 and 2. fault_pairs.py says what can go wrong with it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import psutil

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

from namespaces import Network  # noqa: E402

from pathways import errors  # noqa: E402
from pathways.cluster.operator import inspect  # noqa: E402
from pathways.trust import Role, Tokens  # noqa: E402

MACHINES = ["m0", "m1", "m2"]
MARK = "PATHWAYS_FAULT_WORLD"
#: After this long with an answer still missing, something hangs.
HANGS_S = 90.0


class Program:
    """`fault_pairs_client.py` on a machine."""

    def __init__(self, world: World, machine: str, role: str, *arguments: str) -> None:
        command = [sys.executable, str(HERE / "fault_pairs_client.py"), role, *arguments]
        env = {**world.env, "PATHWAYS_TOKEN": world.token(Role.CLIENT)} if role == "far" else world.env
        self.role = role
        log = open(f"{world.folder}/{role}.log", "ab")  # noqa: SIM115
        with log:
            pipe = subprocess.PIPE
            self.process = world.network.start(machine, command, env, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, *words: str) -> Any:
        """What it answers to a command."""
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        line = self._answers.get(timeout=HANGS_S)
        assert line, f"{self.role} has ended"
        return json.loads(line)


class World:
    """The cluster, its machines and its clients. A context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pw", dir="/tmp"))
        self.mark = secrets.token_hex(6)
        self.env = {
            MARK: self.mark,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(HERE),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        self.network = self._stack.enter_context(Network([*MACHINES, "laptop"]))
        self._agents: dict[str, Any] = {}
        self._joins = 0
        self._kept_down: set[str] = set()
        #: Held by who ends the controller or the far client, and starts another: both faults of a pair may do so.
        self.replacing = threading.Lock()

    def __enter__(self) -> World:
        try:
            self.home = Program(self, "switch", "home", f"{self.network.address}:7077", self.folder)
            self.start_controller()
            for machine in MACHINES:
                self._join(machine)
            self.start_far()
            self.innocent = Program(self, "switch", "innocent", f"{self.folder}/address")
            self.victim = Program(self, "switch", "victim", f"{self.folder}/address")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def token(self, role: Role) -> str:
        """A token for one process to come in with."""
        return str(Tokens(f"{self.folder}/authority").make(role, 3600.0))

    @property
    def clients(self) -> list[Program]:
        """All of them."""
        return [self.innocent, self.victim, self.far]

    # -- the controller ----------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Starts it, or another one at the same address."""
        started = self.home.ask("start")
        self.port, self.address, (_, self.controller) = started["port"], started["address"], started["pids"]
        new = pathlib.Path(self.folder, "address.new")
        new.write_text(self.address.removesuffix("/control.sock"))
        new.rename(f"{self.folder}/address")

    def states(self) -> list[str]:
        """The states of the hosts; empty when the controller does not answer."""
        with contextlib.suppress(errors.PathwaysError):
            return [host["state"] for host in inspect(self.address, 5.0)["hosts"]]
        return []

    # -- the machines ------------------------------------------------------------------------------------------------

    def _join(self, machine: str) -> None:
        self._joins += 1
        name, island = f"{machine}-{self._joins}", machine.removeprefix("m")
        command = [sys.executable, "-m", "pathways", "agent", self.port, "--name", name, "--island", island]
        command += ["--devices-per-host", "2"]
        with open(f"{self.folder}/{machine}.log", "ab") as log:
            env = {**self.env, "PATHWAYS_TOKEN": self.token(Role.HOST)}
            self._agents[machine] = self.network.start(machine, command, env, stdout=log, stderr=log)

    def tend(self) -> None:
        """Starts an agent on each machine that has none, as a service manager does."""
        for machine, process in list(self._agents.items()):
            if process.poll() is not None and machine not in self._kept_down:
                self._join(machine)

    def processes_of(self, machine: str, part: str = "") -> list[psutil.Process]:
        """All processes of a machine, or those with `part` in their command line."""
        with contextlib.suppress(psutil.NoSuchProcess):
            everything = psutil.Process(self._agents[machine].pid).children(recursive=True)
            return [each for each in everything if part in described(each) and "supervisor" not in described(each)]
        return []

    def start_far(self) -> None:
        """A client on the laptop."""
        self.far = Program(self, "laptop", "far", self.port)

    def kill_machine(self, machine: str, down_s: float) -> None:
        """All its processes at once. After a while another agent starts there."""
        self._kept_down.add(machine)
        kill(self.processes_of(machine))
        time.sleep(down_s)
        self._kept_down.discard(machine)

    # -- what there is -----------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """All processes of this world."""
        found = {}
        mark = f"{MARK}={self.mark}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if mark in pathlib.Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found[process.pid] = described(process)
        return found

    def kept(self) -> dict[str, int]:
        """What the controller has, and how many processes there are."""
        controller = psutil.Process(self.controller)
        return {
            "fds": controller.num_fds(),
            "threads": controller.num_threads(),
            "MiB": controller.memory_info().rss >> 20,
            "processes": len(self.processes()),
        }


def described(process: psutil.Process) -> str:
    """Its name and command line."""
    with contextlib.suppress(psutil.Error):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def kill(processes: list[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Sends a signal to each that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
