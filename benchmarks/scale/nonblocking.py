"""Connections to a cluster's port on asyncio's event loop, for a process that stands for many machines.

A real agent has threads for its connections (pathways/agent). A process that models hundreds of machines on a few cores
must do without. What goes over the connections is the same.

    dial          a connection to a port, as `pathways.trust.dial_answered`
    Tunnels       a Unix socket, each connection to which goes on over one to the port (pathways/agent/tunnel.py)

Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from pathways import errors
from pathways.trust import Address, Role, server_name
from pathways.trust.first_line import hello, parse

DIAL_TIMEOUT_S = 10.0
_RETRY_S = 0.05
CHUNK_BYTES = 1 << 18

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def dial(address: str, context: ssl.SSLContext, purpose: str, **fields: Any) -> tuple[Stream, dict[str, Any]]:
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
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            while True:
                with contextlib.suppress(ConnectionError, ssl.SSLError):  # the port may have too many callers
                    return await _dial_once(where, context, line)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise errors.ConnectError(f"{where.endpoint} has not answered {purpose!r} in {DIAL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise errors.ConnectError(f"{where.endpoint} could not be dialled for {purpose!r}: {error}") from None


async def _dial_once(where: Address, context: ssl.SSLContext, line: bytes) -> tuple[Stream, dict[str, Any]]:
    reader, writer = await asyncio.open_connection(
        where.host, where.port, ssl=context, server_hostname=server_name(Role.CONTROLLER)
    )
    try:
        writer.write(line)
        answer = await reader.readline()  # what is behind it is the purpose's own, and stays in the reader
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("it closed the connection instead of an answer")
        said = parse(answer)
        if said.get("ok") is not True:
            raise errors.from_text(f"{said.get('error')}: {said.get('message')}", errors.ConnectError)
    except BaseException:
        writer.transport.abort()
        raise
    return (reader, writer), said


async def pump(reader: asyncio.StreamReader, take: Callable[[bytes], object]) -> str:
    """Gives what comes to `take`, until the connection ends. Returns why it did."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            take(data)
    except OSError as error:
        return str(error)
    return "the other end closed the connection"


class Tunnels:
    """Listens at a Unix socket, and carries each connection there on over one that `dial` makes."""

    def __init__(self, path: str, dial: Callable[[], Awaitable[Stream]]) -> None:
        self._dial = dial
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Takes connections from now on."""
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.ExitStack() as stack:
            stack.callback(self._tasks.discard, task)
            stack.callback(writer.transport.abort)
            with contextlib.suppress(errors.PathwaysError, OSError, asyncio.CancelledError):  # its gRPC tries again
                far_reader, far_writer = await self._dial()
                stack.callback(far_writer.transport.abort)
                ways = [pump(reader, far_writer.write), pump(far_reader, writer.write)]
                await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """Ends all of them."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
