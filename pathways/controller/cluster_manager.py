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
import logging
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.controller.agents import Agents
from pathways.controller.machines import FreePlace, Machine, NoProcess, Placement
from pathways.controller.native_numbers import NativeNumbers
from pathways.controller.observations import Losses
from pathways.controller.records import HostRecord, Peers, ProgramRecord
from pathways.controller.resource_manager import ResourceManager
from pathways.controller.this_machine import ThisMachine
from pathways.plan.memory_profile import UNLIMITED
from pathways.plan.topology import Topology
from pathways.process.children import is_readable
from pathways.process.config import ControllerConfig, HostConfig
from pathways.protocol import control_pb2 as pb
from pathways.protocol.wire import Stage
from pathways.transport import SILENCE_S

_log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
MOST_SAID = 8192  #: Characters of what a host says of its faults and its end.
#: When one host of an island ends, the others that abort because of it end within this time, in seconds.
FOLLOW_S = 0.02
#: A process that ends closes its session first. Within this time, in seconds, the end of the process is seen too.
END_SEEN_S = 0.25

_T = TypeVar("_T")


def _topology(config: ControllerConfig, placement: Placement) -> Topology:
    """The cluster at first. A host's machine has a number; that of a free place is the number of its island's agent."""
    options = config.options
    what: dict[str, Any] = {
        "platform": config.platform,
        "jax_version": importlib.metadata.version("jax"),
        "jaxlib_version": importlib.metadata.version("jaxlib"),
    }
    if options.max_machines:
        return Topology((), options.devices_per_host, **what, most_hosts=options.room)
    grid = Topology.grid(options.islands, options.hosts_per_island, options.devices_per_host, **what)
    here = enumerate(options.machine_of_hosts)
    return dataclasses.replace(
        grid,
        machines=tuple(
            machine if placement.are_filled([host]) else 1 + grid.island_of_hosts[host] for host, machine in here
        ),
    )


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

    def __init__(self, config: ControllerConfig, native: Any, here: int | None = None) -> None:
        """`here`: so many hosts are on this machine. None: all of them, or, of a cluster that listens, none."""
        self.config = config
        self.native = native
        self.here = ThisMachine(config, native, self.fail)
        count = config.options.hosts
        filled = here if here is not None else 0 if config.listen else count
        free = FreePlace()
        self.placement = Placement(free, [self.here] * filled + [free] * (count - filled))
        self.topology = _topology(config, self.placement)
        self.resources = ResourceManager(self.topology)
        self.losses = Losses()
        self.hosts: list[HostRecord] = []
        self._by_token: dict[str, HostRecord] = {}  # those that are not lost
        self.startup: list[pb.StartupEvent] = []
        self.ready = False
        self.failure: errors.PathwaysError | None = None
        self.on_end: list[Callable[[errors.PathwaysError], None]] = []
        self.on_host_ended: Callable[[HostRecord], None] = lambda host: None  # called only once the cluster is ready
        self.on_opened: Callable[[int], None] = lambda island: None  # called with the number of a new island
        self.on_places_open: Callable[[], None] = lambda: None  # called when the hosts here have been started
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._startup_events = asyncio.Event()
        self._are_hosts_started = asyncio.Event()
        self.segment = native.controller_segment()  # the hosts map it
        self.status_segment: Any = None  # clients map it, and can only read
        self.controller: Any = None  # the native controller
        self.numbers: NativeNumbers
        self.agents = Agents(
            native, self, config.options, self.far_path, self.segment, self.placement, self.losses, bool(config.listen)
        )
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
        pool = self._reader_of_rings()
        if islands := [hosts for hosts in self.topology.islands if self.placement.are_filled(hosts)]:
            self.here.begin(islands)
        self.status_segment = self.native.status_segment()
        if sizes.distance_us:
            self.native.set_distance(self.segment, sizes.distance_us)
        self.hosts = [self._absent(host) for host in range(self.topology.hosts)]
        room = self.topology.room
        devices = room * self.topology.devices_per_host
        self.controller = self.native.Controller(
            self.segment,
            [host.segment for host in self.hosts] + [None] * (room - len(self.hosts)),
            # A host reports the memory of its devices when it is ready: see `host_stage`.
            budgets=[sizes.device_memory or UNLIMITED] * devices + [sizes.transfer_bytes] * room,
            policy=getattr(self.native.Policy, sizes.policy),
            asks_for_room=sizes.when_full == "suspend",
            ends_hosts_with_faults=True,
            status=self.status_segment,
            devices=devices,
            host_ring_bytes=sizes.host_ring_bytes,
            pool=pool,
        )
        self.numbers = NativeNumbers(self.controller, self.resources, self.agents.hub.add_group)
        self.numbers.group(range(room))  # the native controller takes group 0 for all hosts
        self.controller.start()
        self._loop.call_later(sizes.start_timeout_s, self._start_timeout)

    def _reader_of_rings(self) -> Any:
        """The pool of links, if it reads the rings to hosts; None: the hosts themselves do.

        Raises:
            OptionError: some do, some do not.
        """
        share = {self.placement.of(host).shares_memory for host in range(self.topology.hosts)}
        if len(share) > 1:
            raise errors.OptionError(
                "hosts on the controller's machine beside hosts of agents are not supported yet: the hosts of a "
                "cluster that listens all come from agents. Start an agent on the controller's machine, too"
            )
        return None if True in share else self.agents.links.native

    async def start_hosts(self) -> None:
        """Starts the hosts whose places are filled, unless the cluster ends first. The others count as lost until an
        agent brings them.
        """
        try:
            for machine in self.placement.machines():
                await self.unless_ended(asyncio.ensure_future(machine.ready()))
            coming = {host.number: (host.segment, 0) for host in self.hosts if self.placement.are_filled([host.number])}
            peers = self.peers(coming)
            for number in coming:
                self.hosts[number] = self.start_host(number, peers)
            self._are_hosts_started.set()
        except (errors.PathwaysError, OSError) as error:  # if the cluster has ended, that was the reason
            self.fail(errors.ConnectError(f"the cluster did not start: {error}"))
            return
        self.on_places_open()
        self._look_ready()

    def _absent(self, number: int) -> HostRecord:
        """A host that was not started yet: it counts as lost."""
        config = HostConfig(
            number,
            self.config.options,
            island=self.topology.islands[self.topology.island_of_hosts[number]],
            device_count=self.topology.count_of(number),
            incarnation=-1,
        )
        is_here = self.placement.are_filled([number])
        segment = self.placement.of(number).new_segment(number) if is_here else None
        return HostRecord(config, segment, NoProcess(), "", is_lost=True)

    def open_island(self, hosts: int, devices: int, platform: str) -> int:
        """Opens an island for an agent, of so many hosts with so many devices each; returns its number. The island has
        free places. A number is never given again.
        """
        island, before = len(self.topology.islands), self.topology.hosts
        self.topology = self.topology.opened(hosts, devices, platform, 1 + island)
        self.resources.grow(self.topology)
        self.placement.grow(hosts)
        self.hosts += [self._absent(number) for number in range(before, before + hosts)]
        self.on_opened(island)
        return island

    async def hosts_started(self) -> None:
        """Waits until each host has a process and a record. Clients may come before."""
        await self.unless_ended(asyncio.ensure_future(self._are_hosts_started.wait()))

    def where(self, host: int) -> tuple[Machine, int]:
        """The machine of a host, and the number of the one that it behaves as if it were on. Two hosts share memory if
        the first is the same, and what they transfer lies in it if both are.
        """
        return self.placement.of(host), self.topology.machine_of(host)

    def peers(self, coming: Mapping[int, tuple[Any, int]]) -> Peers:
        """All hosts, as new hosts are told of them. `coming`: the segment and the incarnation of each new one."""
        found = [(None, -1) if host.is_lost else (host.segment, host.incarnation) for host in self.hosts]
        for number, new in coming.items():
            found[number] = new
        return self._peers_of([segment for segment, _ in found], [incarnation for _, incarnation in found])

    def _peers_of(self, segments: Sequence[Any], incarnations: Sequence[int]) -> Peers:
        streams = [
            "" if segments[number] is None else self.placement.of(number).stream_of(number, incarnation)
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
        """Starts a host process. Its machine must be ready.

        Args:
            number: the host's number.
            peers: all hosts.
            incarnation: see `HostConfig`, also for the arguments that follow.
            predecessor_failure: see `HostConfig`.
            predecessor_client: see `HostConfig`.
        """
        machine, machine_number = here = self.where(number)
        config = HostConfig(
            host=number,
            options=self.config.options,
            island=self.hosts[number].config.island,
            device_count=self.topology.count_of(number),
            platform=self.config.platform,
            address=self.far_address if machine_number else self.address,
            parent=os.getpid(),
            controller_fd=self.segment.fd,
            incarnation=incarnation,
            predecessor_failure=predecessor_failure,
            predecessor_client=predecessor_client,
            machine=machine_number,
            stream=peers.streams[number],
            streams=tuple(None if self.where(peer) == here else stream for peer, stream in enumerate(peers.streams)),
            epochs=tuple(peers.incarnations),
        )
        token = secrets.token_hex(16)
        segments = [each if self.placement.of(peer) is machine else None for peer, each in enumerate(peers.segments)]
        process = machine.launch(config, token, segments)
        host = self._by_token[token] = HostRecord(config, peers.segments[number], process, token)
        process.watch(self._loop, lambda: self._host_ended(host))
        self.announce(pb.StartupEvent(stage=Stage.HOST_STARTED, host=number, pid=process.pid))
        return host

    def host_with(self, token: str) -> HostRecord | None:
        """The host that has this secret, and is not lost."""
        return self._by_token.get(token)

    def end_host(self, host: HostRecord) -> None:
        """Kills a host if it still runs, waits for its end, and closes what the controller holds of it."""
        host.is_lost, host.is_served = True, False
        self._by_token.pop(host.token, None)
        host.process.end()
        host.requests.put_nowait(None)

    def evict(self, host: HostRecord, what: str) -> None:
        """What the host says makes no sense (FAULT-1): whoever started it ends it."""
        what = what[:MOST_SAID]
        host.error = host.error or f"It made no sense: {what}."
        self.placement.of(host.number).evict(host.process, what)

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
        """A host reports a stage of its start. Raises ValueError: the report makes no sense."""
        if not Stage.HOST_STARTED < report.stage <= Stage.HOST_READY:
            raise ValueError(f"a host's stage {report.stage}")
        if report.stage == Stage.HOST_READY and report.device_bytes:
            self.controller.set_budget(list(host.config.devices), report.device_bytes)
            known = self.topology.device_bytes
            if not known or report.device_bytes < known:
                self.topology = dataclasses.replace(self.topology, device_bytes=report.device_bytes)
        if report.stage == Stage.HOST_READY and report.coordinates:
            self.resources.tori.put(host.number, report.coordinates, report.wraps)
            self.topology = dataclasses.replace(self.topology, coordinates=self.resources.tori.coordinates)
        host.stage = max(host.stage, report.stage)
        if host.stage >= Stage.HOST_READY:
            host.ready.set()
        self.announce(pb.StartupEvent(stage=report.stage, host=host.number, pid=host.process.pid, detail=report.detail))
        self._look_ready()

    def _look_ready(self) -> None:
        """The cluster is ready when all hosts are that are to be there."""
        there = [host for host in self.hosts if not host.is_lost]
        if self.ready or self.done.done() or any(host.stage < Stage.HOST_READY for host in there):
            return
        self.ready = True
        for host in there:
            host.is_served, host.opened_at = True, 0
        self.announce(pb.StartupEvent(stage=Stage.CLUSTER_READY, host=-1, detail=self.topology.describe()))

    def _start_timeout(self) -> None:
        if self.ready or self.done.done():
            return
        late = [host for host in self.hosts if not host.is_lost and host.stage < Stage.HOST_READY]
        stages = ", ".join(f"{host.name}: {Stage.Stage.Name(host.stage)}" for host in late) or "the fork server"
        report = late[0].exit_report() if late else self.here.log_tail()
        limit = self.config.options.start_timeout_s
        self.fail(errors.ConnectError(f"the cluster was not ready after {limit:g} s; waiting for {stages}. {report}"))

    # -- ends --------------------------------------------------------------------------------------------------------

    def fail(self, failure: errors.PathwaysError) -> None:
        """Ends the cluster with an error, which goes to every client and watcher. Only the first end counts."""
        if self.done.done():
            return
        self.failure = failure
        error = pb.Error(type=type(failure).__name__, message=str(failure))
        is_meant = isinstance(failure, errors.ClusterClosedError)
        _log.log(logging.INFO if is_meant else logging.ERROR, "the cluster ends: %s: %s", error.type, error.message)
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
        self.here.end()
        if self.controller is not None:
            self.controller.stop()
        self.agents.close()
        if self._supervisor_fd >= 0 and is_readable(self._supervisor_fd):
            shutil.rmtree(self.config.directory, ignore_errors=True)

    def register_plan(self, program: ProgramRecord) -> None:
        """Gives the native controller the client whose runs may name a program, and the hosts of its runs (TRUST-1)."""
        used = sorted({device for binding in program.bindings for device in binding})
        devices = [(device // self.topology.devices_per_host, device) for device in used]
        self.controller.register_plan(program.number, program.client, self.numbers.group(program.stored), devices)
