"""The trace of a cluster: switches it on at the native controller and at every host, and collects what they record.

The cluster is traced for as long as the caller of `Trace` keeps the call open. When the call ends in any way, also
because its process was killed, everything is switched off.

TRUST-1: a guest's trace names only the guest's own programs. Of other clients it has the number, and what their runs
did when. The client that started the cluster, and an operator, see every name.

One trace is recorded at a time, and no guest keeps others from theirs for ever. A guest's trace ends at once when an
operator, or the client that started the cluster, asks for one, and after `LEASE_S` when another guest does. Who
recorded it gets what was recorded, and an error that says who ended it. It does not matter whether the guest reads what
it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.host_requests import HostRequests
from pathways.controller.records import ClientRecord, HostRecord
from pathways.protocol import control_pb2 as pb

#: Runs that the controller keeps until they are taken: 3.5 MiB.
CAPACITY = 1 << 16
#: Seconds between two takes. A host's ring has room for 260,000 records per second.
PERIOD_S = 0.25
#: A host that launches may be slow to answer.
ANSWER_S = 5.0
#: Seconds for which a guest's trace does not give way to another guest's.
LEASE_S = 60.0
#: Seconds that a trace which was ended for another one has to send its last records.
GIVE_WAY_S = 2.0

_Action = pb.HostTrace


class _Trace:
    """A trace that is recorded, until `finished`."""

    def __init__(self, who: str, is_guest: bool, over: asyncio.Event) -> None:
        """`who` records it; see `Recordings.record`, also for `over`."""
        self.who, self.is_guest, self.over = who, is_guest, over
        self.since = time.monotonic()
        self.ended_by = ""  # who ended it for another trace; empty: nobody
        self.finished = asyncio.Event()

    def gives_way_in(self, to_guest: bool) -> float:
        """Seconds until it gives way to a trace of a guest, or of somebody else; infinite: it never does."""
        if not self.is_guest:
            return float("inf")
        return max(0.0, self.since + LEASE_S - time.monotonic()) if to_guest else 0.0

    def give_way(self, to: str) -> None:
        """Ends it, because `to` wants to trace."""
        self.ended_by = self.ended_by or to
        self.over.set()

    def ended(self) -> errors.TraceFileError:
        """The error of who records it."""
        return errors.TraceFileError(
            f"{self.ended_by} has ended this trace to record one: one trace is recorded at a time, and a guest's gives "
            f"way to an operator's, and after {LEASE_S:g} s to another guest's; trace again later"
        )


class Recordings:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, clients: Mapping[int, ClientRecord], requests: HostRequests) -> None:
        """`clients`: those that there are now, by number; the client manager changes it."""
        self._cluster = cluster
        self._clients = clients
        self._requests = requests
        self._current: _Trace | None = None

    async def record(self, who: str, own: set[int] | None, over: asyncio.Event) -> AsyncGenerator[pb.TracePart, None]:
        """Traces until `over` is set, and yields what is recorded.

        Args:
            who: the caller, for people.
            own: the numbers of the clients whose names the caller may see; None: of all.
            over: ends the trace.

        Raises:
            TraceFileError: somebody traces already, and does not give way; or this trace had to give way.
        """
        mine = _Trace(who, own is not None, over)
        await self._take_turn(mine)
        started: dict[int, HostRecord] = {}
        try:
            self._cluster.controller.start_trace(CAPACITY)
            for part in await self._start_new(mine, started):
                yield _seen_by(own, part)
            yield self._about(own)  # from now on everything is recorded
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), PERIOD_S)
                if over.is_set():
                    break
                parts = await self._take(started, _Action.TAKE)
                self._check_turn(mine)
                for part in [*parts, *await self._start_new(mine, started)]:
                    yield _seen_by(own, part)
            self._check_turn(mine)
            last = await self._take(started, _Action.STOP)
            self._check_turn(mine)
            self._cluster.controller.stop_trace()
            # The last of them are the clients that joined meanwhile.
            for part in [*last, self._taken(), self._about(own)]:
                yield _seen_by(own, part)
            if mine.ended_by:
                raise mine.ended()
        finally:
            self._finish(mine)

    async def _take_turn(self, mine: _Trace) -> None:
        """Makes a trace the present one, when the present one gives way or is over.

        Raises:
            TraceFileError: the present one does not give way now.
        """
        while (current := self._current) is not None:
            if seconds := current.gives_way_in(mine.is_guest):
                when = "" if seconds == float("inf") else f", or in {seconds:.0f} s, when it gives way"
                raise errors.TraceFileError(
                    f"{current.who} traces this cluster now, and one trace is recorded at a time: try again when it is "
                    f"over{when}"
                )
            current.give_way(mine.who)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(current.finished.wait(), GIVE_WAY_S)
            self._finish(current)  # although its caller may not read what it is sent
        self._current = mine

    def _check_turn(self, mine: _Trace) -> None:
        """Raises TraceFileError when the trace had to end while it waited: another one may be on now."""
        if self._current is not mine:
            raise mine.ended()

    def _finish(self, trace: _Trace) -> None:
        """Switches off whatever is on, if it is the present trace. It does not wait for the hosts."""
        trace.finished.set()
        if self._current is not trace:
            return
        self._current = None
        for host in self._cluster.hosts:
            host.requests.put_nowait(pb.HostRequest(trace=pb.HostTrace(action=_Action.STOP)))
        self._cluster.controller.stop_trace()
        self._cluster.controller.take_trace()

    async def _start_new(self, mine: _Trace, started: dict[int, HostRecord]) -> list[pb.TracePart]:
        """Starts the trace on hosts that have none yet: at first all, later the successors of lost ones.

        Raises:
            TraceFileError: the trace had to end meanwhile. Then the hosts are another trace's.
        """
        remarks: list[pb.TracePart] = []
        for host in self._cluster.hosts:
            if started.get(host.number) is host or not host.ready.is_set() or host.is_lost:
                continue
            if host.number in started:
                remarks.append(_missing(host))
            self._check_turn(mine)
            started[host.number] = host
            answer = await self._ask(host, _Action.START)
            if answer.remark:
                remarks.append(answer)
        return remarks

    async def _take(self, started: Mapping[int, HostRecord], action: _Action.Action) -> list[pb.TracePart]:
        hosts = [host for host in self._cluster.hosts if started.get(host.number) is host]
        parts = list(await asyncio.gather(*(self._ask(host, action) for host in hosts)))
        return [self._taken(), *parts]

    def _taken(self) -> pb.TracePart:
        records, dropped = self._cluster.controller.take_trace()
        return pb.TracePart(host=-1, records=records, dropped=dropped)

    async def _ask(self, host: HostRecord, action: _Action.Action) -> pb.TracePart:
        """A host's answer; one with a remark when it does not answer. It answers late requests too, in their order."""
        asked = pb.HostRequest(trace=pb.HostTrace(action=action))
        try:
            report = await self._requests.ask(host, asked, ANSWER_S)
        except TimeoutError:
            remark = f"host {host.number} did not answer within {ANSWER_S:g} s: some of its records are missing"
            return pb.TracePart(host=host.number, remark=remark)
        if report is None:
            return _missing(host)
        part = report.traced
        part.host = host.number
        part.clock_ahead_ns = self._cluster.placement.of(host.number).clock_ahead_ns()
        return part

    def _about(self, own: set[int] | None) -> pb.TracePart:
        """What the trace is of: the cluster's hosts, and the clients that there are now."""
        topology = self._cluster.topology
        about = pb.TraceAbout(
            cluster=topology.describe(),
            devices_per_host=topology.devices_per_host,
            hosts=topology.hosts,
            clients={
                client.number: client.terms.name if own is None or client.number in own else ""
                for client in self._clients.values()
            },
        )
        return pb.TracePart(host=-1, about=about, now_ns=time.monotonic_ns())


def _missing(host: HostRecord) -> pb.TracePart:
    remark = f"host {host.number} was lost: what it had recorded last is missing"
    return pb.TracePart(host=host.number, remark=remark)


def _seen_by(own: set[int] | None, part: pb.TracePart) -> pb.TracePart:
    """The part without the names of programs that the caller may not see (TRUST-1)."""
    for program in part.programs.values():
        if own is not None and program.client not in own:
            program.CopyFrom(pb.TracedProgram(client=program.client))
    return part
