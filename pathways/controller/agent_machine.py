"""A machine whose agent runs hosts for the controller, and a host there, as the controller knows them.

`agents.py` lets agents join, and counts them as lost. Owned by the controller's event loop thread.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways.agent.fabric import LINK
from pathways.agent.island import start_of
from pathways.agent.link_door import FarLink
from pathways.controller.log_sources import LogsThere
from pathways.controller.machines import ProgramText, StartedHost
from pathways.process import fd_passing
from pathways.process.config import ClusterOptions, HostConfig
from pathways.protocol import agent_pb2 as pb
from pathways.protocol import control_pb2 as pb_control
from pathways.trust import Identity

_MOST_LOG_CHARS = 8192


class FarHost:
    """A host process on another machine. Like `HostProcess`, which is one of this machine."""

    def __init__(self, agent: AgentMachine, host: int, incarnation: int, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes  # of its twin here
        self.pid = 0  # known when the agent has started it; of that machine
        self.returncode: int | None = None
        self._agent = agent
        self._host = host
        self.incarnation = incarnation
        self._log_tail = ""
        self._on_end: Callable[[], None] | None = None

    def poll(self) -> int | None:
        """How the process ended, None while nothing is known of its end."""
        return self.returncode

    def kill(self) -> None:
        """Asks the agent to kill the process."""
        if self.returncode is None:
            end = pb.EndHost(host=self._host, incarnation=self.incarnation)
            self._agent.requests.put_nowait(pb.AgentRequest(end_host=end))

    def watch(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """Calls `on_end` once, when the process has ended, unless `end` was called before."""
        self._on_end = on_end

    def end(self) -> None:
        """Asks the agent to kill the process. From now on nothing that still comes from it counts."""
        self._on_end = None
        self.kill()
        self._agent.forget(self._host, self)

    def ended(self, returncode: int, log_tail: str) -> None:
        """The agent reports the end of the process, or is lost itself."""
        if self.returncode is None:
            self.returncode, self._log_tail = returncode, log_tail
            if (on_end := self._on_end) is not None:
                self._on_end = None
                on_end()

    def hand_over(self, message: fd_passing.Message, segment: Any) -> None:
        """Lets the agent make a twin of a client's segment and give it to the host."""
        hand = pb.HandClient(
            host=self._host,
            incarnation=self.incarnation,
            client=message["client"],
            arena_bytes=self._agent.arena_bytes_of(segment),
        )
        self._agent.requests.put_nowait(pb.AgentRequest(hand_client=hand))

    def log_tail(self) -> str:
        """The last lines of its log, as the agent sent them."""
        return self._log_tail

    def resident_bytes(self) -> int:
        """Not known here."""
        return 0


class AgentMachine:
    """A machine whose agent has joined, or is about to. See `machines.Machine`."""

    shares_memory = False

    def __init__(
        self,
        identity: Identity,
        island: int,
        streams: Mapping[int, str],
        neighbour: pb.Neighbours.Machine,
        link: FarLink,
        native: Any,
        options: ClusterOptions,
        controller_segment: Any,
    ) -> None:
        """`streams`: by host whose place it has, where the host receives network transfers, a `StreamAddress`.
        `neighbour`: how the other machines of its island find it.
        """
        self.identity = identity
        self.name = identity.name
        self.island = island
        self.neighbour = neighbour
        self.since = time.monotonic()
        #: Called with what it says of its fabric.
        self.on_fabric: Callable[[pb.FabricReport], None] = lambda report: None
        self.hosts = tuple(streams)
        self.link = link
        self._streams = streams
        self._native = native
        self._options = options
        self._controller_segment = controller_segment
        self.requests: asyncio.Queue[pb.AgentRequest | None] = asyncio.Queue()
        #: Programs for its hosts, each with the hosts' numbers and incarnation.
        self.programs: asyncio.Queue[tuple[ProgramText, Sequence[int], int] | None] = asyncio.Queue()
        self.logs = LogsThere(self.name, self.requests.put_nowait)
        self._hosts: dict[int, FarHost] = {}
        self.is_lost = asyncio.Event()
        self.may_go = False  # it was drained: its end is no loss

    def arena_bytes_of(self, segment: Any) -> int:
        """The size of the arena in a client's segment."""
        return int(self._native.arena_bytes_of(segment))

    def new_segment(self, host: int) -> Any:
        """See `Machine`. It is the twin of the segment there, which has the buffers."""
        return self._native.host_segment(host, 1, self._options.host_ring_bytes, 0, 0)

    async def ready(self, timeout_s: float | None = None) -> None:
        """Returns when it can start hosts: at once, because it gets its requests when it can."""

    def launch(self, config: HostConfig, token: str, segments: Sequence[Any]) -> FarHost:
        """See `Machine`. The segments are twins: the agent makes its own."""
        segment = segments[config.host]
        host = self._hosts[config.host] = FarHost(self, config.host, config.incarnation, segment.nbytes)
        self.link.native.add_host(config.host, config.incarnation, segment, self._controller_segment)
        self.requests.put_nowait(pb.AgentRequest(start_host=start_of(config, token)))
        return host

    def hand_program(self, program: ProgramText, hosts: Sequence[int]) -> None:
        """See `Machine`."""
        self.programs.put_nowait((program, hosts, self._hosts[hosts[0]].incarnation))  # they were started together

    def forget(self, number: int, host: FarHost) -> None:
        """Takes no more records from a host."""
        if self._hosts.get(number) is host:
            del self._hosts[number]
            self.link.native.remove_host(number)

    def stream_of(self, host: int, incarnation: int) -> str:
        """See `Machine`."""
        return self._streams[host]

    def clock_ahead_ns(self) -> int:
        """See `Machine`."""
        return int(self.link.native.stats()["clock_ahead_ns"])

    def evict(self, process: StartedHost, why: str) -> None:
        """Loses the machine: whoever speaks for one of its hosts speaks for all."""
        self.link.on_lost(why)

    def cannot_start(self, why: str) -> None:
        """Its places are free for another machine from now on."""
        self.link.on_lost(f"its hosts do not start. {why}")

    def report(self, report: pb.AgentReport) -> None:
        """Takes in what the agent says of its hosts (TRUST-1: of its own only)."""
        kind = report.WhichOneof("report")
        if kind == "log_piece":
            self.logs.answered(report.log_piece)
            return
        if kind == "fabric":
            self.on_fabric(report.fabric)
            return
        what = report.started if kind == "started" else report.ended
        host = self._hosts.get(what.host)
        if host is None or host.incarnation != what.incarnation:
            return
        if isinstance(what, pb.FarHostStarted):
            host.pid = what.pid
        else:
            host.ended(what.returncode, what.log_tail[:_MOST_LOG_CHARS])

    def stats(self, island_name: str) -> pb_control.MachineStats:
        """See `MachineStats`."""
        link = self.link.native.stats()
        return pb_control.MachineStats(
            island=self.island,
            island_name=island_name,
            fabric=str(LINK) if self.neighbour.is_link else self.neighbour.fabric.rpartition(":")[0],
            name=self.name,
            address=self.identity.peer,
            is_encrypted=self.identity.is_encrypted,
            bytes_out=link["bytes_out"],
            bytes_in=link["bytes_in"],
            round_trip_ns=link["round_trip_ns"],
            connected_s=time.monotonic() - self.since,
            kept_bytes=link["kept"],
            via=self.link.via,
            most_kept_bytes=link["most_kept"] + sum(host.segment_bytes for host in self._hosts.values()),
        )

    def let_go(self, why: str = "") -> None:
        """Asks the agent to leave; `why`: there is something wrong with it. It is lost when its link ends."""
        self.may_go = not why
        self.requests.put_nowait(pb.AgentRequest(leave=pb.Leave(why=why)))

    def lost(self, why: str) -> None:
        """Counts all its hosts as killed."""
        self.is_lost.set()
        for queue in (self.requests, self.programs):
            while not queue.empty():
                queue.get_nowait()  # who held its hosts' places is known for longer
            queue.put_nowait(None)
        self.logs.lost(why)
        for host in list(self._hosts.values()):
            end = "has left" if self.may_go else f"is lost: {why}"
            host.ended(-signal.SIGKILL, f"Its machine, {self.name}, {end}.")
