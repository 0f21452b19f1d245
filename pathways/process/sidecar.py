"""A sidecar: the process in which a host runs the functions of one client that are not compiled.

    python -P confinement.py ... pathways.process.sidecar SOCKET MEMORY PARENT

It inherits the two descriptors, and ends with PARENT (`confinement.py`). Each message on the socket is JSON behind its
length; the bytes of a function follow in a message of their own. Arrays lie in the memory, which this process and its
host share, and nobody else. It answers one request at a time, in the order in which they come.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways.process import log_lines
from pathways.process.children import ParentLost, die_with_parent
from pathways.process.host_functions import HostFunction, Kind, describe

#: Arrays begin at multiples of so many bytes.
ALIGNMENT = 64

_LENGTH = struct.Struct("<Q")
_ANY = 1 << 62


def send(link: socket.socket, data: bytes, until: float | None = None) -> None:
    """Sends a message, until this moment of `time.monotonic` at most.

    Raises:
        TimeoutError: the other side did not take it in time.
        OSError: the other side is gone.
    """
    link.settimeout(_left(until))
    link.sendall(_LENGTH.pack(len(data)) + data)


def receive(link: socket.socket, most: int, until: float | None = None) -> bytes:
    """The next message, if it has come by this moment of `time.monotonic`, and has `most` bytes at most.

    Raises:
        TimeoutError: it has not come in time.
        EOFError, OSError: the other side is gone.
        ValueError: it is longer.
    """
    (length,) = _LENGTH.unpack(_receive(link, _LENGTH.size, until))
    if length > most:
        raise ValueError(f"a message of {length} bytes, expected at most {most}")
    return _receive(link, length, until)


def _left(until: float | None) -> float | None:
    return None if until is None else min(1e6, max(0.001, until - time.monotonic()))


def _receive(link: socket.socket, count: int, until: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        link.settimeout(_left(until))
        part = link.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def dtype_of(name: str) -> np.dtype:
    """The element type that NumPy or ml_dtypes gives this name."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def places(kinds: Sequence[Kind], start: int = 0) -> tuple[list[int], int]:
    """Where arrays of these shapes and dtypes lie, one behind the other, and where they end. In bytes."""
    found = []
    for shape, dtype in kinds:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        found.append(start)
        start += math.prod(shape) * dtype.itemsize
    return found, start


def view(memory: Any, kind: Kind, at: int) -> np.ndarray:
    """The array of this shape and dtype at a place of the memory."""
    shape, dtype = kind
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(memory, dtype, math.prod(shape), at).reshape(shape)


class Sidecar:
    """Answers the requests of its host."""

    def __init__(self, link: socket.socket, memory_fd: int) -> None:
        self._link = link
        self._memory_fd = memory_fd
        self._functions: dict[int, HostFunction] = {}
        self._objects: dict[str, Any] = {}
        self._own = os.getpid()

    def serve(self) -> None:
        """Until the host is gone."""
        while True:
            request = json.loads(receive(self._link, _ANY))
            answer = {"id": request.pop("id")}
            try:
                match request.pop("do"):
                    case "load":
                        self._load(**request)
                    case "drop":
                        self._drop(**request)
                    case "call":
                        self._call(**request)
                    case other:
                        raise ValueError(f"the host asks for {other!r}, which a sidecar does not know")
            except BaseException as problem:
                answer["error"] = describe(problem)
            self._check_process()
            send(self._link, json.dumps(answer).encode())

    def _check_process(self) -> None:
        """Ends a child that a function has forked, and that has returned or raised there."""
        if os.getpid() != self._own:
            os._exit(1)

    def _load(self, number: int, path: list[str]) -> None:
        data = receive(self._link, _ANY)
        sys.path[:] = [*path, *(each for each in sys.path if each not in path)]  # the client's modules come first
        self._functions[number] = HostFunction(data, self._objects)

    def _drop(self, number: int) -> None:
        self._functions.pop(number, None)

    def _call(self, number: int, size: int, arguments: list[Any], results: list[Any]) -> None:
        takes = [(tuple(shape), dtype_of(name)) for shape, name in arguments]
        gives = [(tuple(shape), dtype_of(name)) for shape, name in results]
        with mmap.mmap(self._memory_fd, size) as memory:
            arrays = [view(memory, kind, at).copy() for kind, at in zip(takes, places(takes)[0], strict=True)]
            made = self._functions[number](arrays, gives)
            self._check_process()
            for array, kind, at in zip(made, gives, places(gives)[0], strict=True):
                out = view(memory, kind, at)
                out[...] = array
                del out  # no view outlives the mapping


def main(socket_fd: int, memory_fd: int, parent: int) -> None:
    """Serves on inherited descriptors."""
    log_lines.begin("functions")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the client; this process ends with its host
    with contextlib.suppress(ParentLost, EOFError, ConnectionError, BrokenPipeError):
        die_with_parent(parent)
        Sidecar(socket.socket(fileno=socket_fd), memory_fd).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)  # whatever threads functions have left
