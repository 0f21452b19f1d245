"""One connection of a client: the calls of the protocol, and the thread that serves them.

    socket --receive--> calls: sessions, host buffers --respond, finish--> socket

The connection's thread handles requests itself: what a client asks takes no other thread, and a client that sends much
is read only as fast as it is served. What other threads have to tell the session, they post.

Flow (PROXY-4): a session's stream is read while less than `Limits.requests` of its requests are without a reply, and
while less than `Limits.unread_bytes` of replies are unwritten. So a client that sends much, or never reads, stops by
itself. The bytes of a host buffer are read when there is room for them.
"""

from __future__ import annotations

import base64
import binascii
import collections
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from pathways import _native
from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import Code, Refused, refusal_of
from pathways.proxy.host_buffers import HostBuffers
from pathways.proxy.service import PACKAGE, SERVICE, BufferName, Service, name_in
from pathways.proxy.session import EXPECTED, Session, refused

log = logging.getLogger(__name__)

SESSION_KEY = b"ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_KEY = b"ifrt-proxy-grpc-host-buffer-store-metadata-bin"
CHUNK_BYTES = 1 << 20
#: Calls of one connection at a time. A stock client brings each host buffer by a call, of which many wait for room.
#: What the next request needs must not wait behind them.
CALLS = 1 << 14
#: Seconds for which a client may be silent before it speaks HTTP/2, while it has no call, until it is asked whether it
#: is there, and until it answers that. A client on a machine that is gone does not say so.
PATIENCE = {"begin_s": 20.0, "idle_s": 120.0, "silent_s": 30.0, "answer_s": 60.0}

Fields = dict[bytes, bytes]


class Connection:
    """Serves one connection. `run` is its thread; any thread may call `post` and `end`."""

    def __init__(self, service: Service, sock: socket.socket, peer: str, identities: tuple[str, ...]) -> None:
        """Takes the socket over. `identities`: the names in the client's certificate."""
        self.service, self.peer, self.identities = service, peer, identities
        limits = service.limits
        self.native = _native.Http2Connection(
            sock.detach(),
            calls=CALLS,
            message_bytes=limits.request_bytes,
            room_bytes=limits.unread_bytes,
            **PATIENCE,
        )
        self._calls: dict[int, _Call] = {}
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._thread = 0
        self.is_given_up = False  # the server's

    def post(self, work: Callable[[], None]) -> None:
        """Lets the connection's thread do something soon."""
        self._posted.append(work)
        if threading.get_ident() != self._thread:
            self.native.wake()

    @property
    def is_idle(self) -> bool:
        """Whether it has no call. Any thread."""
        return not self._calls

    def end(self) -> None:
        """Ends the connection."""
        self.native.end()

    def run(self) -> None:
        """Serves until the connection is over."""
        self._thread = threading.get_ident()
        try:
            while (events := self.native.receive()) is not None:
                for kind, number, what in events:
                    self._tell(kind, number, what)
                while self._posted:
                    self._posted.popleft()()
        finally:
            for number in list(self._calls):
                self._drop(number)
            log.debug("the connection of %s is over: %s", self.peer, self.native.why)

    def fail(self, number: int, error: BaseException) -> None:
        """Ends a call with an error."""
        refusal = refusal_of(error)
        if not isinstance(error, EXPECTED):
            log.warning("a call of %s failed", self.peer, exc_info=error)
        self.native.finish(number, int(refusal.code), refusal.text[:4096])
        self._drop(number)

    def succeed(self, number: int) -> None:
        """Ends a call."""
        self.native.finish(number)
        self._drop(number)

    def _tell(self, kind: int, number: int, what: Any) -> None:
        try:
            if kind == _native.Http2Connection.CALL:
                fields = dict(what)
                make = METHODS.get(fields.get(b":path", b"").decode(errors="replace"))
                if make is None:
                    raise Refused(Code.UNIMPLEMENTED, f"this is a server of {SERVICE}, and has no such call")
                self._calls[number] = make(self, number, fields)
                return
            call = self._calls.get(number)
            if call is None:  # it is over here, and the client did not know as yet
                return
            if kind == _native.Http2Connection.MESSAGE:
                call.message(what)
            elif kind == _native.Http2Connection.END:
                call.ended()
            elif kind == _native.Http2Connection.ROOM:
                call.room()
            else:
                self._drop(number)
        except Exception as error:
            self.fail(number, error)

    def _drop(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        try:
            call.over()
        except Exception:  # of this call; the others go on
            log.exception("a call of %s could not be ended", self.peer)


class _Call:
    """One call. Its methods are called by the connection's thread; what they raise is told to the client."""

    def __init__(self, connection: Connection, number: int, fields: Fields) -> None:
        self.connection, self.number = connection, number
        self.service, self.native = connection.service, connection.native

    def message(self, data: bytes) -> None:
        """The client has sent a message."""

    def ended(self) -> None:
        """It sends no more."""

    def room(self) -> None:
        """Most of what was responded is written."""

    def over(self) -> None:
        """The call is over. Called once, last."""


class _Session(_Call):
    """The stream of a session: requests in, replies out."""

    def __init__(self, connection: Connection, number: int, fields: Fields) -> None:
        super().__init__(connection, number, fields)
        self._limits = self.service.limits
        self._lock = threading.Lock()
        self._under_way = 0  # requests without a reply
        self._is_held = False
        metadata, who = _metadata(fields, SESSION_KEY), (connection.peer, connection.identities)
        self._session: Session | None = None
        self._refused: Exception | None = None
        try:
            self._session = self.service.begin(metadata, *who, self._send, self._post)
        except Exception as error:
            self._refused = error
        else:
            log.info("session %x of %s begins", self._session.number, connection.peer)
            self.native.resume(number)

    def message(self, data: bytes) -> None:
        """See `_Call`, as for the others."""
        if self._session is None:
            assert self._refused is not None
            # A stock client shows its user what its first request fails with, and not why its stream has ended.
            self.native.respond(self.number, refused(data, refusal_of(self._refused)))
            raise self._refused
        reply = self._session.answer(data)
        if reply is not None and self.native.respond(self.number, reply) <= self._limits.unread_bytes:
            return
        with self._lock:
            if reply is None:
                self._under_way += 1
            else:
                self._session.is_paused = True
            self._pace(self._session)
        if reply is None:
            self._session.receive(data)

    def ended(self) -> None:
        if self._refused is not None:
            raise self._refused
        self.connection.succeed(self.number)

    def room(self) -> None:
        if self._session is None:
            return
        with self._lock:
            self._session.is_paused = False
            self._pace(self._session)
        self._session.go_on()

    def over(self) -> None:
        if self._session is not None:
            self._session.end()
            log.info("session %x of %s ends", self._session.number, self.connection.peer)

    def _send(self, reply: bytes) -> None:
        """The next reply to what `receive` took. Any thread."""
        assert self._session is not None  # it has asked something
        with self._lock:
            if self.native.respond(self.number, reply) > self._limits.unread_bytes:
                self._session.is_paused = True
            self._under_way -= 1
            self._pace(self._session)

    def _pace(self, session: Session) -> None:
        """Reads requests, or does not, as the flow allows. Under the lock."""
        must_wait = session.is_paused or self._under_way >= self._limits.requests
        if must_wait != self._is_held:
            self._is_held = must_wait
            (self.native.hold if must_wait else self.native.resume)(self.number)

    def _post(self, work: Callable[[], None]) -> None:
        """Does something, and what the session can do afterwards. Any thread. What it raises ends the session."""

        def guarded() -> None:
            try:
                work()
                if self._session is not None:
                    self._session.go_on()
            except Exception as error:
                self.connection.fail(self.number, error)

        self.connection.post(guarded)


class _Unary(_Call):
    """A call with one message."""

    def __init__(self, connection: Connection, number: int, fields: Fields) -> None:
        super().__init__(connection, number, fields)
        self._data: bytes | None = None

    def message(self, data: bytes) -> None:
        if self._data is not None:
            raise Refused(Code.INVALID_ARGUMENT, "a call with one message came with two")
        self._data = data

    def ended(self) -> None:
        if self._data is None:
            raise Refused(Code.INVALID_ARGUMENT, "a call came without its message")
        self.handle(self._data)

    def handle(self, data: bytes) -> None:
        """Does it."""


class _GetVersion(_Unary):
    def handle(self, data: bytes) -> None:
        self.native.respond(self.number, self.service.get_version(data))
        self.connection.succeed(self.number)


class _Delete(_Unary):
    """The client needs a host buffer no more."""

    def handle(self, data: bytes) -> None:
        name = name_in("GrpcHostBufferDeleteRequest", data)
        self.service.buffers_of(name).release(name.handle)
        self.native.respond(self.number, b"")
        self.connection.succeed(self.number)


class _LookUp(_Unary):
    """The client fetches what was read."""

    _left = memoryview(b"")

    def handle(self, data: bytes) -> None:
        name = name_in("GrpcHostBufferLookupRequest", data)
        self._left = memoryview(self.service.buffers_of(name).look_up(name.handle)).cast("B")
        self.native.respond(self.number, _with_data(self._next()))
        self.room()

    def room(self) -> None:
        while self._left:
            if self.native.respond(self.number, _with_data(self._next())) > self.service.limits.unread_bytes:
                return
        self.connection.succeed(self.number)

    def _next(self) -> memoryview:
        part, self._left = self._left[:CHUNK_BYTES], self._left[CHUNK_BYTES:]
        return part


class _Reserving:
    """Room for a host buffer: `then` is called when it is there, unless it is given up before."""

    def __init__(self, call: _Call, name: BufferName, then: Callable[[], None]) -> None:
        self.buffers: HostBuffers = call.service.buffers_of(name)
        self._name, self._then, self._call = name, then, call
        self._is_kept = self._is_over = False
        self.buffers.reserve(name.handle, name.size, self._reserved)

    def keep(self, data: Any) -> None:
        """The buffer is here."""
        self._is_kept = True
        self.buffers.put(self._name.handle, data)

    def over(self) -> None:
        """Gives the room back, unless the buffer is here."""
        self._is_over = True
        if not self._is_kept:
            self.buffers.release(self._name.handle)

    def _reserved(self, wrong: Refused | None) -> None:
        """Any thread."""
        if wrong is not None:
            self._is_kept = True  # there is no room to give back

        def tell() -> None:
            if self._is_over:
                return
            try:
                if wrong is not None:
                    raise wrong
                self._then()
            except Exception as error:
                self._call.connection.fail(self._call.number, error)

        self._call.connection.post(tell)


class _Store(_Call):
    """Bytes of an array come, in parts."""

    def __init__(self, connection: Connection, number: int, fields: Fields) -> None:
        super().__init__(connection, number, fields)
        self._name = name_in("GrpcHostBufferStoreMetadata", _metadata(fields, STORE_KEY))
        self._early: list[bytes] | None = []  # what came before there was room; None: there is
        self._data: bytearray | memoryview = memoryview(b"")
        self._filled = 0
        self._has_ended = False
        self._room = _Reserving(self, self._name, self._reserved)

    def message(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
            return
        part, size = _data_in(data), self._name.size
        end = self._filled + len(part)
        if end > size:
            raise self._wrong(end)
        if not self._filled and end == size:
            self._data = part
        else:
            if not self._filled:
                self._data = bytearray(size)
            self._data[self._filled : end] = part
        self._filled = end

    def ended(self) -> None:
        self._has_ended = True
        if self._early is not None:
            return
        if self._filled != self._name.size:
            raise self._wrong(self._filled)
        self._room.keep(self._data)
        self.native.respond(self.number, b"")
        self.connection.succeed(self.number)

    def over(self) -> None:
        self._room.over()

    def _reserved(self) -> None:
        early, self._early = self._early or [], None
        self.native.resume(self.number)
        for data in early:
            self.message(data)
        if self._has_ended:
            self.ended()

    def _wrong(self, came: int) -> Refused:
        return Refused(Code.DATA_LOSS, f"{self._name.size} bytes were announced for a host buffer, but {came} came")


class _ReadFromDisk(_Unary):
    """Bytes of an array lie in the shared directory."""

    _room: _Reserving | None = None

    def handle(self, data: bytes) -> None:
        name = name_in("GrpcHostBufferReadFromDiskRequest", data)

        def reserved() -> None:
            assert self._room is not None
            self._room.keep(self.service.read_from_disk(name))
            self.native.respond(self.number, b"")
            self.connection.succeed(self.number)

        self._room = _Reserving(self, name, reserved)

    def over(self) -> None:
        if self._room is not None:
            self._room.over()


METHODS: dict[str, Callable[[Connection, int, Fields], _Call]] = {
    f"/{SERVICE}/{name}": made
    for name, made in {
        "GetVersion": _GetVersion,
        "IfrtSession": _Session,
        "HostBufferStore": _Store,
        "HostBufferLookup": _LookUp,
        "HostBufferDelete": _Delete,
        "HostBufferReadFromDisk": _ReadFromDisk,
    }.items()
}


def _metadata(fields: Fields, key: bytes) -> bytes:
    """A field with bytes, which gRPC writes in base 64, with or without its padding. Raises `Refused`."""
    found = fields.get(key)
    if found is None:
        raise Refused(Code.INVALID_ARGUMENT, f"the call has no metadata {key.decode()}")
    try:
        return base64.b64decode(found + b"=" * (-len(found) % 4), validate=True)
    except binascii.Error:
        raise Refused(Code.INVALID_ARGUMENT, f"the metadata {key.decode()} is not in base 64") from None


def _data_in(raw: bytes) -> memoryview:
    """The bytes in a GrpcHostBufferStoreRequest, which has nothing else. They are copied for a message that is written
    in another way than usual only.
    """
    at, size, shift = 1, 0, 0
    if raw[:1] == _DATA_TAG:
        while at < len(raw) and shift < 35:
            byte = raw[at]
            at, size, shift = at + 1, size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        if len(raw) == at + size:
            return memoryview(raw)[at:]
    return memoryview(_parsed(raw))


def _parsed(raw: bytes) -> bytes:
    from google.protobuf.message import DecodeError

    try:
        found: bytes = _STORE.FromString(raw).data
    except DecodeError:
        raise Refused(Code.INVALID_ARGUMENT, "what came is no GrpcHostBufferStoreRequest") from None
    return found


def _with_data(data: memoryview) -> bytes:
    """A GrpcHostBufferLookupResponse."""
    if not data:
        return b""
    size, count = bytearray(), len(data)
    while count > 127:
        size.append(count & 127 | 128)
        count >>= 7
    size.append(count)
    return b"".join((_DATA_TAG, size, data))


_STORE = message(f"{PACKAGE}.GrpcHostBufferStoreRequest")
#: Field 1 of both messages, with bytes.
_DATA_TAG = bytes([_STORE.DESCRIPTOR.fields_by_name["data"].number << 3 | 2])
