"""What calls of other machines take at the controller while they are under way has a bound for all of them together:
who takes more loses its tunnel, and the others are served (LINK-4). A real server of gRPC is behind the tunnels.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from call_frames import DATA, HEADERS, call_of_no_text, call_until_message, frame_of, opening, padded_message
from control_clusters import eventually
from transport_cases import DEADLINE_S, loop, wait_for

from pathways._native import Http2Fields
from pathways.process.shared_room import SharedRoom
from pathways.transport.call_room import CallMeter
from pathways.transport.loop import Loop
from pathways.transport.tunnels import Tunnels, TunnelServer

__all__ = ["loop"]

MOST = 8 << 20
_MIB = 1 << 20


class Head:
    """A server of gRPC that gives back how much it was sent, behind tunnels with a room for calls."""

    def __init__(self, stack: contextlib.ExitStack, folder: pathlib.Path, loop: Loop) -> None:
        self.room = SharedRoom(MOST)
        self._stack, self._folder, self._loop = stack, folder, loop
        self._path = str(folder / "server.sock")
        self.tunnels = Tunnels(loop)
        stack.callback(self.tunnels.close)
        server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        handlers = {
            "Once": grpc.unary_unary_rpc_method_handler(lambda message, _: b"%d" % len(message)),
            "Often": grpc.stream_stream_rpc_method_handler(
                lambda messages, _: (b"%d" % len(each) for each in messages)
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Calls", handlers),))
        server.add_insecure_port(f"unix:{self._path}")
        server.start()
        stack.callback(server.stop, None)

    def dial(self, who: str) -> socket.socket:
        """A tunnel of a caller."""
        mine, other = socket.socketpair()
        mine.settimeout(DEADLINE_S)
        self.tunnels.add_to(self._path, other, meter=CallMeter(self.room, who, Http2Fields(1 << 20)))
        return mine

    def channel(self, who: str) -> grpc.Channel:
        path = str(self._folder / f"{who}.sock")
        server = TunnelServer(self._loop, path, lambda: self.dial(who))
        self._stack.callback(server.close)
        options = [("grpc.max_send_message_length", -1)]
        return self._stack.enter_context(grpc.insecure_channel(f"unix:{path}", options=options))


@pytest.fixture
def head(tmp_path: pathlib.Path, loop: Loop) -> Iterator[Head]:
    with contextlib.ExitStack() as stack:
        yield Head(stack, tmp_path, loop)


def once(channel: grpc.Channel) -> Callable[..., bytes]:
    return channel.unary_unary("/test.Calls/Once")  # type: ignore[no-any-return]


def half_a_call(size: int, sent: int) -> bytes:
    """A call whose message of `size` bytes has not come but for `sent` of them."""
    pieces = [b"\x00" + size.to_bytes(4, "big")]
    pieces += [bytes(min(1 << 14, sent - done)) for done in range(0, sent, 1 << 14)]
    return call_until_message() + b"".join(frame_of(DATA, 0, 1, each) for each in pieces)


def test_what_is_whole_and_answered_takes_nothing(head: Head) -> None:
    """More than there is room for, one after the other, and at once as much as there is."""
    channel = head.channel("honest")
    for size in (0, 1, 5, 1 << 14, 3 * _MIB + 1, 5 * _MIB):
        assert once(channel)(bytes(size), timeout=DEADLINE_S) == b"%d" % size
    together = [once(channel).future(bytes(_MIB), timeout=DEADLINE_S) for _ in range(6)]  # type: ignore[attr-defined]
    assert [each.result() for each in together] == [b"%d" % _MIB] * 6
    sizes = [0, 7, 2 * _MIB, 2 * _MIB, 2 * _MIB, 2 * _MIB, 2 * _MIB, 1]
    answers = channel.stream_stream("/test.Calls/Often")(map(bytes, sizes), timeout=DEADLINE_S)
    assert list(answers) == [b"%d" % size for size in sizes]
    cancelled = channel.stream_stream("/test.Calls/Often")(iter([bytes(_MIB)]))
    next(cancelled)
    cancelled.cancel()
    wait_for(lambda: not head.room.taken)


def test_who_sends_halves_loses_its_tunnels(head: Head, caplog: pytest.LogCaptureFixture) -> None:
    """In one connection or in many. Others have their part, also of calls that are whole only later."""
    honest = head.channel("honest")
    slow = head.dial("slow")
    slow.sendall(half_a_call(2 * _MIB, _MIB))
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(head.dial("greedy")) for _ in range(8)]
        for each in greedy:
            with contextlib.suppress(OSError):
                each.sendall(half_a_call(1 << 30, 2 * _MIB))
            assert sum(head.room.taken.values()) <= MOST + _MIB
            assert once(honest)(bytes(3 * _MIB // 2), timeout=DEADLINE_S) == b"%d" % (3 * _MIB // 2)
        eventually(lambda: "a connection of greedy for calls ends" in caplog.text, "it is told")
    slow.settimeout(0.2)
    with pytest.raises(TimeoutError):
        while slow.recv(1 << 16):
            pass
    slow.close()
    wait_for(lambda: not head.room.taken)


def test_calls_that_say_nothing_take_room_too(head: Head) -> None:
    before, headers = opening()
    with head.dial("greedy") as sock:
        sock.sendall(before)
        count = MOST // (1 << 14)
        for stream in range(1, 2 * count, 2):
            sock.sendall(frame_of(HEADERS, 4, stream, headers))
        wait_for(lambda: not head.room.taken)
        is_over(sock)


def test_padded_messages_end_their_tunnel(head: Head) -> None:
    with head.dial("odd") as sock:
        sock.sendall(call_until_message() + padded_message())
        is_over(sock)
    wait_for(lambda: not head.room.taken)


def test_a_method_that_is_no_text_does_not_arrive(head: Head) -> None:
    """At once, or in pieces that leave the last byte of the fields out."""
    broken = call_of_no_text("/test.Calls/Once")
    honest = head.channel("honest")
    for cut in (len(broken), 10, 60, 200):
        with head.dial("odd") as sock:
            for at in range(0, len(broken), cut):
                with contextlib.suppress(OSError):
                    sock.sendall(broken[at : at + cut])
            is_over(sock)
        assert once(honest)(b"xx", timeout=DEADLINE_S) == b"2"
    wait_for(lambda: head.room.taken.keys() <= {"honest"})


def is_over(sock: socket.socket) -> None:
    """Reads until the other end has closed. Raises TimeoutError."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
