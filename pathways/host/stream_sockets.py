"""The connections of streams between hosts on different machines: how they are opened, and the frames on them.

A stream is two connections, one per direction (pathways/transport/loop.py). On the first one the receiver answers, on
the second one the sender sends messages. Both begin with the stream's number, which the sender draws, so that the
receiver knows which two belong together.

Sockets and not gRPC: gRPC copies every message twice more at each end, and hands it through three of its threads.

CERT-1: a stream says who its sender is by a certificate, unless streams are not encrypted, and by a secret. The
controller draws a secret for each machine that joins, gives it to that machine, and says it to the hosts to which it
introduces the machine's hosts. So a machine that has left, or whose place another one has now, sends nothing any more.

A frame is a head of 16 bytes, which begins with the length, and then the bytes. With this head a message begins at a
multiple of 16, as its chunks want it (csrc/bulk/network_transfer.cc).

Threading: any thread may call; a thread waits for a connection that it opens, and then a loop serves it. Connections
that come are introduced by the listener's own thread (`pathways/transport/callers.py`).
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import ssl
import struct
from collections.abc import Callable, Generator
from typing import NamedTuple

from pathways import errors
from pathways.transport import HEARTBEAT_S, TAKES_NOTHING_S
from pathways.transport.callers import Caller, Callers, Steps, received, sent
from pathways.transport.connection import Connection
from pathways.trust.address import Address
from pathways.trust.credentials import Credentials
from pathways.trust.dialing import check_machine
from pathways.trust.identity import Identity, Role, identity_of, server_name
from pathways.trust.refusals import RefusalLog

_HELLO = struct.Struct("<8s16sB32s")  # what it is, the stream's number, which of its connections, the secret
_MAGIC = b"pwstream"
_ANSWERS, _MESSAGES = 0, 1
_FRAME = struct.Struct("<QQ")  # bytes that follow; 0
#: A longer frame breaks the stream. The words of a copy plan are not cut, so a message may be long.
MOST_FRAME_BYTES = 64 << 20
_LEAST_BUFFER = (1 << 20) + _FRAME.size
_MOST_AHEAD = 32 << 10  # bytes that are read before it is known where they belong
_VERDICT = struct.Struct("<I")  # bytes of the text that follows, which says why the stream is refused; 0: it is not
_HELLO_S = 10.0
_MOST_ARRIVING = 64  # connections whose stream has no messages yet


class StreamAddress(NamedTuple):
    """Where a host receives network transfers, as hosts are told: `MACHINE@ADDRESS#SECRET`."""

    machine: str  # empty where machines are modelled, and the host's own
    address: str  # `unix:PATH`, or `HOST:PORT`; empty: the host is lost now
    secret: str  # of the machine; empty where machines are modelled

    @classmethod
    def parse(cls, text: str) -> StreamAddress:
        """Reads it."""
        where, _, secret = text.partition("#")
        machine, _, address = where.rpartition("@")
        return cls(machine, address, secret)


class Sender(NamedTuple):
    """What the one that opened a stream has shown."""

    identity: Identity | None  # None: the stream is not encrypted
    secret: str

    def __str__(self) -> str:
        if self.identity is None:
            return "a host"
        return f"machine {self.identity.name}" if self.identity.role is Role.HOST else str(self.identity)

    def is_at(self, there: StreamAddress) -> bool:
        """Whether it is the machine of a host that is there (CERT-1)."""
        is_named = self.identity is None or self.identity.name == there.machine
        return bool(there.address) and is_named and hmac.compare_digest(self.secret.encode(), there.secret.encode())


Serve = Callable[[Sender, socket.socket, socket.socket], None]


def _unix_path(address: str) -> str | None:
    return address.removeprefix("unix:") if address.startswith("unix:") else None


def _watch(connection: socket.socket) -> None:
    """Lets the kernel find out that the other machine is gone. For connections that may be idle for long."""
    if connection.family == socket.AF_UNIX:
        return
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, int(HEARTBEAT_S)),
        (socket.TCP_KEEPINTVL, int(HEARTBEAT_S)),
        (socket.TCP_USER_TIMEOUT, int(TAKES_NOTHING_S * 1e3)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connect(there: StreamAddress, secret: str, own: Credentials | None) -> tuple[socket.socket, socket.socket]:
    """Opens a stream to a host: the connection that answers, and that of the messages.

    Args:
        there: where the host is, as the controller has said.
        secret: of this end's machine.
        own: what this end shows; None: streams are not encrypted.

    Raises:
        OSError: nobody is there, or it is no host of this cluster.
        PermissionDeniedError: the host refuses this caller, or another machine answers there.
    """
    number = os.urandom(16)
    answers = _open(there, secret, own, number, _ANSWERS)
    try:
        _hear_verdict(answers)
        messages = _open(there, secret, own, number, _MESSAGES)
    except BaseException:
        answers.close()
        raise
    for connection in (answers, messages):
        connection.settimeout(None)
    return answers, messages


def _hear_verdict(answers: socket.socket) -> None:
    head = bytearray(_VERDICT.size)
    if not read_all(answers, memoryview(head)):
        raise ConnectionError("the host closed the stream as it was opened")
    text = bytearray(_VERDICT.unpack(head)[0])
    if text and read_all(answers, memoryview(text)):
        raise errors.PermissionDeniedError(text.decode())


def _open(there: StreamAddress, secret: str, own: Credentials | None, number: bytes, which: int) -> socket.socket:
    path = _unix_path(there.address)
    if path is None:
        listener = Address.parse(there.address)
        connection = socket.create_connection((listener.host, listener.port), timeout=_HELLO_S)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_HELLO_S)
    try:
        if path is not None:
            connection.connect(path)
        _watch(connection)
        if own is not None:
            connection = own.client_context().wrap_socket(connection, server_hostname=server_name(Role.HOST))
            check_machine(connection, there.machine, there.address)
        connection.sendall(_HELLO.pack(_MAGIC, number, which, secret.encode()))
    except BaseException:
        connection.close()
        raise
    return connection


class StreamListener:
    """Takes streams, and hands each one over."""

    def __init__(self, address: str, credentials: str, knows: Callable[[Sender], bool], serve: Serve) -> None:
        """Listens.

        Args:
            address: `unix:PATH`, or `HOST:PORT`.
            credentials: the file of the machine's credentials; empty: streams are not encrypted.
            knows: whether a caller is of a machine that the controller has introduced. Called in the listener's thread.
            serve: called with who sends, the connection for answers, and that of the messages, which are its from then
                on.

        Raises:
            OSError: cannot listen at the address.
        """
        self._credentials = credentials
        self._knows = knows
        self._serve = serve
        self._refusals = RefusalLog(logging.getLogger(__name__))
        self._answers: dict[bytes, socket.socket] = {}  # by the numbers of streams that have no messages yet
        path = _unix_path(address)
        if path is None:
            there = Address.parse(address)
            # The agent keeps the port reserved for this host by a socket of its own, which does not listen.
            listener = socket.create_server(
                (there.host, there.port),
                family=socket.AF_INET6 if ":" in there.host else socket.AF_INET,
                reuse_port=True,
                dualstack_ipv6=there.host == "::",
            )
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
        self._callers = Callers("pw-streams-arrive", listener, self._arrive, self._no_place, _HELLO_S)

    def close(self) -> None:
        """Takes no more streams."""
        self._callers.close()
        for connection in list(self._answers.values()):
            connection.close()

    def _arrive(self, caller: Caller) -> Steps[None]:
        try:
            _watch(caller.sock)
            if self._credentials:
                # It shows the certificate that is in the file now, because the agent renews it.
                yield from caller.shake_hands(Credentials.load(self._credentials).server_context())
            stream = yield from self._joined(caller.sock)
        except (OSError, errors.PathwaysError) as error:
            if not self._callers.is_closed:
                self._refusals.add("a stream from %s is refused: %s", caller.peer, error)
            caller.leave()
            caller.sock.close()
            return
        caller.leave()
        if stream is not None:
            self._serve(*stream)

    def _no_place(self, peer: str, why: str) -> None:
        # An honest host finds its connection closed, and opens another one for its next transfer.
        self._refusals.add("a stream from %s is refused: %s", peer, why)

    def _joined(self, connection: socket.socket) -> Steps[tuple[Sender, socket.socket, socket.socket] | None]:
        """Reads which stream a connection belongs to. Returns the stream when both of its connections are there."""
        hello = b""
        while len(hello) < _HELLO.size:
            hello += yield from received(connection, _HELLO.size - len(hello))
        magic, number, which, secret = _HELLO.unpack(hello)
        if magic != _MAGIC or which not in (_ANSWERS, _MESSAGES):
            raise ConnectionError("what called is no host's stream")
        sender, why = Sender(_identity(connection), secret.rstrip(b"\0").decode(errors="replace")), ""
        if sender.identity is not None and sender.identity.role is not Role.HOST:  # CERT-1
            why = f"only hosts send transfers, and {sender} is none"
        elif not self._knows(sender):
            why = f"only hosts that the controller has introduced send transfers, and {sender} is none of them"
        if why:
            yield from sent(connection, _VERDICT.pack(len(why.encode())) + why.encode())
            raise errors.PermissionDeniedError(why)
        if which == _MESSAGES:
            answers = self._answers.pop(number, None)
            if answers is None:
                raise ConnectionError("messages came for a stream that nobody has opened")
            return sender, answers, connection
        while len(self._answers) >= _MOST_ARRIVING:  # the oldest one was given up, or is no host's
            self._answers.pop(next(iter(self._answers))).close()
        self._answers[number] = connection
        yield from sent(connection, _VERDICT.pack(0))
        return None


def _identity(connection: socket.socket) -> Identity | None:
    """Whose certificate the other end has shown; None: the connection is not encrypted."""
    return identity_of(connection.getpeercert(True) or b"") if isinstance(connection, ssl.SSLSocket) else None


def read_all(connection: socket.socket, into: memoryview) -> bool:
    """Fills `into`. False: the other end has closed the connection before the first byte.

    Raises:
        ConnectionError: it has closed it in between.
    """
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if count == 0:
            if at == 0:
                return False
            raise ConnectionError("a message is cut off")
        at += count
    return True


class Reader:
    """Reads what comes on a connection: its methods are parts of a parser (see `Connection`). What they return is good
    until the next call.
    """

    def __init__(self, least_buffer: int = _MOST_AHEAD) -> None:
        self._buffer = memoryview(bytearray(least_buffer))
        self._begin = self._end = 0  # the bytes that were read and not returned
        self.is_within = False  # the other end has said a part of something

    def take(self, count: int) -> Generator[memoryview, int, memoryview]:
        """The next bytes."""
        yield from self._fill(count)
        begin = self._begin
        self._begin += count
        return self._buffer[begin : self._begin]

    def _fill(self, count: int) -> Generator[memoryview, int, None]:
        """Reads until `count` bytes are there."""
        have = self._end - self._begin
        if have >= count:
            return
        if self._begin + count > len(self._buffer) or have == 0:
            old = self._buffer[self._begin : self._end]
            if count > len(self._buffer):
                self._buffer = memoryview(bytearray(count))
            self._buffer[:have] = bytes(old)
            self._begin, self._end = 0, have
        while self._end - self._begin < count:
            most = max(_MOST_AHEAD, self._begin + count - self._end)
            self._end += yield self._buffer[self._end : self._end + most]
            self.is_within = True


class Frames(Reader):
    """Reads frames: `begin`, then `whole`, or after a look at the first bytes `rest_into`."""

    def __init__(self) -> None:
        super().__init__(_LEAST_BUFFER)
        self._length = 0  # of the frame that has begun

    def begin(self) -> Generator[memoryview, int, int]:
        """The bytes of the next frame.

        Raises:
            ConnectionError: it is too long.
        """
        self.is_within = self._begin != self._end
        length, _ = _FRAME.unpack((yield from self.take(_FRAME.size)))
        if length > MOST_FRAME_BYTES:
            raise ConnectionError(f"a message of {length} bytes is longer than the longest, {MOST_FRAME_BYTES}")
        self._length = length
        return int(length)

    def peek(self, count: int) -> Generator[memoryview, int, memoryview]:
        """The first bytes of the frame: so many, or all of them."""
        count = min(count, self._length)
        yield from self._fill(count)
        return self._buffer[self._begin : self._begin + count]

    def whole(self) -> Generator[memoryview, int, memoryview]:
        """The frame."""
        return (yield from self.take(self._length))

    def rest_into(self, skipped: int, into: memoryview) -> Generator[memoryview, int, None]:
        """Reads the frame from byte `skipped` on into memory of just that size."""
        begin = self._begin + skipped
        have = min(self._end - begin, len(into))
        into[:have] = self._buffer[begin : begin + have]
        self._begin = begin + have
        while have < len(into):
            have += yield into[have:]


class FrameBuffer:
    """Where a frame is written before it is sent."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_LEAST_BUFFER))

    def room(self, count: int) -> memoryview:
        """Room for a message of `count` bytes."""
        if _FRAME.size + count > len(self._buffer):
            self._buffer = memoryview(bytearray(_FRAME.size + count))
        return self._buffer[_FRAME.size : _FRAME.size + count]

    def send(self, connection: Connection, count: int, payload: memoryview | None = None) -> None:
        """Sends the first `count` bytes of the room, and the bytes that follow, as a frame. All must stay as they are
        while the connection keeps something.
        """
        _FRAME.pack_into(self._buffer, 0, count + (0 if payload is None else len(payload)), 0)
        connection.send(self._buffer[: _FRAME.size + count], stays=True)
        if payload is not None:
            connection.send(payload, stays=True)
