"""Links that other machines open: how the two connections of each come together, and how it ends.

    KIND-up      opens a link: the machine says who it is, and gets a secret. From then on this connection carries what
                 the machine sends.
    KIND-down    the second connection of the same link, which carries what it is sent

A `LinkDoor` is for one kind of link: to agents, or to clients. Owned by the event loop's thread; the `serve_` methods
are called by threads of the port.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pathways import errors
from pathways.transport.links import Link, Links
from pathways.trust import Identity, Port, Role

#: The second connection of a link comes within this time, in seconds.
OPEN_TIMEOUT_S = 5.0
#: Seconds between two looks whether the machine has left instead.
LOOK_S = 0.1

_T = TypeVar("_T")


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
        self.carrier: Link | None = None
        self.let_go: Callable[[socket.socket], object] = lambda connection: None  # closes a connection
        self.is_half_open = threading.Event()  # `receiving` is there
        self.is_over = threading.Event()

    @property
    def is_open(self) -> bool:
        """Whether both connections are there."""
        return self.carrier is not None

    def close(self) -> None:
        """Ends the link. May wait for its carrier. A second call does nothing."""
        if self.is_over.is_set():
            return
        if self.carrier is not None:
            self.carrier.close()
        else:
            self.native.close()
        for connection in (self.sending, self.receiving):
            if connection is not None:
                self.let_go(connection)
        self.on_lost = _nobody  # who hears of it and the link name each other: so the memory goes now
        self.is_over.set()


def _nobody(why: str) -> None:
    """Hears of the end of a link that was closed."""


class LinkDoor:
    """Opens the links of one kind."""

    def __init__(
        self,
        open_link: Callable[[Identity, dict[str, Any]], tuple[FarLink, dict[str, Any]]],
        on_open: Callable[[FarLink], object],
        links: Links,
    ) -> None:
        """`open_link`: makes the link for a caller, and says what the caller is told; or raises a `PathwaysError`.
        `on_open`: called when both connections are there. Both on the event loop. `links`: carries them.
        """
        self._open_link = open_link
        self._on_open = on_open
        self._links = links
        self._let_go: Callable[[socket.socket], object] = lambda connection: None
        self._by_token: dict[str, FarLink] = {}  # those that wait for their second connection
        self._loop = asyncio.get_running_loop()

    def serve_at(self, port: Port, kind: str, roles: Iterable[Role]) -> None:
        """Lets these roles open links at a port. It keeps the connections of open links, without threads."""
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

    def _serve_up(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> bool:
        link: FarLink = hello["link"]
        link.receiving = connection
        link.is_half_open.set()
        while not link.is_open and not link.is_over.wait(LOOK_S):
            if _has_ended(connection):
                self.on_loop(self._give_up, link, "it closed the first connection of its link")
        return link.is_open

    def _serve_down(self, connection: socket.socket, identity: Identity, hello: dict[str, Any]) -> bool:
        link = self.on_loop(self._waiting, identity, hello)
        link.is_half_open.wait(OPEN_TIMEOUT_S)  # another thread of the port is about to say so
        return self.on_loop(self._complete, link, connection)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _open(self, identity: Identity, hello: dict[str, Any]) -> dict[str, Any]:
        link, answer = self._open_link(identity, hello)
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

    def _complete(self, link: FarLink, connection: socket.socket) -> bool:
        """Opens a link, both of whose connections are there. False: it has been given up."""
        if self._by_token.pop(link.token, None) is None or link.receiving is None:
            return False
        lost = self._loop.call_soon_threadsafe
        link.sending, link.let_go = connection, self._let_go
        link.carrier = self._links.add(link.native, connection, link.receiving, lambda why: lost(link.on_lost, why))
        self._on_open(link)
        return True

    def _give_up(self, link: FarLink, why: str) -> None:
        if self._by_token.pop(link.token, None) is not None:
            link.on_lost(why)


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection on which it has sent nothing."""
    try:  # the bytes as they come, encrypted or not
        return not socket.socket.recv(connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
