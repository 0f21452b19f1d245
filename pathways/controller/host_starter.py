"""What starts hosts: on this machine the fork server, on another machine its agent (`agents.py`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Protocol

from pathways.process import environment, fd_passing, log_files
from pathways.process.config import ClusterOptions, HostConfig
from pathways.process.host_processes import HostProcess, HostProcesses


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


class HostStarter(Protocol):
    """Starts hosts."""

    async def ready(self, timeout_s: float | None = None) -> None:
        """Waits until it can start hosts."""

    def launch(self, config: HostConfig, token: str, segment: Any) -> StartedHost:
        """Starts a host, which has this secret for its session, and this segment in the controller's process."""


class HostStarterHere(HostProcesses):
    """Starts hosts on this machine."""

    def __init__(self, options: ClusterOptions, platform: str, directory: str) -> None:
        self._options = options
        self._platform = platform
        self._directory = directory
        super().__init__(
            "pathways.host.main:main",
            options.host_modules,
            environment.host_environment(options, platform, 0, os.environ),
            os.path.join(directory, "logs", "fork-server.log"),
        )

    def launch(self, config: HostConfig, token: str, segment: Any) -> HostProcess:
        """See `HostStarter`."""
        log_path = log_files.host_log(self._directory, config.host, config.incarnation)
        env = environment.host_environment(self._options, self._platform, config.host, os.environ)
        return self.start_host(config, env, log_path, token)


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
