"""Machines as namespaces: each has addresses, process ids, /dev/shm, a temporary folder and clocks of its own. For
tests; needs root. The temporary folder is not /tmp, because this repository may lie there.

    with Network(["m1", "m2"]) as network:
        network.run(["python", "controller.py"])        # in the namespace of the switch, at network.address
        network.start("m1", ["pathways", "agent", ...])
        network.pull("m1")                              # pulls the cable of m1; `plug` plugs it in again

The switch's namespace holds a bridge, and one end of the cable to each machine. Nothing outside of the namespaces is
reached, and nothing of them is left at the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import psutil


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.getuid() != 0:
        return "namespaces need root"
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        return f"namespaces need {', '.join(missing)}"
    probe = f"pw{os.getpid()}probe"
    if subprocess.run(["ip", "netns", "add", probe], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        return "this machine lets nobody make namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None


@functools.cache
def _have_clocks() -> bool:
    """Whether a namespace may have clocks of its own here; without, all machines of a test have the same ones."""
    return subprocess.run(["unshare", "--time", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0


def pid_there(process: psutil.Process) -> int:
    """The pid of a process on the machine where it runs; one machine's processes are all descendants of this one."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)[1])  # type: ignore[index]


def pid_on(machine: str, there: int) -> int:
    """The pid here of the process that has pid `there` on a machine; `machine`: its `Network.file_of`."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # it has ended
            on_it = os.stat(f"/proc/{process.pid}/ns/net").st_ino == os.stat(machine).st_ino
            if on_it and pid_there(process) == there:
                return process.pid
    raise LookupError(f"no process {there} on {machine}")


class Network:
    """A switch and its machines. A context manager."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._prefix = f"pw{os.getpid() % 100000}"
        self._machines = list(machines)
        self._stack = contextlib.ExitStack()
        self.address = "10.203.7.1"  # of the switch's namespace

    def _name(self, machine: str) -> str:
        return f"{self._prefix}-{machine}"

    def address_of(self, machine: str) -> str:
        """The address of a machine."""
        return f"10.203.7.{2 + self._machines.index(machine)}"

    def file_of(self, machine: str) -> str:
        """The file by which a process can move to a machine's network."""
        return f"/run/netns/{self._name(machine)}"

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as stack:
            switch = self._add(stack, "switch")
            self._in("switch", "ip link add br0 type bridge")
            self._in("switch", f"ip addr add {self.address}/24 dev br0")
            self._in("switch", "ip link set br0 up")
            for number, machine in enumerate(self._machines):
                name = self._add(stack, machine)
                _ip(f"link add {machine} netns {switch} type veth peer name eth0 netns {name}")
                self._in("switch", f"ip link set {machine} master br0 up")
                self._in(machine, f"ip addr add 10.203.7.{2 + number}/24 dev eth0")
                self._in(machine, "ip link set eth0 up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add_fabric(self) -> None:
        """A second network, of the machines alone: `fabric_of`. Its cable to m0 is m0-fabric at the switch."""
        self._in("switch", "ip link add br1 type bridge")
        self._in("switch", "ip link set br1 up")
        for machine in self._machines:
            cable, switch, name = f"{machine}-fabric", self._name("switch"), self._name(machine)
            _ip(f"link add {cable} netns {switch} type veth peer name eth1 netns {name}")
            self._in("switch", f"ip link set {cable} master br1 up")
            self._in(machine, f"ip addr add {self.fabric_of(machine)}/24 dev eth1")
            self._in(machine, "ip link set eth1 up")

    def fabric_of(self, machine: str) -> str:
        """The address of a machine on the second network."""
        return f"10.203.8.{2 + self._machines.index(machine)}"

    def _add(self, stack: contextlib.ExitStack, machine: str) -> str:
        name = self._name(machine)
        _ip(f"netns add {name}")
        stack.callback(_ip, f"netns del {name}")
        self._in(machine, "ip link set lo up")
        return name

    def _in(self, machine: str, command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self._name(machine), *command.split()], check=True)

    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a machine; on the switch when it is "switch"."""
        inside = ["ip", "netns", "exec", self._name(machine)]
        if machine == "switch":
            return [*inside, *command]
        folder = tempfile.mkdtemp(prefix="pw", dir="/tmp")
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        own = (
            f"mount -t tmpfs tmpfs {folder} && mount -t tmpfs tmpfs /dev/shm && "
            f'export TMPDIR={folder} XDG_STATE_HOME={folder} && exec "$@"'
        )
        since = str(1_000_000 * (1 + self._machines.index(machine)))  # seconds that it is up for longer than this one
        clock = ["--time", "--monotonic", since, "--boottime", since] if _have_clocks() else []
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *clock]
        return [*inside, *unshare, "sh", "-c", own, "sh", *command]

    def start(self, machine: str, command: Sequence[str], env: Mapping[str, str] | None = None, **what: Any) -> Any:
        """Starts a command on a machine; it is killed at the end, with everything in its namespace of processes."""
        process = subprocess.Popen(self.command(machine, command), env={**os.environ, **(env or {})}, **what)
        self._stack.callback(end, process)
        return process

    def pull(self, machine: str) -> None:
        """Pulls the cable of a machine."""
        self._in("switch", f"ip link set {machine} down")

    def plug(self, machine: str) -> None:
        """Plugs it in again."""
        self._in("switch", f"ip link set {machine} up")

    def cut(self, source: str, target: str) -> None:
        """Lets nothing through from a machine to another one, or the switch; the other direction stays as it is. As
        with a firewall, nobody is told: the source sends its packets to a hardware address that nobody has.
        """
        device = "br0" if source == "switch" else "eth0"
        address = self.address if target == "switch" else self.address_of(target)
        self._in(source, f"ip neigh replace {address} lladdr 02:00:00:00:00:99 nud permanent dev {device}")

    def mend(self, source: str, target: str) -> None:
        """Lets everything through again."""
        device = "br0" if source == "switch" else "eth0"
        address = self.address if target == "switch" else self.address_of(target)
        self._in(source, f"ip neigh del {address} dev {device}")


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that `Network.start` started, and all that it started."""
    everything: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        everything = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    for child in everything[:1]:  # `unshare` hands no signal on
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for each in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, stdout=sys.stderr)
