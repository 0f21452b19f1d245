"""Links that other machines open: how the two connections of each come together, and how it ends.

    KIND-up      opens a link: the machine says who it is, and gets a secret. From then on this connection carries what
                 the machine sends.
    KIND-down    the second connection of the same link, which carries what it is sent

A `LinkDoor` is for one kind of link: at the controller to agents, to clients, or to relays; at a relay to the machines
that it carries. Owned by the event loop's thread; the `serve_` methods are called by the port's thread.

A link that a relay carries is opened in the same way: so the machine gets its keys over TLS from the controller itself
(CARRY-1). The two connections end when the link is open, because a relay's connection carries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import select
import socket
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from pathways import errors
from pathways.transport.links import Link, Links
from pathways.transport.loop import Loop, Served
from pathways.trust import Identity, Port, Role

#: The second connection of a link comes within this time, in seconds.
OPEN_TIMEOUT_S = 5.0

_T = TypeVar("_T")


class PlaceAtRelay(Protocol):
    """A link's place in the connection of a relay. `name`: the relay's."""

    name: str

    def start(self) -> None:
        """Sends for it from now on."""

    def close(self) -> None:
        """Ends the link. A second call does nothing."""


class FarLink:
    """A link to another machine: the native one, and its two connections when they are there."""

    def __init__(self, native: Any, identity: Identity, on_lost: Callable[[str], None]) -> None:
        """`native`: the native link. `on_lost`: called once, on the event loop, when it breaks or does not open."""
        self.native = native
        self.identity = identity
        self.on_lost = on_lost
        self.token = secrets.token_hex(16)  # by which the second connection, and the machine's calls, name the link
        self.receiving: socket.socket | None = None  # the first connection
        self.sending: socket.socket | None = None  # the second one
        self.half: _HalfOpen | None = None  # while only the first one is there
        self.carried: PlaceAtRelay | None = None  # its place at a relay, if one carries it
        self.carrier: Link | PlaceAtRelay | None = None
        self.on_delivered: Callable[[], object] | None = None  # see `Links.add`
        self.let_go: Callable[[socket.socket], object] = lambda connection: None  # closes a connection
        self.is_over = False

    @property
    def via(self) -> str:
        """The name of the relay that carries it; empty: none."""
        return self.carried.name if self.carried is not None else ""

    @property
    def is_open(self) -> bool:
        """Whether both connections are there."""
        return self.carrier is not None

    def close(self) -> None:
        """Ends the link, without a word to the peer. When it returns, nobody uses its connections or brings anything by
        it. A second call does nothing.
        """
        if self.is_over:
            return
        self.is_over = True
        if self.half is not None:
            self.half.leave()
            self.half = None
        for each in (self.carrier, self.carried):
            if each is not None:
                each.close()
        self.native.close()
        for connection in (self.sending, self.receiving):
            if connection is not None:
                self.let_go(connection)
        self.on_lost = _nobody  # who hears of it and the link name each other: so the memory goes now


def _nobody(why: str) -> None:
    """Hears of the end of a link that was closed."""


class _HalfOpen(Served):
    """The first connection of a link, until the second one has come."""

    def __init__(self, loop: Loop, sock: socket.socket, on_end: Callable[[], object]) -> None:
        """`on_end`: called by the loop if the machine leaves instead."""
        super().__init__(loop, sock)
        self._on_end = on_end
        with self.lock:
            loop.add(self)

    def wanted(self) -> int:
        """See `Served`."""
        return select.EPOLLRDHUP

    def turn(self, events: int) -> None:
        """See `Served`."""
        self.leave()
        self._on_end()

    def leave(self) -> None:
        """The second one is there, or nobody waits for it."""
        with self.lock:
            self.loop.forget(self)


class LinkDoor:
    """Opens the links of one kind."""

    def __init__(
        self,
        open_link: Callable[[Identity, dict[str, Any]], tuple[FarLink | None, dict[str, Any]]],
        on_open: Callable[[FarLink], object],
        links: Links,
    ) -> None:
        """`open_link`: makes the link for a caller, and says what the caller is told; or raises a `PathwaysError`.
        Without a link the caller is told to do something else.
        `on_open`: called when both connections are there. Both on the event loop. `links`: carries them.
        """
        self._open_link = open_link
        self._on_open = on_open
        self._links = links
        self._let_go: Callable[[socket.socket], object] = lambda connection: None
        self._by_token: dict[str, FarLink] = {}  # those that wait for their second connection
        self._loop = asyncio.get_running_loop()

    def serve_at(self, port: Port, kind: str, roles: Iterable[Role]) -> None:
        """Lets these roles open links at a port. It keeps the connections of open links."""
        self._let_go = port.let_go
        port.on(f"{kind}-up", roles, self._serve_up, lambda *caller: self.on_loop(self._open, *caller))
        port.on(f"{kind}-down", roles, self._serve_down, lambda *caller: self.on_loop(self._check, *caller))

    def on_loop(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Calls a function on the event loop's thread, from another one."""

        async def call() -> _T:
            return function(*arguments)

        if self._loop.is_closed():
            raise errors.ClusterClosedError("the cluster has ended")
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(OPEN_TIMEOUT_S)

    def _serve_up(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        link: FarLink | None = hello["link"]
        if link is None:
            self._let_go(connection)
            return

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the cluster has ended
                self._loop.call_soon_threadsafe(self._give_up, link, "it closed the first connection of its link")

        link.receiving = connection
        link.half = _HalfOpen(self._links.loop, connection, ended)
        if link.is_over:  # it came too late
            link.half.leave()
            raise errors.ConnectError("its link has been given up")

    def _serve_down(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        self.on_loop(self._complete, identity, hello, connection)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _open(self, identity: Identity, hello: dict[str, Any]) -> dict[str, Any]:
        link, answer = self._open_link(identity, hello)
        if link is None:
            hello["link"] = None
            return answer
        link.let_go = self._let_go
        hello["link"] = self._by_token[link.token] = link  # for `_serve_up`, which gets the same first line
        late = "it did not open the second connection of its link"
        self._loop.call_later(OPEN_TIMEOUT_S, self._give_up, link, late)
        return {**answer, "session": link.token}

    def _waiting(self, identity: Identity, hello: dict[str, Any]) -> FarLink:
        """The link of this caller that waits for its second connection."""
        link = self._by_token.get(str(hello.get("session", "")))
        if link is None or (link.identity.role, link.identity.name) != (identity.role, identity.name):
            raise errors.PermissionDeniedError("no link of this machine waits for its second connection")
        return link

    def _check(self, identity: Identity, hello: dict[str, Any]) -> dict[str, Any]:
        self._waiting(identity, hello)
        return {}

    def _complete(self, identity: Identity, hello: dict[str, Any], connection: socket.socket) -> None:
        """Opens a link, both of whose connections are there."""
        link = self._waiting(identity, hello)
        if link.receiving is None or link.half is None:
            raise errors.ConnectError("the first connection of this link is still being opened")
        del self._by_token[link.token]
        link.half.leave()
        link.half = None
        lost = self._loop.call_soon_threadsafe
        if link.carried is not None:
            link.carrier = link.carried
            link.carried.start()
            self._let_go(connection)
            self._let_go(link.receiving)
            link.receiving = None
        else:
            link.sending = connection
            link.carrier = self._links.add(
                link.native,
                connection,
                link.receiving,
                lambda why: lost(link.on_lost, why),
                on_delivered=link.on_delivered,
            )
        self._on_open(link)

    def _give_up(self, link: FarLink, why: str) -> None:
        if self._by_token.pop(link.token, None) is not None:
            link.on_lost(why)
