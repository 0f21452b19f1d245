"""What `pathways logs` shows: the end of the log of the controller, of a host, or of a machine's agent.

A log is read in pieces, and the next one is asked for when the caller has taken the last one: so a slow caller makes
nobody wait, and nothing is kept for it.

Owned by the controller's event loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.log_sources import OWN, LogSource, NoSuchLog
from pathways.controller.machines import NoProcess
from pathways.process.log_files import LogPiece
from pathways.protocol import control_pb2 as pb

#: Seconds between two looks for more, of a log that is followed.
LOOK_S = 0.2
_MOST_LINES = 1 << 40


class Logs:
    """Finds who has the log that a request means."""

    def __init__(self, cluster: ClusterManager) -> None:
        self._cluster = cluster

    async def read(self, request: pb.LogsRequest) -> AsyncGenerator[pb.LogPart, None]:
        """The last lines that were asked for, and what is written from then on, if it is followed.

        Raises:
            ConnectError: there is no such process or log, or the log cannot be read now.
        """
        match request.WhichOneof("what"):
            case "host":
                log: _Log = _HostLog(self._cluster, request)
            case "machine":
                log = _OwnLog(self._cluster.agents.called(request.machine).logs)
            case _:
                log = _OwnLog(self._cluster.here.logs)
        piece = await log.piece(-1, min(request.lines, _MOST_LINES))
        size = piece.size
        while request.follow or piece.data:
            if piece.data:
                yield pb.LogPart(text=piece.data, restart=log.restart)
            if not request.follow and piece.end >= size:
                return  # what was written meanwhile is left out, so that a busy log has an end
            if piece.data:
                piece = await log.piece(piece.end, 0)
            elif log.is_begun_anew():
                piece = await log.piece(0, 0)
            else:
                await self._cluster.unless_ended(asyncio.ensure_future(asyncio.sleep(LOOK_S)))
                piece = await log.piece(piece.end, 0)


class _OwnLog:
    """The log of the controller, or of an agent."""

    restart = 0

    def __init__(self, source: LogSource) -> None:
        self._source = source

    async def piece(self, offset: int, lines: int) -> LogPiece:
        """See `LogSource.piece`."""
        try:
            return await self._source.piece(OWN, 0, offset, lines)
        except NoSuchLog:
            raise errors.ConnectError("its log is gone: somebody has removed the file") from None

    def is_begun_anew(self) -> bool:
        """Whether there is a newer log of it. Then that one is read from now on."""
        return False


class _HostLog:
    """The log of a host: of its last start, and if that is followed, of those that come after it; or of another one."""

    def __init__(self, cluster: ClusterManager, request: pb.LogsRequest) -> None:
        if not 0 <= request.host < cluster.topology.hosts:
            raise errors.ConnectError(f"no host {request.host}: the cluster has {cluster.topology.say_hosts()}")
        self._cluster = cluster
        self._host = request.host
        self._is_last = not request.HasField("restart")
        #: How often the host had been started again when the log began.
        self.restart = self._current() if self._is_last else request.restart

    def _current(self) -> int:
        return self._cluster.hosts[self._host].incarnation

    async def piece(self, offset: int, lines: int) -> LogPiece:
        """See `LogSource.piece`."""
        try:
            return await self._source().piece(self._host, self.restart, offset, lines)
        except NoSuchLog as error:
            there = ", ".join(map(str, error.incarnations)) or "none"
            if self.restart < 0:
                raise errors.ConnectError(f"host {self._host} has no log: no machine has brought it yet") from None
            raise errors.ConnectError(
                f"there is no log of host {self._host} after {self.restart} restarts where the host is; there are "
                f"those after so many restarts: {there}"
            ) from None

    def is_begun_anew(self) -> bool:
        """See `_OwnLog`."""
        if not self._is_last or self._current() <= self.restart:
            return False
        self.restart = self._current()
        return True

    def _source(self) -> LogSource:
        if (logs := self._cluster.placement.of(self._host).logs) is not None:
            return logs
        island = self._cluster.topology.island_of(self._host)
        host = self._cluster.hosts[self._host]
        if isinstance(host.process, NoProcess):
            raise errors.ConnectError(f"host {self._host} has no log: island {island} has not started as yet")
        raise errors.ConnectError(
            f"the log of host {self._host} is on a machine that is lost. {host.exit_report()} When its agent has "
            "joined again, --restart shows the logs that are still there"
        )


_Log = _OwnLog | _HostLog
