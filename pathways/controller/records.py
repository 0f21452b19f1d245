"""The controller's records of hosts, islands, connections, clients and programs. Data only; the managers act on it.

Only the controller's event loop thread uses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Sequence
from typing import Any

from pathways.controller.machines import ProgramText, StartedHost
from pathways.plan.memory_profile import ProgramMemory
from pathways.process import fd_passing
from pathways.process.children import describe_exit
from pathways.process.client_terms import ClientTerms
from pathways.process.config import HostConfig
from pathways.protocol import control_pb2 as pb
from pathways.protocol.wire import Stage


@dataclasses.dataclass
class HostRecord:
    """One host process."""

    config: HostConfig
    segment: Any
    process: StartedHost
    token: str  # the secret by which its session identifies itself
    requests: asyncio.Queue[pb.HostRequest | None] = dataclasses.field(default_factory=asyncio.Queue)
    stage: int = Stage.HOST_STARTED
    error: str = ""
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    is_served: bool = False  # it gets new clients and programs at once
    is_lost: bool = False
    opened_at: int = -1  # number of losses in the cluster before it entered the order; -1: not entered
    #: Clients that it may know, and that have left before it entered the order.
    gone: list[int] = dataclasses.field(default_factory=list)

    @property
    def number(self) -> int:
        """The host's number in the cluster."""
        return self.config.host

    @property
    def incarnation(self) -> int:
        """How often the host was started again."""
        return self.config.incarnation

    @property
    def state(self) -> str:
        """The host's state, for people: `lost`, `up` or `starting`."""
        return "lost" if self.is_lost else "up" if self.opened_at >= 0 else "starting"

    @property
    def name(self) -> str:
        """For messages: `host 1 (pid 4242)`."""
        return f"host {self.number} (pid {self.process.pid})"

    def exit_report(self) -> str:
        """How the host ended, and why: the error that it reported, else the last lines of its log."""
        returncode = self.process.poll()
        end = "stopped answering" if returncode is None else describe_exit(returncode)
        if self.error:
            return f"{self.name} {end}: {self.error}"
        return f"{self.name} {end}. {self.process.log_tail()}"


@dataclasses.dataclass(frozen=True)
class Peers:
    """What new hosts are told of all hosts, by number."""

    segments: Sequence[Any]  # None: the host is lost now
    incarnations: Sequence[int]  # -1: the host is lost now
    streams: Sequence[str]  # where they receive network transfers; empty: lost now, or there is one machine only


@dataclasses.dataclass(eq=False)
class Island:
    """One island's history. `recovery.py` has its states."""

    number: int
    hosts: tuple[int, ...]
    is_up: bool = True
    incarnation: int = 0  # -1: it was never started
    failed_starts: int = 0  # in a row
    loss: int = 0  # the number of the island's last loss, counted over the cluster
    predecessor_failure: str = ""  # the failure reason of that loss
    predecessor_client: int = 0  # the youngest client at that loss
    task: asyncio.Task[None] | None = None  # that starts it


@dataclasses.dataclass(eq=False)
class Connection:
    """A process that is connected to the controller: it may become a client by joining, or it is an operator."""

    number: int
    pid: int  # of a process on this machine; 0: it is on another one
    token: str  # the secret by which its calls identify themselves
    bell: Any  # the segment of the doorbell at which it rings the controller
    segment: Any = None  # the client's block, or the twin of that of a client on another machine
    client: ClientRecord | None = None
    link: Any = None  # the native link to a client on another machine
    has_segment: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # set for those on other machines

    @property
    def is_far(self) -> bool:
        """Whether it is on another machine."""
        return not self.pid

    @property
    def who(self) -> str:
        """For people."""
        return f"pid {self.pid}"

    @property
    def proven_name(self) -> str | None:
        """The name that its certificate says; None: there is none, and it is what it calls itself."""
        return None

    @property
    def is_operator(self) -> bool:
        """Whether it has an operator's rights whatever else it is."""
        return False

    @property
    def most_kept(self) -> int:
        """Bytes that it can take on the controller's machine: of shared memory, and of its link."""
        shared = 0 if self.segment is None else int(self.segment.nbytes)
        return shared + (0 if self.link is None else int(self.link.stats()["most_kept"]))

    def tell(self, message: fd_passing.Message) -> None:
        """Sends a message if the other end still takes one."""

    def close(self) -> None:
        """Closes what the connection has of the system."""


@dataclasses.dataclass(eq=False)
class NearConnection(Connection):
    """A connection on the descriptor socket, of a process of this machine."""

    socket: socket.socket = dataclasses.field(kw_only=True)
    pidfd: int = dataclasses.field(kw_only=True)

    def tell(self, message: fd_passing.Message) -> None:
        """See `Connection`."""
        with contextlib.suppress(OSError):
            fd_passing.send(self.socket, message)

    def close(self) -> None:
        """See `Connection`."""
        os.close(self.pidfd)
        self.socket.close()


class Questions(asyncio.Queue["pb.CallbackPart | None"]):
    """Parts of calls of a client's functions that the client has not taken."""

    PART_BYTES = 256  # what a part takes beside its data, at most
    nbytes = 0

    def _put(self, item: pb.CallbackPart | None) -> None:
        self.nbytes += self.size_of(item)
        super()._put(item)

    def _get(self) -> pb.CallbackPart | None:
        item = super()._get()
        self.nbytes -= self.size_of(item)
        return item

    @classmethod
    def size_of(cls, part: pb.CallbackPart | None) -> int:
        """What a part takes."""
        return 0 if part is None else cls.PART_BYTES + len(part.data)


@dataclasses.dataclass
class ClientRecord:
    """One client. What it owns is freed when it ends (OWN-1)."""

    number: int
    connection: Connection
    owner: bool
    terms: ClientTerms
    checkpoint_root: str  # where its checkpoints must lie; empty: anywhere
    futures: int  # of its table, as it was when the client joined (TRUST-1)
    slices: set[int] = dataclasses.field(default_factory=set)
    programs: set[int] = dataclasses.field(default_factory=set)
    groups: set[int] = dataclasses.field(default_factory=set)  # of hosts, that it has named
    attaching: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)  # by host: it has not answered
    suspended: bool = False
    stays_away: bool = False  # somebody asked for it to be suspended, and has not asked for it to be resumed
    variables: pb.VariablesRequest = dataclasses.field(default_factory=pb.VariablesRequest)  # as it has named them
    #: Calls from hosts to the client's functions, while its stream of callbacks is open. An item None ends the stream.
    questions: Questions | None = None
    #: Requests to move slices, while the client's stream of them is open. An item None ends the stream.
    moves: asyncio.Queue[pb.MoveRequest | None] | None = None
    #: Held while the client is being suspended or resumed.
    moving: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


@dataclasses.dataclass
class ProgramRecord:
    """One registered program, and what each of its hosts has done with it."""

    number: int
    client: int
    owner: str  # what its client is called by its certificate
    text: ProgramText
    stored: dict[int, asyncio.Future[str]]  # by host: the error text, empty for success
    compiled: dict[int, asyncio.Future[str]]
    name: str = ""
    #: Of each who waits for the hosts: a future that gets, when one of them is lost, how it was lost.
    waiting: set[asyncio.Future[str]] = dataclasses.field(default_factory=set)
    # Dropped when the native controller has the memory that a run takes:
    bindings: tuple[tuple[int, ...], ...] = ()
    memory: dict[int, ProgramMemory] = dataclasses.field(default_factory=dict)  # by host
    is_admitted: bool = False  # the native controller has it
    kept_bytes: int = 0  # what it counts for in its client's bound
