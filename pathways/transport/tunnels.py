"""Byte tunnels between machines for what is rare: each carries one gRPC connection over one connection of a port.

Hosts and the agent find the controller's gRPC server at a Unix socket of their own machine, where `TunnelServer`
listens. For each connection there it dials the controller's port, and the controller's end goes on to the real server's
Unix socket. So hosts need neither addresses nor certificates to speak with the controller.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Callable

from pathways import errors
from pathways.process import fd_passing
from pathways.transport.call_room import CallMeter
from pathways.transport.connection import Connection, delivering
from pathways.transport.loop import Listener, Loop

_log = logging.getLogger(__name__)

_MOST_KEPT = 1 << 20
_LINGER_S = 5.0


class _Tunnel:
    """Two connections, and what goes both ways between them. All but `start` is called by the loop."""

    def __init__(
        self,
        tunnels: Tunnels,
        one: socket.socket,
        other: socket.socket,
        on_end: Callable[[], object],
        meter: CallMeter | None,
    ) -> None:
        self._tunnels, self._on_end, self._meter = tunnels, on_end, meter
        self._is_ending = self._is_over = False
        self.ends = [
            Connection(
                tunnels.loop,
                connection,
                functools.partial(self._ended, end),
                parse=delivering(tunnels.loop, functools.partial(self._move, end)),
                on_room=functools.partial(self._room, end),
            )
            for end, connection in enumerate((one, other))
        ]

    def start(self) -> None:
        for end in self.ends:
            end.start()

    def _move(self, end: int, data: memoryview) -> None:
        if self._meter is not None:
            self._meter.went(data) if end else self._meter.came(data)
        target = self.ends[1 - end]
        if not target.send(data) and target.kept_bytes >= _MOST_KEPT:
            self.ends[end].reads(False)

    def _room(self, end: int) -> None:
        if self._is_ending:
            self._close()
        else:
            self.ends[1 - end].reads(True)

    def _ended(self, end: int, why: str) -> None:
        """One end is over: the other one takes what is left."""
        target = self.ends[1 - end]
        self._is_ending = True
        if target.is_over or not target.kept_bytes:
            self._close()
        else:
            target.reads(False)
            target.end_by(time.monotonic() + _LINGER_S, "it does not take what is left")

    def _close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        for end in self.ends:
            end.end()
            end.sock.close()
        if self._meter is not None:
            self._meter.close()
        self._tunnels.open.discard(self)
        try:
            self._on_end()
        except Exception:  # of who hears of the end; the other tunnels go on
            _log.exception("the end of a tunnel could not be told")


class Tunnels:
    """Carries the bytes of many tunnels. An idle tunnel costs no thread. Any thread may call any method."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.open: set[_Tunnel] = set()
        self._is_closed = False

    def add(
        self,
        one: socket.socket,
        other: socket.socket,
        on_end: Callable[[], object] = lambda: None,
        meter: CallMeter | None = None,
    ) -> None:
        """Carries bytes both ways until either connection ends, then closes both, and calls `on_end`. `meter`: ends it
        when there is no room for the calls that come from `one`.
        """
        tunnel = _Tunnel(self, one, other, on_end, meter)
        if self._is_closed:
            tunnel._close()
            return
        self.open.add(tunnel)
        tunnel.start()

    def add_to(
        self,
        path: str,
        connection: socket.socket,
        on_end: Callable[[], object] = lambda: None,
        meter: CallMeter | None = None,
    ) -> None:
        """The same between a connection and a Unix socket of this machine. Raises OSError: nothing listens there."""
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.setblocking(False)  # who listens there may be stopped, with a full backlog
            near.connect(path)
        except OSError:
            near.close()
            raise
        self.add(connection, near, on_end, meter)

    def close(self) -> None:
        """Takes no more tunnels. Those that are open go on until they end."""
        self._is_closed = True


class TunnelServer:
    """Listens on this machine, and tunnels each connection to where `dial` connects."""

    def __init__(
        self,
        loop: Loop,
        where: str | socket.socket,
        dial: Callable[[], socket.socket],
        check: Callable[[socket.socket], object] = lambda near: None,
    ) -> None:
        """Listens from now on.

        Args:
            loop: serves the tunnels.
            where: the path for a Unix socket, or a socket that listens.
            dial: the far end of a tunnel. It may wait; what it raises, of `PathwaysError` and `OSError`, ends this one.
            check: gets a caller's connection before that, and may raise the same.
        """
        self._dial, self._check = dial, check
        self._tunnels = Tunnels(loop)
        listener = fd_passing.listen(where, socket.SOCK_STREAM) if isinstance(where, str) else where
        self._listener = Listener(loop, listener, self._accept)

    def close(self) -> None:
        """Accepts no more connections; open tunnels go on until one of their ends is closed."""
        self._listener.close()
        self._tunnels.close()

    def _accept(self, near: socket.socket, _: object) -> None:
        threading.Thread(target=self._tunnel, args=(near,), name="pw-tunnel", daemon=True).start()

    def _tunnel(self, near: socket.socket) -> None:
        try:
            self._check(near)
            far = self._dial()
        except (errors.PathwaysError, OSError) as error:
            _log.warning("a tunnel could not be opened: %s", error)
            near.close()
            return
        self._tunnels.add(near, far)
