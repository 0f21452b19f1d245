"""A way between two hosts: what is told of outgoing transfers when streams work, break, stop, and find nobody.

The other end is a listener of the test's own; packing and unpacking are native and tested in
`tests/cpp/bulk/test_network_transfer.cc`, both ends together in `test_machines.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from chunks import chunk
from control_clusters import eventually
from stream_cases import BlockingFrames, framed

from pathways import _core
from pathways.host import network_transfer, stream_sockets
from pathways.host.stream_sockets import StreamAddress
from pathways.transport.loop import Loop


@dataclasses.dataclass(eq=False)
class OutgoingTransfer:
    """As `_core.OutgoingTransfer`, of `left` chunks."""

    order: int
    node: int = 1
    nbytes: int = 8
    left: int = 1
    destination: int = 3

    @property
    def is_over(self) -> bool:
        return self.left == 0


class Core:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: dict[int, str | None] = {}
        self._news = threading.Condition()

    def open_stream(self, peer: int) -> None:
        """Nothing follows from it."""

    def remote_send_done(self, outgoing: OutgoingTransfer, error: str | None) -> None:
        with self._news:
            assert outgoing.order not in self.told, "told twice"
            self.told[outgoing.order] = error
            self._news.notify_all()

    def wait(self, *orders: int) -> list[str | None]:
        with self._news:
            assert self._news.wait_for(lambda: all(order in self.told for order in orders), 30), self.told
            return [self.told[order] for order in orders]


def pack(outgoing: list[OutgoingTransfer], limit: int, room: Callable[[int], memoryview]) -> int:
    """One chunk of each, as its order; the last of an outgoing transfer is odd."""
    message = b""
    for each in outgoing:
        each.left -= 1
        message += bytes([each.order * 2 + each.is_over])
    room(len(message))[:] = message
    return len(message)


def answer_of(order: int, text: str = "") -> bytes:
    return struct.pack("<QII", order, 1, len(text)) + text.encode()


def answered(message: bytes, text: str = "") -> bytes:
    """The answers to all outgoing transfers whose last chunk is in the message."""
    return b"".join(answer_of(chunk // 2, text) for chunk in message if chunk % 2)


@pytest.fixture
def way(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], tuple[Any, Core]]]:
    """`way(answer)`: a way to a host that answers each message with `answer(message)`, and its core."""
    monkeypatch.setattr(_core, "pack", pack)
    stops: list[Callable[[], Any]] = []
    loops = network_transfer.Loops(Loop(), Loop())

    def start(answer: Callable[[bytes], bytes]) -> tuple[Any, Core]:
        address = f"unix:{tmp_path}/{len(stops)}.sock"

        def receive(answers: socket.socket, messages: socket.socket) -> None:
            with answers, messages, contextlib.suppress(OSError):  # closed by the listener at the test's end
                answers.setblocking(True)
                messages.setblocking(True)
                BlockingFrames(messages).each(lambda message: answers.sendall(answer(message)))

        def serve(_: Any, *stream: socket.socket) -> None:
            threading.Thread(target=receive, args=stream, daemon=True).start()

        listener = stream_sockets.StreamListener(address, "", lambda sender: True, serve)
        core = Core()
        made = network_transfer._HostStream(core, StreamAddress.parse(address), "", "", loops)
        stops.extend((made.stop, listener.close))
        return made, core

    yield start
    for stop in stops:
        stop()
    for loop in loops:
        loop.close()


def test_native_code_reads_what_the_tests_write() -> None:
    """`chunks.chunk` writes the format that hosts read."""
    words = [0, 1, 5, 1, 5, 1, 0, 0, 0, 0, 5, 0]  # a copy plan: five bytes of one source into one block
    block = np.zeros(5, np.uint8)
    waiting = {(7, 1, 3): _core.IncomingTransfer([block])}
    message = chunk(7, 1, 3, b"he", copy_plan=words) + chunk(7, 1, 3, b"llo", at=2)
    assert _core.unpack(message, lambda *key: waiting[key], None) == [(7, 1, 3, None)]
    assert block.tobytes() == b"hello"


def test_each_is_told_once_and_what_is_queued_shares_messages(way: Any) -> None:
    sizes: list[int] = []
    gate = threading.Event()

    def answer(message: bytes) -> bytes:
        sizes.append(len(message))
        gate.wait(30)
        return answered(message)

    made, core = way(answer)
    for order in range(50):
        made.send(OutgoingTransfer(order, left=1 + order % 3, nbytes=8 if order % 2 else 1 << 20))
    gate.set()
    assert core.wait(*range(50)) == [None] * 50
    assert sum(sizes) == sum(1 + order % 3 for order in range(50))
    assert len(sizes) < 25  # while the first was on its way the others gathered


def test_a_refusal_is_the_transfers_own(way: Any) -> None:
    made, core = way(lambda message: answered(message, "nobody waits for it there" if message[0] == 3 else ""))
    for order in (1, 2):
        made.send(OutgoingTransfer(order))
        core.wait(order)
    assert core.wait(1, 2) == ["nobody waits for it there", None]


def test_a_stream_that_breaks_fails_what_it_carried_and_the_next_is_new(way: Any) -> None:
    calls: list[bytes] = []

    def answer(message: bytes) -> bytes:
        calls.append(message)
        if len(calls) == 1:
            raise ConnectionError("it fell")
        return answered(message)

    made, core = way(answer)
    made.send(OutgoingTransfer(1, left=5))
    (error,) = core.wait(1)
    assert error is not None and "host 3" in error and "broke" in error
    assert error.startswith("ComputationError: ")
    made.send(OutgoingTransfer(2))
    assert core.wait(2) == [None]


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_kept_of_what_is_over(way: Any, breaks: bool) -> None:
    """An outgoing transfer holds an array, and an array may hold memory that a client has lent."""

    def answer(message: bytes) -> bytes:
        if breaks:
            raise ConnectionError("it fell")
        return answered(message)

    made, core = way(answer)
    for order in range(3):
        outgoing = OutgoingTransfer(order, left=1 << 30 if breaks else 1)
        is_there = weakref.ref(outgoing)
        made.send(outgoing)
        del outgoing
        core.wait(order)
        eventually(lambda is_there=is_there: is_there() is None, "it is let go")


def test_nobody_there(way: Any) -> None:
    """A lost host has no address; a wrong one is a stream that breaks; a stopped way takes nothing more."""
    core = Core()
    for order, address in enumerate(("", "unix:/nowhere/at.all")):
        there = StreamAddress.parse(address)
        lost = network_transfer._HostStream(core, there, "", "", network_transfer.Loops(Loop(), Loop()))
        lost.send(OutgoingTransfer(order))
        (error,) = core.wait(order)
        assert error is not None and "stream" in error
    made, core = way(answered)
    gate = OutgoingTransfer(7, left=1 << 30)  # never all there
    made.send(gate)
    made.stop()
    (error,) = core.wait(7)
    assert error is not None
    made.send(OutgoingTransfer(8))
    (error,) = core.wait(8)
    assert error is not None and "lost" in error


def test_streams_of_one_machine_are_bounded(tmp_path: Any) -> None:
    """Of more than honest hosts open, the oldest ends; and all of them, when their machine has left (CERT-1)."""
    address = f"unix:{tmp_path}/own.sock"
    far = {1: "m1@127.0.0.1:1#one", 2: "m2@127.0.0.1:2#two", 3: "m2@127.0.0.1:3#two"}
    streams = network_transfer.Streams(Core(), f"{address}#own", far)
    most = 2 * network_transfer._MOST_LANES
    with contextlib.ExitStack() as stack:
        stack.callback(streams.stop)

        def opened(secret: str) -> socket.socket:
            there = StreamAddress.parse(address)
            answers, _ = map(stack.enter_context, stream_sockets.connect(there, secret, None))
            answers.settimeout(30)
            return answers

        def is_open(stream: socket.socket) -> bool:
            stream.settimeout(0.2)
            try:
                return stream.recv(1) != b""
            except TimeoutError:
                return True

        innocent = [opened("two") for _ in range(most + 1)]  # of two hosts
        guilty = [opened("one") for _ in range(most + 2)]
        assert [stream.recv(1) for stream in guilty[:2]] == [b"", b""]
        assert all(map(is_open, innocent)) and all(map(is_open, guilty[2:]))
        streams.expect_peer(1, 1, "m1@127.0.0.1:1#another")
        assert [stream.recv(1) for stream in guilty[2:]] == [b""] * most
        assert all(map(is_open, innocent))


def test_a_successor_is_sent_to_when_it_opens(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to earlier runs goes to its predecessor. It may send itself as soon as it is expected (ERR-2)."""
    monkeypatch.setattr(_core, "pack", pack)
    heard: list[tuple[str, int]] = []
    with contextlib.ExitStack() as stack:

        def listen(name: str) -> str:
            def receive(answers: socket.socket, messages: socket.socket) -> None:
                with answers, messages, contextlib.suppress(OSError):
                    answers.setblocking(True)
                    messages.setblocking(True)

                    def answer(message: bytes) -> None:
                        heard.extend((name, each // 2) for each in message)
                        answers.sendall(answered(message))

                    BlockingFrames(messages).each(answer)

            def serve(_: Any, *stream: socket.socket) -> None:
                threading.Thread(target=receive, args=stream, daemon=True).start()

            address = f"unix:{tmp_path}/{name}.sock"
            stack.callback(stream_sockets.StreamListener(address, "", lambda sender: True, serve).close)
            return address

        core, kept = Core(), [b""]
        core.keep_early = lambda message: kept.append(bytes(message)) or True  # type: ignore[attr-defined]
        own = f"unix:{tmp_path}/own.sock"
        streams = network_transfer.Streams(core, f"{own}#own", {1: f"m1@{listen('old')}#one"})
        stack.callback(streams.stop)

        def early(order: int) -> bytes:
            """What the streams answer to an early transfer of the successor."""
            answers, messages = map(stack.enter_context, stream_sockets.connect(StreamAddress.parse(own), "two", None))
            answers.settimeout(30)
            messages.sendall(framed(chunk(order, 1, 1, b"hello", copy_plan=[0, 1, 5, 1, 5, 1, 0, 0, 0, 0, 5, 0])))
            return answers.recv(1 << 10)

        streams.send(OutgoingTransfer(1, destination=1))
        core.wait(1)
        streams.expect_peer(1, 4, f"m2@{listen('failed')}#two")
        streams.expect_peer(1, 5, f"m2@{listen('new')}#two")
        streams.send(OutgoingTransfer(2, destination=1))
        core.wait(2)
        assert early(7) != answer_of(7) and kept == [b""]
        streams.peer_opens(1, 3)  # nobody expects it
        streams.peer_opens(1, 4)
        assert early(8) != answer_of(8) and kept == [b""]
        streams.peer_opens(1, 5)
        streams.send(OutgoingTransfer(3, destination=1))
        core.wait(3)
        assert heard == [("old", 1), ("old", 2), ("new", 3)]
        assert early(9) == answer_of(9) and len(kept) == 2
