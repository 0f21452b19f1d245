"""What a process that is no client asks of a cluster: the operator's calls, each on a connection of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import os
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.agent.controller_session import ControllerSession, Endpoint, is_far
from pathways.cluster.address import Address, first_message, open_connection
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.recording import RemoteRecording
from pathways.plan.topology import Topology
from pathways.process.client_terms import ClientTerms
from pathways.protocol import control_pb2 as pb
from pathways.protocol import control_pb2_grpc as rpc
from pathways.protocol import wire
from pathways.protocol.serialization import load


def inspect(address: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """The same as `RemoteControl.cluster_stats`, for a process that is no client. Raises as `look` does."""
    return wire.load_stats(look(address, timeout_s))


def describe(stats: pb.StatsReply) -> str:
    """See `Topology.describe`."""
    return load(stats.topology, Topology).describe()


def look(address: str, timeout_s: float = 10.0) -> pb.StatsReply:
    """The statistics of a cluster, for a process that is no client.

    Raises:
        ConnectError: no cluster listens there, or the controller does not answer in time.
    """
    with way_to(address) as way:
        reply: pb.StatsReply = _answer(address, way, "Stats", pb.StatsRequest(), timeout_s)
    return reply


def suspend(address: str, client: int, *, to_disk: bool = False) -> int:
    """Suspends a client of the cluster at `address`, for a process that is no client. Returns the bytes that left the
    devices.

    Raises:
        ConnectError: no cluster listens there.
        ResourceExhaustedError: a host has no room; the client goes on.
    """
    return int(_operate(address, "Suspend", client_request(pb.SuspendRequest, client, disk=to_disk)).bytes)


def resume(address: str, client: int) -> int:
    """Resumes a suspended client, for a process that is no client. Returns the bytes that came back to the devices."""
    return int(_operate(address, "Resume", client_request(pb.ResumeRequest, client)).bytes)


def limit(address: str, client: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes what a client may have, for a process that is no client; see `ControlPlane.limit`."""
    return dict(wire.plain(_operate(address, "Limit", limit_request(client, changes))))


def drain(address: str, target: DrainTarget, timeout_s: float, force: bool) -> int:
    """Drains hosts; see `pathways.controller.draining`. Returns the number of their island."""
    return int(_operate(address, "Drain", target.request(timeout_s, force)).island)


def undrain(address: str, target: DrainTarget) -> int:
    """Lets slices lie on drained hosts again. Returns the number of their island."""
    return int(_operate(address, "Undrain", target.request()).island)


def logs(
    address: str, what: int | str | None, *, lines: int, follow: bool = False, restart: int | None = None
) -> Iterator[pb.LogPart]:
    """The end of a log of the cluster at `address`, part by part. To close the iterator ends it.

    Args:
        address: of the cluster.
        what: a host's number, the name of a machine whose agent is meant, or None for the controller.
        lines: how many of the last lines come first.
        follow: whether what is written from then on comes, too.
        restart: see `LogsRequest`.

    Raises:
        ConnectError: no cluster listens there, or there is no such process or log.
    """
    whose: dict[str, Any] = {"controller": Empty()}
    if what is not None:
        whose = {"machine": what} if isinstance(what, str) else {"host": what}
    request = pb.LogsRequest(lines=lines, follow=follow, restart=restart, **whose)
    with way_to(address) as way, grpc.insecure_channel(way.control, options=wire.CHANNEL_OPTIONS) as channel:
        try:
            yield from rpc.ControllerStub(channel).Logs(request, metadata=wire.bearer(way.token))
        except grpc.RpcError as error:
            raise translated(address, error) from None


def limit_request(client: int, changes: Mapping[str, Any]) -> pb.LimitRequest:
    """The request to change what a client may have: see `ControlPlane.limit`. 0 takes a quota away.

    Raises:
        OptionError: a limit is out of range.
        ClusterClosedError: that is no client's number.
    """
    request = client_request(pb.LimitRequest, client)
    is_checked = {what: value for what, value in changes.items() if value != 0 or what in ("weight", "priority")}
    terms = ClientTerms.checked(**is_checked)
    for what in changes:
        setattr(request, what, getattr(terms, what))
    return request


@contextlib.contextmanager
def record(address: str) -> Iterator[RemoteRecording]:
    """A recording of the cluster at `address`, for a process that is no client. It ends with the block.

    Raises:
        ConnectError: no cluster listens there.
        TraceFileError: somebody traces this cluster already.
    """

    with way_to(address) as way, grpc.insecure_channel(way.control, options=wire.CHANNEL_OPTIONS) as channel:
        open_stream = functools.partial(rpc.ControllerStub(channel).Trace, metadata=wire.bearer(way.token))
        recording = RemoteRecording(open_stream, functools.partial(translated, address))
        try:
            yield recording
        finally:
            recording.cancel()


def client_request(kind: Any, client: int, **fields: Any) -> Any:
    """A request of this kind about a client.

    Raises:
        ClusterClosedError: that is no client's number.
    """
    number: Any = client
    is_integer = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    if not (is_integer and 0 <= number < 1 << 31):
        raise errors.ClusterClosedError(f"client {client!r} is no client's number; see the cluster's stats")
    return kind(client=int(number), **fields)


@dataclasses.dataclass(frozen=True)
class Access:
    """Where the controller's gRPC server is reached, and the secret of this process's connection."""

    control: str
    token: str


@contextlib.contextmanager
def way_to(address: str) -> Iterator[Access]:
    """A connection to a cluster, of this machine or of another one. It ends with the block.

    Raises:
        ConnectError: no cluster listens there.
        PermissionDeniedError: this user may not connect there.
    """
    if is_far(address):
        with ControllerSession(Endpoint.find(address, os.environ, "operator")) as session:
            yield Access(f"unix:{session.control}", session.token)
        return
    where = Address.parse(address)
    with contextlib.closing(open_connection(address, where)) as connection:
        message, fds = first_message(address, connection)
        for fd in fds:
            os.close(fd)
        yield Access(where.control, message["token"])


def _operate(address: str, method: str, request: Any) -> Any:
    with way_to(address) as way:
        return _answer(address, way, method, request, None)


def _answer(address: str, way: Access, method: str, request: Any, timeout_s: float | None) -> Any:
    with grpc.insecure_channel(way.control, options=wire.CHANNEL_OPTIONS) as channel:
        try:
            call = getattr(rpc.ControllerStub(channel), method)
            return call(request, timeout=timeout_s, metadata=wire.bearer(way.token))
        except grpc.RpcError as error:
            raise translated(address, error) from None


def translated(address: str, error: grpc.RpcError) -> errors.PathwaysError:
    """The error by which the cluster at `address` refused a call, or did not answer it."""
    return wire.raised(error) or errors.ConnectError(f"no cluster answers at {address}: {error.details()}")
