"""Network transfers between machines: streams from each host to each host on another machine that it sends to.

A message is a sequence of chunks of outgoing transfers (csrc/bulk/network_transfer.h). When the stream is idle, a
transfer goes at once; a small one, after a pause, without a change of threads. When it is busy, as many chunks as fit
into `MESSAGE_BYTES` share a message. Short outgoing transfers go before long ones. For each outgoing transfer the
receiver answers once: it is written completely, or why it never will be. The receiving host sees by itself what has
come; no record goes by way of the controller's machine for it. A short transfer may come before its receive has memory:
then the receiver keeps it (FAR-3). When a stream breaks, all its unanswered transfers have failed; the next outgoing
transfer opens a new stream. The kernel ends a stream whose other machine was silent for `TAKES_NOTHING_S`
(pathways/host/stream_sockets.py).

`jax.experimental.transfer` is not used, for two reasons. It has no call to withdraw an offer, so what a sender offers
to a host that is then lost stays in the sender's memory for ever. And on CPU it moves large arrays more slowly
(benchmarks/results/transfer-*).

Where machines are real, streams are mutual TLS 1.3 (LINK-1) from host to host, unless the cluster was started without
encryption. The controller says where a host receives and which machine it is on (`StreamAddress`). A transfer goes
only to that machine's certificate, and counts only if it comes with the certificate and the secret of the sending
host's machine (CERT-1). The machines of a
`LocalCluster` are modelled: there, streams use Unix sockets in the cluster's directory, which only its user can enter;
see `LocalCluster.machines`.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from pathways import _core, errors
from pathways.host import stream_sockets
from pathways.host.stream_sockets import Sender, StreamAddress
from pathways.transport.connection import Connection, Pair, Parser
from pathways.transport.loop import Loop
from pathways.trust.credentials import Credentials

_log = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
SHORT_BYTES = 64 << 10
#: As many bytes in one piece are sent from a shard itself, and received into a block itself.
_PIECE_BYTES = 64 << 10
_PREFIX_BYTES = 4 << 10  # of a message, in which the head of a chunk is looked for
_AT_ONCE_BYTES = 8 << 10  # fits into the kernel's empty buffers, so the thread that sends it does not wait
_QUIET_S = 200e-6  # after so long without a transfer, the next one is no part of a flood, which is sent in batches
_MOST_LANES = 4
_TURN_MESSAGES = 8  # after so many, a stream lets the others of its loop take their turn
# How an outgoing transfer ended: its order and node, and the bytes of the error's text that follow; 0: it is complete.
_ANSWER = struct.Struct("<QII")
_REFUSED = (1 << 32) - 1  # instead of a node: the whole stream is refused, as the text says


def lanes(is_encrypted: bool) -> int:
    """How many streams a host has to each other host at most. One transfer uses one of them.

    A stream with TLS keeps a core busy at either end, one without TLS does not (measured over loopback).
    """
    cores = len(os.sched_getaffinity(0))
    return max(1 if is_encrypted else 2, min(_MOST_LANES, cores // 2))


def _answer(order: int, node: int, error: str | None) -> bytes:
    text = (error or "").encode()
    return _ANSWER.pack(order, node, len(text)) + text


class Streams:
    """Both ends of one host's streams.

    The enqueue thread calls `send`, `expect`, `forget` and `peer_opens`; any thread may call `expect_peer`.

    A successor may send before this host has heard of the loss (ERR-2). It is known as soon as it is expected, and its
    predecessor is not any more. What it sends early is refused until it is open: the executor would take it for its
    predecessor's. It is sent again when its receive is announced.
    """

    def __init__(self, core: Any, address: str, far: Mapping[int, str], credentials: str = "") -> None:
        """Listens.

        Args:
            core: the native host.
            address: where it listens: a `StreamAddress`, as those of `far`.
            far: where the hosts on other machines listen; "" for one that is lost now.
            credentials: the file of the machine's credentials; empty: streams are not encrypted.

        Raises:
            OSError: cannot listen at the address.
        """
        self._core = core
        self._credentials = credentials
        # TLS keeps a core busy: so there is a loop for each lane, and one for each direction.
        count = lanes(bool(credentials))
        self._loops = [Loops(Loop("pw-streams-out"), Loop("pw-streams-in")) for _ in range(count)]
        self._next_loop = itertools.cycle(self._loops)
        self._incoming: dict[Pair, Sender] = {}  # by age
        own = StreamAddress.parse(address)
        self._secret = own.secret
        self._expected: dict[tuple[int, int], StreamAddress] = {}  # by host and epoch
        self._far = {peer: StreamAddress.parse(there) for peer, there in far.items()}
        self._lanes = {peer: self._lanes_to(there) for peer, there in self._far.items()}
        self._waiting: dict[tuple[int, int, int], Any] = {}  # incoming transfers by order, node and sender
        for peer in far:
            core.open_stream(peer)
        self._listener = stream_sockets.StreamListener(own.address, credentials, self._knows, self._receive)

    def _lanes_to(self, there: StreamAddress) -> list[_HostStream]:
        return [_HostStream(self._core, there, self._secret, self._credentials, loops) for loops in self._loops]

    def _knows(self, sender: Sender) -> bool:
        return any(sender.is_at(there) for there in list(self._far.values()))

    def send(self, outgoing: Any) -> None:
        """Sends an outgoing transfer to its destination; calls `core.remote_send_done` at its end."""
        min(self._lanes[outgoing.destination], key=lambda lane: lane.queued_bytes).send(outgoing)

    def expect(self, order: int, node: int, sources: Sequence[int], views: list[Any]) -> None:
        """Makes a receive wait for its sources on other machines. Call it before the receive is announced to them."""
        for source in sources:
            if source in self._lanes:
                self._waiting[order, node, source] = _core.IncomingTransfer(views)

    def place_early(self, order: int, node: int, source: int, chunk: bytes) -> None:
        """Writes a chunk that came before its receive waited for it.

        Raises:
            RuntimeError: the receive does not wait for it, or it does not fit.
        """
        incoming = self._waiting.pop((order, node, source), None)
        for _, _, _, error in _core.unpack(chunk, lambda *_: incoming, None):
            if error is not None:
                raise RuntimeError(error)

    def forget(self, order: int, node: int, sources: Sequence[int]) -> None:
        """Makes a receive wait no longer: a chunk that still comes for it is refused (FAR-1)."""
        for source in sources:
            self._waiting.pop((order, node, source), None)

    def expect_peer(self, host: int, epoch: int, stream: str) -> None:
        """A lost host has a successor, or a host comes that was not there before. It sends from now on, and is sent to
        when it opens. It is at `stream`, a `StreamAddress`; empty: on this machine.
        """
        if not stream and host not in self._lanes:
            return
        self._expected[host, epoch] = self._far[host] = StreamAddress.parse(stream)
        for incoming, sender in list(self._incoming.items()):
            if not self._knows(sender):
                incoming.ended("its machine has left")

    def peer_opens(self, host: int, epoch: int) -> None:
        """Ends the streams to the lost host; its successor has its own ones."""
        there = self._expected.get((host, epoch))
        if there is None:
            return
        for lane in self._lanes.get(host, ()):
            lane.stop()
        self._lanes[host] = self._lanes_to(there)
        if there.address:
            self._core.open_stream(host)
        del self._expected[host, epoch]

    def stop(self) -> None:
        """Ends all streams. Nobody is notified of the ends of their transfers any more."""
        for to_one in self._lanes.values():
            for lane in to_one:
                lane.stop()
        self._listener.close()
        for stream in list(self._incoming):
            stream.close()
            for connection in stream.connections:
                connection.sock.close()
        for loops in self._loops:
            for loop in loops:
                loop.close()

    def _receive(self, sender: Sender, answers: socket.socket, messages: socket.socket) -> None:
        """Serves a stream to this host."""
        loop, frames = next(self._next_loop).receive, stream_sockets.Frames()

        def ended(why: str) -> None:
            if frames.is_within:
                _log.warning("a stream from %s broke: %s", sender, why)
            self._incoming.pop(stream, None)
            answers.close()
            messages.close()

        stream = Pair(ended)
        self._incoming[stream] = sender
        reply = Connection(loop, answers, stream.ended)
        parser = self._take_all(frames, sender, lambda data: reply.send(memoryview(data), stays=True))
        stream.start(reply, Connection(loop, messages, stream.ended, parse=parser))
        # Twice as many as an honest machine opens, which may not know yet that some are over.
        theirs = [each for each, whose in list(self._incoming.items()) if whose.secret == sender.secret]
        most = 2 * _MOST_LANES * sum(map(sender.is_at, list(self._far.values())))
        for oldest in theirs[: max(0, len(theirs) - most)]:
            oldest.ended("its machine has opened too many others")

    def _take_all(self, frames: stream_sockets.Frames, sender: Sender, answer: Callable[[bytes], object]) -> Parser:
        """Takes what a stream brings, and answers."""
        delivery = self._delivery_for(sender)
        reply = bytearray()

        def keep_early(order: int, node: int, host: int, chunk: memoryview) -> bool:
            if any(host == each for each, _ in list(self._expected)) or not self._core.keep_early(chunk):
                return False
            reply.extend(_answer(order, node, None))
            return True

        try:
            while True:
                for order, node, host, error in (yield from self._take(frames, delivery, keep_early)):
                    # No name for it: what it refers to must go before the next message comes.
                    has_waited = self._waiting.pop((order, node, host), None) is not None
                    if has_waited and error is None:
                        self._core.arrived(order, node, host)
                    reply += _answer(order, node, error)
                if reply:
                    answer(bytes(reply))
                    reply.clear()
        except (errors.PermissionDeniedError, RuntimeError) as error:  # who may not send that, and what is no message
            answer(_answer(0, _REFUSED, str(error)))
            raise RuntimeError(f"what {sender} sends is refused: {error}") from error

    @staticmethod
    def _take(
        frames: stream_sockets.Frames, delivery: Callable[[int, int, int], Any], keep_early: Any
    ) -> Generator[memoryview, int, list[tuple[int, int, int, str | None]]]:
        """Takes a message, and says which transfers it ends and how."""
        length = yield from frames.begin()
        if length >= _PIECE_BYTES:
            place = _core.place((yield from frames.peek(_PREFIX_BYTES)), length, delivery)
            if place is not None:
                order, node, host, incoming, skipped, memory = place
                yield from frames.rest_into(skipped, memory)
                return [(order, node, host, None)] if incoming.is_over else []
        found: list[tuple[int, int, int, str | None]] = _core.unpack((yield from frames.whole()), delivery, keep_early)
        return found

    def _delivery_for(self, sender: Sender) -> Callable[[int, int, int], Any]:
        """What finds the incoming transfer of a chunk, of a host on the sender's machine (CERT-1)."""

        def delivery(order: int, node: int, host: int) -> Any:
            there = self._far.get(host)
            if there is None or not sender.is_at(there):
                why = f"{sender} sends a transfer of host {host}, which is not on that machine"
                raise errors.PermissionDeniedError(why)
            return self._waiting.get((order, node, host))

        return delivery


class Loops(NamedTuple):
    """Who serves the streams of a lane."""

    send: Loop
    receive: Loop


class _HostStream:
    """The sending end to one host: outgoing transfers that are queued, and those that the host has not answered yet.

    The loop sends; the enqueue thread sends what is small itself, while nothing else is under way.
    """

    def __init__(self, core: Any, there: StreamAddress, secret: str, credentials: str, loops: Loops) -> None:
        self._core = core
        self._there = there
        self._secret = secret
        self._credentials = credentials
        self._loops = loops
        self._lock = threading.Lock()  # guards the fields below; who holds it uses no connection
        self._short: list[Any] = []
        self._long: list[Any] = []
        self._open: dict[tuple[int, int], Any] = {}  # not answered yet, by order and node
        self._stream: Pair | None = None
        self._messages: Connection | None = None  # of the stream, when it is open
        self._stopped = False
        self._last_s = 0.0  # when the last transfer came
        self.queued_bytes = 0  # of what is not answered yet; a stale value does no harm
        # Those that follow are of who holds the lock of the connection for messages.
        self._buffer = stream_sockets.FrameBuffer()
        self._picked: Any = None  # what is being sent stays until then

    def send(self, outgoing: Any) -> None:
        """Sends an outgoing transfer, or queues it. Opens the stream if there is none."""
        with self._lock:
            is_stopped = self._stopped
            if not is_stopped:
                now = time.monotonic()
                is_quiet = not self._open and now - self._last_s > _QUIET_S
                self._last_s = now
                self._open[outgoing.order, outgoing.node] = outgoing
                self.queued_bytes += outgoing.nbytes
                if self._stream is None:
                    self._stream = stream = Pair(lambda why: self._broken(stream, why))
                    threading.Thread(target=self._connect, args=(stream,), name="pw-stream", daemon=True).start()
                messages = self._messages
        if is_stopped:
            self._fail(outgoing, "the host is lost")
        elif not (
            is_quiet and outgoing.nbytes <= _AT_ONCE_BYTES and messages and self._send_at_once(messages, outgoing)
        ):
            with self._lock:
                if (outgoing.order, outgoing.node) in self._open:  # else its stream has broken meanwhile
                    (self._short if outgoing.nbytes <= SHORT_BYTES else self._long).append(outgoing)
                messages = self._messages
            if messages is not None:
                messages.ask()

    def stop(self) -> None:
        """Ends the stream."""
        with self._lock:
            self._stopped = True
            stream = self._stream
        if stream is not None:
            stream.ended("the host is lost")

    def _connect(self, stream: Pair) -> None:
        """Opens a stream, which may wait; streams to other hosts do not wait for it."""
        try:
            if not self._there.address:
                raise ConnectionError("the host is lost")
            # Loaded again for each stream: the agent renews them.
            own = Credentials.load(self._credentials) if self._credentials else None
            sockets = stream_sockets.connect(self._there, self._secret, own)
        except Exception as error:  # every transfer must get an answer, so report any error
            stream.ended(f"{type(error).__name__}: {error}")
            return
        answers = Connection(self._loops.receive, sockets[0], stream.ended, parse=self._hear_answers())
        messages = Connection(self._loops.send, sockets[1], stream.ended, on_room=self._send)
        stream.start(answers, messages)
        if stream.is_over:  # meanwhile
            stream.close()
            for connection in sockets:
                connection.close()
            return
        with self._lock:
            if self._stream is stream:
                self._messages = messages
        messages.ask()

    def _send_at_once(self, messages: Connection, outgoing: Any) -> bool:
        """Sends a small transfer from the calling thread. False: it must be queued."""
        if not messages.lock.acquire(blocking=False):
            return False
        try:
            if messages.kept_bytes or messages.is_over:
                return False
            self._picked = outgoing
            self._buffer.send(messages, _core.pack([outgoing], MESSAGE_BYTES, self._buffer.room))
            if not messages.kept_bytes:
                self._picked = None
        finally:
            messages.lock.release()
        return True

    def _send(self) -> None:
        """Sends what is queued, as far as the connection takes it. By the loop, when the connection keeps nothing."""
        messages = self._messages
        if messages is None:
            return
        for _ in range(_TURN_MESSAGES):
            self._picked = None  # it has been sent
            with self._lock:
                picked = [*self._short, *self._long]
                has_short = bool(self._short)
            if not picked:
                return
            # Long ones take turns.
            piece = None if has_short else _core.pack_head(picked[0], _PIECE_BYTES, MESSAGE_BYTES, self._buffer.room)
            count = _core.pack(picked, MESSAGE_BYTES, self._buffer.room) if piece is None else piece[0]
            with self._lock:
                self._short = [outgoing for outgoing in self._short if not outgoing.is_over]
                self._long = [outgoing for outgoing in self._long[1:] + self._long[:1] if not outgoing.is_over]
            self._picked = picked
            self._buffer.send(messages, count, None if piece is None else piece[1])
            if messages.kept_bytes:
                return
        messages.ask()  # the others of the loop take their turn

    def _hear_answers(self) -> Parser:
        """Takes the other end's answers: how outgoing transfers ended."""
        reader = stream_sockets.Reader()
        while True:
            order, node, length = _ANSWER.unpack((yield from reader.take(_ANSWER.size)))
            if length > stream_sockets.MOST_FRAME_BYTES:
                raise RuntimeError(f"an answer has {length} bytes")
            text = bytes((yield from reader.take(length))).decode()
            if node == _REFUSED:
                raise RuntimeError(text)
            self._answered(order, node, text if length else None)

    def _answered(self, order: int, node: int, error: str | None) -> None:
        with self._lock:
            outgoing = self._open.pop((order, node), None)
            if outgoing is not None:
                self.queued_bytes -= outgoing.nbytes
        if outgoing is not None:
            self._core.remote_send_done(outgoing, error)

    def _broken(self, stream: Pair, why: str) -> None:
        """Fails all unanswered transfers of a stream that is over."""
        for connection in stream.connections:
            connection.sock.close()
        with self._lock:
            if self._stream is not stream:
                return
            self._stream = self._messages = self._picked = None
            lost = list(self._open.values())
            self._short, self._long = [], []
            self._open.clear()
            self.queued_bytes = 0
        if lost and not self._stopped:
            _log.warning("a stream to %s broke: %s", self._there.address, why)
        for outgoing in lost:
            self._fail(outgoing, why)

    def _fail(self, outgoing: Any, why: str) -> None:
        text = f"ComputationError: a transfer to host {outgoing.destination} failed, for its stream broke: {why}"
        self._core.remote_send_done(outgoing, text)
