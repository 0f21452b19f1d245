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

import functools
import json
import queue
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib, errors
from pathways.runtime import payloads
from pathways.runtime.proto import control_pb2 as pb

#: Bytes of a question or an answer in one message, so that no other message waits long behind it.
PIECE_BYTES = 1 << 20
#: Characters of an error's text.
MOST_WORDS = 1 << 14
#: Calls that a computation on several devices may make after one of its calls failed, before its host gives up.
MOST_VAIN_CALLS = 10_000

_HEAD = struct.Struct("<QQ")  # the callback's number, bytes of JSON

Kind = tuple[tuple[int, ...], np.dtype]


def pack(number: int, arrays: Sequence[np.ndarray]) -> bytes:
    """A callback's number and its arrays as bytes."""
    kinds = json.dumps([[array.shape, array.dtype.name] for array in arrays]).encode()
    return b"".join((_HEAD.pack(number, len(kinds)), kinds, *(np.ascontiguousarray(each).tobytes() for each in arrays)))


def unpack(data: bytes) -> tuple[int, list[np.ndarray]]:
    """What `pack` was given.

    Raises:
        ValueError: the bytes are no such thing.
    """
    try:
        number, length = _HEAD.unpack_from(data)
        at = _HEAD.size + length
        arrays = []
        for shape, name in json.loads(data[_HEAD.size : at]):
            dtype = payloads.dtype_of(name)
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(data, dtype, count, at).reshape(shape) if count else np.empty(shape, dtype)
            arrays.append(array)
            at += array.nbytes
    except (struct.error, TypeError, KeyError) as error:
        raise ValueError(f"{len(data)} bytes that should be a call or its answer: {error}") from error
    if at != len(data):
        raise ValueError(f"{len(data)} bytes where a call or its answer takes {at}")
    return number, arrays


def pieces(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Parts of `PIECE_BYTES`, at least one, and whether it is the last."""
    for at in range(0, max(1, len(data)), PIECE_BYTES):
        yield data[at : at + PIECE_BYTES], at + PIECE_BYTES >= len(data)


def call(callbacks: Mapping[int, _jaxlib.Callback], number: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Calls a function of this process.

    Raises:
        CallbackFailedError: it failed, or gave something else than it promised; names it.
    """
    callback = callbacks.get(number)
    if callback is None:
        raise errors.CallbackFailedError("the client no longer has the function that was called")
    try:
        return callback(arrays)
    except BaseException as problem:
        words = f"{callback.what} failed in its client: {type(problem).__name__}: {problem}"
        raise errors.CallbackFailedError(words[:MOST_WORDS]) from problem


class Crew:
    """Threads for work that may wait: as many as there is work at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # guarded by _lock
        self._busy = 0  # jobs that are not over; guarded by _lock

    def do(self, job: Callable[[], None]) -> None:
        """Does `job`, which raises nothing, at once."""
        with self._lock:
            self._busy += 1
            grows = self._busy > self._threads
            self._threads += grows
        if grows:
            threading.Thread(target=self._loop, name=self._name, daemon=True).start()
        self._work.put(job)

    def stop(self) -> None:
        """Ends the threads as they come out of their work."""
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._work.put(None)

    def _loop(self) -> None:
        while (job := self._work.get()) is not None:
            job()
            del job
            with self._lock:
                self._busy -= 1


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
        #: Takes pieces to the client; None: the client is this process, and `local` has its functions.
        self.send: Callable[[pb.CallbackPart], None] | None = None
        self.local: Mapping[int, _jaxlib.Callback] = {}
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
            return call(self.local, number, arrays)
        expected = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in kinds)
        question = _Question(client, expected + (1 << 16))
        with self._lock:
            if client in self._gone:
                raise errors.CallbackFailedError(f"client {client}, which would have to answer, is gone")
            self._last += 1
            own = self._last
            self._open[own] = question
        for data, last in pieces(pack(number, arrays)):
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


class Answers:
    """A client's end: calls its functions as hosts ask. Opened with the first program that has any."""

    def __init__(
        self,
        open_stream: Callable[[Iterator[pb.CallbackPart]], Any],
        callbacks: Mapping[int, _jaxlib.Callback],
    ) -> None:
        """`open_stream(answers)` gives the stream of questions; `callbacks` are the functions by number, and grow."""
        self._callbacks = callbacks
        self._crew = Crew("pw-callback")
        self._out: queue.SimpleQueue[pb.CallbackPart | None] = queue.SimpleQueue()
        self._stream = open_stream(iter(self._out.get, None))
        next(self._stream)  # the controller has it
        threading.Thread(target=self._read, name="pw-callbacks", daemon=True).start()

    def stop(self) -> None:
        """Answers nothing more."""
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
        except Exception:  # the stream is over; whoever uses the cluster hears why
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
            self._out.put(to(last=True, error=words[:MOST_WORDS] or type(problem).__name__))
            return
        for piece, last in pieces(answer):
            self._out.put(to(data=piece, last=last))
