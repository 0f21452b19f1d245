"""The links and tunnels of a loop: one slow, silent or wrong peer among others.

- LINK-1: each link breaks by itself, once, with its reason; the others go on.
- POOL-2: a peer that reads nothing does not hold up what others are sent.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from pathways import _native
from pathways.transport import links, tunnels
from pathways.transport.links import Links
from pathways.transport.loop import Loop, Served
from pathways.transport.tunnels import Tunnels, TunnelServer

_DEADLINE_S = 20.0


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def threads_named(begin: str) -> list[threading.Thread]:
    """Those of this process with such a name: others come and go as other tests' clusters please."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(begin)]


def cpu_s(thread: threading.Thread) -> float:
    """The processor's time that the thread has taken."""
    (found,) = (each for each in psutil.Process().threads() if each.id == thread.native_id)
    return float(found.user_time + found.system_time)


class Pair:
    """A link in a pool, whose other end is the test's."""

    def __init__(self, pool: Links) -> None:
        self.reasons: list[str] = []
        self.hub = _native.LinkHub()
        self.link: Any = self.hub.open_link(True, pool.native)
        (sending, self.hears), (self.says, receiving) = socket.socketpair(), socket.socketpair()
        self.connections = [sending, self.hears, self.says, receiving]
        self.member = pool.add(self.link, sending, receiving, self.reasons.append)

    def relay(self, payload: bytes) -> None:
        """Lets the link send so many bytes, as if a host of another machine had written to one of this link's."""
        self.says.sendall(payload)

    def close(self) -> None:
        self.member.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop("pw-test")
    yield made
    made.close()
    wait_for(lambda: not threads_named("pw-test"))


@pytest.fixture
def pool(loop: Loop) -> Iterator[Links]:
    made = Links(loop, _native)
    yield made
    made.close()
    wait_for(lambda: not threads_named("pw-links"))


@pytest.fixture
def pairs(pool: Links) -> Iterator[list[Pair]]:
    made = [Pair(pool) for _ in range(5)]
    yield made
    for each in made:
        each.close()


def ping() -> bytes:
    """A frame that is answered by a pong."""
    return struct.pack("<IHHIiq", 8, 7, 0, 0, 0, time.monotonic_ns())


def pongs_in(data: bytes | bytearray) -> int:
    """How many pongs are in what came, which begins with a frame."""
    count = at = 0
    while at + 16 <= len(data):
        size, kind = struct.unpack_from("<IH", data, at)
        at += 16 + (size + 7) // 8 * 8
        count += kind == 8 and at <= len(data)
    return count


def read_some(pair: Pair) -> None:
    pair.hears.settimeout(_DEADLINE_S)
    assert pair.hears.recv(1 << 16)


def read_pongs(pair: Pair, count: int) -> None:
    data = bytearray()
    pair.hears.settimeout(_DEADLINE_S)
    while pongs_in(data) < count:
        piece = pair.hears.recv(1 << 20)
        assert piece
        data += piece


def test_many_links_have_two_threads_and_hear_of_each_other(pool: Links) -> None:
    agents, heads = [], []
    for _ in range(40):
        (a, b), (c, d) = socket.socketpair(), socket.socketpair()
        link = _native.LinkHub().open_link(True, pool.native)
        heads.append((link, pool.add(link, a, d, print), (a, b, c, d)))
    assert len(threads_named("pw-links")) == len(threads_named("pw-test")) == 1
    there = Links(pool.loop, _native)
    for _, _, (_, b, c, _) in heads:
        link = _native.LinkHub().open_link(False, there.native)
        agents.append((link, there.add(link, c, b, print)))
    wait_for(lambda: all(link.stats()["round_trip_ns"] > 0 for link, *_ in heads))
    wait_for(lambda: all(link.stats()["bytes_in"] > 0 for link, *_ in agents))
    for _, member in agents:
        member.close()
    there.close()
    for _, member, connections in heads:
        member.close()
        member.close()  # does nothing
        for connection in connections:
            connection.close()


def test_one_breaks_and_the_others_go_on(pairs: list[Pair]) -> None:
    pairs[0].says.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    pairs[1].says.close()
    pairs[2].hears.close()
    wait_for(lambda: all(pair.reasons for pair in pairs[:3]))
    assert "broke the protocol" in pairs[0].reasons[0]
    assert "closed the connection" in pairs[1].reasons[0]
    assert "closed the connection" in pairs[2].reasons[0] or "broke" in pairs[2].reasons[0]
    for pair in pairs[3:]:
        assert pair.hears.recv(100)  # its ping
        before = pair.link.stats()["bytes_out"]
        wait_for(lambda pair=pair, before=before: pair.link.stats()["bytes_out"] > before)
        assert not pair.reasons
    assert all(len(pair.reasons) == 1 for pair in pairs[:3])


def test_who_reads_nothing_holds_nobody_up(pool: Links) -> None:
    """Its bytes wait, in their order, until it reads; meanwhile the others get theirs."""
    stuck, quick = Pair(pool), Pair(pool)
    try:
        many = 40_000  # pongs: more than the buffers of a socket take
        writer = threading.Thread(target=stuck.says.sendall, args=(ping() * many,), daemon=True)
        writer.start()
        wait_for(lambda: stuck.member.sending.kept_bytes > 0)
        for _ in range(20):
            quick.says.sendall(ping())
        read_pongs(quick, 20)
        assert stuck.member.sending.kept_bytes > 0
        read_pongs(stuck, many)
        writer.join(_DEADLINE_S)
        stuck.says.sendall(ping() * 3)
        read_pongs(stuck, 3)
        assert not stuck.reasons and not quick.reasons
    finally:
        stuck.close()
        quick.close()


def test_who_never_reads_and_who_says_nothing_break(pool: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    monkeypatch.setattr("pathways.transport.connection.TAKES_NOTHING_S", 3.0)
    stuck, silent, well = Pair(pool), Pair(pool), Pair(pool)
    try:
        pings = threading.Event()

        def speak() -> None:
            while not pings.wait(0.1):
                for pair in (stuck, well):
                    pair.says.send(ping() * (5000 if pair is stuck and not stuck.member.sending.kept_bytes else 1))

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        wait_for(lambda: stuck.reasons and silent.reasons)
        pings.set()
        speaker.join()
        assert silent.reasons == ["nothing was heard of it for 1 s"]
        assert stuck.reasons == ["it took nothing of what was sent for 3 s"]
        assert not well.reasons
    finally:
        for pair in (stuck, silent, well):
            pair.close()


def test_slow_is_not_silent(pool: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes and brings a few bytes now and then lives, though nothing whole comes for longer than `SILENCE_S`."""
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    pair = Pair(pool)
    try:
        writer = threading.Thread(target=pair.says.sendall, args=(ping() * 40_000,), daemon=True)
        writer.start()
        wait_for(lambda: pair.member.sending.kept_bytes > 0)
        writer.join(_DEADLINE_S)
        frame = ping()
        for byte in frame:  # 3.6 s; of a Unix socket, the kernel counts pieces of 32 KiB
            assert pair.hears.recv(1 << 14)
            pair.says.sendall(bytes([byte]))
            time.sleep(0.15)
        assert not pair.reasons
    finally:
        pair.close()


def test_who_lives_says_so_against_a_stream_that_stops(pool: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel keeps back behind a lost packet is no silence of the other end (LINK-1)."""
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    monkeypatch.setattr("pathways.transport.connection.HEARTBEAT_S", 0.2)
    pair = Pair(pool)
    try:
        threading.Thread(target=pair.says.sendall, args=(ping() * 40_000,), daemon=True).start()
        wait_for(lambda: pair.member.sending.kept_bytes > 0)
        for _ in range(12):  # 2.4 s, in which nothing comes and nothing is taken
            pair.hears.sendall(b"\0")
            time.sleep(0.2)
        assert not pair.reasons
        assert pair.says.recv(1 << 10).strip(b"\0") == b"", "it says that it lives, too"
        wait_for(lambda: pair.reasons)
        assert pair.reasons == ["nothing was heard of it for 1 s"]
    finally:
        pair.close()


class Stops(Served):
    """Holds up the thread of its loop for 3 s, as if the process had been stopped, once something comes."""

    def turn(self, events: int) -> None:
        self.sock.recv(1)
        time.sleep(3.0)


def test_who_stood_still_itself_calls_nobody_silent(loop: Loop, pool: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a cluster are stopped and go on: a laptop that sleeps, a frozen container (LINK-1)."""
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    monkeypatch.setattr("pathways.transport.connection.HEARTBEAT_S", 0.5)
    pair, (stop, other) = Pair(pool), socket.socketpair()
    stops = Stops(loop, other)
    try:
        assert loop.add(stops)
        pair.says.sendall(ping())
        stop.send(b"!")
        time.sleep(3.2)  # the other end stands still, too
        pair.says.sendall(ping())
        time.sleep(0.5)
        assert not pair.reasons
        began = time.monotonic()
        wait_for(lambda: pair.reasons)
        assert pair.reasons == ["nothing was heard of it for 1 s"]
        assert time.monotonic() - began < 2.5, "what it did not see itself makes nobody live longer"
    finally:
        loop.forget(stops)
        pair.close()
        stop.close()
        other.close()


def test_what_goes_wrong_with_one_link_is_its_own(pool: Links, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever should hear of its end fails; and its connections are closed under the threads, and their numbers are
    another link's."""

    def gone(why: str) -> None:
        raise RuntimeError("the event loop is closed")

    well, deaf = Pair(pool), Pair(pool)
    deaf.member._on_end = gone
    deaf.says.close()
    wait_for(lambda: deaf.member.is_over)
    for _ in range(5):
        closed = Pair(pool)
        read_some(closed)
        closed.member.sending.sock.close()
        closed.member.receiving.sock.close()
        other = Pair(pool)  # it gets the same descriptors
        other.says.sendall(ping())
        read_pongs(other, 1)
        closed.close()
        other.says.sendall(ping())
        read_pongs(other, 1)
        other.close()
        assert not other.reasons
    well.says.sendall(ping())
    read_pongs(well, 1)
    assert not well.reasons and "the event loop is closed" in capfd.readouterr().err
    for pair in (well, deaf):
        pair.close()


def test_a_link_is_closed_while_it_is_used(pool: Links) -> None:
    well = Pair(pool)
    for _ in range(20):
        pair = Pair(pool)
        pair.says.sendall(ping() * 500)
        pair.close()
        assert not pair.reasons
    well.says.sendall(ping())
    read_pongs(well, 1)
    well.close()


def test_links_of_a_closed_pool_close(loop: Loop) -> None:
    made = Links(loop, _native)
    before, after = Pair(made), None
    made.close()
    before.close()
    after = Pair(made)
    after.close()
    assert not before.reasons and not after.reasons


# Tunnels.


class Server:
    """Listens at a Unix socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.listener.settimeout(_DEADLINE_S)

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(_DEADLINE_S)
        return connection


def tunnels_of(splicer: Tunnels, server: Server, count: int) -> list[tuple[socket.socket, socket.socket]]:
    """So many tunnels: the ends on both sides."""
    made = []
    for _ in range(count):
        mine, other = socket.socketpair()
        mine.settimeout(_DEADLINE_S)
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
    target.settimeout(_DEADLINE_S)
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
    splicer: Tunnels, server: Server, capfd: pytest.CaptureFixture[str]
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
    assert "ZeroDivisionError" in capfd.readouterr().err
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
    loop: Loop, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def dial() -> socket.socket:
        raise ConnectionRefusedError("not there")

    path = str(tmp_path / "tunnel.sock")
    server = TunnelServer(loop, path, dial)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_DEADLINE_S)
    connection.connect(path)
    assert connection.recv(1) == b""
    connection.close()
    server.close()
    assert "a tunnel to the controller could not be opened: not there" in capfd.readouterr().err
