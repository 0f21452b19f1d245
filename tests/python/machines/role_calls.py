"""Calls of each method of the control service by those for whom it is not: every one is refused."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest

from pathways.protocol import control_pb2, wire

#: What the control service does for whom has not joined as a client. All else is refused to it.
OPEN_TO_ALL = {"WatchStartup", "Join", "Stats", "Trace"}
OPERATORS = {"Suspend", "Resume", "Limit", "Profile", "Drain", "Logs", "Undrain", "Shutdown"}


def machine_is_refused(channel: grpc.Channel, secret: str) -> int:
    """A machine, or its host, finds none of the methods for clients. Returns how many it tried."""
    names = [f"/pathways.Controller/{method.name}" for method in _methods("Controller")]
    for name in names:
        assert _refused(channel, name, secret).code() == grpc.StatusCode.UNIMPLEMENTED, name
    return len(names)


def client_is_refused(channel: grpc.Channel, welcome: dict[str, Any]) -> int:
    """One that has not joined. Returns how many it tried."""
    tried = 0
    for service in control_pb2.DESCRIPTOR.services_by_name:
        for method in _methods(service):
            if method.name not in OPEN_TO_ALL:
                error = _refused(channel, f"/pathways.{service}/{method.name}", welcome["session"])
                no_client = r"(client is not, or no longer, part|is no host) of this"
                words = " may not " if method.name in OPERATORS else no_client
                assert re.search(words, error.details()), f"{method.name}: {error.details()}"
                tried += 1
    return tried


def _methods(service: str) -> list[Any]:
    return list(control_pb2.DESCRIPTOR.services_by_name[service].methods)


def _refused(channel: grpc.Channel, method: str, secret: str) -> Any:
    call = channel.stream_stream(method)
    with pytest.raises(grpc.RpcError) as error:
        next(iter(call(iter([b""]), metadata=wire.bearer(secret), timeout=20)))
    return error.value
