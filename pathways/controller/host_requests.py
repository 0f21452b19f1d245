"""The controller's requests to hosts, and their answers. Nothing waits for a host that is lost (ERR-2)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.records import HostRecord
from pathways.process import fd_passing
from pathways.protocol import control_pb2 as pb

STATS_TIMEOUT_S = 2.0


class HostRequests:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager) -> None:
        self._cluster = cluster
        # Requests that hosts have not answered yet. The key: kind of request, host, its incarnation, a number.
        self._asked: dict[tuple[str, int, int, int], asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)  # of requests that are about no one thing

    async def ask(self, host: HostRecord, what: str, number: int, request: pb.HostRequest, timeout_s: float) -> Any:
        """Sends a host a request and returns its answer; empty when the host is lost.

        Raises:
            TimeoutError: the host did not answer in time.
            PathwaysError: the cluster ended.
        """
        if host.is_lost:
            return ""
        key = (what, host.number, host.incarnation, number)
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        host.requests.put_nowait(request)
        try:
            return await self._cluster.unless_ended(answer, timeout_s)
        finally:
            del self._asked[key]

    async def hand_over(
        self,
        host: HostRecord,
        what: str,
        number: int,
        request: pb.HostRequest,
        message: fd_passing.Message,
        segment: Any,
        timeout_s: float,
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
        return str(await self._ask_in_time(host, what, number, request, timeout_s))

    async def _ask_in_time(
        self, host: HostRecord, what: str, number: int, request: pb.HostRequest, timeout_s: float
    ) -> Any:
        try:
            return await self.ask(host, what, number, request, timeout_s)
        except TimeoutError:
            raise errors.HostLostError(f"{host.name} did not answer in {timeout_s:g} s") from None

    def new_number(self) -> int:
        """A number for a request that is about no one thing."""
        return next(self._numbers)

    async def replace_peers(
        self, host: HostRecord, request: pb.ReplacePeers, segments: Mapping[int, Any], timeout_s: float
    ) -> dict[int, str]:
        """Gives a host the successors of lost hosts. Returns, by successor, why the host refuses it; nothing for a host
        that is lost.

        Args:
            host: the host that gets them.
            request: may go to several hosts, with one number.
            segments: by number, of the successors that have a segment there.
            timeout_s: how long the host may take for all of them.

        Raises:
            HostLostError: the host has not answered in time.
        """
        untaken: dict[int, str] = {}
        try:
            for each in request.successors if segments and not host.is_lost else ():
                host.process.hand_over({"kind": "peer", "peer": each.host}, segments[each.host])
        except fd_passing.Closed:
            return {}
        except BlockingIOError:  # what it was not given must not be in the request: it would wait for the segments
            given = list(request.successors).index(each)
            untaken = {
                each.host: "it has not taken what it was given before" for each in list(request.successors)[given:]
            }
            request = pb.ReplacePeers(request=request.request, successors=list(request.successors)[:given])
        asked = pb.HostRequest(replace_peers=request)
        answer = await self._ask_in_time(host, "peers_replaced", request.request, asked, timeout_s)
        return untaken | ({each.number: each.error.message for each in answer.refused} if answer else {})

    async def stats(self, host: HostRecord, program: int = 0) -> str:
        """A host's driver statistics, or its analysis of a program, as JSON; `{}` when it does not answer in time."""
        if not host.ready.is_set():
            return "{}"
        number = next(self._numbers)
        request = pb.HostRequest(report_stats=pb.ReportStats(request=number, program_id=program))
        try:
            return str(await self.ask(host, "stats", number, request, STATS_TIMEOUT_S)) or "{}"
        except TimeoutError:
            return "{}"

    def answered(self, host: HostRecord, what: str, number: int, answer: Any) -> None:
        """Takes in a host's answer."""
        settle(self._asked.get((what, host.number, host.incarnation, number)), answer)

    def host_lost(self, host: HostRecord) -> None:
        """Completes every open request to a host with an empty answer."""
        for (_, number, incarnation, _), answer in list(self._asked.items()):
            if (number, incarnation) == (host.number, host.incarnation):
                settle(answer, "")


def settle(future: asyncio.Future[Any] | None, value: Any) -> None:
    """Completes a future that is there and not done."""
    if future is not None and not future.done():
        future.set_result(value)
