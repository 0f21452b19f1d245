"""A relay between a process that dials the controller's port, a far client or an agent, and the port: for tests that
count round trips. It can hold what one side sends, and counts the bytes that each side has sent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

DIALER, PORT = "dialer", "port"  # who sends


class HeldWire:
    """Dial `address` instead of the port's. A context manager."""

    def __init__(self, port: str) -> None:
        """`port`: the address of the controller's port, pathways://host:port."""
        self._scheme, _, where = port.partition("://")
        self._host, _, number = where.rpartition(":")
        self._number = int(number)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = {DIALER: 0, PORT: 0}  # bytes, also those that are held

    def __enter__(self) -> HeldWire:
        self._thread.start()
        self.address = f"{self._scheme}://{self._host}:{self._do(self._start())}"
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def hold(self, who: str) -> None:
        """What `who` sends from now on is kept."""
        self._loop.call_soon_threadsafe(self._open[who].clear)

    def let_go(self) -> None:
        """What was kept goes on, and nothing is kept any more."""
        for event in self._open.values():
            self._loop.call_soon_threadsafe(event.set)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> int:
        self._open = {DIALER: asyncio.Event(), PORT: asyncio.Event()}
        self.let_go()
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._number)
        for who, source, target in ((DIALER, reader, far_writer), (PORT, far_reader, writer)):
            task = self._loop.create_task(self._pass_on(who, source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, who: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                self.sent[who] += len(data)
                await self._open[who].wait()
                target.write(data)
                await target.drain()
        except OSError:  # one of the ends is gone, and so the other loses its connection
            pass
        finally:
            target.close()
