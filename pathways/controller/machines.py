"""Where hosts run: each host has a place, and a machine has the place. Machines differ by their methods.

    this_machine.py    the controller's own machine: hosts and controller share memory
    agent_machine.py   another machine, whose agent has joined: a link carries what they say to each other
    FreePlace          nobody has the place. An agent may take it

An island is a set of hosts. Its places are filled one by one, and its hosts start when all of them are filled.

Owned by the controller's event loop thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from pathways import errors
from pathways.controller.log_sources import LogSource
from pathways.process import fd_passing
from pathways.process.config import HostConfig


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramText:
    """A `StoreProgram`, by which hosts store a program. It is here while the program is, so that successors of lost
    hosts get it, and until the machines of its hosts have taken it.
    """

    data: bytes


class StartedHost(Protocol):
    """A host process, here or on another machine: see `HostProcess`."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """How it ended, at the last look."""

    def poll(self) -> int | None:
        """How it ended, None while it runs."""

    def kill(self) -> None:
        """Kills it."""

    def watch(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """Calls `on_end` once at its end."""

    def end(self) -> None:
        """Kills it and forgets it."""

    def hand_over(self, message: fd_passing.Message, segment: Any) -> None:
        """Gives it a segment."""

    def log_tail(self) -> str:
        """The last lines of its log."""

    def resident_bytes(self) -> int:
        """The memory that it takes; 0: not known here."""


class Machine(Protocol):
    """What runs hosts."""

    #: For people; empty: it is the controller's own.
    name: str
    #: Its hosts map the segments of this process, and of each other.
    shares_memory: bool

    @property
    def logs(self) -> LogSource | None:
        """Its logs; None: there is no machine."""

    async def ready(self, timeout_s: float | None = None) -> None:
        """Waits until it can start hosts.

        Raises:
            PathwaysError: it cannot.
        """

    def new_segment(self, host: int) -> Any:
        """Memory for the rings and buffers of one incarnation of a host, in this process."""

    def launch(self, config: HostConfig, token: str, segments: Sequence[Any]) -> StartedHost:
        """Starts a host. Call it only after `ready`.

        Args:
            config: what hosts of all machines are told.
            token: the secret by which its session identifies itself.
            segments: by host, of those that are on this machine, too; None for the others, and for those that are lost.
        """

    def hand_program(self, program: ProgramText, hosts: Sequence[int]) -> None:
        """Gives a program to its hosts, of these numbers. It crosses to the machine once (ONCE-1)."""

    def stream_of(self, host: int, incarnation: int) -> str:
        """Where an incarnation of a host receives network transfers; empty: it is not there."""

    def clock_ahead_ns(self) -> int:
        """How far its clock is ahead of the controller's, within half a round trip of its link."""

    def cannot_start(self, why: str) -> None:
        """Its hosts have failed to start again and again."""

    def evict(self, process: StartedHost, why: str) -> None:
        """One of its hosts has sent what makes no sense (FAULT-1)."""


class NoProcess:
    """The process of a host that was never started."""

    pid = 0
    returncode: int | None = None

    def poll(self) -> int | None:
        """None: it has not ended, either."""
        return None

    def kill(self) -> None:
        """Does nothing."""

    def watch(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""

    def hand_over(self, message: fd_passing.Message, segment: Any) -> None:
        """Is refused."""
        raise fd_passing.Closed("the host is not there")

    def log_tail(self) -> str:
        """Why there is no log."""
        return "It was never started."

    def resident_bytes(self) -> int:
        """None."""
        return 0


class FreePlace:
    """Stands for the machine of a place that no machine has. It is the same for all places."""

    name = "-"
    logs = None
    shares_memory = False

    async def ready(self, timeout_s: float | None = None) -> None:
        """See `Machine`."""
        raise errors.HostLostError("its machine is lost")

    def new_segment(self, host: int) -> Any:
        """See `Machine`."""
        raise errors.HostLostError("its machine is lost")

    def launch(self, config: HostConfig, token: str, segments: Sequence[Any]) -> StartedHost:
        """See `Machine`."""
        raise errors.HostLostError("its machine is lost")

    def hand_program(self, program: ProgramText, hosts: Sequence[int]) -> None:
        """See `Machine`: the hosts are about to count as lost."""

    def stream_of(self, host: int, incarnation: int) -> str:
        """See `Machine`."""
        return ""

    def clock_ahead_ns(self) -> int:
        """See `Machine`."""
        return 0

    def cannot_start(self, why: str) -> None:
        """Whoever had the place is gone already."""

    def evict(self, process: StartedHost, why: str) -> None:
        """See `Machine`: nobody is there."""


class Placement:
    """By host, the machine that has its place."""

    def __init__(self, free: Machine, machines: Sequence[Machine]) -> None:
        """`free`: stands for the machine of each place that nobody has. `machines`: by host, at first."""
        self._free = free
        self._of = list(machines)
        #: By host, the name of the machine that was lost with it, until a machine has the place again.
        self._lost: dict[int, str] = {}

    def of(self, host: int) -> Machine:
        """The machine of a host."""
        return self._of[host]

    def name_of(self, host: int) -> str:
        """The name of the machine of a host, also while it is lost; `FreePlace.name`: it has left, or never came."""
        return self._lost.get(host, self._of[host].name)

    def is_lost(self, name: str) -> bool:
        """Whether a machine of this name is lost, and its places wait for it."""
        return name in self._lost.values()

    def machines(self, hosts: Iterable[int] | None = None) -> list[Machine]:
        """The machines that have places of these hosts, or of any, each once; free places aside."""
        found = self._of if hosts is None else [self._of[host] for host in hosts]
        return [machine for machine in dict.fromkeys(found) if machine is not self._free]

    def are_filled(self, hosts: Iterable[int]) -> bool:
        """Whether machines have the places of all these hosts."""
        return all(self._of[host] is not self._free for host in hosts)

    def grow(self, hosts: int) -> None:
        """Adds so many places, which nobody has."""
        self._of += [self._free] * hosts

    def fill(self, hosts: Iterable[int], machine: Machine) -> None:
        """A machine has these places from now on."""
        for host in hosts:
            self._of[host] = machine
            self._lost.pop(host, None)

    def free(self, machine: Machine, *, is_lost: bool) -> None:
        """A machine has no place any more. `is_lost`: it has not left, and may come back."""
        if is_lost:
            self._lost |= {host: machine.name for host, each in enumerate(self._of) if each is machine}
        self._of = [self._free if each is machine else each for each in self._of]
