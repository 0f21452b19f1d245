"""Functions of a client that its computations call: a host asks, the client's process answers.

    XLA's thread --ask--> Questions (host) --pieces, by way of the controller--> Answers (client) --> the function

A computation that calls back is launched by a thread beside the enqueue thread (`Attendants`), which may wait for as
long as the client takes: nothing else is launched on its devices meanwhile, all else on the host goes on. Its results
exist when it is over, so a failed call fails exactly what depends on it (ERR-1).

A client's Python runs in the client's own process, never in a host. What a host reads in an answer is checked against
what the computation was compiled for, and what a client may answer follows from its own stream (the controller looks).
A client that is gone has answered everything: with an error, now and in what is asked later (OWN-1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pathways import errors
from pathways.protocol import control_pb2 as pb
from pathways.protocol.callback_messages import Kind, chunks, pack, unpack

#: Calls that a computation on several devices may make after one of its calls failed, before its host gives up.
MOST_VAIN_CALLS = 10_000


class _Question:
    """A call that waits for its answer."""

    def __init__(self, client: int, limit: int) -> None:
        self.client = client
        self.limit = limit  # bytes that an answer can have
        self.parts: list[bytes] = []
        self.error: str | None = None
        self.answered = threading.Event()


class Questions:
    """One host's calls. Any thread."""

    def __init__(self, host: int) -> None:
        self._host = host
        #: Sends chunks to the client; None: the client is this process, and `local` calls its functions.
        self.send: Callable[[pb.CallbackPart], None] | None = None
        self.local: Callable[[int, Sequence[np.ndarray]], list[np.ndarray]] | None = None
        self._lock = threading.Lock()
        self._open: dict[int, _Question] = {}  # guarded by _lock, as is what follows
        self._gone: set[int] = set()
        self._last = 0

    def ask(self, client: int, number: int, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        """Calls a function of a client; waits for what it gives, arrays of these kinds.

        Raises:
            CallbackFailedError: it failed, gave something else, or its client is gone.
        """
        if self.send is None:
            assert self.local is not None, "an embedded cluster sets it before the first program"
            return self.local(number, arrays)
        expected = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in kinds)
        question = _Question(client, expected + (1 << 16))
        with self._lock:
            if client in self._gone:
                raise errors.CallbackFailedError(f"client {client}, which would have to answer, is gone")
            self._last += 1
            own = self._last
            self._open[own] = question
        for data, last in chunks(pack(number, arrays)):
            self.send(pb.CallbackPart(client=client, host=self._host, call=own, data=data, last=last))
        question.answered.wait()
        if question.error is not None:
            raise errors.CallbackFailedError(question.error)
        try:
            _, answer = unpack(b"".join(question.parts))
        except ValueError as error:
            raise errors.CallbackFailedError(f"client {client} answered with {error}") from error
        given = [(array.shape, array.dtype) for array in answer]
        if given != list(kinds):
            raise errors.CallbackFailedError(f"client {client} answered with {given}, expected {list(kinds)}")
        return answer

    def answer(self, part: pb.CallbackPart) -> None:
        """A piece of an answer has come."""
        with self._lock:
            question = self._open.get(part.call)
            if question is None:
                return
            question.parts.append(part.data)
            question.limit -= len(part.data)
            if question.limit < 0:
                question.error = f"client {question.client} answered with more than was asked for"
            elif part.error:
                question.error = part.error
            elif not part.last:
                return
            del self._open[part.call]
        question.answered.set()

    def forget(self, client: int) -> None:
        """The client is gone (OWN-1)."""
        with self._lock:
            self._gone.add(client)
            over = [number for number, question in self._open.items() if question.client == client]
            questions = [self._open.pop(number) for number in over]
        for question in questions:
            question.error = f"client {client}, which was to answer, is gone"
            question.answered.set()


class Asker:
    """What the callbacks of one executable ask by, through one launch after the other.

    A call that failed ends the computation of one device there and then. Where several devices compute together the
    others would wait for this one in vain: so the computation goes on, with zeros for what its calls should give, and
    fails when it is over.
    """

    def __init__(self, ask: Callable[..., list[np.ndarray]], devices: int, give_up: Callable[[str], None]) -> None:
        self._ask = ask
        self._is_alone = devices == 1
        self._give_up = give_up
        self.failure: errors.CallbackFailedError | None = None  # of the launch under way
        self._vain = 0

    def begin(self) -> None:
        """A launch begins."""
        self.failure = None
        self._vain = 0

    def __call__(self, number: int, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        """What XLA's thread calls."""
        if self.failure is None:
            try:
                return self._ask(number, arrays, kinds)
            except errors.CallbackFailedError as failure:
                self.failure = failure
        if self._is_alone:
            raise self.failure
        self._vain += 1
        if self._vain > MOST_VAIN_CALLS:
            self._give_up(f"a computation goes on although what it called has failed: {self.failure}")
            raise self.failure
        return [np.zeros(shape, dtype) for shape, dtype in kinds]
