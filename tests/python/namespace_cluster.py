"""A cluster over machines that are namespaces: the head, machines with hosts, and this process on one more.

`pathways up` runs on the head, which is the switch's namespace, and `pathways agent` on the machines m0, m1 and so on.
This process moves to the network of the machine `laptop`, and is a client that comes in at the head's port with a
token. Call `Machines()` before this process has other threads, which would stay where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

import pytest
from namespaces import Network, end

import pathways as pw
from pathways.trust import Role, Tokens

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_PATHWAYS = [sys.executable, "-m", "pathways"]
START_S = 120.0


class Machines:
    """The network, in which clusters follow one another."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.network = self._stack.enter_context(Network(["laptop", "m0", "m1", "m2", "m3"]))
        try:
            self._move("laptop")
        except BaseException:
            self._stack.close()
            raise

    def _move(self, machine: str) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        with open(self.network.file_of(machine), "rb") as file:
            if library.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"this process cannot move to the network of {machine}")

    def close(self) -> None:
        """Removes the network. This process stays on a machine without a cable."""
        self._stack.close()


class NamespaceCluster:
    """`pathways up`, and the agents of each island. `close` ends everything."""

    def __init__(
        self,
        network: Network,
        islands: int,
        hosts_per_island: int,
        devices_per_host: int,
        *,
        machines_per_island: int = 1,
        agents: int | None = None,
    ) -> None:
        """`agents`: how many machines join; all when not given."""
        self._network = network
        self._devices = islands * hosts_per_island * devices_per_host
        self._hosts = hosts_per_island // machines_per_island
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pw", dir="/tmp"))
        self._authority = f"{self.folder}/authority"
        self._shape = shape = ["--devices-per-host", str(devices_per_host), "--platform", "cpu"]
        try:
            command = [*_PATHWAYS, "up", "--listen", f"{network.address}:0", "--authority", self._authority]
            command += ["--islands", str(islands), "--hosts-per-island", str(hosts_per_island), *shape]
            self._head = self._start(network, "switch", command, stderr=subprocess.PIPE, text=True)
            self.port = _port_in(self._head.stderr)
            for number in range(islands * machines_per_island if agents is None else agents):
                spans = machines_per_island > 1
                fabric = network.address_of(f"m{number}") if spans else ""
                self.start_agent(f"m{number}", str(number // machines_per_island), fabric)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, network: Network, machine: str, command: list[str], env: Any = None, **what: Any) -> Any:
        process = network.start(machine, command, env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **what)
        self._stack.callback(end, process)
        return process

    def start_agent(self, machine: str, island: str, fabric: str = "", **what: Any) -> Any:
        """Starts an agent on a machine; `what` goes to `subprocess.Popen`."""
        command = [*_PATHWAYS, "agent", self.port, "--island", island, "--name", machine]
        command += ["--hosts", str(self._hosts), *self._shape, *(["--fabric", fabric] if fabric else [])]
        return self._start(self._network, machine, command, {"PATHWAYS_TOKEN": self.token(Role.HOST)}, **what)

    def token(self, role: Role) -> str:
        """A new one."""
        return Tokens(self._authority).make(role, 600.0)

    def is_alive(self) -> bool:
        """Whether the controller still runs."""
        return self._head.poll() is None

    def connect(self) -> pw.Cluster:
        """This process as a client, when all devices are there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATHWAYS_TOKEN", self.token(Role.CLIENT))
            patch.setenv("XDG_STATE_HOME", f"{self.folder}/state")
            cluster = pw.connect(self.port)
        cluster.wait_for(self._devices, START_S)
        return cluster

    def close(self) -> None:
        """Ends the controller and the agents."""
        self._stack.close()


def _port_in(lines: IO[str]) -> str:
    """The address that `pathways up` prints. What comes after it is read, and shown with the test's output."""
    seen = ""
    for line in lines:
        if found := re.search(r"machines join at (\S+?);", line):
            threading.Thread(target=sys.stderr.writelines, args=(lines,), daemon=True).start()
            return found.group(1)
        seen += line
    raise AssertionError(f"`pathways up` has ended: {seen}")
