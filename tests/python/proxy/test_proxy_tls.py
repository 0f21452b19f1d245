"""The proxy by TLS: callers show a certificate of an authority that the operator named, and its names are known."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import pytest
from doors import PACKAGE

from pathways import errors
from pathways._jaxlib.proxy_messages import message
from pathways.proxy.limits import Limits
from pathways.proxy.server import Server
from pathways.proxy.service import Client, Service
from pathways.trust.authority import Authority
from pathways.trust.credentials import Credentials
from pathways.trust.identity import server_name


class Scene:
    """A proxy whose cluster refuses everyone, and notes who came."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.clients: list[Client] = []
        self.authority = Authority.create(str(folder / "mine"))
        self.other = Authority.create(str(folder / "other"))
        context = self.authority.credentials("controller", "proxy").server_context()
        self.server = Server(Service(self._refuse, Limits(sessions=2)), ["127.0.0.1:0"], context)
        self.port = self.server.ports[0]

    def _refuse(self, client: Client) -> NoReturn:
        self.clients.append(client)
        raise errors.PermissionDeniedError("nobody comes in")

    def channel(self, credentials: Credentials | None) -> grpc.Channel:
        pair = (None, None) if credentials is None else (credentials.key.encode(), credentials.certificate.encode())
        secure = grpc.ssl_channel_credentials(self.authority.pem.encode(), *pair)
        options = [("grpc.ssl_target_name_override", server_name("controller")), ("grpc.enable_retries", 0)]
        return grpc.secure_channel(f"127.0.0.1:{self.port}", secure, options)


@pytest.fixture
def scene(tmp_path: pathlib.Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.server.close()


def ask(channel: grpc.Channel) -> Any:
    request = message(f"{PACKAGE}.GrpcGetVersionRequest")()
    for version in (request.min_version, request.max_version):
        version.protocol_version, version.ifrt_serdes_version_number = 25, 3
    call = channel.unary_unary(f"/{PACKAGE}.GrpcIfrtService/GetVersion")
    return call(request.SerializeToString(), timeout=20)


def test_a_caller_with_a_certificate_comes_in_by_its_name(scene: Scene) -> None:
    with scene.channel(scene.authority.credentials("client", "alice")) as channel:
        assert ask(channel)
        metadata = message(f"{PACKAGE}.GrpcIfrtSessionMetadata")()
        metadata.version.protocol_version, metadata.version.ifrt_serdes_version_number = 25, 3
        call = channel.stream_stream(f"/{PACKAGE}.GrpcIfrtService/IfrtSession")
        key = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
        with pytest.raises(grpc.RpcError) as refused:
            next(call(iter(()), metadata=((key, metadata.SerializeToString()),), timeout=20))
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert any("alice" in name for name in scene.clients[0].identities)


def test_nobody_else_comes_in(scene: Scene) -> None:
    for credentials in (None, scene.other.credentials("client", "alice")):
        with scene.channel(credentials) as channel, pytest.raises(grpc.RpcError) as refused:
            ask(channel)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", b"\x16\x03\x01" + bytes(500)):
        with socket.create_connection(("127.0.0.1", scene.port), timeout=20) as plain:
            plain.sendall(sent)
    with scene.channel(scene.authority.credentials("client", "bob")) as channel:
        assert ask(channel)
    assert not scene.clients


def test_a_client_that_does_not_offer_http2(scene: Scene) -> None:
    """It speaks TLS, and then something else: its connection ends, and others go on."""
    context = scene.authority.credentials("client", "carol").client_context()
    context.check_hostname = False
    plain = socket.create_connection(("127.0.0.1", scene.port), timeout=20)
    with context.wrap_socket(plain) as secure:
        secure.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # or an orderly end
            while secure.recv(4096):
                pass
    with scene.channel(scene.authority.credentials("client", "bob")) as channel:
        assert ask(channel)


def test_silent_callers_keep_nobody_out(scene: Scene) -> None:
    """More of them than there may be connections, who begin no handshake, or half of one (CERT-4)."""
    most = scene.server._most
    with contextlib.ExitStack() as stack:
        for number in range(most + 10):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", scene.port), timeout=10))
            silent.sendall(b"\x16\x03\x01"[: number % 4])
        before = threading.active_count()
        with scene.channel(scene.authority.credentials("client", "alice")) as channel:
            assert ask(channel)
        assert before < most
