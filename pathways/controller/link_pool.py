"""All links to machines with hosts, with one thread that sends and one that receives, however many machines there are.

The native pool says which link has something to send (`csrc/link/link_pool.h`); epoll says which connection has brought
something. `pathways/agent/link_threads.py` says what a link is, and does the same for one link with two threads of its
own, as an agent and a client do.

A connection never holds the threads up (POOL-2). What a connection does not take now is kept, and nothing more is
collected for this link until the connection takes it. A link breaks once, for the first reason that either thread finds
(LINK-1), and no link's fault is another one's.

A member leaves in three steps: its connections are shut down; each thread drops it, between two calls; then `close`
returns, and the connections' descriptors may be closed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from pathways.agent.link_threads import HEARTBEAT_S, SILENCE_S
from pathways.agent.tunnel import send_again_soon

_BUFFER_BYTES = 1 << 20
#: Seconds between two looks for links of which nothing is heard.
_LOOK_S = 0.5
_WOULD_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _nobody(why: str) -> None:
    """Hears of the end of a link that was closed."""


@dataclasses.dataclass(eq=False)
class PooledLink:
    """One link of a pool. `close` by any thread but the pool's."""

    pool: LinkPool
    native: Any
    sending: socket.socket
    receiving: socket.socket
    on_broken: Callable[[str], object]
    #: What the connection has not taken. The sender's.
    unsent: memoryview = dataclasses.field(default_factory=lambda: memoryview(b""))
    unsent_since: float = 0.0
    heard_at: float = 0.0  # the receiver's
    descriptors: tuple[int, ...] = ()  # that the receiver watches: a connection may be closed before it is dropped
    is_over: bool = False
    #: Each thread says so when it has dropped the link.
    is_dropped_by_sender: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_dropped_by_receiver: threading.Event = dataclasses.field(default_factory=threading.Event)

    def close(self) -> None:
        """Ends the link. Returns when neither thread uses it any more. A second call does nothing."""
        self.pool.drop(self)
        self.is_dropped_by_sender.wait()
        self.is_dropped_by_receiver.wait()
        self.native.close()
        self.on_broken = _nobody  # it may name what holds this object


_Task = Callable[[PooledLink], None]
_Tasks = collections.deque[tuple[PooledLink, _Task]]


class LinkPool:
    """Any thread may call any method. The threads start with the first link."""

    def __init__(self, native: Any) -> None:
        """`native`: the module. Links are opened with `self.native` as their pool."""
        self.native = native.LinkPool()
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._is_closed = self._has_ended = False
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._for_sender: _Tasks = collections.deque()
        self._for_receiver: _Tasks = collections.deque()
        self._by_slot: dict[int, PooledLink] = {}  # the sender's
        self._by_descriptor: dict[int, PooledLink] = {}  # the receiver's: by that of either connection

    def add(
        self, native: Any, sending: socket.socket, receiving: socket.socket, on_broken: Callable[[str], object]
    ) -> PooledLink:
        """Carries a link from now on.

        Args:
            native: the native link, of this pool.
            sending: the connection on which this end sends.
            receiving: the connection on which it receives.
            on_broken: called once, from one of the threads, with the reason; not after `close`.
        """
        member = PooledLink(self, native, sending, receiving, on_broken, heard_at=time.monotonic())
        for connection in (sending, receiving):
            connection.setblocking(False)
            send_again_soon(connection)
        with self._lock:
            if not self._threads and not self._is_closed:
                self._threads = [
                    threading.Thread(target=work, name=name, daemon=True)
                    for work, name in ((self._send_all, "pw-links-send"), (self._receive_all, "pw-links-receive"))
                ]
                for thread in self._threads:
                    thread.start()
            self._tell(member, self._begin_sending, self._begin_receiving)
        return member

    def drop(self, member: PooledLink) -> bool:
        """Ends a link's connections, and lets both threads drop it. True for the call that did it."""
        with self._lock:
            if member.is_over:
                return False
            member.is_over = True
            for connection in (member.sending, member.receiving):
                with contextlib.suppress(OSError):
                    # (`SSLSocket.shutdown` would take the TLS state away that a thread may be using.)
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
            self._tell(member, self._end_sending, self._end_receiving)
        return True

    def close(self) -> None:
        """Ends both threads, once. A link that is still there is carried no more, and can be closed."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
        self.native.wake()
        os.eventfd_write(self._wake, 1)
        for thread in threads:
            thread.join()
        with self._lock:
            self._has_ended = True
            self._by_slot.clear()
            self._by_descriptor.clear()
            self._run(self._for_sender)  # what came too late for them
            self._run(self._for_receiver)
            self._epoll.close()
            os.close(self._wake)

    def _tell(self, member: PooledLink, sender: _Task, receiver: _Task) -> None:
        """Lets each thread do something of its own, soon."""
        self._for_sender.append((member, sender))
        self._for_receiver.append((member, receiver))
        if self._has_ended:
            self._run(self._for_sender)
            self._run(self._for_receiver)
            return
        self.native.wake()
        os.eventfd_write(self._wake, 1)

    def _run(self, tasks: _Tasks) -> None:
        while tasks:
            member, task = tasks.popleft()
            try:
                task(member)
            except Exception as fault:
                self._failed(member, fault)

    def _broke(self, member: PooledLink, why: str) -> None:
        if self.drop(member):
            print(f"a link broke: {why}", file=sys.stderr, flush=True)
            try:
                member.on_broken(why)
            except Exception:  # who hears of it may be gone; the other links go on
                traceback.print_exc()

    def _failed(self, member: PooledLink, error: Exception) -> None:
        """Whatever went wrong with one link breaks this link, and nothing else."""
        if isinstance(error, OSError):
            why = f"the connection broke: {error.strerror or error}"
        elif isinstance(error, RuntimeError | ValueError):
            why = f"it broke the protocol: {error}"
        else:  # the machine on the other end must not wait for ever
            traceback.print_exception(error)
            why = f"{type(error).__name__}: {error}"
        self._broke(member, why)

    # -- the sender --------------------------------------------------------------------------------------------------

    def _begin_sending(self, member: PooledLink) -> None:
        if not member.is_over and not self._has_ended:
            self._by_slot[member.native.slot] = member
            self.native.resume(member.native.slot)

    def _end_sending(self, member: PooledLink) -> None:
        try:
            if self._by_slot.get(member.native.slot) is member:
                del self._by_slot[member.native.slot]
                self.native.pause(member.native.slot)
        finally:
            member.is_dropped_by_sender.set()

    def _send_all(self) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while not self._is_closed:
            self._run(self._for_sender)
            found = self.native.collect(buffer, HEARTBEAT_S / 2)
            if found is None:
                continue
            slot, count, error = found
            member = self._by_slot.get(slot)
            if member is None:
                continue
            try:
                if error:
                    raise ValueError(error)
                self._send(member, buffer[:count])
            except Exception as fault:
                self._failed(member, fault)

    def _send(self, member: PooledLink, data: memoryview) -> None:
        try:
            while data:
                data = data[member.sending.send(data) :]
        except _WOULD_WAIT:
            self.native.pause(member.native.slot)
            member.unsent, member.unsent_since = memoryview(bytes(data)), time.monotonic()
            self._await_room(member)

    def _await_room(self, member: PooledLink) -> None:
        self._for_receiver.append((member, self._watch_for_room))
        os.eventfd_write(self._wake, 1)

    def _send_rest(self, member: PooledLink) -> None:
        """The connection takes bytes again."""
        if self._by_slot.get(member.native.slot) is not member:
            return
        try:
            while member.unsent:
                member.unsent = member.unsent[member.sending.send(member.unsent) :]
                member.unsent_since = time.monotonic()
        except _WOULD_WAIT:
            self._await_room(member)
        except Exception as fault:
            self._failed(member, fault)
        else:
            self.native.resume(member.native.slot)

    # -- the receiver ------------------------------------------------------------------------------------------------

    def _begin_receiving(self, member: PooledLink) -> None:
        if not member.is_over and not self._has_ended:
            member.descriptors = sending, receiving = member.sending.fileno(), member.receiving.fileno()
            self._by_descriptor |= dict.fromkeys(member.descriptors, member)
            self._epoll.register(receiving, select.EPOLLIN)
            self._epoll.register(sending, 0)

    def _end_receiving(self, member: PooledLink) -> None:
        try:
            for descriptor in member.descriptors:
                if self._by_descriptor.get(descriptor) is member:
                    del self._by_descriptor[descriptor]
                    with contextlib.suppress(OSError):  # it is closed, and so not watched any more
                        self._epoll.unregister(descriptor)
        finally:
            member.is_dropped_by_receiver.set()

    def _watch_for_room(self, member: PooledLink) -> None:
        if self._by_descriptor.get(member.sending.fileno()) is member:
            self._epoll.modify(member.sending.fileno(), select.EPOLLOUT)

    def _receive_all(self) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        next_look = 0.0
        while not self._is_closed:
            self._run(self._for_receiver)
            for descriptor, events in self._epoll.poll(_LOOK_S):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif (member := self._by_descriptor.get(descriptor)) is not None:
                    try:
                        if descriptor == member.descriptors[1]:
                            self._receive(member, buffer)
                        else:
                            self._sending_woke(member, events)
                    except Exception as fault:
                        self._failed(member, fault)
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LOOK_S
                self._look(now)

    def _receive(self, member: PooledLink, buffer: memoryview) -> None:
        try:
            count = member.receiving.recv_into(buffer)
        except _WOULD_WAIT:
            return
        if count == 0:
            self._broke(member, "the other end closed the connection")
            return
        member.heard_at = time.monotonic()
        member.native.deliver(buffer[:count])

    def _sending_woke(self, member: PooledLink, events: int) -> None:
        if events & (select.EPOLLHUP | select.EPOLLERR):
            self._broke(member, "the other end closed the connection")
            return
        self._epoll.modify(member.sending.fileno(), 0)
        self._for_sender.append((member, self._send_rest))
        self.native.wake()

    def _look(self, now: float) -> None:
        """Breaks the links of which nothing was heard, or whose connection took nothing, for `SILENCE_S`."""
        for member in set(self._by_descriptor.values()):
            is_stuck = bool(member.unsent) and now - member.unsent_since > SILENCE_S
            if now - member.heard_at > SILENCE_S or is_stuck:
                self._broke(member, f"nothing was heard of it for {SILENCE_S:g} s")
