"""Callbacks: functions of a client that its computations call. A host asks, the client's process answers.

    XLA's thread --ask--> Questions (host) --chunks, through the controller--> Answers (client) --> the function

A computation with callbacks is launched by a thread beside the enqueue thread (`Attendants.attend`). That thread may
wait as long as the client takes. Meanwhile the host launches nothing else on the computation's devices; everything else
on the host goes on. The computation's results exist only when it is over, so a failed call fails exactly what depends
on the computation (ERR-1).

A client's Python runs in the client's own process, never in a host. Functions of `pw.host_callback` are answered by the
client's process on this host: see `pathways.host.sidecars`. The host checks each answer against the shapes and
dtypes that the computation was compiled for. The controller checks, by the client's own stream, what a client may
answer. When a client is gone, each of its calls fails: the open ones now, and later ones at once (OWN-1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pathways import errors
from pathways.host.sidecars import Sidecars
from pathways.protocol import control_pb2 as pb
from pathways.protocol.callback_messages import Kind, chunks, pack, readable, unpack

#: After a failed call, a computation on several devices may make so many more calls. Then its host gives up.
MOST_VAIN_CALLS = 10_000


class _Question:
    """A call that waits for its answer."""

    def __init__(self, client: int, limit: int) -> None:
        self.client = client
        self.limit = limit  # bytes that the answer may still have
        self.parts: list[bytes] = []
        self.error: str | None = None
        self.answered = threading.Event()


class Questions:
    """One host's open calls. Any thread may use it."""

    def __init__(self, host: int, sidecars: Sidecars) -> None:
        self._host = host
        self._sidecars = sidecars
        #: Sends a chunk of a call to the client. None: the client is this process, and `local` calls its functions.
        self.send: Callable[[pb.CallbackPart], None] | None = None
        self.local: Callable[[int, Sequence[np.ndarray]], list[np.ndarray]] | None = None
        self._lock = threading.Lock()
        self._open: dict[int, _Question] = {}  # guarded by _lock, as are the fields below
        self._gone: set[int] = set()
        self._last = 0

    def ask(self, client: int, number: int, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        """Calls function `number` of a client and waits for its results, arrays of shapes and dtypes `kinds`.

        Raises:
            CallbackFailedError: the function failed, gave something else, or its client is gone.
        """
        if self._sidecars.has(client, number):
            return self._sidecars.ask(client, number, arrays, kinds)
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
        """Takes a chunk of an answer."""
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
        """Fails all calls of a client that is gone (OWN-1)."""
        with self._lock:
            self._gone.add(client)
            over = [number for number, question in self._open.items() if question.client == client]
            questions = [self._open.pop(number) for number in over]
        for question in questions:
            question.error = f"client {client}, which was to answer, is gone"
            question.answered.set()


class Asker:
    """Makes the calls of one executable, for one launch after the other.

    On one device, a failed call ends the computation at once. On several devices the other devices would then wait
    forever for this one. So there the computation goes on, with zeros as the results of its calls, and fails when it is
    over.
    """

    def __init__(self, ask: Callable[..., list[np.ndarray]], devices: int, give_up: Callable[[str], None]) -> None:
        self._ask = ask
        self._is_alone = devices == 1
        self._give_up = give_up
        #: Of the launch under way. A text, because an exception would keep what its frames hold: the call's arrays.
        self.failure: str | None = None
        self._vain = 0

    def begin(self, failure: str | None = None) -> None:
        """Prepares for a new launch. `failure`: why it has failed already, and is to call nobody."""
        self.failure = failure
        self._vain = 0

    def __call__(self, number: int, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        """Answers a call. XLA's thread runs this."""
        if self.failure is None:
            try:
                return self._ask(number, arrays, kinds)
            except errors.CallbackFailedError as failure:
                self.failure = readable(str(failure))
        if self._is_alone:
            raise errors.CallbackFailedError(self.failure)
        self._vain += 1
        if self._vain > MOST_VAIN_CALLS:
            self._give_up(f"a computation goes on although what it called has failed: {self.failure}")
            raise errors.CallbackFailedError(self.failure)
        return [np.zeros(shape, dtype) for shape, dtype in kinds]
