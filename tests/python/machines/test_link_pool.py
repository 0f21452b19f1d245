"""The links of a loop: one slow, silent or wrong peer among others.

- LINK-1: each link breaks by itself, once, with its reason; the others go on.
- POOL-2: a peer that reads nothing does not hold up what others are sent.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_cases import DEADLINE_S, loop, threads_named, wait_for

from pathways import _native
from pathways.transport import links
from pathways.transport.links import Links
from pathways.transport.loop import Loop, Served

__all__ = ["loop"]


class Pair:
    """A link in a pool, whose other end is the test's."""

    def __init__(self, pool: Links, connected: Callable[[], tuple[Any, Any]] = socket.socketpair) -> None:
        self.reasons: list[str] = []
        self.hub = _native.LinkHub()
        self.link: Any = self.hub.open_link(True, pool.native)
        (sending, self.hears), (self.says, receiving) = connected(), connected()
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
    pair.hears.settimeout(DEADLINE_S)
    assert pair.hears.recv(1 << 16)


def read_pongs(pair: Pair, count: int) -> None:
    data = bytearray()
    pair.hears.settimeout(DEADLINE_S)
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
        writer.join(DEADLINE_S)
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


def over_tcp() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection that holds little."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        one = socket.create_connection(listener.getsockname())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        return one, listener.accept()[0]


def test_the_end_of_a_silent_link_waits_for_nothing_that_was_sent(pool: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other end would hear of it only when it has taken that, which may be never."""
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    pair = Pair(pool, over_tcp)
    try:
        pings = threading.Thread(target=pair.says.sendall, args=(ping() * 10_000,), daemon=True)
        pings.start()
        wait_for(lambda: pair.member.sending.kept_bytes > 0)
        pings.join(DEADLINE_S)
        wait_for(lambda: pair.reasons)
        assert pair.reasons == ["nothing was heard of it for 1 s"]
        for connection in (pair.connections[0], pair.connections[3]):
            connection.close()
        with pytest.raises(ConnectionResetError):
            while pair.hears.recv(1 << 16):
                pass
    finally:
        pair.close()


def test_slow_is_not_silent(pool: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes and brings a few bytes now and then lives, though nothing whole comes for longer than `SILENCE_S`."""
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    pair = Pair(pool)
    try:
        writer = threading.Thread(target=pair.says.sendall, args=(ping() * 40_000,), daemon=True)
        writer.start()
        wait_for(lambda: pair.member.sending.kept_bytes > 0)
        writer.join(DEADLINE_S)
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


def test_what_goes_wrong_with_one_link_is_its_own(pool: Links, caplog: pytest.LogCaptureFixture) -> None:
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
    assert not well.reasons and "the event loop is closed" in caplog.text
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
