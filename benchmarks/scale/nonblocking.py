"""Connections to a cluster's port on an event loop, for a process that stands for many machines.

A real agent has threads for its connections (pathways/agent). A process that models hundreds of machines on a few cores
must do without: here one event loop serves all of them. What goes over the connections is the same.

    dial          a connection to a port, as `pathways.trust.dial_answered`
    Connection    bytes as they come, bytes to send in their order
    Tunnels       a Unix socket, each connection to which goes on over one to the port (pathways/agent/tunnel.py)

Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pathways import errors
from pathways.trust import Address, Role, server_name
from pathways.trust.first_line import LONGEST_LINE, hello, parse

DIAL_TIMEOUT_S = 10.0
_RETRY_S = 0.05
_CHUNK_BYTES = 1 << 18
_BUFFER = memoryview(bytearray(_CHUNK_BYTES))  # of one loop's thread: what was read is taken before the next read

_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


async def _ready(sock: socket.socket, writes: bool) -> None:
    """Waits until a socket can be read, or written."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writes else (loop.add_reader, loop.remove_reader)

    def on_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(sock.fileno(), on_ready)
    try:
        await ready
    finally:
        remove(sock.fileno())


async def _until_done(sock: socket.socket, do: Callable[[], Any]) -> Any:
    """What `do` returns, which is called again whenever the socket is ready for it."""
    while True:
        try:
            return do()
        except ssl.SSLWantWriteError:
            await _ready(sock, writes=True)
        except (ssl.SSLWantReadError, BlockingIOError):
            await _ready(sock, writes=False)


async def dial(
    address: str, context: ssl.SSLContext, purpose: str, **fields: Any
) -> tuple[socket.socket, dict[str, Any]]:
    """A connection to a port and the port's answer.

    Args:
        address: of the port.
        context: the TLS of the caller's certificate.
        purpose: what the caller wants to do.
        fields: more of the first line.

    Raises:
        ConnectError: there is no connection to be had in `DIAL_TIMEOUT_S`.
        PathwaysError: the port refuses; class and message are the port's.
    """
    where, line = Address.parse(address), hello(purpose, fields)
    deadline = time.monotonic() + DIAL_TIMEOUT_S
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            while True:
                try:
                    return await _dial_once(where, context, line)
                except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):  # the port may have too many callers
                    if time.monotonic() + _RETRY_S >= deadline:
                        raise
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise errors.ConnectError(f"{where.endpoint} has not answered {purpose!r} in {DIAL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise errors.ConnectError(f"{where.endpoint} could not be dialled for {purpose!r}: {error}") from None


async def _dial_once(where: Address, context: ssl.SSLContext, line: bytes) -> tuple[socket.socket, dict[str, Any]]:
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (where.host, where.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock = secure = context.wrap_socket(
            sock, server_hostname=server_name(Role.CONTROLLER), do_handshake_on_connect=False
        )
        await _until_done(secure, secure.do_handshake)
        await _until_done(secure, lambda: secure.send(line))
        answer = bytearray()
        while not answer.endswith(b"\n"):
            byte = await _until_done(secure, lambda: secure.recv(1))  # none behind it: these are the purpose's own
            if not byte or len(answer) > LONGEST_LINE:
                raise ConnectionResetError("it closed the connection instead of an answer")
            answer += byte
    except BaseException:
        sock.close()
        raise
    said = parse(bytes(answer))
    if said.get("ok") is not True:
        sock.close()
        raise errors.from_text(f"{said.get('error')}: {said.get('message')}", errors.ConnectError)
    return sock, said


class Connection:
    """One connection. `on_bytes` gets what comes, valid for the call; `on_end` is called once, unless it was closed."""

    def __init__(
        self, sock: socket.socket, on_bytes: Callable[[memoryview], object], on_end: Callable[[str], object]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._on_bytes = on_bytes
        self._on_end = on_end
        self._queued = bytearray()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._loop.add_reader(self._fd, self._readable)

    @property
    def has_queued(self) -> bool:
        """Whether bytes wait until the other end takes more."""
        return bool(self._queued)

    def read_now(self) -> None:
        """Takes what TLS has decrypted already."""
        self._readable()

    def _readable(self) -> None:
        while not self._is_closed:
            try:
                count = self._sock.recv_into(_BUFFER)
            except _LATER:
                return
            except OSError as error:
                return self._ended(str(error))
            if not count:
                return self._ended("the other end closed the connection")
            self._on_bytes(_BUFFER[:count])

    def write(self, data: bytes | memoryview) -> None:
        """Sends bytes, now or when the other end takes more."""
        if self._is_closed:
            return
        if self._queued:
            self._queued += data
            return
        while data:
            try:
                count = self._sock.send(data)
            except _LATER:
                self._queued += data
                self._loop.add_writer(self._fd, self._writable)
                return
            except OSError as error:
                return self._ended(str(error))
            data = data[count:]

    def _writable(self) -> None:
        waiting, self._queued = bytes(self._queued), bytearray()
        self._loop.remove_writer(self._fd)
        self.write(waiting)

    def _ended(self, why: str) -> None:
        if not self._is_closed:
            self.close()
            self._on_end(why)

    def close(self) -> None:
        """Closes it. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._sock.close()


class Tunnels:
    """Listens at a Unix socket, and carries each connection there on over one that `dial` makes."""

    def __init__(self, path: str, dial: Callable[[], Awaitable[socket.socket]]) -> None:
        self._dial = dial
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(16)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            near, _ = self._listener.accept()
            task = self._loop.create_task(self._open(near))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self, near: socket.socket) -> None:
        try:
            far = await self._dial()
        except (errors.PathwaysError, OSError):
            near.close()  # its gRPC channel tries again
            return
        except BaseException:
            near.close()
            raise
        ends: list[Connection] = []

        def end(why: str) -> None:
            for each in ends:
                each.close()
                self._connections.discard(each)

        ends.append(Connection(near, lambda data: ends[1].write(data), end))
        ends.append(Connection(far, lambda data: ends[0].write(data), end))
        self._connections.update(ends)
        ends[1].read_now()

    def close(self) -> None:
        """Ends all of them."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
