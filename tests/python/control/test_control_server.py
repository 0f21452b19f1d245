"""A caller that names a method in bytes that are no text ends grpc.aio's server, and so shut out everybody else; a new
one takes its place at once, and the calls that are open go on (TRUST-1). A message that is too long is refused before
it is there.
"""

from __future__ import annotations

import pathlib
import socket

import grpc
import pytest
from control_clusters import SIZES, eventually
from recorded_calls import recorded
from trust_cases import read_all

from pathways import errors
from pathways.cluster import operator, remote
from pathways.cluster.launcher import LocalClusterHandle
from pathways.process import log_files
from pathways.protocol import control_pb2, wire
from pathways.protocol.serialization import MAX_PROGRAM_BYTES


def test_a_method_that_is_no_text(own: LocalClusterHandle) -> None:
    path = own.address.removeprefix("unix:")
    stream = recorded("/pathways.Controller/Stats_", [b""])
    broken = stream.replace(b"/pathways.Controller/Stats_", b"/pathways.Controller/Stat\x80s")
    assert broken != stream
    client = remote.connect_unix(own.address, native="control_doubles", sizes=SIZES)
    followed = operator.logs(own.address, 0, lines=1, follow=True)
    assert next(followed).text.endswith(b" host 0 has its devices, 0\n")
    pids = [host["pid"] for host in operator.inspect(own.address)["hosts"]]
    for number in range(1, 4):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(0.2)
            sock.connect(path)
            sock.sendall(broken)
            read_all(sock)
        eventually(lambda: answers(own.address), "the controller answers again")
        said = pathlib.Path(log_files.own_log(own.directory)).read_text()
        assert said.count(f"the server at {path} begins anew: UnicodeDecodeError") == number
    with open(log_files.host_log(own.directory, 0, 0), "ab") as log:
        log.write(b"a call that was open goes on\n")
    assert next(followed).text == b"a call that was open goes on\n"
    assert [host["pid"] for host in operator.inspect(own.address)["hosts"]] == pids
    assert client.allocate_slice((1,), ("x",)).devices
    client.close()
    followed.close()  # type: ignore[attr-defined]


def answers(address: str) -> bool:
    try:
        operator.inspect(address)
    except errors.ConnectError:
        return False
    return True


@pytest.mark.parametrize("secret", ["", "0" * 32])
def test_no_method_runs_without_the_secret_of_a_session(own: LocalClusterHandle, secret: str) -> None:
    """TRUST-1: each method of each service, by its description; streams as well, which send nothing."""
    tried = 0
    metadata = wire.bearer(secret) if secret else ()
    with grpc.insecure_channel(own.address) as channel:
        for service in control_pb2.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                call = channel.stream_stream(f"/{service.full_name}/{method.name}")
                with pytest.raises(grpc.RpcError) as refused:
                    next(iter(call(iter([]), metadata=metadata, timeout=30)))
                assert isinstance(wire.raised(refused.value), errors.PermissionDeniedError), method.full_name
                tried += 1
    assert tried >= 25


@pytest.mark.slow  # it makes a message of 1 GiB
def test_a_message_that_is_too_long(own: LocalClusterHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whomever it is refused, its sender hears what to do, and is served."""
    client = remote.connect_unix(own.address, native="control_doubles", sizes=SIZES)
    with grpc.insecure_channel(own.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            message = bytes(MAX_PROGRAM_BYTES + 1)
            channel.unary_unary("/pathways.Controller/Stats")(message, metadata=wire.bearer(client._token), timeout=60)
        told = client._translated(refused.value)
        assert isinstance(told, errors.ResourceExhaustedError) and "give large constants" in str(told)
    assert client.allocate_slice((1,), ("x",)).devices
    client.close()
    monkeypatch.setattr(wire, "CHANNEL_OPTIONS", [("grpc.max_send_message_length", 1 << 12)])
    client = remote.connect_unix(own.address, native="control_doubles", sizes=SIZES)
    with pytest.raises(errors.ResourceExhaustedError, match="give large constants of a program as arg"):
        client.name_variables(control_pb2.VariablesRequest(variables=[control_pb2.Variable(name="x" * 5000)]))
    assert client.allocate_slice((1,), ("x",)).devices
    client.close()
