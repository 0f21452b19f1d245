"""Messages of any length to another process of this machine. The sender waits for nobody.

A message is its length, 8 bytes little-endian, and its bytes. `HostProcess` sends a host its programs so.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import socket
from collections.abc import Iterator

_AT_ONCE = 64  # parts of messages in a call of the system, which takes 1,024


class Outgoing:
    """The sender's end. Belongs to the event loop's thread."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection`: one of a pair of stream sockets; it is closed by `close`."""
        connection.setblocking(False)
        self._connection = connection
        self._kept: collections.deque[memoryview] = collections.deque()

    def send(self, message: bytes) -> None:
        """Sends a message. What the other end has no room for is kept, and not copied. A message to who is gone is
        dropped.
        """
        is_idle = not self._kept
        self._kept += (memoryview(len(message).to_bytes(8, "little")), memoryview(message))
        if is_idle:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._kept:
                sent = self._connection.sendmsg(itertools.islice(self._kept, _AT_ONCE))
                while self._kept and sent >= len(self._kept[0]):
                    sent -= len(self._kept.popleft())
                if sent:  # the rest of a long message goes in turns with what else the loop has to do
                    self._kept[0] = self._kept[0][sent:]
                    loop.add_writer(self._connection, self._flush)
                    return
        except BlockingIOError:
            loop.add_writer(self._connection, self._flush)
            return
        except OSError:  # the other end is closed
            self._kept.clear()
        loop.remove_writer(self._connection)

    def close(self) -> None:
        """Drops what is kept."""
        asyncio.get_running_loop().remove_writer(self._connection)
        self._kept.clear()
        self._connection.close()


def incoming(connection: socket.socket) -> Iterator[bytes]:
    """The messages of the `Outgoing` at the other end of `connection`, until that end is closed. It waits for them."""
    with connection.makefile("rb") as source:
        while len(head := source.read(8)) == 8:
            size = int.from_bytes(head, "little")
            if len(message := source.read(size)) < size:
                return
            yield message
