"""The tunnels of a loop: one slow, silent or wrong peer among others.

- POOL-2: a peer that reads nothing does not hold up what others are sent.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from transport_cases import DEADLINE_S, cpu_s, loop, threads_named, wait_for

from pathways.transport import tunnels
from pathways.transport.loop import Loop
from pathways.transport.tunnels import Tunnels, TunnelServer

__all__ = ["loop"]


class Server:
    """Listens at a Unix socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.listener.settimeout(DEADLINE_S)

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(DEADLINE_S)
        return connection


def tunnels_of(splicer: Tunnels, server: Server, count: int) -> list[tuple[socket.socket, socket.socket]]:
    """So many tunnels: the ends on both sides."""
    made = []
    for _ in range(count):
        mine, other = socket.socketpair()
        mine.settimeout(DEADLINE_S)
        splicer.add_to(server.path, other)
        made.append((mine, server.accept()))
    return made


def read_all(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture
def server(tmp_path: Any) -> Iterator[Server]:
    made = Server(str(tmp_path / "server.sock"))
    yield made
    made.listener.close()


@pytest.fixture
def splicer(loop: Loop) -> Iterator[Tunnels]:
    made = Tunnels(loop)
    yield made
    made.close()


def test_tunnels_carry_both_ways_and_share_a_thread(splicer: Tunnels, server: Server) -> None:
    made = tunnels_of(splicer, server, 30)
    assert len(threads_named("pw-test")) == 1
    for n, (near, far) in enumerate(made):
        near.sendall(b"there %d" % n)
        far.sendall(b"back %d" % n)
    for n, (near, far) in enumerate(made):
        assert far.recv(100) == b"there %d" % n
        assert near.recv(100) == b"back %d" % n
    for near, far in made:
        near.close()
        assert far.recv(1) == b""
        far.close()


@pytest.mark.parametrize("is_near", [True, False])
def test_what_was_sent_before_the_end_arrives(splicer: Tunnels, server: Server, is_near: bool) -> None:
    """Also when the other end reads slowly, and has sent bytes that nobody takes any more."""
    ((near, far),) = tunnels_of(splicer, server, 1)
    source, target = (near, far) if is_near else (far, near)
    data = os.urandom(3 << 20)
    target.setblocking(False)
    target.send(os.urandom(1 << 16))
    target.settimeout(DEADLINE_S)
    sender = threading.Thread(target=lambda: (source.sendall(data), source.close()), daemon=True)
    sender.start()
    time.sleep(0.2)
    assert read_all(target) == data
    sender.join()
    target.close()


def test_a_tunnel_that_nobody_reads_holds_no_other_up(
    splicer: Tunnels, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "_LINGER_S", 0.5)
    (stuck, deaf), (near, far) = tunnels_of(splicer, server, 2)
    stuck.setblocking(False)
    sent = 0
    while True:
        try:
            sent += stuck.send(bytes(1 << 16))
        except BlockingIOError:
            time.sleep(0.05)
            try:
                sent += stuck.send(bytes(1 << 16))
            except BlockingIOError:
                break
    assert 1 << 20 < sent < 4 << 20, "what waits is bounded"
    (thread,) = threads_named("pw-test")
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    before = cpu_s(thread)
    time.sleep(0.5)
    assert cpu_s(thread) - before < 0.3, "waiting costs nothing"
    deaf.close()
    wait_for(lambda: len(splicer.open) == 1)
    for connection in (stuck, near, far):
        connection.close()


def test_who_takes_nothing_after_the_end_is_left(
    splicer: Tunnels, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "_LINGER_S", 0.5)
    ((near, deaf),) = tunnels_of(splicer, server, 1)
    near.sendall(bytes(1 << 20))  # fits what may wait, and not the buffers of a socket
    near.close()
    wait_for(lambda: not splicer.open)
    deaf.close()


def test_who_hears_of_a_tunnel_s_end_may_fail(
    splicer: Tunnels, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    ((near, far),) = tunnels_of(splicer, server, 1)
    mine, other = socket.socketpair()
    splicer.add_to(server.path, other, fails)
    server.accept().close()
    assert mine.recv(1) == b""
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    assert "ZeroDivisionError" in caplog.text
    for connection in (near, far, mine):
        connection.close()


def test_nobody_listens(splicer: Tunnels, tmp_path: Any) -> None:
    one, other = socket.socketpair()
    with pytest.raises(OSError):
        splicer.add_to(str(tmp_path / "nobody"), other)
    one.close()
    other.close()


def test_closed_tunnels_take_nothing_and_carry_on_what_is_open(server: Server) -> None:
    loop = Loop("pw-test")
    splicer = Tunnels(loop)
    ((near, far),) = tunnels_of(splicer, server, 1)
    splicer.close()
    splicer.close()
    loop.close()
    loop.close()
    one, other = socket.socketpair()
    splicer.add_to(server.path, other)
    assert one.recv(1) == b""
    server.accept().close()
    near.sendall(b"still")
    assert far.recv(10) == b"still"
    near.close()
    wait_for(lambda: not threads_named("pw-test"))
    far.close()
    one.close()
    Loop().close()


def test_a_server_whose_other_end_cannot_be_dialled(
    loop: Loop, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def dial() -> socket.socket:
        raise ConnectionRefusedError("not there")

    path = str(tmp_path / "tunnel.sock")
    server = TunnelServer(loop, path, dial)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(DEADLINE_S)
    connection.connect(path)
    assert connection.recv(1) == b""
    connection.close()
    server.close()
    assert "a tunnel could not be opened: not there" in caplog.text
