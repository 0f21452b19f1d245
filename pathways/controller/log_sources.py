"""Where logs lie: on this machine, or on one whose agent is asked for them. Used by `logs.py`.

What an agent answers is data: only the piece that was asked for is taken, and no more than its most bytes.

Owned by the controller's event loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from pathways import errors
from pathways.controller.pending_answers import PendingAnswers
from pathways.process import log_files
from pathways.process.log_files import LogPiece
from pathways.protocol import agent_pb2

#: An agent answers within this time, in seconds.
ANSWER_S = 5.0
_AGENT = 0  # the only one that answers
OWN = -1  # instead of a host's number: the log of the process that reads


class NoSuchLog(Exception):
    """The log is not there; `incarnations` of that host are."""

    def __init__(self, incarnations: Sequence[int]) -> None:
        super().__init__()
        self.incarnations = incarnations


class LogSource(Protocol):
    """The logs of one machine."""

    async def piece(self, host: int, incarnation: int, offset: int, lines: int) -> LogPiece:
        """See `log_files.read_piece`; host `OWN`: the log of the controller or agent itself.

        Raises:
            NoSuchLog: there is no such log.
            ConnectError: it cannot be read, or the machine is lost.
        """


class LogsHere:
    """The logs in the controller's directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def piece(self, host: int, incarnation: int, offset: int, lines: int) -> LogPiece:
        """See `LogSource`."""
        path = (
            log_files.own_log(self._directory)
            if host == OWN
            else log_files.host_log(self._directory, host, incarnation)
        )
        try:
            return await asyncio.to_thread(log_files.read_piece, path, offset, lines)
        except FileNotFoundError:
            raise NoSuchLog(log_files.incarnations(self._directory, host)) from None
        except OSError as error:
            raise errors.ConnectError(f"the log cannot be read: {error}") from error


class LogsThere:
    """The logs on a machine whose agent is asked for them."""

    def __init__(self, machine: str, ask: Callable[[agent_pb2.AgentRequest], None]) -> None:
        self._machine = machine
        self._ask = ask
        self._answers: PendingAnswers[agent_pb2.LogPiece] = PendingAnswers()
        self._failure: errors.ConnectError | None = None

    async def piece(self, host: int, incarnation: int, offset: int, lines: int) -> LogPiece:
        """See `LogSource`."""
        if self._failure is not None:
            raise self._failure
        number = self._answers.new_number()
        answer = self._answers.expect(_AGENT, number)
        read = agent_pb2.ReadLog(request=number, host=host, incarnation=incarnation, offset=offset, lines=lines)
        self._ask(agent_pb2.AgentRequest(read_log=read))
        try:
            found = await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            raise errors.ConnectError(
                f"the agent of machine {self._machine} did not answer in {ANSWER_S:g} s"
            ) from None
        if found.is_missing:
            raise NoSuchLog(list(found.incarnations))
        if found.error:
            raise errors.ConnectError(f"machine {self._machine} cannot read the log: {found.error[:1000]}")
        return LogPiece(found.data[: log_files.MOST_BYTES], found.end, found.size)

    def answered(self, piece: agent_pb2.LogPiece) -> None:
        """Takes in what the agent has answered."""
        self._answers.answered(_AGENT, piece.request, piece)

    def lost(self, why: str) -> None:
        """The agent answers no more."""
        self._failure = errors.ConnectError(f"machine {self._machine} is lost: {why}")
        self._answers.gone(_AGENT, self._failure)
