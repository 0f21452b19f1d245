"""The client's side of callbacks: calls the client's functions when hosts request it.

A host's computation calls `Questions.ask` (`pathways.host.callbacks`). The call comes here through the controller, and
the answer goes back the same way. A client's Python code runs in the client's own process, never in a host.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib, errors
from pathways.process.worker_threads import WorkerThreads
from pathways.protocol import control_pb2 as pb
from pathways.protocol.callback_messages import chunks, pack, readable, unpack


def call(callbacks: Mapping[int, _jaxlib.Callback], number: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Calls a function of this process.

    Raises:
        CallbackFailedError: the function failed, or returned something else than it declared; the message names it.
    """
    callback = callbacks.get(number)
    if callback is None:
        raise errors.CallbackFailedError("the client no longer has the function that was called")
    try:
        return callback(arrays)
    except BaseException as problem:
        words = f"{callback.what} failed in its client: {type(problem).__name__}: {problem}"
        raise errors.CallbackFailedError(readable(words)) from problem


class Answers:
    """Calls a client's functions as hosts request it. Opened with the client's first program that has callbacks."""

    def __init__(
        self,
        open_stream: Callable[[Iterator[pb.CallbackPart]], Any],
        callbacks: Mapping[int, _jaxlib.Callback],
    ) -> None:
        """`open_stream(answers)` returns the stream of calls. `callbacks`: the functions by number; it may grow."""
        self._callbacks = callbacks
        self._crew = WorkerThreads("pw-callback")
        self._out: queue.SimpleQueue[pb.CallbackPart | None] = queue.SimpleQueue()
        self._stream = open_stream(iter(self._out.get, None))
        next(self._stream)  # the controller has opened the stream
        threading.Thread(target=self._read, name="pw-callbacks", daemon=True).start()

    def stop(self) -> None:
        """Ends the stream: this client answers no more calls."""
        self._stream.cancel()
        self._out.put(None)
        self._crew.stop()

    def _read(self) -> None:
        parts: dict[tuple[int, int, int], list[bytes]] = {}
        try:
            for part in self._stream:
                key = (part.host, part.incarnation, part.call)
                parts.setdefault(key, []).append(part.data)
                if part.last:
                    data = b"".join(parts.pop(key))
                    self._crew.do(lambda key=key, data=data: self._answer(key, data))  # type: ignore[misc]
        except Exception:  # the stream is over; the next use of the cluster raises the reason
            return

    def _answer(self, key: tuple[int, int, int], data: bytes) -> None:
        host, incarnation, own = key
        to = functools.partial(pb.CallbackPart, host=host, incarnation=incarnation, call=own)
        try:
            number, arrays = unpack(data)
            answer = pack(number, call(self._callbacks, number, arrays))
        except BaseException as problem:
            words = (
                str(problem) if isinstance(problem, errors.PathwaysError) else f"{type(problem).__name__}: {problem}"
            )
            self._out.put(to(last=True, error=readable(words) or type(problem).__name__))
            return
        for piece, last in chunks(answer):
            self._out.put(to(data=piece, last=last))
