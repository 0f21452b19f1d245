"""Connections that a loop serves, with TLS or without.

A connection never holds the loop up: what its socket does not take now is kept, and the loop sends it when the socket
takes it. A connection ends once, with one reason: its other end closed it, its owner's callback failed, its deadline
has passed, or nothing was heard of it for too long. No connection's fault is another one's.

Slow is not silent. Silence counts from the last byte that has come, or that the other end has taken, whole or not.
Time in which the loop did not look, because the process was stopped or the machine slept, is no silence: the other end
may have stood still, too. From one look to the next, a silence grows by `HEARTBEAT_S` at most.
A packet that is lost holds back all that was sent after it on its connection; a packet that is lost twice, for longer
than an end may be silent. So while an end sends much on one connection, it says on a second one that it lives
(`beats`), in the direction in which little is sent there: nothing is in front of it, and the kernel sends it again soon
(`send_again_soon`).

Threading: any thread may call any method. OpenSSL does not let two threads use one connection at the same time, so who
uses a connection holds its lock. Callbacks run under it, except `on_end`. They may use other connections, but wait for
nobody. A connection that is used in one direction only makes nobody wait: the loop receives, and another thread sends.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import math
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from pathways.transport import HEARTBEAT_S, TAKES_NOTHING_S
from pathways.transport.loop import BUFFER_BYTES, Loop, Served

_log = logging.getLogger(__name__)

_RECORD_BYTES = 1 << 14  # TLS decrypts so many at a time; who has sent as many has probably sent more
_AT_A_TIME = 1 << 17  # of what is sure to come, the loop is woken for so many bytes
_WOULD_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_GONE = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_TCP_THIN_LINEAR_TIMEOUTS = 16  # linux/tcp.h; Python's socket module does not have it
_TCP_RTO_MAX_MS = 44  # the same; Linux 6.15 and newer
_TCP_INFO_ROUND_TRIP = struct.Struct("68xII")  # of `struct tcp_info`: round trip and its deviation, in microseconds
_BEAT = memoryview(b"\0")

#: Yields where the next bytes go, and is sent how many have come.
Parser = Generator[memoryview, int, Any]


def _nobody(why: str) -> None:
    """Hears of an end of which nobody is to hear."""


def _nothing() -> None:
    """Is done when there is room."""


class _EndedError(Exception):
    """The other end has closed the connection."""


class Connection(Served):
    """A connection that a loop serves after `start`. Its owner closes the socket when it has ended."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_end: Callable[[str], object],
        *,
        parse: Parser | None = None,
        on_room: Callable[[], object] = _nothing,
        silence_s: float = math.inf,
    ) -> None:
        """A connection.

        Args:
            loop: serves it.
            sock: connected, and secured if it is to be.
            on_end: called once with the reason, by the loop's thread, when the connection has ended; not after `end`.
            parse: reads what comes. None: nothing comes here, and it ends when the other end closes its direction.
            on_room: called when everything that was kept has been sent, and after `ask`.
            silence_s: the connection ends if for so long nothing came, or nothing that was kept was taken.
        """
        super().__init__(loop, sock)
        send_again_soon(sock)
        self._on_end, self._parse, self._on_room, self._silence_s = on_end, parse, on_room, silence_s
        self._is_secure = isinstance(sock, ssl.SSLSocket)
        # All below is guarded by the lock.
        self.is_over = False
        self._fault = ""  # why the loop is to end it
        self.kept_bytes = 0
        self._kept: collections.deque[memoryview] = collections.deque()
        self._place = memoryview(b"") if parse is None else next(parse)  # for what comes next
        self._reads = parse is not None
        self._deadline, self._late = math.inf, ""
        self._heard_at = self._taken_at = self._looked_at = time.monotonic()
        self._silent_s = self._stuck_s = 0.0  # at the last look: how long it had said nothing, and taken nothing
        self._waiting = 0  # bytes in the kernel, then
        self._low_water = 1
        self._beat_at = 0.0
        #: Another connection with the same end. What comes there is heard here.
        self.other: Connection | None = None
        #: While the other end has not taken all that was sent here, it is told on `other` that this one lives.
        self.beats = False

    def start(self) -> None:
        """Serves it from now on."""
        with self.lock:
            if self.is_over:
                return
            if self.loop.add(self):
                if self._silence_s != math.inf:
                    self.loop.look_after(self)
                if self._fault:
                    self.loop.again(self, 0)
                return
        self.end("it came too late: this end takes no more connections")

    def end(self, why: str = "") -> None:
        """Ends it. When this returns, nobody uses the socket any more. `why`: for `on_end`; empty: nobody is told."""
        with self.lock:
            if self.is_over:
                return
            self.is_over = True
            on_end = self._on_end
            # They may name what holds this object: so the memory goes now.
            self._on_end, self._on_room, self._parse = _nobody, _nothing, None
            self._kept.clear()
            self.loop.forget(self)
            with contextlib.suppress(OSError):
                # (`SSLSocket.shutdown` would wait for the other end.)
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        if why:
            try:
                on_end(why)
            except Exception:  # who hears of it may be gone; the other connections go on
                _log.exception("the end of a connection could not be told")

    def send(self, data: memoryview, stays: bool = False) -> bool:
        """Sends bytes behind those that are kept. False: some of them are kept, until `on_room`.

        Args:
            data: the bytes.
            stays: they stay as they are until then; else they are copied if they are kept.
        """
        with self.lock:
            if self.is_over or self._fault:
                return True
            try:
                rest = data if self._kept else self._write(data)
                if not rest:
                    return True
                if not self._kept:
                    self._taken_at = time.monotonic()
                self._kept.append(rest if stays else memoryview(bytes(rest)))
                self.kept_bytes += len(rest)
                self.loop.watch(self)
                return False
            except Exception as fault:
                self.break_off(reason_of(fault))
                return True

    def break_off(self, why: str) -> None:
        """Has the loop end it soon, and tell why."""
        with self.lock:
            self._fault = self._fault or why
            self.loop.again(self, 0)

    def ask(self) -> None:
        """Has the loop call `on_room` soon, if nothing is kept then."""
        self.loop.again(self, select.EPOLLOUT)

    def reads(self, does: bool) -> None:
        """Whether what comes is received, or stays with the other end."""
        with self.lock:
            if self._reads != does and not self.is_over:
                self._reads, self._heard_at = does, time.monotonic()
                self.loop.watch(self)

    def end_by(self, deadline: float, why: str) -> None:
        """Ends it at this time (monotonic) at the latest."""
        with self.lock:
            self._deadline, self._late = deadline, why
            self.loop.look_after(self)

    # -- by the loop -------------------------------------------------------------------------------------------------

    def wanted(self) -> int:
        """See `Served`, as for the others."""
        events = select.EPOLLOUT if self._kept else 0
        if self._parse is None:
            return events | select.EPOLLRDHUP
        return events | (select.EPOLLIN if self._reads else 0)

    def turn(self, events: int) -> None:
        """Sends what is kept, and receives what has come."""
        with self.lock:
            if self.is_over:
                return
            try:
                if events & select.EPOLLOUT and not self._fault:
                    self._send_kept()
                if self._parse is None and events & _GONE:
                    raise _EndedError
                if self._reads and events & (select.EPOLLIN | _GONE):
                    self._heard_at = time.monotonic()  # also if it is only a part of what TLS can decrypt
                    self._receive()
                why = self._fault
            except Exception as fault:
                why = reason_of(fault)
        if why:
            self.end(why)

    def look(self, now: float) -> None:
        """Ends the connection if it is late or silent. Of two with one end, tells on the other that this one lives."""
        other = self.other
        with self.lock:
            waiting = 0 if self.is_over else _waiting(self.sock)
            if waiting != self._waiting:
                self._waiting, self._taken_at = waiting, now
            if waiting:
                send_again_soon(self.sock)
            since_s, self._looked_at = min(now - self._looked_at, HEARTBEAT_S), now
            self._silent_s = min(now - self._heard_at, self._silent_s + since_s)
            self._stuck_s = min(now - self._taken_at, self._stuck_s + since_s)
            silent_s = self._silent_s if other is None else min(self._silent_s, other._silent_s)
            is_silent = self._reads and silent_s > self._silence_s
            patience_s = self._silence_s if other is None else TAKES_NOTHING_S
            is_stuck = bool(self._kept) and self._stuck_s > patience_s
            beats = self.beats and waiting > 0 and now - self._beat_at >= HEARTBEAT_S
            self._beat_at = now if beats else self._beat_at
        if is_silent or is_stuck:
            for each in (self, other):
                if each is not None:
                    _reset_when_closed(each.sock)
        if now > self._deadline:
            self.end(self._late)
        elif is_silent:
            self.end(f"nothing was heard of it for {self._silence_s:g} s")
        elif is_stuck:
            self.end(f"it took nothing of what was sent for {patience_s:g} s")
        elif beats and other is not None:  # not under the lock: the other one's look has both the other way round
            other.send(_BEAT, stays=True)

    def _write(self, data: memoryview) -> memoryview:
        """Sends what the socket takes now, and returns the rest."""
        try:
            while data:
                data = data[self.sock.send(data) :]
        except _WOULD_WAIT:
            pass
        except (BrokenPipeError, ConnectionResetError):
            if self._parse is None:
                raise
            data = data[:0]  # it takes no more, but what it sent before that is still to be received
        return data

    def _send_kept(self) -> None:
        while self._kept:
            rest = self._write(self._kept[0])
            if sent := len(self._kept[0]) - len(rest):
                self.kept_bytes -= sent
                self._taken_at = time.monotonic()
            if rest:
                self._kept[0] = rest
                return
            self._kept.popleft()
        self.loop.watch(self)
        self._on_room()

    def _receive(self) -> None:
        """Takes what has come, about as much as the loop's buffer holds."""
        left, is_all = BUFFER_BYTES, False
        while left > 0 and not is_all and self._reads and not self.is_over:
            count, is_all = self._read(self._place)
            left -= count
            if count and self._parse is not None:
                self._place = self._parse.send(count)
        if self._silence_s == math.inf and not self.is_over:
            self._wait_for_more()
        if self._is_secure and not self.is_over and self.sock.pending():  # type: ignore[attr-defined]
            self.loop.again(self, select.EPOLLIN)  # epoll does not see what TLS has decrypted

    def _wait_for_more(self) -> None:
        """Has the kernel wake the loop when much has come, if much is sure to come."""
        sure = 0 if self._place is self.loop.buffer else len(self._place)
        low_water = min(_AT_A_TIME, sure // 2) if sure > 4 * _RECORD_BYTES else 1
        if low_water != self._low_water:
            self._low_water = low_water
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _read(self, into: memoryview) -> tuple[int, bool]:
        """Reads what has come: how many bytes, and whether it is probably all; if it is not, epoll says so."""
        count = 0
        try:
            while count < len(into):
                got = self.sock.recv_into(into[count:])
                if got == 0 and count == 0:
                    raise _EndedError
                count += got
                if got < _RECORD_BYTES and count < len(into):
                    return count, True
        except _WOULD_WAIT:
            return count, True
        except OSError:
            if count == 0:
                raise
            self.loop.again(self, select.EPOLLIN)  # what came before it counts; the next try finds it, or the end
            return count, True
        return count, False


def delivering(loop: Loop, deliver: Callable[[memoryview], object]) -> Parser:
    """Reads what comes to the loop's buffer, which is `deliver`'s until it returns."""
    while True:
        count = yield loop.buffer
        deliver(loop.buffer[:count])


def ignoring(loop: Loop) -> Parser:
    """Reads what comes, and drops it: it says that the other end lives."""
    return delivering(loop, lambda _: None)


class Pair:
    """Two connections, one per direction, that end together, once."""

    def __init__(self, on_end: Callable[[str], object]) -> None:
        """`on_end`: called with the reason when both have ended."""
        self._on_end = on_end
        self._lock = threading.Lock()  # guards the fields below
        self.connections: tuple[Connection, ...] = ()
        self.is_over = False

    def start(self, *connections: Connection) -> None:
        """These are the connections, whose `on_end` is `ended`."""
        with self._lock:
            self.connections = connections
            is_over = self.is_over
        for connection in connections:
            connection.start()
        if is_over:
            self._end()

    def ended(self, why: str) -> None:
        """One of them has ended, or could not be opened."""
        with self._lock:
            is_first, self.is_over = not self.is_over, True
            on_end, self._on_end = self._on_end, _nobody
        self._end()
        if is_first:
            on_end(why)

    def close(self) -> None:
        """Ends both, and tells nobody. When this returns, nobody uses them any more. A second call does nothing."""
        with self._lock:
            self.is_over, self._on_end = True, _nobody  # it may name what holds this object
        self._end()

    def _end(self) -> None:
        for connection in self.connections:
            connection.end()


def reason_of(fault: Exception) -> str:
    """Why a connection ends at which this has happened, as a clause."""
    if isinstance(fault, _EndedError):
        return "the other end closed the connection"
    if isinstance(fault, OSError):
        return f"the connection broke: {fault.strerror or fault}"
    if isinstance(fault, RuntimeError | ValueError):
        return f"it broke the protocol: {fault}"
    _log.error("a connection ends by a fault of this code", exc_info=fault)
    return f"{type(fault).__name__}: {fault}"


def send_again_soon(connection: socket.socket) -> None:
    """Asks the kernel to send lost packets again at equal intervals, not at ever longer ones. So after a cable was
    pulled for 3 s, the other machine is heard soon, and nobody takes it for lost. An interval is a second, or longer if
    a round trip is now: sent sooner, a packet would go out again while the answer to it is on its way. Kernels before
    6.15 do so for a while, and only where little is under way.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # it is closed, or the kernel is older
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ROUND_TRIP.size)
        round_trip_us, deviation_us = _TCP_INFO_ROUND_TRIP.unpack(info)
        interval_ms = max(1000, (round_trip_us + 4 * deviation_us) // 1000)
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, min(interval_ms, 120_000))


def _reset_when_closed(connection: socket.socket) -> None:
    """Has the kernel reset a connection when its socket is closed. An end of the stream is sent only when the other end
    has taken enough of what was sent before. When only the way back is cut, it would hear of the end when that is
    mended.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # it is closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _waiting(connection: socket.socket) -> int:
    """The bytes in the kernel that the other end has not taken."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):  # it is closed
        return 0
