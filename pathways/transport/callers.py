"""Callers that are not known yet: `Callers` takes their connections and has them introduced, step by step.

It has a loop of its own, with the only thread of a port. A handshake is some milliseconds of arithmetic, and who is
introduced may need a file or another thread's word; all that time is the newcomers', not that of links and streams.

CERT-4 (bounded): until a caller is known, it has a bounded time and one of a bounded number of places, of which the
callers of one address (of one network, with IPv6) have at most half. When these are taken, who has had a place for a
second or longer without a word loses it to the next caller; else that one is sent away, and may call again. Nobody
gets a place while the process has few descriptors left: these are for those who are in.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from pathways.transport.loop import Listener, Loop, Served

_log = logging.getLogger(__name__)

PLACES = 1024  # for all callers together
_SAFE_S = 1.0  # how long a caller keeps its place, however many want it
_NETWORK_BITS = 64  # a caller with IPv6 has all addresses of its network
_T = TypeVar("_T")

#: Yields the events that it waits for.
Steps = Generator[int, None, _T]


class Caller(Served):
    """One caller. All is of the loop's thread."""

    def __init__(self, callers: Callers, sock: socket.socket, peer: str, origin: str) -> None:
        super().__init__(callers.loop, sock)
        self.peer, self.origin = peer, origin  # its address for people, and what has a share of the places
        self.who = peer  # for the log
        self.deadline = time.monotonic() + callers.patience_s
        self.safe_until = self.deadline - callers.patience_s + _SAFE_S
        self.is_heard = False  # it has said what it wants, and keeps its place
        self.is_turned_away = False  # another one has its place
        self._callers = callers
        self._events = 0
        self._steps = callers.introduce(self)

    def shake_hands(self, context: ssl.SSLContext) -> Steps[ssl.SSLSocket]:
        """Its socket becomes one of TLS. Raises OSError."""
        self.sock = secure = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        yield from patiently(secure.do_handshake)
        return secure

    def gives_way(self) -> None:
        """Any other caller may have its place."""
        self.is_heard, self.safe_until = False, 0.0

    def leave(self) -> None:
        """It is not served here any more: its socket is somebody else's, or closed. A second call does nothing."""
        self._callers.waiting.pop(self, None)
        self.loop.forget(self)

    def wanted(self) -> int:
        """See `Served`, as for the others."""
        return self._events

    def turn(self, events: int) -> None:
        """It can go on."""
        self.go_on()

    def look(self, now: float) -> None:
        """It may be late."""
        if now > self.deadline:
            self.go_on(TimeoutError("it did not say in time what it wants"))

    def go_on(self, fault: Exception | None = None) -> None:
        """Takes the next steps, from where it waits; or has `fault` raised there."""
        try:
            self._events = next(self._steps) if fault is None else self._steps.throw(fault)
            self.loop.watch(self)
        except StopIteration:
            self.leave()
        except Exception:  # a fault here; the others go on
            _log.exception("a call could not be served")
            self.leave()
            self.sock.close()


class Callers:
    """Takes connections until it is closed, which any thread may do."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        introduce: Callable[[Caller], Steps[None]],
        refused: Callable[[str, str], object],
        patience_s: float,
    ) -> None:
        """Takes callers from now on.

        Args:
            name: of the thread.
            listener: listens.
            introduce: the steps by which a caller is introduced. At their end the socket is closed, or somebody else's
                after `leave`. They may wait for disks and other threads for a little, but
                for callers only by `patiently`.
            refused: called with the address and the reason when a caller gets no place.
            patience_s: seconds for all steps together; then TimeoutError is raised in them.
        """
        self.introduce, self.patience_s = introduce, patience_s
        self.waiting: dict[Caller, None] = {}  # by age
        self.is_closed = False
        self._refused = refused
        self.loop = Loop(name)
        self._listener = Listener(self.loop, listener, self._take)

    def close(self) -> None:
        """Listens no more, and ends the connections of those who wait."""
        self.is_closed = True
        self._listener.close()
        for caller in list(self.waiting):
            end(caller.sock)
        self.loop.close()

    def _take(self, sock: socket.socket, name: Any) -> None:
        peer, origin = _shown(name)
        if why := self._make_room(sock, origin):
            self._refused(peer, why)
            sock.close()
            return
        caller = Caller(self, sock, peer, origin)
        self.waiting[caller] = None
        if self.loop.add(caller):
            self.loop.look_after(caller)
        if self.is_closed:
            end(sock)
        caller.go_on()

    def _make_room(self, sock: socket.socket, origin: str) -> str:
        """Why there is no place for a caller. Empty: there is one."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if sock.fileno() >= most - most // 4:  # a new one gets the lowest number that is free
            return f"few of the {most} descriptors of this process are left"
        crowd = [caller for caller in self.waiting if caller.origin == origin]
        places = PLACES // 2
        if len(crowd) < places:
            crowd, places = list(self.waiting), PLACES
        if len(crowd) < places:
            return ""
        oldest = min((each for each in crowd if not each.is_heard), key=lambda each: each.safe_until, default=None)
        if oldest is None or time.monotonic() < oldest.safe_until:
            return f"{places} others wait"
        oldest.is_turned_away = True
        oldest.go_on(ConnectionError(f"{places} others wait, and it said nothing for {_SAFE_S:g} s"))
        return ""


def _shown(name: Any) -> tuple[str, str]:
    """A caller's address for people, and what has a share of the places. Those of this machine have all alike."""
    if not isinstance(name, tuple):
        return "a process of this machine", ""
    host, port = name[:2]
    if ":" not in host:
        return f"{host}:{port}", host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    network = address.ipv4_mapped or ipaddress.IPv6Network((address, _NETWORK_BITS), strict=False)
    return f"[{host}]:{port}", str(network)


def end(sock: socket.socket) -> None:
    """Makes whoever uses a connection find that it is over."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of TLS, too: its own would wait for the other end


def patiently(act: Callable[[], _T], events: int = select.EPOLLIN) -> Steps[_T]:
    """What `act` returns when a non-blocking socket lets it. `events`: what it waits for, if TLS does not say it."""
    while True:
        try:
            return act()
        except ssl.SSLWantWriteError:
            yield select.EPOLLOUT
        except ssl.SSLWantReadError:
            yield select.EPOLLIN
        except BlockingIOError:
            yield events


def sent(sock: socket.socket, data: bytes) -> Steps[None]:
    """Sends all of it. Raises OSError."""
    while data:
        data = data[(yield from patiently(functools.partial(sock.send, data), select.EPOLLOUT)) :]


def received(sock: socket.socket, most: int) -> Steps[bytes]:
    """What has come, at most so many bytes. Raises OSError; the end of the connection is one."""
    data = yield from patiently(functools.partial(sock.recv, most))
    if not data:
        raise ConnectionResetError("it closed the connection before it had said what it wants")
    return data
