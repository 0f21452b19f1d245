"""The controller's own machine: hosts that it starts by its fork server, and that share memory with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pathways import errors
from pathways.controller.log_sources import LogsHere
from pathways.controller.machines import ProgramText, StartedHost
from pathways.process import environment, log_files
from pathways.process.config import ControllerConfig, HostConfig
from pathways.process.host_processes import HostProcess, HostProcesses


class ThisMachine(HostProcesses):
    """See `machines.Machine`. Belongs to the main thread: see `HostProcesses`."""

    name = ""
    shares_memory = True

    def __init__(self, config: ControllerConfig, native: Any, fail: Callable[[errors.PathwaysError], object]) -> None:
        """Starts nothing yet. `fail` ends the cluster."""
        self._options = config.options
        self._platform = config.platform
        self._directory = config.directory
        self._native = native
        self._fail = fail
        self._hosts: dict[int, HostProcess] = {}  # by number, the last one that was started
        #: By the hosts of an island: address and service of its present group.
        self._coordinators: dict[tuple[int, ...], tuple[str, Any]] = {}
        self.logs = LogsHere(config.directory)
        super().__init__(
            "pathways.host.main:main",
            self._options.host_modules,
            environment.host_environment(self._options, self._platform, 0, os.environ),
            os.path.join(self._directory, "logs", "fork-server.log"),
        )

    def begin(self, islands: Iterable[tuple[int, ...]]) -> None:
        """Starts what the first hosts of islands need; the fork server goes on with its imports meanwhile."""
        self.start()
        for island in islands:
            self._coordinator(island, 0)

    def new_segment(self, host: int) -> Any:
        """See `Machine`."""
        sizes = self._options
        return self._native.host_segment(host, sizes.hosts, sizes.host_ring_bytes, sizes.host_arena_bytes)

    def launch(self, config: HostConfig, token: str, segments: Sequence[Any]) -> HostProcess:
        """See `Machine`."""
        config = dataclasses.replace(
            config,
            coordinator=self._coordinator(config.island, config.incarnation),
            segment_fds=tuple(-1 if segment is None else segment.fd for segment in segments),
        )
        log_path = log_files.host_log(self._directory, config.host, config.incarnation)
        env = environment.host_environment(self._options, self._platform, config.host, os.environ)
        host = self._hosts[config.host] = self.start_host(config, env, log_path, token)
        return host

    def hand_program(self, program: ProgramText, hosts: Sequence[int]) -> None:
        """See `Machine`."""
        for host in hosts:
            self._hosts[host].send_program(program.data)

    def _coordinator(self, island: tuple[int, ...], incarnation: int) -> str:
        """Where an incarnation of the group of an island's hosts finds its coordination service; empty: it needs none.

        The first host of an incarnation gets a new service, and the old one ends, so that no state of it remains.
        """
        if len(island) == 1:
            return ""
        address = f"unix:{self._directory}/island-{island[0]}-{incarnation}.sock"
        old_address, old = self._coordinators.get(island, ("", None))
        if address != old_address:
            from pathways._jaxlib.coordination import start_service, stop_service

            if old is not None:
                stop_service(old)
            self._coordinators[island] = (address, start_service(address, len(island)))
        return address

    def stream_of(self, host: int, incarnation: int) -> str:
        """See `Machine`. For hosts that behave as if they were on another machine: see `LocalCluster.machines`."""
        return f"unix:{self._directory}/stream-{host}-{incarnation}.sock"

    def clock_ahead_ns(self) -> int:
        """See `Machine`."""
        return 0

    def evict(self, process: StartedHost, why: str) -> None:
        """Kills the host; its island starts again."""
        process.kill()

    def cannot_start(self, why: str) -> None:
        """Ends the cluster: no other machine takes the place of this one."""
        self._fail(errors.HostLostError(f"{why}; the cluster has ended with it; connect again."))
