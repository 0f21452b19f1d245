"""A caller of a host's streams that sends what a test gives it, and hears what the host says."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from pathways.host import stream_sockets
from pathways.trust import Credentials

_REFUSED = (1 << 32) - 1
_T = TypeVar("_T")


class BlockingFrames:
    """Reads frames of a socket that waits, as a loop does of one that does not."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames = stream_sockets.Frames()
        self._sock = sock

    def read(self, part: Generator[memoryview, int, _T]) -> _T | None:
        """Does a part of a parser. None: the other end has closed the connection between two frames.

        Raises:
            ConnectionError: it has closed it within one.
        """
        try:
            place = next(part)
            while count := self._sock.recv_into(place):
                place = part.send(count)
        except StopIteration as end:
            found: _T = end.value
            return found
        if self.frames.is_within:
            raise ConnectionError("a message is cut off")
        return None

    def each(self, do: Callable[[bytes], Any]) -> None:
        """Hands each message over, until the end."""
        while self.read(self.frames.begin()) is not None:
            whole = self.read(self.frames.whole())
            assert whole is not None
            do(bytes(whole))


class StreamRefusedError(Exception):
    """The host has refused the whole stream."""


def framed(message: bytes) -> bytes:
    """A message as it goes over a stream."""
    return struct.pack("<QQ", len(message), 0) + message


def hello(number: bytes, which: int, secret: bytes = bytes(32)) -> bytes:
    """How one of a stream's two connections begins."""
    return b"pwstream" + number + bytes([which]) + secret


def say(
    where: str, own: Credentials | None, sent: Sequence[bytes], secret: str = "", timeout_s: float = 20.0
) -> list[str]:
    """Sends these bytes over a new stream, and ends it. Returns the errors of the answers; "" for a complete transfer.
    `where`: `MACHINE@ADDRESS`, or without encryption `ADDRESS`. `secret`: of the machine that sends.

    Raises:
        StreamRefusedError: the host has refused the stream.
        PermissionDeniedError: it has refused the caller.
        OSError: there is no stream to be had.
    """
    answers, messages = stream_sockets.connect(stream_sockets.StreamAddress.parse(where), secret, own)
    with answers, messages:
        answers.settimeout(timeout_s)
        messages.settimeout(timeout_s)
        with contextlib.suppress(OSError):  # it may have refused already
            for each in sent:
                messages.sendall(each)
            socket.socket.shutdown(messages, socket.SHUT_WR)
        found: list[str] = []
        head = memoryview(bytearray(16))
        while stream_sockets.read_all(answers, head):
            _, node, length = struct.unpack("<QII", head)
            text = memoryview(bytearray(length))
            assert not length or stream_sockets.read_all(answers, text)
            if node == _REFUSED:
                raise StreamRefusedError(bytes(text).decode())
            found.append(bytes(text).decode())
        return found
