"""The profile of a cluster: has XLA's profiler record on every host, and hands on what they recorded.

TRUST-1: a host's profile shows what all clients run there, with names. So only an operator, and the client that started
the cluster, get one. One profile is recorded at a time. It ends with the caller's call in any way, also because its
process was killed. A host that does not answer holds up nobody: the others' parts come as they are there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.host_requests import HostRequests
from pathways.controller.records import HostRecord
from pathways.protocol import control_pb2 as pb

#: Seconds that a host has to begin a profile, and to send it. The caller waits a little longer.
ANSWER_S = 3.5
#: Seconds between two looks for hosts that have come back.
PERIOD_S = 0.5


class Profiles:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, requests: HostRequests) -> None:
        self._cluster = cluster
        self._requests = requests
        self._who: str | None = None  # records now

    async def record(self, who: str, over: asyncio.Event) -> AsyncGenerator[pb.ProfilePart, None]:
        """Profiles until `over` is set; first yields a part that says that it is on, and in the end those of the hosts.

        Raises:
            TraceFileError: somebody profiles already.
        """
        if self._who is not None:
            raise errors.TraceFileError(
                f"{self._who} profiles this cluster now, and one profile is recorded at a time: try again when it is "
                "over"
            )
        self._who = who
        started: dict[int, HostRecord] = {}
        try:
            for part in await self._start_new(started):
                yield part
            yield pb.ProfilePart(host=-1)
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), PERIOD_S)
                if not over.is_set():
                    for part in await self._start_new(started):
                        yield part
            asked = [self._ask(host, is_on=False) for host in started.values()]
            for answer in asyncio.as_completed(asked):
                yield await answer
            started.clear()
        finally:
            self._who = None
            for host in started.values():  # the call was cut; nobody waits for the answers
                host.requests.put_nowait(pb.HostRequest(profile=pb.HostProfile(is_on=False)))

    async def _start_new(self, started: dict[int, HostRecord]) -> list[pb.ProfilePart]:
        """Starts the profile on hosts that have none yet: at first all, later the successors of lost ones."""
        new = []
        remarks = []
        for host in self._cluster.hosts:
            if started.get(host.number) is host or not host.ready.is_set() or host.is_lost:
                continue
            if host.number in started:
                remarks.append(_lost(host.number))
            started[host.number] = host
            new.append(self._ask(host, is_on=True))
        return [*remarks, *(part for part in await asyncio.gather(*new) if part.remark)]

    async def _ask(self, host: HostRecord, *, is_on: bool) -> pb.ProfilePart:
        request = pb.HostRequest(profile=pb.HostProfile(is_on=is_on))
        try:
            report = await self._requests.ask(host, request, ANSWER_S)
        except TimeoutError:
            what = "its profile may be missing" if is_on else "its profile is missing"
            return pb.ProfilePart(
                host=host.number, remark=f"host {host.number} did not answer within {ANSWER_S:g} s: {what}"
            )
        if report is None:
            return _lost(host.number)
        part = report.profiled
        part.host = host.number
        return part


def _lost(number: int) -> pb.ProfilePart:
    return pb.ProfilePart(host=number, remark=f"host {number} was lost: what it had recorded is missing")
