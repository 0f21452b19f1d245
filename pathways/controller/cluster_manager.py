"""The cluster in the controller process: starts the hosts, monitors all processes, and holds the cluster's state.

Life: `start` -> all hosts ready -> ... -> `fail` or `end`, whichever comes first, once; then `tear_down`.

    a host ends          -> `recovery.py` starts its island again, and everything else goes on (ERR-2). It calls `fail`
                            when the start fails again and again. During start-up: `fail(ConnectError)`
    the owner ends       -> `end`: the cluster ends with its owner
    a client ends        -> nothing here: `client_manager.py` removes the client, the others notice nothing (OWN-1)
    the supervisor ends  -> `end`, and the controller removes the directory itself

Everything here runs on one thread, the event loop's. This must be the main thread of the process, because the kernel
kills the hosts when the thread that started them ends. Nothing here is on the dispatch path, which runs on the native
controller's own thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.controller.agents import Agents
from pathways.controller.host_starter import HostStarter, HostStarterHere, NoProcess
from pathways.controller.native_numbers import NativeNumbers
from pathways.controller.records import HostRecord, Peers, ProgramRecord
from pathways.controller.resource_manager import ResourceManager
from pathways.plan.memory_profile import UNLIMITED
from pathways.plan.topology import Topology
from pathways.process.children import is_readable
from pathways.process.config import ControllerConfig, HostConfig
from pathways.protocol import control_pb2 as pb
from pathways.protocol.wire import Stage
from pathways.transport import SILENCE_S

STOP_GRACE_S = 2.0
#: When one host of an island ends, the others that abort because of it end within this time, in seconds.
FOLLOW_S = 0.02
#: A process that ends closes its session first. Within this time, in seconds, the end of the process is seen too.
END_SEEN_S = 0.25

_T = TypeVar("_T")


def _machines(config: ControllerConfig) -> tuple[int, ...]:
    """The machine of each host. Of a cluster that listens, each island is on a machine of its own."""
    each = config.options.hosts_per_island
    if config.listen:
        return tuple(1 + host // each for host in range(config.options.hosts))
    return config.options.machine_of_hosts


def first_lost(ended: HostRecord, hosts: Sequence[HostRecord]) -> HostRecord:
    """The host that was lost first: of the hosts that have ended, one that did not abort.

    The other hosts of an island abort (SIGABRT) when they lose a peer.
    """
    if ended.process.poll() is None:  # it is on another machine, and does not answer
        return ended
    time.sleep(FOLLOW_S)
    lost = [host for host in hosts if host.process.poll() is not None]
    return min(lost, key=lambda host: host.process.returncode == -signal.SIGABRT)


class ClusterManager:
    """The state of the controller process. Made and used on the event loop's thread."""

    def __init__(self, config: ControllerConfig, native: Any) -> None:
        self.config = config
        self.native = native
        self.topology = Topology.grid(
            config.options.islands,
            config.options.hosts_per_island,
            config.options.devices_per_host,
            platform=config.platform,
            jax_version=importlib.metadata.version("jax"),
            jaxlib_version=importlib.metadata.version("jaxlib"),
            machines=_machines(config),
        )
        self.resources = ResourceManager(self.topology)
        self.hosts: list[HostRecord] = []
        self._by_token: dict[str, HostRecord] = {}  # those that are not lost
        self._has_machines = max(self.topology.machines) > 0
        self.startup: list[pb.StartupEvent] = []
        self.ready = False
        self.failure: errors.PathwaysError | None = None
        self.on_end: list[Callable[[errors.PathwaysError], None]] = []
        self.on_host_ended: Callable[[HostRecord], None] = lambda host: None  # called only once the cluster is ready
        self.on_places_open: Callable[[], None] = lambda: None  # called when all hosts have records, and none is there
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._startup_events = asyncio.Event()
        self._are_hosts_started = asyncio.Event()
        self._services: dict[int, Any] = {}  # by island: the coordination service of its group
        self.segment: Any = None  # the hosts map it
        self.status_segment: Any = None  # clients map it, and can only read
        self.controller: Any = None  # the native controller
        self.numbers: NativeNumbers
        self.processes = HostStarterHere(config.options, config.platform, config.directory)
        #: The agents of other machines, which run all hosts of a cluster that listens; None: all hosts are here.
        self.agents: Agents | None = None
        self._segments: list[Any] = []  # of the first hosts
        self._supervisor_fd = -1

    @property
    def address(self) -> str:
        """The address at which clients connect."""
        return f"unix:{self.near_path}"

    @property
    def near_path(self) -> str:
        """The socket of `address`."""
        return f"{self.config.directory}/control.sock"

    @property
    def far_address(self) -> str:
        """The address at which hosts on other machines connect. A host that stops answering there counts as lost."""
        return f"unix:{self.far_path}"

    @property
    def far_path(self) -> str:
        """The socket of `far_address`."""
        return f"{self.config.directory}/far.sock"

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Makes the segments and the native controller. The hosts follow by `start_hosts`."""
        self._supervisor_fd = os.pidfd_open(os.getppid())
        self._loop.add_reader(self.config.owner_fd, self._owner_ended)
        self._loop.add_reader(self._supervisor_fd, self._supervisor_ended)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.end, f"the controller was told to end by {number.name}")
        sizes = self.config.options
        self.segment = self.native.controller_segment()
        if self.config.listen:
            self.agents = Agents(self.native, self.topology, sizes, self.far_path, self.segment)
        else:
            self.processes.start()
        self.status_segment = self.native.status_segment()
        if sizes.distance_us:
            self.native.set_distance(self.segment, sizes.distance_us)
        count = self.topology.hosts
        segments = self._segments = [self.new_segment(host) for host in range(count)]
        if self.agents is None:
            for island in range(len(self.topology.islands)):
                self.start_coordinator(island, 0)
        self.controller = self.native.Controller(
            self.segment,
            segments,
            # A host reports the memory of its devices when it is ready: see `host_stage`.
            budgets=[sizes.device_memory or UNLIMITED] * self.topology.devices + [sizes.transfer_bytes] * count,
            spaces=self._spaces(),
            policy=getattr(self.native.Policy, sizes.policy),
            asks_for_room=sizes.when_full == "suspend",
            status=self.status_segment,
            devices=self.topology.devices,
            pool=None if self.agents is None else self.agents.links.native,
        )
        on_group = None if self.agents is None else self.agents.hub.add_group
        self.numbers = NativeNumbers(self.controller, self.resources, on_group)
        self.numbers.group(range(count))  # the native controller takes group 0 for all hosts
        self.controller.start()
        self._loop.call_later(sizes.start_timeout_s, self._start_timeout)

    async def start_hosts(self) -> None:
        """Starts all hosts, unless the cluster ends first."""
        try:
            if self.agents is not None:
                self._open_places()
                return
            await self.unless_ended(asyncio.ensure_future(self.processes.ready()))
            peers = self._peers_of(self._segments, [0] * self.topology.hosts)
            for host in range(self.topology.hosts):
                self.hosts.append(self.start_host(host, peers))
            self._are_hosts_started.set()
        except (errors.PathwaysError, OSError) as error:  # if the cluster has ended, that was the reason
            self.fail(errors.ConnectError(f"the cluster did not start: {error}"))

    def _open_places(self) -> None:
        """Makes the cluster ready without a host: agents bring them. Until then each host counts as lost."""
        for number, segment in enumerate(self._segments):
            config = HostConfig(number, self.config.options, incarnation=-1)
            host = HostRecord(config, segment, NoProcess(), "")
            host.is_lost = True
            self.hosts.append(host)
        self._are_hosts_started.set()
        self.on_places_open()
        self.ready = True
        self.announce(pb.StartupEvent(stage=Stage.CLUSTER_READY, host=-1, detail=self.topology.describe()))

    async def hosts_started(self) -> None:
        """Waits until each host has a process and a record. Clients may come before."""
        await self.unless_ended(asyncio.ensure_future(self._are_hosts_started.wait()))

    def _spaces(self) -> list[str]:
        """The names of the memory spaces, in the order of their numbers: devices, then hosts' memory for transfers."""
        each = self.topology.devices_per_host
        devices = [f"device {number} of host {number // each}" for number in range(self.topology.devices)]
        return devices + [f"host {host}'s memory for transfers" for host in range(self.topology.hosts)]

    def new_segment(self, host: int) -> Any:
        """Memory for the rings and buffers of one incarnation of a host."""
        sizes = self.config.options
        if self.agents is not None:  # the twin of one of another machine, which has rings to its peers there
            return self.native.host_segment(host, self.topology.hosts, sizes.host_ring_bytes, 0, 0)
        return self.native.host_segment(host, self.topology.hosts, sizes.host_ring_bytes, sizes.host_arena_bytes)

    def start_coordinator(self, island: int, incarnation: int) -> None:
        """Starts a new coordination service for an incarnation of an island's group, and stops the old one, so that no
        state of the old group remains.
        """
        if self.config.options.hosts_per_island == 1 or self.agents is not None:
            return
        from pathways._jaxlib.coordination import start_service, stop_service

        if (old := self._services.pop(island, None)) is not None:
            stop_service(old)
        self._services[island] = start_service(
            self._coordinator(island, incarnation), len(self.topology.islands[island])
        )

    def _coordinator(self, island: int, incarnation: int) -> str:
        return f"unix:{self.config.directory}/island-{island}-{incarnation}.sock"

    def stream_of(self, host: int, incarnation: int) -> str:
        """The address where an incarnation of a host receives network transfers from other machines; empty: it is not
        there.
        """
        if self.agents is not None:
            return self.agents.stream_of(host)
        return f"unix:{self.config.directory}/stream-{host}-{incarnation}.sock"

    def peers(self, coming: Mapping[int, tuple[Any, int]]) -> Peers:
        """All hosts, as new hosts are told of them. `coming`: the segment and the incarnation of each new one."""
        found = [(None, -1) if host.is_lost else (host.segment, host.incarnation) for host in self.hosts]
        for number, new in coming.items():
            found[number] = new
        return self._peers_of([segment for segment, _ in found], [incarnation for _, incarnation in found])

    def _peers_of(self, segments: Sequence[Any], incarnations: Sequence[int]) -> Peers:
        streams = [
            self.stream_of(number, incarnation) if self._has_machines and segments[number] is not None else ""
            for number, incarnation in enumerate(incarnations)
        ]
        return Peers(segments, incarnations, streams)

    def start_host(
        self,
        number: int,
        peers: Peers,
        incarnation: int = 0,
        predecessor_failure: str = "",
        predecessor_client: int = 0,
    ) -> HostRecord:
        """Starts a host process. What starts hosts must be ready: see `starter`.

        Args:
            number: the host's number.
            peers: all hosts.
            incarnation: see `HostConfig`, also for the arguments that follow.
            predecessor_failure: see `HostConfig`.
            predecessor_client: see `HostConfig`.
        """
        island = self.topology.island_of(number)
        options = self.config.options
        machine = self.topology.machine_of(number)
        is_elsewhere = [there != machine for there in self.topology.machines]
        # Segments of other machines are of no use there: the agent makes its own.
        segment_fds = () if self.agents is not None else [-1 if each is None else each.fd for each in peers.segments]
        streams = [peers.streams[peer] if is_far else None for peer, is_far in enumerate(is_elsewhere)]
        config = HostConfig(
            host=number,
            options=options,
            platform=self.config.platform,
            address=self.far_address if machine else self.address,
            coordinator=self._coordinator(island, incarnation) if options.hosts_per_island > 1 else "",
            parent=os.getpid(),
            controller_fd=self.segment.fd,
            segment_fds=tuple(segment_fds),
            incarnation=incarnation,
            predecessor_failure=predecessor_failure,
            predecessor_client=predecessor_client,
            machine=machine,
            stream=peers.streams[number],
            streams=tuple(streams),
            epochs=tuple(peers.incarnations),
        )
        token = secrets.token_hex(16)
        starter = self.starter(island)
        assert starter is not None
        process = starter.launch(config, token, peers.segments[number])
        host = self._by_token[token] = HostRecord(config, peers.segments[number], process, token)
        process.watch(self._loop, lambda: self._host_ended(host))
        self.announce(pb.StartupEvent(stage=Stage.HOST_STARTED, host=number, pid=process.pid))
        return host

    def host_with(self, token: str) -> HostRecord | None:
        """The host that has this secret, and is not lost."""
        return self._by_token.get(token)

    def starter(self, island: int) -> HostStarter | None:
        """What starts the hosts of an island; None while the island's place is free."""
        return self.processes if self.agents is None else self.agents.of(island)

    def clock_ahead_ns(self, host: int) -> int:
        """How far the clock of a host's machine is ahead of this one's, within half a round trip of its link."""
        agent = None if self.agents is None else self.agents.of(self.topology.island_of(host))
        return 0 if agent is None else int(agent.link.native.stats()["clock_ahead_ns"])

    def agents_of_machines(self) -> Agents:
        """The agents of other machines.

        Raises:
            ConnectError: all hosts are here.
        """
        if self.agents is None:
            raise errors.ConnectError("no machine can join this cluster: its hosts are all on the controller's machine")
        return self.agents

    def end_host(self, host: HostRecord) -> None:
        """Kills a host if it still runs, waits for its end, and closes what the controller holds of it."""
        host.is_lost, host.is_served = True, False
        self._by_token.pop(host.token, None)
        host.process.end()
        host.requests.put_nowait(None)

    def announce(self, event: pb.StartupEvent) -> None:
        """Reports an event of the start to all watchers. A cluster that is ready reports only that, and its failure."""
        if self.ready and event.stage not in (Stage.CLUSTER_READY, Stage.FAILED):
            return
        event.hosts = self.topology.hosts
        self.startup.append(event)
        self._startup_events.set()
        self._startup_events = asyncio.Event()

    async def startup_events(self) -> None:
        """Waits for the next event."""
        await self._startup_events.wait()

    def host_stage(self, host: HostRecord, report: pb.HostStage) -> None:
        """A host reports a stage of its start. The cluster is ready when all hosts are."""
        if report.stage == Stage.HOST_READY and report.device_bytes:
            self.controller.set_budget(list(host.config.devices), report.device_bytes)
            known = self.topology.device_bytes
            if not known or report.device_bytes < known:
                self.topology = dataclasses.replace(self.topology, device_bytes=report.device_bytes)
        host.stage = max(host.stage, report.stage)
        if host.stage >= Stage.HOST_READY:
            host.ready.set()
        self.announce(pb.StartupEvent(stage=report.stage, host=host.number, pid=host.process.pid, detail=report.detail))
        if not self.ready and not self.done.done() and all(each.stage >= Stage.HOST_READY for each in self.hosts):
            self.ready = True
            for each in self.hosts:
                each.is_served, each.opened_at = True, 0
            self.announce(pb.StartupEvent(stage=Stage.CLUSTER_READY, host=-1, detail=self.topology.describe()))

    def _start_timeout(self) -> None:
        if self.ready or self.done.done():
            return
        late = [host for host in self.hosts if host.stage < Stage.HOST_READY]
        stages = ", ".join(f"{host.name}: {Stage.Stage.Name(host.stage)}" for host in late) or "the fork server"
        report = late[0].exit_report() if late else self.processes.log_tail()
        limit = self.config.options.start_timeout_s
        self.fail(errors.ConnectError(f"the cluster was not ready after {limit:g} s; waiting for {stages}. {report}"))

    # -- ends --------------------------------------------------------------------------------------------------------

    def fail(self, failure: errors.PathwaysError) -> None:
        """Ends the cluster with an error, which goes to every client and watcher. Only the first end counts."""
        if self.done.done():
            return
        self.failure = failure
        error = pb.Error(type=type(failure).__name__, message=str(failure))
        print(f"{error.type}: {error.message}", file=sys.stderr, flush=True)
        if self.controller is not None:
            self.controller.fail(f"{error.type}: {error.message}")
        self.announce(pb.StartupEvent(stage=Stage.FAILED, host=-1, error=error))
        for callback in self.on_end:
            callback(failure)
        self.done.set_result(None)

    def end(self, reason: str) -> None:
        """Ends the cluster in order. Only the first end counts."""
        self.fail(errors.ClusterClosedError(f"the cluster was closed: {reason}"))

    async def unless_ended(self, future: asyncio.Future[_T], timeout_s: float | None = None) -> _T:
        """The future's result.

        Raises:
            PathwaysError: the cluster ended first.
            TimeoutError: neither happened in time.
        """
        both: list[asyncio.Future[Any]] = [future, self.done]
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        if self.failure is not None:
            raise self.failure
        raise TimeoutError

    def _owner_ended(self) -> None:
        self._loop.remove_reader(self.config.owner_fd)
        self.end(f"the process that started it (pid {self.config.owner_pid}) is gone")

    def _supervisor_ended(self) -> None:
        self._loop.remove_reader(self._supervisor_fd)
        self.end("its supervisor process is gone")

    def _host_ended(self, host: HostRecord) -> None:
        if self.done.done():
            return
        if self.ready:
            self.on_host_ended(host)
        else:
            self.fail(errors.ConnectError(f"the cluster did not start: {first_lost(host, self.hosts).exit_report()}"))

    def session_ended(self, host: HostRecord) -> None:
        """A host's session is closed. For a host on this machine, the end of its process is reported by its pidfd. For
        a host on another machine, the session is the only sign.
        """
        if host.config.machine:
            self._loop.call_later(END_SEEN_S, self._fell_silent, host)

    def _fell_silent(self, host: HostRecord) -> None:
        if not host.is_lost and host.process.poll() is None and not self.done.done():
            host.error = host.error or f"nothing has been heard of it for {SILENCE_S:g} s"
            self._host_ended(host)

    async def tear_down(self) -> None:
        """Call it after `done`. Ends every host. When the cluster was closed in order, the hosts first get a request to
        stop, and some seconds. Removes the directory if the supervisor is gone.
        """
        if isinstance(self.failure, errors.ClusterClosedError):
            for host in self.hosts:
                host.requests.put_nowait(pb.HostRequest(stop=Empty()))
            deadline = time.monotonic() + STOP_GRACE_S
            there = [host for host in self.hosts if not host.is_lost]
            while time.monotonic() < deadline and any(host.process.poll() is None for host in there):
                await asyncio.sleep(0.01)
        left = [host for host in self.hosts if not host.is_lost]
        for host in left:
            host.process.kill()
        for host in left:
            self.end_host(host)
        self.processes.end()
        if self.controller is not None:
            self.controller.stop()
        if self.agents is not None:
            self.agents.close()
        if self._supervisor_fd >= 0 and is_readable(self._supervisor_fd):
            shutil.rmtree(self.config.directory, ignore_errors=True)

    def register_plan(self, program: ProgramRecord) -> None:
        """Gives the native controller the client whose runs may name a program, and the hosts of its runs (TRUST-1)."""
        used = sorted({device for binding in program.bindings for device in binding})
        devices = [(device // self.topology.devices_per_host, device) for device in used]
        self.controller.register_plan(program.number, program.client, self.numbers.group(program.stored), devices)
