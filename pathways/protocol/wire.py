"""What both ends of the control plane share: channel options, errors in gRPC calls, the statistics as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from pathways import errors
from pathways.plan.topology import Topology
from pathways.protocol import control_pb2 as pb
from pathways.protocol.serialization import MAX_PROGRAM_BYTES, load
from pathways.transport import ANSWER_S, HEARTBEAT_S

#: The stages in the start of a host or of the cluster.
Stage = pb.StartupEvent

ERROR_KEY = "pathways-error"
#: TRUST-1: the metadata key of the caller's secret. The controller gave the secret to this caller alone, on a
#: connection of the caller's own.
TOKEN_KEY = "pathways-token"
#: Of the fields of a call.
MAX_METADATA_BYTES = 1 << 20
#: So many variables of a client are named at most, in texts of so many characters.
MOST_VARIABLES, MOST_CHARS = 100, 200
_MAX_ERROR_CHARS = 1 << 16

# The longest message brings a program with its modules, and what these have of large constants. gRPC refuses a longer
# one when it has read the length, at the sender or here. Error texts are sent as metadata.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_PROGRAM_BYTES),
    ("grpc.max_receive_message_length", MAX_PROGRAM_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

#: For the sessions of hosts and agents on other machines. The controller holds a message until all of it has come, and
#: runs a task for each session; a connection needs one.
BOUNDS: list[tuple[str, Any]] = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_concurrent_streams", 16)]

# The controller cannot see a process on another machine end. So a peer that does not answer an HTTP/2 ping for
# ANSWER_S counts as gone. gRPC's own threads answer the pings, also while another thread holds the GIL.
FAR_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", int(HEARTBEAT_S * 1e3)),
    ("grpc.keepalive_timeout_ms", int(ANSWER_S * 1e3)),
    ("grpc.http2.ping_timeout_ms", int(ANSWER_S * 1e3)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_recv_interval_without_data_ms", int(HEARTBEAT_S * 500)),
]

#: Between machines that are joined by a link. When the link is silent, its machine is lost; and the agent looks at the
#: pulse of each host. So these connections send pings seldom. If each sent one every second, that would be most of the
#: work of an idle cluster of many machines.
LINKED_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call by the connection to which the controller gave `token`."""
    return ((TOKEN_KEY, token),)


def token_of(context: Any) -> str:
    """The secret in a call's metadata; empty when there is none."""
    return secret_in(context.invocation_metadata())


def secret_in(metadata: Any) -> str:
    """The secret in the metadata of a call; empty when there is none."""
    return next((str(value) for key, value in metadata or () if key == TOKEN_KEY), "")


#: How the refusal of a call begins whose session is over.
NO_SESSION = "the call came by no open connection to this cluster"


async def refuse(context: Any, error: errors.PathwaysError) -> NoReturn:
    """Ends a call with an error. At the caller, `raised` makes an error of the same class of it."""
    text = str(error)
    if len(text) > _MAX_ERROR_CHARS:
        text = text[:_MAX_ERROR_CHARS] + " ... (cut)"
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text, ((ERROR_KEY, type(error).__name__),))
    raise AssertionError("abort raises")


def raised(error: grpc.RpcError) -> errors.PathwaysError | None:
    """The error by which the controller refused a call; None when the call failed for another reason."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return make_error(value, error.details() or "")
    return None


def make_error(kind: str, message: str) -> errors.PathwaysError:
    """An instance of the class of pathways.errors with this name; a `PathwaysError` when there is no such class."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, errors.PathwaysError):
        return found(message)
    return errors.PathwaysError(f"{kind}: {message}")


def checked_variables(request: pb.VariablesRequest) -> pb.VariablesRequest:
    """A client's list as the controller keeps it: no longer than `MOST_VARIABLES`, with short texts (TRUST-1)."""
    kept = [
        pb.Variable(
            name=each.name[:MOST_CHARS],
            type=each.type[:MOST_CHARS],
            slice=each.slice[:MOST_CHARS],
            device_bytes=each.device_bytes,
        )
        for each in request.variables[:MOST_VARIABLES]
    ]
    return pb.VariablesRequest(variables=kept, variable_count=request.variable_count)


def plain(value: Any) -> Any:
    """A message, or the value of a field, as plain data; None stands for what is not given."""
    if isinstance(value, Message):
        return {
            field.name: plain(getattr(value, field.name))
            if not field.has_presence or value.HasField(field.name)
            else None
            for field in value.DESCRIPTOR.fields
        }
    if isinstance(value, Mapping):
        return dict(value)
    return [plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def load_stats(reply: pb.StatsReply) -> dict[str, Any]:
    """The statistics of a cluster as plain data, with the counts of hosts and the lists of variables merged in."""
    stats = plain(reply)
    for host in stats["hosts"]:
        host.update(host.pop("counts") or {})
    for client in stats["clients"]:
        client.update(client["variables"])
    return {**stats, "topology": load(reply.topology, Topology)}
