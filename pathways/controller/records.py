"""The controller's records of who takes part: hosts, clients, programs. Data only; `cluster.py` acts on it.

Everything here belongs to the controller's one event loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import subprocess
from typing import Any

from pathways.plan.memory_profile import ProgramMemory
from pathways.process import fd_passing
from pathways.process.children import describe_exit, log_tail
from pathways.process.config import HostConfig
from pathways.protocol import control_pb2 as pb
from pathways.protocol.wire import Stage


@dataclasses.dataclass
class Host:
    """One host process."""

    config: HostConfig
    segment: Any
    process: subprocess.Popen[bytes]
    pidfd: int
    socket: socket.socket
    log_path: str
    token: str  # what its session says who it is by
    requests: asyncio.Queue[pb.HostRequest | None] = dataclasses.field(default_factory=asyncio.Queue)
    stage: int = Stage.HOST_STARTED
    error: str = ""
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    is_served: bool = False  # it is told of clients and programs as they come
    is_lost: bool = False
    opened_at: int = -1  # how many losses the cluster had had when it entered the order; -1: it has not

    @property
    def number(self) -> int:
        """The host's number in the cluster."""
        return self.config.host

    @property
    def incarnation(self) -> int:
        """How often it was started anew."""
        return self.config.incarnation

    @property
    def state(self) -> str:
        """For people."""
        return "lost" if self.is_lost else "up" if self.opened_at >= 0 else "starting"

    @property
    def name(self) -> str:
        """For messages: `host 1 (pid 4242)`."""
        return f"host {self.number} (pid {self.process.pid})"

    def exit_report(self) -> str:
        """How it ended, and why: the error that it reported, else the last lines of its log."""
        returncode = self.process.poll()
        end = "stopped answering" if returncode is None else describe_exit(returncode)
        if self.error:
            return f"{self.name} {end}: {self.error}"
        return f"{self.name} {end}. {log_tail(self.log_path)}"


@dataclasses.dataclass
class Connection:
    """An open connection on the descriptor socket; becomes a client by joining."""

    number: int
    socket: socket.socket
    pid: int
    pidfd: int
    token: str  # what its calls say whose they are by
    bell: Any  # the segment where it rings
    segment: Any = None
    client: Client | None = None

    def tell(self, message: fd_passing.Message) -> None:
        """Sends a message if the other end still takes one."""
        with contextlib.suppress(OSError):
            fd_passing.send(self.socket, message)


@dataclasses.dataclass
class Client:
    """One client: what it owns goes with it (OWN-1)."""

    number: int
    connection: Connection
    owner: bool
    slices: set[int] = dataclasses.field(default_factory=set)
    programs: set[int] = dataclasses.field(default_factory=set)
    suspended: bool = False
    #: What hosts ask of it, while its stream of callbacks is open; None: that ends.
    questions: asyncio.Queue[pb.CallbackPart | None] | None = None
    #: Held by who suspends or resumes it.
    moving: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


@dataclasses.dataclass
class Program:
    """One registered program, and what each host concerned has done with it."""

    number: int
    client: int
    request: pb.HostRequest  # what hosts are told of it
    stored: dict[int, asyncio.Future[str]]  # by host: an error's text, or empty
    compiled: dict[int, asyncio.Future[str]]
    name: str = ""
    bindings: tuple[tuple[int, ...], ...] = ()
    memory: dict[int, ProgramMemory] = dataclasses.field(default_factory=dict)  # by host
    is_admitted: bool = False  # the native controller knows what it takes
