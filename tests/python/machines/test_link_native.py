"""Two ends of a link between machines over connections.

- LINK-1: they hear of each other, and each has its clock of how long ago (`test_ends_hear_of_each_other`); a link that
  breaks says so once, with the reason, at both ends (`test_nonsense_breaks_the_link`, `test_an_end_that_is_gone`).
- LINK-2: what names no host of the link is dropped (`test_records_for_nobody_are_dropped`).
"""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pathways import _native
from pathways.transport.links import Link, Links
from pathways.transport.loop import Loop

_DEADLINE_S = 20.0


class Broken:
    """Why an end broke: what it was told, and how often."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.happened = threading.Event()

    def __call__(self, why: str) -> None:
        self.reasons.append(why)
        self.happened.set()


@dataclasses.dataclass
class End:
    """One machine: its hub, its end of the link, and the connections."""

    hub: Any
    link: Any
    carried: Link
    broken: Broken
    sending: socket.socket


def _wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """The head and an agent. Their threads run."""
    loop = Loop()
    there, back = socket.socketpair(), socket.socketpair()
    made, pools = [], [Links(loop, _native), Links(loop, _native)]
    for is_head, sending, receiving, links in (
        (True, there[0], back[1], pools[0]),
        (False, back[0], there[1], pools[1]),
    ):
        hub = _native.LinkHub()
        broken = Broken()
        link = hub.open_link(is_head, links.native)
        made.append(End(hub, link, links.add(link, sending, receiving, broken), broken, sending))
    yield made[0], made[1]
    for end in made:
        end.carried.close()
    for links in pools:
        links.close()
    loop.close()
    for connection in (*there, *back):
        connection.close()


def _frame(kind: int, a: int, b: int, payload: bytes) -> bytes:
    padding = -len(payload) % 8
    return struct.pack("<IHHIi", len(payload), kind, 0, a, b) + payload + bytes(padding)


def test_ends_hear_of_each_other(ends: tuple[End, End]) -> None:
    head, agent = ends
    _wait_for(lambda: all(end.link.stats()["round_trip_ns"] > 0 for end in ends))
    for end in ends:
        stats = end.link.stats()
        assert stats["bytes_in"] > 0 and stats["bytes_out"] > 0
        assert 0 <= stats["heard_ns"] < _DEADLINE_S * 1e9
        assert stats["dropped"] == stats["records_in"] == stats["records_out"] == 0
    head.carried.close()
    assert head.broken.reasons == []  # it was closed here; the other end hears of it
    assert agent.broken.happened.wait(_DEADLINE_S)


def test_hosts_come_and_go(ends: tuple[End, End]) -> None:
    head, agent = ends
    controllers = [_native.controller_segment(), _native.controller_segment()]
    for incarnation in range(20):
        for end, controller in zip(ends, controllers, strict=True):
            segment = _native.host_segment(0, 2, arena_bytes=0, link_ring_bytes=1 << 15)
            end.link.add_host(0, incarnation, segment, controller)
            del segment  # the link has a mapping of its own
        client = agent.link.twin_client(incarnation, 1 << 20)
        assert client.fd >= 0 and _native.arena_bytes_of(client) >= 1 << 20
        for end in ends:
            end.link.remove_host(0)
            end.link.remove_host(7)  # never there
    assert head.broken.reasons == agent.broken.reasons == []


def test_clients_come_and_go(ends: tuple[End, End]) -> None:
    head, _ = ends
    segment = _native.client_segment(futures=64, ring_bytes=4096, arena_bytes=1 << 20)
    for client in range(10):
        head.hub.add_client(client, segment)
        head.hub.add_group(client, [0, 1])
        head.hub.remove_client(client)
    head.hub.remove_client(77)
    with pytest.raises(ValueError, match="client"):
        head.hub.add_client(1, _native.controller_segment())


def test_records_for_nobody_are_dropped(ends: tuple[End, End]) -> None:
    head, agent = ends
    record = struct.pack("<HHI", 5, 0, 0)
    agent.sending.sendall(_frame(2, 3, 1, record) + _frame(3, 3, 1, record))
    _wait_for(lambda: head.link.stats()["dropped"] == 2)
    assert not head.broken.reasons


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (_frame(99, 0, 0, b""), "a frame of kind 99"),
        (struct.pack("<IHHIi", 0xFFFFFFFF, 7, 0, 0, 0), "a frame of 4294967295 bytes"),
        (_frame(2, 0, 0, b"1234"), "a record of 4 bytes"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "a frame"),
    ],
)
def test_nonsense_breaks_the_link(ends: tuple[End, End], frame: bytes, why: str) -> None:
    head, agent = ends
    agent.link.wake()
    agent.sending.sendall(frame)
    for end in (head, agent):
        assert end.broken.happened.wait(_DEADLINE_S)
    assert why in head.broken.reasons[0] and "broke the protocol" in head.broken.reasons[0]
    time.sleep(0.05)
    assert len(head.broken.reasons) == len(agent.broken.reasons) == 1


def test_an_end_that_is_gone(ends: tuple[End, End]) -> None:
    head, agent = ends
    agent.carried.close()
    assert head.broken.happened.wait(_DEADLINE_S)
    assert len(head.broken.reasons) == 1
    assert agent.broken.reasons == []
    with pytest.raises((RuntimeError, ValueError), match="closed"):
        agent.link.add_host(
            0, 1, _native.host_segment(0, 2, arena_bytes=0, link_ring_bytes=1 << 15), _native.controller_segment()
        )


def test_buffers_are_plain_bytes(ends: tuple[End, End]) -> None:
    link = _native.LinkHub().open_link(True)
    with pytest.raises(ValueError, match="1 MiB"):
        link.collect(memoryview(bytearray(100)))
    with pytest.raises(ValueError, match="plain"):
        link.collect(memoryview(bytearray(4 << 20))[::2])
    with pytest.raises((BufferError, TypeError, ValueError)):
        link.collect(memoryview(bytes(1 << 20)))
    link.deliver(memoryview(b""))
    link.close()
    assert link.collect(memoryview(bytearray(1 << 20))) == 0
