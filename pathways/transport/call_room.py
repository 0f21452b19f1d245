"""What the calls of other machines take at the controller until they are whole, and answered: bounded for all of them
together. `Tunnels` has a `CallMeter` look at what crosses; the port's handlers say whose tunnel it is.

gRPC keeps a message until all of it has come, and a call until it is answered, and it has no bound for those of all
connections. So this reads the frames of HTTP/2 that cross a tunnel (RFC 9113), as far as it must know where calls and
their messages (5 bytes, of which the last four are the length, then the message) begin and end.

grpc.aio's server takes no calls of anybody any more when one of them names its method in bytes that are no text (seen
with grpcio 1.85). So the names of methods are read, too, and such a call does not reach it.

LINK-4, FLOW-1: each of n callers may always have an n-th of the room. Who takes more while there is none, or names such
a method, loses this tunnel, and nobody else does.

Owned by the loop that serves the tunnels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

from pathways.process.shared_room import SharedRoom

_log = logging.getLogger(__name__)

_PREFACE_BYTES = 24  # with which a client of HTTP/2 begins
_HEAD_BYTES, _PREFIX_BYTES = 9, 5  # of a frame, and of a message of gRPC
_DATA, _HEADERS, _RESET, _CONTINUATION = 0, 1, 3, 9  # types of frames
_END_STREAM, _END_HEADERS, _PADDED, _WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20  # flags
_PRIORITY_BYTES = 5
#: A call that is open takes so much here, beside its headers and its message. Measured with grpcio 1.85: 12 KiB.
_CALL_BYTES = 1 << 14


class Fields(Protocol):
    """Decodes the header fields of one connection (`pathways._native.Http2Fields`)."""

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]] | None:
        """Name and value of each; None: they are malformed, or too many bytes."""


class _Call:
    """One that is open: what it takes, and how much of its message is to come."""

    def __init__(self) -> None:
        self.taken = 0
        self.got = 0  # of the message that comes now
        self.left = 0
        self.prefix = bytearray()


class CallMeter:
    """The calls of one tunnel."""

    def __init__(self, room: SharedRoom, who: str, fields: Fields) -> None:
        """`who`: has the tunnel. `fields`: decodes those that come by it."""
        self._room, self._who, self._fields = room, who, fields
        self._calls: dict[int, _Call] = {}  # by stream
        self._block = bytearray()  # of fields, until all of it has come
        self._coming, self._going = _Frames(_PREFACE_BYTES), _Frames(0)

    def came(self, data: memoryview) -> None:
        """The caller has sent this.

        Raises:
            ValueError: there is no room for it, or no client of gRPC sends such a thing.
        """
        for kind, flags, stream, part, left in self._coming.parts(data):
            call = self._calls.get(stream)
            if kind in (_HEADERS, _CONTINUATION):
                if call is None:
                    call = self._calls[stream] = _Call()
                    self._take(call, _CALL_BYTES)
                self._take(call, len(part))
                self._block += part
                if not left:
                    self._read_fields(kind, flags)
            elif kind == _DATA and call is not None:
                if flags & _PADDED:
                    raise ValueError("it pads messages, and no client of gRPC does")
                self._read(call, part)
            elif kind == _RESET:
                self._end(stream)

    def went(self, data: memoryview) -> None:
        """The server has sent this."""
        for kind, flags, stream, _, _ in self._going.parts(data):
            if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                self._end(stream)

    def close(self) -> None:
        """The tunnel is over."""
        for stream in list(self._calls):
            self._end(stream)

    def _read_fields(self, kind: int, flags: int) -> None:
        """A frame of fields has come whole."""
        if kind == _HEADERS:
            if flags & _PADDED:
                raise ValueError("it pads the fields of calls, and no client of gRPC does")
            if flags & _WITH_PRIORITY:
                del self._block[:_PRIORITY_BYTES]
        if not flags & _END_HEADERS:
            return
        fields = self._fields.decode(bytes(self._block))
        self._block.clear()
        if fields is None:
            raise ValueError("the fields of its call make no sense, or are too long")
        for name, value in fields:
            if name == b":path" and not value.isascii():
                raise ValueError("it names a method in bytes that are no text")

    def _read(self, call: _Call, part: memoryview) -> None:
        while len(part):
            if not call.left:
                head = part[: _PREFIX_BYTES - len(call.prefix)]
                call.prefix += head
                part = part[len(head) :]
                if len(call.prefix) == _PREFIX_BYTES:
                    call.left = int.from_bytes(call.prefix[1:], "big")
                    call.prefix.clear()
                continue
            count = min(call.left, len(part))
            part = part[count:]
            call.left -= count
            call.got += count
            self._take(call, count)
            if not call.left:  # it is whole, and its method takes it
                self._take(call, -call.got)
                call.got = 0

    def _take(self, call: _Call, count: int) -> None:
        if count > 0 and not self._room.has(self._who, count):
            _log.warning(
                f"a connection of {self._who} for calls ends: its calls and their messages that are under way take "
                f"{self._room.taken.get(self._who, 0):,} bytes, and those of all {len(self._room.taken)} callers "
                f"{self._room.sum:,} of {self._room.most:,}",
            )
            raise ValueError("there is no room for its calls")
        call.taken += count
        self._room.add(self._who, count)

    def _end(self, stream: int) -> None:
        if (call := self._calls.pop(stream, None)) is not None:
            self._room.add(self._who, -call.taken)


class _Frames:
    """Cuts what comes in one direction into the parts of frames."""

    def __init__(self, skipped: int) -> None:
        """`skipped`: bytes before the first frame."""
        self._skipped = skipped
        self._head = bytearray()
        self._frame = 0, 0, 0  # type, flags, stream
        self._left = 0  # of the frame

    def parts(self, data: memoryview) -> Iterator[tuple[int, int, int, memoryview, int]]:
        """Type, flags and stream of each frame, with what has come of it now, and how many bytes are left: a frame may
        come in several parts.
        """
        while len(data):
            if self._skipped:
                count = min(self._skipped, len(data))
                self._skipped -= count
                data = data[count:]
            elif self._left:
                part = data[: self._left]
                self._left -= len(part)
                data = data[len(part) :]
                yield *self._frame, part, self._left
            else:
                head = data[: _HEAD_BYTES - len(self._head)]
                self._head += head
                data = data[len(head) :]
                if len(self._head) == _HEAD_BYTES:
                    self._left = int.from_bytes(self._head[:3], "big")
                    self._frame = self._head[3], self._head[4], int.from_bytes(self._head[5:], "big") & 0x7FFFFFFF
                    self._head.clear()
                    if not self._left:
                        yield *self._frame, data[:0], 0
