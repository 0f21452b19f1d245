"""A gRPC server of the controller at a Unix socket, which no caller can end, and where no method runs for a stranger.

TRUST-1: a call has the secret of an open session (of a client, an operator, a host or an agent), or is refused before
its method runs, whichever method it is.

The loop of grpc.aio's server ends, and the server with it, when a caller names a method in bytes that are no UTF-8
(seen with grpcio 1.85): so one caller would shut out all others. When that happens, a new server takes its place at the
same address. The calls that are open go on in the old one.

Owned by the controller's event loop thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from pathways import errors
from pathways.protocol import wire

_log = logging.getLogger(__name__)

#: The old server removes its socket within this time, in seconds.
_REMOVED_S = 2.0
#: An old server may serve its open calls for so long, in seconds: for ever.
_GRACE_S = 1e9


def no_session() -> errors.PermissionDeniedError:
    """The refusal of a call without the secret of an open session."""
    return errors.PermissionDeniedError(
        f"{wire.NO_SESSION}: connect first, and again when that was closed. If this process has another release of "
        "Pathways than the cluster, install the cluster's"
    )


class _Door(grpc.aio.ServerInterceptor):
    """Lets calls of open sessions in."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        if self._knows(wire.secret_in(details.invocation_metadata)):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: Any, context: Any) -> None:
    """Of any method, as it reads no request."""
    await wire.refuse(context, no_session())


class ControlServer:
    """Listens from `start` until `stop`."""

    def __init__(
        self,
        path: str,
        options: Sequence[tuple[str, Any]],
        register: Sequence[Callable[[Any], None]],
        knows: Callable[[str], bool],
    ) -> None:
        """Starts nothing yet.

        Args:
            path: of the Unix socket. Only this user may connect.
            options: see `grpc.aio.server`.
            register: each adds a service to a server.
            knows: whether a secret is that of an open session.
        """
        self._path = path
        self._options = options
        self._register = register
        self._door = _Door(knows)
        self._server: Any = None
        self._is_over = False
        self._old: set[Any] = set()  # servers with calls that are open
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens."""
        server = grpc.aio.server(options=self._options, interceptors=[self._door])
        for register in self._register:
            register(server)
        old = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{self._path}")
            others = asyncio.all_tasks()
            await server.start()
        finally:
            os.umask(old)
        self._server = server
        for task in asyncio.all_tasks() - others:  # among them the server's loop, which nothing else makes known
            task.add_done_callback(self._loop_ended)

    def _loop_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._is_over:
            _log.error("the server at %s begins anew: %r", self._path, task.exception())
            self._do(self._begin_anew(self._server))

    async def _begin_anew(self, old: Any) -> None:
        self._do(self._retire(old))
        deadline = asyncio.get_running_loop().time() + _REMOVED_S
        while os.path.exists(self._path) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.001)  # or the old server would remove the socket of the new one
        if not self._is_over:
            await self.start()

    async def _retire(self, old: Any) -> None:
        self._old.add(old)
        await old.stop(_GRACE_S)
        self._old.discard(old)

    def _do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def stop(self, grace_s: float) -> None:
        """Ends it. Calls that are under way have so long to end."""
        self._is_over = True
        for task in list(self._background):
            task.cancel()
        there = [*self._old, *([] if self._server is None else [self._server])]
        await asyncio.gather(*(server.stop(grace_s) for server in there))
