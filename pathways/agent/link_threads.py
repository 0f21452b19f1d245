"""The two threads of a link between machines: one sends what the native link collects, one delivers what arrives.

A link has a connection per direction. Why: OpenSSL does not let two threads read and write one connection at the same
time, and a thread that waits for bytes must not hold up one that has bytes to send. `csrc/link/link.h` says what the
bytes are. A thread holds Python's lock while it collects, and while it delivers little: to take the lock again would
cost more. It does not hold the lock while it waits, encrypts or delivers much.

A link breaks once, for the first reason that either thread finds: the connection ended, the other end broke the
protocol, or nothing was heard of it for `SILENCE_S` (LINK-1). Then both connections are closed.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from pathways.agent.tunnel import send_again_soon

#: Home, the controller's end, asks at least this often, in seconds, and the other end answers.
HEARTBEAT_S = 1.0
#: An end of which nothing was heard for this long, in seconds, counts as gone.
SILENCE_S = 4.5

_BUFFER_BYTES = 1 << 20


def _nobody(why: str) -> None:
    """Hears of the end of a link that was closed."""


class LinkThreads:
    """Runs one end of a link until it breaks or is closed. Any thread may call any method."""

    def __init__(
        self, link: Any, sending: socket.socket, receiving: socket.socket, on_broken: Callable[[str], object]
    ) -> None:
        """Call `start` afterwards.

        Args:
            link: the native link, see `_native.Link`.
            sending: the connection on which this end sends.
            receiving: the connection on which it receives.
            on_broken: called once, from one of the threads, with the reason; not after `close`.
        """
        self._link = link
        self._sending = sending
        self._receiving = receiving
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for work, name in ((self._send, "pw-link-send"), (self._receive, "pw-link-receive"))
        ]

    @classmethod
    def started(
        cls, link: Any, sending: socket.socket, receiving: socket.socket, on_broken: Callable[[str], object]
    ) -> LinkThreads:
        """A link whose threads run."""
        threads = cls(link, sending, receiving, on_broken)
        threads.start()
        return threads

    def start(self) -> None:
        """Starts both threads."""
        for connection in (self._sending, self._receiving):
            connection.settimeout(SILENCE_S)
            send_again_soon(connection)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the link. Returns when neither thread uses it any more."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join()
        self._link.close()
        self._on_broken = _nobody  # it may name what holds this object

    def _end(self) -> bool:
        """Makes both threads end. True for the call that did it."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        for connection in (self._sending, self._receiving):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if is_first:
            self._link.wake()
        return is_first

    def _run(self, work: Callable[[], str]) -> None:
        try:
            why = work()
        except TimeoutError:
            why = f"nothing was heard of it for {SILENCE_S:g} s"
        except OSError as error:
            why = f"the connection broke: {error.strerror or error}"
        except (RuntimeError, ValueError) as error:
            why = f"it broke the protocol: {error}"
        except Exception as error:  # whatever it is, the machine on the other end must not wait for ever
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
        if self._end():
            print(f"a link broke: {why}", file=sys.stderr, flush=True)
            self._on_broken(why)

    def _send(self) -> str:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while not self._is_over:
            count = self._link.collect(buffer)
            if count:
                self._sending.sendall(buffer[:count])
            else:
                self._link.wait(HEARTBEAT_S / 2)
        return "it was closed"

    def _receive(self) -> str:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while not self._is_over:
            count = self._receiving.recv_into(buffer)
            if count == 0:
                return "the other end closed the connection"
            self._link.deliver(buffer[:count])
        return "it was closed"
