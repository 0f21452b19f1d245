"""The one reader of a cluster's statistics: for `pathways top`, the metrics and the dashboard. No client.

It keeps its connection, because a look by a new one costs ten times as much. One whose cluster has ended, or whose
connection has broken, opens another one at the next look. Any thread may look: one at a time does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping

import grpc

from pathways import errors
from pathways.cluster.operator import Access, translated, way_to
from pathways.protocol import control_pb2 as pb
from pathways.protocol import control_pb2_grpc as rpc
from pathways.protocol import wire

#: The device time of a client on a device, in nanoseconds since the start of the host.
BusyTimes = Mapping[tuple[int, int, int, int], int]  # by host, pid of the host, client, device of the host


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A cluster's statistics, and when they were read by `time.monotonic`."""

    stats: pb.StatsReply
    at: float


class Snapshots:
    """Reads the statistics of the cluster at `address`. A context manager, which closes it."""

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open: contextlib.ExitStack | None = None  # this and what follows are guarded by _lock
        self._way: Access
        self._stub: rpc.ControllerStub
        self._last: Snapshot | None = None

    def look(self, max_age_s: float = 0.0) -> Snapshot:
        """The statistics, at most so old.

        Raises:
            ConnectError: no cluster listens there, or the controller does not answer in time.
            PermissionDeniedError: this user may not connect there.
        """
        with self._lock:
            if self._last is not None and time.monotonic() - self._last.at <= max_age_s:
                return self._last
            is_new = self._open is None
            try:
                stats = self._stats()
            except errors.PathwaysError:
                self._close()
                if is_new:
                    raise
                stats = self._stats()  # the cluster at this address may be another one by now
            self._last = Snapshot(stats, time.monotonic())
            return self._last

    def logs(self, request: pb.LogsRequest) -> Iterator[pb.LogPart]:
        """See `operator.logs`."""
        with self._lock:
            self._connect()
            stub, way = self._stub, self._way
        try:
            yield from stub.Logs(request, timeout=self._timeout_s, metadata=wire.bearer(way.token))
        except grpc.RpcError as error:
            raise translated(self.address, error) from None

    def _stats(self) -> pb.StatsReply:
        self._connect()
        try:
            reply: pb.StatsReply = self._stub.Stats(
                pb.StatsRequest(), timeout=self._timeout_s, metadata=wire.bearer(self._way.token)
            )
        except grpc.RpcError as error:
            raise translated(self.address, error) from None
        return reply

    def _connect(self) -> None:
        if self._open is not None:
            return
        with contextlib.ExitStack() as stack:
            self._way = stack.enter_context(way_to(self.address))
            channel = stack.enter_context(grpc.insecure_channel(self._way.control, options=wire.CHANNEL_OPTIONS))
            self._stub = rpc.ControllerStub(channel)
            self._open = stack.pop_all()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        with self._lock:
            self._close()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def busy_times(stats: pb.StatsReply) -> BusyTimes:
    """See `BusyTimes`. A host that was started again counts from 0, and has another pid."""
    return {
        (host.host, host.pid, each.client, each.device): each.busy_ns
        for host in stats.hosts
        for each in host.counts.busy
    }


def device_use(before: pb.StatsReply, after: pb.StatsReply, seconds: float) -> dict[int, dict[int, float]]:
    """By device and client: the part of the time in which the device was busy for the client."""
    use: dict[int, dict[int, float]] = {}
    was = busy_times(before)
    silent = {(host.host, host.pid) for host in before.hosts if not host.HasField("counts")}  # it had not answered
    devices = {host.host: host.devices for host in after.hosts}
    for key, busy_ns in busy_times(after).items():
        host, _, client, device = key
        if key[:2] not in silent and (spent := busy_ns - was.get(key, 0)) > 0:
            use.setdefault(devices[host][device], {})[client] = spent / 1e9 / seconds
    return use


def client_names(stats: pb.StatsReply) -> dict[int, str]:
    """What people call each client, by its number."""
    return {each.client: each.name or f"client {each.client}" for each in stats.clients}


def memory_of_clients(stats: pb.StatsReply) -> dict[int, int]:
    """The bytes that each client has on devices, summed over all of them, by its number."""
    held: dict[int, int] = {}
    for host in stats.hosts:
        for account in host.counts.memory.accounts:
            held[account.client] = held.get(account.client, 0) + account.bytes
    return held
