"""The client's side of draining: the controller asks this client to move a slice, and its library does it.

pathways/controller/slice_moves.py asks. The stream is open for as long as the client is connected. One thread moves one
slice after the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pathways.protocol import control_pb2 as pb

#: Moves a slice, by its number, to devices, within so many seconds.
Move = Callable[[int, Sequence[int], float], None]


class SliceMover:
    """Answers the controller's requests."""

    def __init__(self, open_stream: Callable[[Iterator[pb.MoveAnswer]], Any], move: Move) -> None:
        """`open_stream(answers)` returns the stream of requests."""
        self._move = move
        self._out: queue.SimpleQueue[pb.MoveAnswer | None] = queue.SimpleQueue()
        self._stream = open_stream(iter(self._out.get, None))
        next(self._stream)  # the controller has opened the stream
        threading.Thread(target=self._read, name="pw-slice-moves", daemon=True).start()

    def stop(self) -> None:
        """Ends the stream."""
        self._stream.cancel()
        self._out.put(None)

    def _read(self) -> None:
        try:
            for request in self._stream:
                self._out.put(self._answer(request))
        except Exception:  # the stream is over; the next use of the cluster raises the reason
            return

    def _answer(self, request: pb.MoveRequest) -> pb.MoveAnswer:
        try:
            self._move(request.slice_id, tuple(request.devices), request.timeout_s)
        except Exception as error:
            answer = pb.MoveAnswer(request=request.request)
            answer.error.type, answer.error.message = type(error).__name__, str(error)
            return answer
        return pb.MoveAnswer(request=request.request)
