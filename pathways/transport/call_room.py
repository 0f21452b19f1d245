"""What the calls of other machines take at the controller until they are whole, and answered: bounded for all of them
together. `Tunnels` asks for room for what comes; the port's handlers say whose tunnel it is.

gRPC keeps a message until all of it has come, and a call until it is answered, and it has no bound for those of all
connections. So this reads the frames of HTTP/2 that cross a tunnel (RFC 9113), as far as it must know where calls and
their messages (5 bytes, of which the last four are the length, then the message) begin and end.

LINK-4, FLOW-1: each of n callers may always have an n-th of the room. Who takes more while there is none loses this
tunnel, and nobody else does.

Owned by the loop that serves the tunnels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

_PREFACE_BYTES = 24  # with which a client of HTTP/2 begins
_HEAD_BYTES, _PREFIX_BYTES = 9, 5  # of a frame, and of a message of gRPC
_DATA, _HEADERS, _RESET, _CONTINUATION = 0, 1, 3, 9  # types of frames
_END_STREAM, _PADDED = 0x1, 0x8  # flags
#: A call that is open takes so much here, beside its headers and its message. Measured with grpcio 1.85: 12 KiB.
_CALL_BYTES = 1 << 14


class CallRoom:
    """The room for all calls. `taken`: the bytes of each caller that has some."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: dict[str, int] = {}
        self._sum = 0

    def change(self, who: str, count: int) -> None:
        """A caller has so many bytes more, or fewer.

        Raises:
            ValueError: there is no room for more.
        """
        mine = self.taken.get(who, 0) + count
        self._sum += count
        if mine:
            self.taken[who] = mine
        else:
            self.taken.pop(who, None)
        if count > 0 and self._sum > self.most and mine > self.most // len(self.taken):
            print(
                f"a connection of {who} for calls ends: its calls and their messages that are under way take "
                f"{mine:,} bytes, and those of all {len(self.taken)} callers {self._sum:,} of {self.most:,}",
                file=sys.stderr,
                flush=True,
            )
            raise ValueError("there is no room for its calls")


class _Call:
    """One that is open: what it takes, and how much of its message is to come."""

    def __init__(self) -> None:
        self.taken = 0
        self.got = 0  # of the message that comes now
        self.left = 0
        self.prefix = bytearray()


class CallMeter:
    """The calls of one tunnel."""

    def __init__(self, room: CallRoom, who: str) -> None:
        self._room, self._who = room, who
        self._calls: dict[int, _Call] = {}  # by stream
        self._coming, self._going = _Frames(_PREFACE_BYTES), _Frames(0)

    def came(self, data: memoryview) -> None:
        """The caller has sent this.

        Raises:
            ValueError: there is no room for it, or no client of gRPC sends such a thing.
        """
        for kind, flags, stream, part in self._coming.parts(data):
            call = self._calls.get(stream)
            if kind in (_HEADERS, _CONTINUATION) and stream:
                if call is None:
                    call = self._calls[stream] = _Call()
                    self._take(call, _CALL_BYTES)
                self._take(call, len(part))
            elif kind == _DATA and call is not None:
                if flags & _PADDED:
                    raise ValueError("it pads messages, and no client of gRPC does")
                self._read(call, part)
            elif kind == _RESET:
                self._end(stream)

    def went(self, data: memoryview) -> None:
        """The server has sent this."""
        for kind, flags, stream, _ in self._going.parts(data):
            if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                self._end(stream)

    def close(self) -> None:
        """The tunnel is over."""
        for stream in list(self._calls):
            self._end(stream)

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
        call.taken += count
        self._room.change(self._who, count)

    def _end(self, stream: int) -> None:
        if (call := self._calls.pop(stream, None)) is not None:
            self._room.change(self._who, -call.taken)


class _Frames:
    """Cuts what comes in one direction into the parts of frames."""

    def __init__(self, skipped: int) -> None:
        """`skipped`: bytes before the first frame."""
        self._skipped = skipped
        self._head = bytearray()
        self._frame = 0, 0, 0  # type, flags, stream
        self._left = 0  # of the frame

    def parts(self, data: memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
        """Type, flags and stream of each frame, with what has come of it now: a frame may come in several parts."""
        while len(data):
            if self._skipped:
                count = min(self._skipped, len(data))
                self._skipped -= count
                data = data[count:]
            elif self._left:
                part = data[: self._left]
                self._left -= len(part)
                data = data[len(part) :]
                yield *self._frame, part
            else:
                head = data[: _HEAD_BYTES - len(self._head)]
                self._head += head
                data = data[len(head) :]
                if len(self._head) == _HEAD_BYTES:
                    self._left = int.from_bytes(self._head[:3], "big")
                    self._frame = self._head[3], self._head[4], int.from_bytes(self._head[5:], "big") & 0x7FFFFFFF
                    self._head.clear()
                    if not self._left:
                        yield *self._frame, data[:0]
