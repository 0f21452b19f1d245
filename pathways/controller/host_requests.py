"""The controller's requests to hosts, and their answers: reports with the request's number.

END-1: nothing waits for a host that is lost (ERR-2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from typing import Any

from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.pending_answers import PendingAnswers
from pathways.controller.records import HostRecord
from pathways.process import fd_passing
from pathways.protocol import control_pb2 as pb

STATS_TIMEOUT_S = 2.0


class HostRequests:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager) -> None:
        self._cluster = cluster
        self._answers: PendingAnswers[pb.HostReport | None] = PendingAnswers()

    async def ask(
        self, host: HostRecord, request: pb.HostRequest, timeout_s: float | None = None
    ) -> pb.HostReport | None:
        """Sends a host a request, which gets a number, and returns its answer; None when the host is lost.

        Raises:
            TimeoutError: the host did not answer in time.
            PathwaysError: the cluster ended.
        """
        if host.is_lost:
            return None
        request.request = self._answers.new_number()
        answer = self._answers.expect(host.number, request.request)
        host.requests.put_nowait(request)
        try:
            return await self._cluster.unless_ended(answer, timeout_s)
        finally:
            answer.cancel()

    def expect_all(
        self, client: int, without: Container[int] = ()
    ) -> tuple[int, list[asyncio.Future[pb.HostReport | None]]]:
        """The number of a request that every host gets in the order, as a command for a client, and their answers.
        They fail when the client is gone (OWN-1). Hosts that are not in the order get no such request. `without`: hosts
        that do not have the client yet: they do not answer.
        """
        number = self._answers.new_number()
        there = [host for host in self._cluster.hosts if host.opened_at >= 0 and not host.is_lost]
        asked = [host.number for host in there if host.number not in without]
        return number, [self._answers.expect(host, number, client) for host in asked]

    async def hand_over(
        self, host: HostRecord, request: pb.HostRequest, message: fd_passing.Message, segment: Any, timeout_s: float
    ) -> str:
        """Gives a host a segment, and asks it to use it. Returns the host's error text; empty for success, and for a
        host that is lost.

        Raises:
            HostLostError: the host has not answered in `timeout_s` seconds.
        """
        try:
            if not host.is_lost:
                host.process.hand_over(message, segment)
        except fd_passing.Closed:  # the process has ended; the controller is about to notice
            return ""
        answer = await self._ask_in_time(host, request, timeout_s)
        return answer.client_attached.message if answer is not None else ""

    async def _ask_in_time(self, host: HostRecord, request: pb.HostRequest, timeout_s: float) -> pb.HostReport | None:
        try:
            return await self.ask(host, request, timeout_s)
        except TimeoutError:
            raise errors.HostLostError(f"{host.name} did not answer in {timeout_s:g} s") from None

    async def replace_peers(
        self, host: HostRecord, request: pb.ReplacePeers, segments: Mapping[int, Any], timeout_s: float
    ) -> dict[int, str]:
        """Gives a host the successors of lost hosts. Returns, by successor, why the host refuses it; nothing for a host
        that is lost.

        Args:
            host: the host that gets them.
            request: may go to several hosts.
            segments: by number, of the successors. A host gets those of its own machine.
            timeout_s: how long the host may take for all of them.

        Raises:
            HostLostError: the host has not answered in time.
        """
        untaken: dict[int, str] = {}
        try:
            for each in request.successors if not host.is_lost else ():
                if each.has_segment:
                    host.process.hand_over({"kind": "peer", "peer": each.host}, segments[each.host])
        except fd_passing.Closed:
            return {}
        except BlockingIOError:  # what it was not given must not be in the request: it would wait for the segments
            given = list(request.successors).index(each)
            untaken = {
                each.host: "it has not taken what it was given before" for each in list(request.successors)[given:]
            }
            request = pb.ReplacePeers(successors=list(request.successors)[:given])
        answer = await self._ask_in_time(host, pb.HostRequest(replace_peers=request), timeout_s)
        refused = answer.peers_replaced.refused if answer is not None else ()
        return untaken | {each.number: each.error.message for each in refused}

    async def counts(self, host: HostRecord) -> pb.HostCounts | None:
        """What a host has done, and does; None when it does not answer in time."""
        answer = await self._ask_soon(host, pb.HostRequest(report_stats=Empty()))
        return answer.stats if answer is not None and answer.HasField("stats") else None

    async def analysis(self, host: HostRecord, program: int) -> pb.Analysis:
        """A host's analysis of a program; empty when it does not answer in time."""
        answer = await self._ask_soon(host, pb.HostRequest(analyze=pb.ProgramRequest(program_id=program)))
        return answer.analysis if answer is not None else pb.Analysis()

    async def _ask_soon(self, host: HostRecord, request: pb.HostRequest) -> pb.HostReport | None:
        if not host.ready.is_set():
            return None
        try:
            return await self.ask(host, request, STATS_TIMEOUT_S)
        except TimeoutError:
            return None

    def answered(self, host: HostRecord, report: pb.HostReport) -> None:
        """Takes in a host's answer."""
        self._answers.answered(host.number, report.request, report)

    def host_lost(self, host: HostRecord) -> None:
        """Every open request to a host ends without an answer."""
        self._answers.gone(host.number, None)

    def client_gone(self, client: int, error: Exception) -> None:
        """Every open request of `expect_all` for a client fails."""
        self._answers.dropped(client, error)
