"""The hosts of an island on this machine, as the machine's agent runs them for a controller elsewhere.

The agent makes what the controller makes for hosts on its own machine: their segments, the coordination service of
their group (`rendezvous.py`), and the processes. The block of the controller, which is elsewhere, is a twin here, and
each client has memory here for what it puts (csrc/link).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways import errors
from pathways.agent.collective_tunnels import CollectiveTunnels, address_on_link
from pathways.agent.fabric import Fabric, everywhere
from pathways.agent.rendezvous import Rendezvous
from pathways.process import environment, log_files
from pathways.process.children import describe_exit
from pathways.process.config import ClusterOptions, HostConfig
from pathways.process.fd_passing import Closed
from pathways.process.host_processes import HostProcess, HostProcesses
from pathways.process.memory import memory_bytes
from pathways.process.pulses import Pulses
from pathways.protocol import agent_pb2 as pb

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0

Report = Callable[[pb.AgentReport], None]


@dataclasses.dataclass
class _Host:
    config: HostConfig
    segment: Any
    process: HostProcess
    silence: str = ""  # why it was killed: see pulses.py


def start_of(config: HostConfig, token: str) -> pb.StartHost:
    """What the controller says of a host to the agent that starts it; `config_of` reads it."""
    peers = [
        pb.StartHost.Peer(host=peer, incarnation=incarnation, stream=stream)
        for peer, (stream, incarnation) in enumerate(zip(config.streams, config.epochs, strict=True))
        if stream is not None and incarnation >= 0
    ]
    return pb.StartHost(
        host=config.host,
        token=token,
        incarnation=config.incarnation,
        predecessor_failure=config.predecessor_failure,
        predecessor_client=config.predecessor_client,
        machine=config.machine,
        peers=peers,
    )


def config_of(
    request: pb.StartHost,
    options: ClusterOptions,
    platform: str,
    here: Sequence[int],
    island: Sequence[int],
    device_count: int,
) -> HostConfig:
    """The configuration of a host, as far as its controller says it. `here`: the hosts of this machine. `island`: those
    of its island, of which each has so many devices.
    """
    peers: dict[int, tuple[str | None, int]]
    peers = {peer.host: (peer.stream, peer.incarnation) for peer in request.peers}
    peers |= dict.fromkeys(here, (None, request.incarnation))
    streams, epochs = zip(*(peers.get(host, ("", -1)) for host in range(max(peers) + 1)), strict=True)
    return HostConfig(
        host=request.host,
        options=options,
        island=tuple(island),
        device_count=device_count,
        platform=platform,
        incarnation=request.incarnation,
        predecessor_failure=request.predecessor_failure,
        predecessor_client=request.predecessor_client,
        machine=request.machine,
        streams=streams,
        epochs=epochs,
    )


def shape_here(options: ClusterOptions, hosts: int, devices: int) -> ClusterOptions:
    """The hosts of one machine, as if they were all of the cluster: what their environment depends on."""
    return dataclasses.replace(options, islands=1, hosts_per_island=hosts, devices_per_host=devices, max_machines=0)


class IslandHosts:
    """Owned by the event loop's thread, which is the main thread: see `HostProcesses`."""

    def __init__(
        self,
        directory: str,
        platform: str,
        options: ClusterOptions,
        here: Sequence[int],
        island: Sequence[int],
        device_count: int,
        native: Any,
        link: Any,
        processes: HostProcesses,
        report: Report,
        ports: Sequence[str],
        credentials: str,
        fabric: Fabric | None,
        rendezvous: Rendezvous,
        collectives: CollectiveTunnels | None,
    ) -> None:
        """Starts nothing yet.

        Args:
            directory: of the agent; `control.sock` there leads to the controller.
            platform: of the hosts.
            options: of the cluster.
            here: the hosts whose places this machine has.
            island: the hosts of their island.
            device_count: how many devices each of them has.
            native: the module that makes segments.
            link: the native link to the controller.
            processes: starts the hosts.
            report: tells the controller of a host.
            ports: where the hosts receive network transfers, in their order.
            credentials: the file of the machine's credentials, for these; empty: they are not encrypted.
            fabric: what collectives with hosts of other machines use.
            rendezvous: where the hosts meet those of their island's other machines.
            collectives: what carries the collectives, if the fabric is `link`.
        """
        self._directory = directory
        self._platform = platform
        self._options = options
        self._here = tuple(here)
        self._island = tuple(island)
        self._device_count = device_count
        self._shape = shape_here(options, len(here), device_count)
        self._native = native
        self._link = link
        self._processes = processes
        self._report = report
        self._ports = ports
        self._credentials = credentials
        self._fabric = fabric if len(here) < len(island) else None  # else they are all here
        self._rendezvous = rendezvous
        self._collectives = None if self._fabric is None else collectives
        self._coordinator = ""  # where the present group meets
        self._tell_ports = ""  # and says where its collectives listen
        self._controller = native.controller_segment()
        self._hosts: dict[int, _Host] = {}
        self._incarnation = -1
        self._segments: dict[int, Any] = {}  # of this incarnation
        self._loop = asyncio.get_running_loop()

    async def start(self, request: pb.StartHost) -> None:
        """Starts a host. The first one of an incarnation takes the place of the whole last incarnation."""
        config = config_of(request, self._options, self._platform, self._here, self._island, self._device_count)
        try:
            await self._processes.ready(START_TIMEOUT_S)
            if config.incarnation != self._incarnation:
                self._begin(config)
            self._start(config, request.token)
        except (errors.PathwaysError, OSError, RuntimeError) as error:
            self._tell_end(config, 1, f"The agent could not start it: {error}")

    def _begin(self, config: HostConfig) -> None:
        """Makes what all hosts of an incarnation share."""
        self.end()
        options = self._options
        self._incarnation = config.incarnation
        self._segments = {
            host: self._native.host_segment(
                host,
                self._here[-1] + 1 - self._here[0],
                options.host_ring_bytes,
                options.host_arena_bytes,
                link_ring_bytes=self._native.LINK_RING_BYTES,
                first_peer=self._here[0],
            )
            for host in self._here
        }
        self._coordinator = self._rendezvous.begin(config.incarnation, len(self._island))
        if self._collectives is not None:
            self._tell_ports = self._collectives.begin(config.incarnation)

    def _start(self, config: HostConfig, token: str) -> None:
        segments = self._segments
        config = dataclasses.replace(
            config,
            address=f"unix:{self._directory}/control.sock",
            coordinator=self._coordinator,
            fabric=self._address_of(config.host),
            tell_ports=self._tell_ports,
            parent=os.getpid(),
            controller_fd=self._controller.fd,
            segment_fds=tuple(segments[peer].fd if peer in segments else -1 for peer in range(len(config.streams))),
            stream=f"{everywhere()}:{self._ports[self._here.index(config.host)]}",
            is_linked=True,
            credentials=self._credentials,
        )
        self._link.add_host(config.host, config.incarnation, segments[config.host], self._controller)
        log = log_files.host_log(self._directory, config.host, config.incarnation)
        process = self._processes.start_host(config, self._environment(config), log, token)
        self._hosts[config.host] = _Host(config, segments[config.host], process)
        process.watch(self._loop, lambda: self._host_ended(config.host))
        _log.info("host %d begins, start %d, process %d", config.host, config.incarnation, process.pid)
        started = pb.FarHostStarted(host=config.host, incarnation=config.incarnation, pid=process.pid)
        self._report(pb.AgentReport(started=started))

    def _address_of(self, host: int) -> str:
        """Where a host's collectives listen."""
        if self._fabric is None:
            return HostConfig.fabric
        return self._fabric.address if self._collectives is None else address_on_link(host)

    def _environment(self, config: HostConfig) -> Mapping[str, str]:
        found = environment.host_environment(self._shape, self._platform, self._here.index(config.host), os.environ)
        if self._fabric is None:
            return found
        return {**found, **environment.fabric_variables(self._platform, self._fabric.interface)}

    def _host_ended(self, number: int) -> None:
        host = self._hosts[number]
        returncode = host.process.poll()
        text = host.process.log_tail()
        how = "is told to end" if returncode is None else describe_exit(returncode)
        _log.warning("host %d, process %d, %s", number, host.process.pid, how)
        if host.silence:
            text = f"{host.silence} {text}"
        self._tell_end(host.config, 0 if returncode is None else returncode, text)

    def _tell_end(self, config: HostConfig, returncode: int, text: str) -> None:
        ended = pb.FarHostEnded(host=config.host, incarnation=config.incarnation, returncode=returncode, log_tail=text)
        self._report(pb.AgentReport(ended=ended))

    async def watch_pulses(self) -> None:
        """Kills hosts that are stopped or frozen, until it is cancelled (END-1)."""

        def silent(host: _Host, why: str) -> None:
            host.silence = why
            host.process.kill()

        await Pulses(self._native.pulse_of).watch(lambda: list(self._hosts.values()), silent)

    def end_host(self, number: int, incarnation: int) -> None:
        """Kills a host, if this incarnation of it is there."""
        host = self._hosts.get(number)
        if host is not None and host.config.incarnation == incarnation:
            self._remove(number)

    def hand_client(self, request: pb.HandClient) -> None:
        """Gives a host the memory of a client's blocks, if this incarnation of the host is there."""
        host = self._hosts.get(request.host)
        if host is None or host.config.incarnation != request.incarnation:
            return
        # A host keeps a block only for an array that is booked (MEM-6). Nobody pays for pages that are not touched.
        twin = self._link.twin_client(request.client, request.arena_bytes + memory_bytes())
        with contextlib.suppress(Closed):  # its end is about to be reported
            host.process.hand_over({"kind": "client", "client": request.client}, twin)

    def hand_program(self, handed: pb.HandProgram) -> None:
        """Gives a program to those hosts of this incarnation that are there."""
        program = handed.program  # each read of it is a copy
        for number in handed.hosts:
            host = self._hosts.get(number)
            if host is not None and host.config.incarnation == handed.incarnation:
                host.process.send_program(program)

    def end(self) -> None:
        """Kills all hosts, and ends their group."""
        for number in list(self._hosts):
            self._hosts[number].process.kill()
        for number in list(self._hosts):
            self._remove(number)
        self._rendezvous.end()
        if self._collectives is not None:
            self._collectives.end()

    def _remove(self, number: int) -> None:
        host = self._hosts.pop(number)
        host.process.end()
        self._link.remove_host(number)
