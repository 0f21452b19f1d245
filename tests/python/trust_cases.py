"""What the tests of `pathways.trust` share: a controller's port with an authority of its own, and its callers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pathways.process.config import PROTOCOL_VERSION
from pathways.trust import Authority, Credentials, Identity, Port, Role, Tokens, dial, join

#: A token's secret with its surroundings, and what begins every private key.
SECRETS = re.compile(r"pathways1\.\w+\.\d+\.[A-Za-z0-9_-]{20}|PRIVATE KEY")

HELLO = {"purpose": "link", "protocol": PROTOCOL_VERSION}


def until(is_so: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def _echo(sock: socket.socket, port: Port) -> None:
    sock.setblocking(True)
    with contextlib.suppress(OSError):
        while read := sock.recv(65536):
            sock.sendall(read)
    port.let_go(sock)


class Controller:
    """A port that serves three purposes: "link" for hosts, "run" for clients, "status" for clients and operators."""

    def __init__(self, folder: pathlib.Path, address: str = "127.0.0.1:0", **options: Any) -> None:
        self.authority = Authority.create(str(folder))
        self.tokens = Tokens(str(folder))
        self.seen: list[tuple[Identity, dict[str, Any]]] = []
        self.own = self.authority.credentials(Role.CONTROLLER, "controller")
        self.port = Port(address, self.own, self.authority, self.tokens, **options)
        self.serve(self.port)

    def serve(self, port: Port) -> Port:
        def echo(sock: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
            threading.Thread(target=_echo, args=(sock, port), daemon=True).start()

        port.on("link", [Role.HOST], echo, self._admit)
        port.on("run", [Role.CLIENT], echo, self._admit)
        port.on("status", [Role.CLIENT, Role.OPERATOR], echo, self._admit)
        return port.start()

    def _admit(self, identity: Identity, hello: dict[str, Any]) -> dict[str, Any]:
        self.seen.append((identity, hello))
        return {"number": len(self.seen)}

    @property
    def address(self) -> str:
        return str(self.port.address)

    def credentials(self, role: Role, name: str = "someone", **options: Any) -> Credentials:
        return self.authority.credentials(role, name, **options)

    def innocent(self, name: str = "innocent") -> None:
        """A machine comes in with a new token and is served."""
        own = join(self.address, self.tokens.make(Role.HOST, 60), name)
        with dial(self.address, own, "link") as sock:
            sock.sendall(b"hello")
            assert read_exactly(sock, 5) == b"hello"

    def plain(self) -> socket.socket:
        """A TCP connection of a caller that has said nothing yet."""
        sock = socket.create_connection((self.port.address.host, self.port.address.port))
        sock.settimeout(30)
        return sock

    def secure(self, credentials: Credentials | None = None) -> ssl.SSLSocket:
        """A TLS connection of a caller that has said nothing yet; it does not look at the port's certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if credentials is None else credentials.client_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context.wrap_socket(self.plain())


def waiting(controller: Controller) -> int:
    """How many callers are not known yet."""
    assert controller.port._callers is not None
    return len(controller.port._callers.waiting)


def forged(credentials: Credentials, authority: Credentials) -> Credentials:
    """Credentials whose owner trusts another one's authority, and knows nothing of the end of their own."""
    return dataclasses.replace(credentials, authority=authority.authority, expires=time.time() + 3600)


def read_exactly(sock: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        more = sock.recv(count - len(read))
        assert more, f"the stream ended after {read!r}"
        read += more
    return read


def read_all(sock: socket.socket) -> bytes:
    """What comes until the end, in whichever way the connection ends."""
    read = b""
    try:
        while more := sock.recv(65536):
            read += more
    except OSError:
        pass
    return read


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the serving side has logged as refused."""
    return [
        record.getMessage()
        for record in list(caplog.records)
        if record.levelno >= logging.WARNING and record.name.startswith("pathways.trust")
    ]


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs `work(0)` .. `work(count - 1)` in threads that begin together; their results, or what they raised."""
    results: list[Any] = [None] * count
    begin = threading.Barrier(count)

    def one(n: int) -> None:
        begin.wait()
        try:
            results[n] = work(n)
        except Exception as error:
            results[n] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
