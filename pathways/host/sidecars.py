"""Host functions (`pw.host_callback`): functions of clients that run on hosts, in processes of their own.

    XLA's thread --ask--> Sidecars (host) --socket, shared memory--> the client's sidecar on this host --> the function

A host has one sidecar per client, from the client's first call on. So a client's Python runs beside its arrays, yet
never in a host, which holds other clients' data, nor in a process of another client. A sidecar is given copies of the
arguments, and nothing else. What it answers is data: bytes of the promised shapes and dtypes, and texts (TRUST-1).

A call that does not end within its deadline ends the process, and with it what the functions kept there. The next call
starts another one. When a client is gone, its sidecar is killed (OWN-1); a sidecar ends with its host. With it ends
whatever its functions have started (`pathways/process/confinement.py`). On a machine that serves clients from
elsewhere, sidecars are confined (GUEST-1).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways import errors
from pathways.compiler.ir import HostFunction
from pathways.process import confinement, sidecar
from pathways.process.children import describe_exit
from pathways.process.environment import SECRETS
from pathways.process.host_functions import MAX_ERROR_CHARS, Kind
from pathways.process.memory import memory_bytes
from pathways.process.worker_threads import WorkerThreads

_MOST_ANSWER_BYTES = 16 * MAX_ERROR_CHARS  # JSON writes some characters as twelve bytes
_MOST_PROCESSES = 4096  # and threads, of a confined one
_ENDS_S = 10.0  # when it is killed, with all that functions have started
_START_S = 60.0  # to start a process and to read a function, beside the deadline


class Sidecars:
    """The sidecars of one host. Any thread may use it.

    Args:
        host: its number.
        hidden: gives the folders that functions do not see; they reach no other process, and have bounds
            (`pathways/process/confinement.py`). None: they may do what the host's user may.
    """

    def __init__(self, host: int, hidden: Callable[[], list[str]] | None = None) -> None:
        self._host = host
        self._hidden = hidden
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._functions: dict[tuple[int, int], list[Any]] = {}  # by client and number: the function, and its programs
        self._processes: dict[int, _Process] = {}  # by client
        self._gone: set[int] = set()
        self._is_stopped = False

    def add(self, client: int, functions: Sequence[HostFunction]) -> None:
        """A program of the client has these functions."""
        with self._lock:
            for function in functions:
                self._functions.setdefault((client, function.number), [function, 0])[1] += 1

    def drop(self, client: int, functions: Sequence[HostFunction]) -> None:
        """A program that had these functions is dropped."""
        over = []
        with self._lock:
            for function in functions:
                known = self._functions.get((client, function.number))
                if known is not None:
                    known[1] -= 1
                    if known[1] == 0:
                        del self._functions[client, function.number]
                        over.append(function.number)
            process = self._processes.get(client)
        if process is not None:
            for number in over:
                process.drop(number)

    def has(self, client: int, number: int) -> bool:
        """Whether the client's function of this number runs here."""
        return (client, number) in self._functions

    def ask(self, client: int, number: int, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        """Calls a function and waits for its results, arrays of shapes and dtypes `kinds`.

        Raises:
            CallbackFailedError: it failed, gave something else, did not end in time, or its client is gone.
        """
        with self._lock:
            if client in self._gone or self._is_stopped:
                raise errors.CallbackFailedError(f"client {client}, whose function was to run, is gone")
            function = self._functions[client, number][0]
            process = self._processes.get(client)
            if process is None:
                process = self._processes[client] = _Process(client, self._host, self._hidden)
        return process.ask(function, arrays, kinds)

    def forget(self, client: int) -> None:
        """Ends the process of a client that is gone (OWN-1)."""
        with self._lock:
            self._gone.add(client)
            process = self._processes.pop(client, None)
            for key in [key for key in self._functions if key[0] == client]:
                del self._functions[key]
        if process is not None:
            process.stop()

    def stop(self) -> None:
        """Ends all processes."""
        with self._lock:
            self._is_stopped = True
            processes = list(self._processes.values())
            self._processes.clear()
        for process in processes:
            process.stop()

    def stats(self) -> dict[str, Any]:
        """Statistics, for people to read: the pids of the processes, by client."""
        with self._lock:
            found = {str(client): process.pid for client, process in self._processes.items()}
        return {"sidecars": {client: pid for client, pid in found.items() if pid is not None}}


class _Failed(Exception):
    """The process answered that a request failed."""


class _Process:
    """The sidecar of one client. Calls take their turns, in the order in which they come."""

    def __init__(self, client: int, host: int, hidden: Callable[[], list[str]] | None = None) -> None:
        self._client = client
        self._host = host
        self._hidden = hidden
        # One thread for the process's whole life: the kernel ends a child with the thread that has started it.
        self._thread = WorkerThreads("pw-sidecar", most=1)
        self._child: subprocess.Popen[bytes] | None = None  # the thread sets it under _ending; `stop` kills it
        self._ending = threading.Lock()
        self._is_stopped = False
        self._link: socket.socket | None = None  # the thread sets it under _ending; `stop` shuts it down
        # Only the thread uses these:
        self._requests = 0
        self._memory = -1
        self._memory_bytes = 0
        self._loaded: set[int] = set()

    @property
    def pid(self) -> int | None:
        child = self._child
        if child is None or child.returncode is not None:
            return None
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{child.pid}/task/{child.pid}/children") as file:
            return int(file.read().split()[0])  # the others are what it has left behind
        return None

    def ask(self, function: HostFunction, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        """Any thread. See `Sidecars.ask`."""
        over = threading.Event()
        found: list[np.ndarray] = []
        failure: list[str] = []

        def job() -> None:
            try:
                found.extend(self._call(function, arrays, kinds))
            except _Failed as problem:
                failure.append(f"{function.what} failed on host {self._host}: {problem}")
            except BaseException as problem:
                failure.append(f"{function.what} could not be called on host {self._host}: {problem!r}")
            over.set()

        with self._ending:  # the thread does what it was given before `stop`, and nothing later
            if self._is_stopped:
                raise errors.CallbackFailedError(f"client {self._client}, whose function was to run, is gone")
            self._thread.do(job)
        over.wait()
        if failure:
            raise errors.CallbackFailedError(failure[0][:MAX_ERROR_CHARS])
        return found

    def drop(self, number: int) -> None:
        """Any thread: nobody calls the function any more."""

        def job() -> None:
            if number in self._loaded and self._link is not None:
                self._loaded.discard(number)
                with contextlib.suppress(_Failed):
                    self._request({"do": "drop", "number": number}, None, _START_S, "")

        with self._ending:
            if not self._is_stopped:
                self._thread.do(job)

    def stop(self) -> None:
        """Any thread: kills the process; calls that wait fail, and later ones."""
        with self._ending:
            self._is_stopped = True
            if self._child is not None:
                _kill(self._child)
            if self._link is not None:  # a process that a function has started may still hold the other end
                with contextlib.suppress(OSError):
                    self._link.shutdown(socket.SHUT_RDWR)
            self._thread.do(self._over)
        self._thread.stop()

    # ---- from its thread

    def _over(self) -> None:
        self._end(0.0)

    def _call(self, function: HostFunction, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        arrays = [np.ascontiguousarray(each).reshape(each.shape) for each in arrays]
        takes = [(each.shape, each.dtype) for each in arrays]
        (at, end), (out, most) = sidecar.places(takes), sidecar.places(kinds)
        if self._link is None:
            self._start()
        if function.number not in self._loaded:
            request = {"do": "load", "number": function.number, "path": list(function.path)}
            limit_s = None if function.deadline_s == 0 else max(_START_S, function.deadline_s)
            self._request(request, function.function, limit_s, "was not read, with what it keeps,")
            self._loaded.add(function.number)
        size = max(end, most, 1)
        if size > self._memory_bytes:
            os.ftruncate(self._memory, size)
            self._memory_bytes = size
        with mmap.mmap(self._memory, size) as memory:
            for array, place in zip(arrays, at, strict=True):
                memory[place : place + array.nbytes] = array.reshape(-1).view(np.uint8).data
            request = {
                "do": "call",
                "number": function.number,
                "size": size,
                "arguments": [[shape, dtype.name] for shape, dtype in takes],
                "results": [[shape, dtype.name] for shape, dtype in kinds],
            }
            self._request(request, None, function.deadline_s or None, "did not end")
            return [sidecar.view(memory, kind, place).copy() for kind, place in zip(kinds, out, strict=True)]

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._memory = os.memfd_create("pathways-sidecar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # What is mapped here stays there, whatever the process does (TRUST-1).
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._memory_bytes = 0
        self._loaded.clear()
        handed = (theirs.fileno(), self._memory)
        command = [sys.executable, "-P", confinement.__file__, str(os.getpid()), self._bounds(), sidecar.__name__]
        with self._ending, theirs:
            if self._is_stopped:
                ours.close()
                os.close(self._memory)
                raise _Failed(f"client {self._client}, whose function was to run, is gone")
            inherited = {name: text for name, text in os.environ.items() if name not in SECRETS}
            environment = {**inherited, "JAX_PLATFORMS": "cpu"}  # a function that uses JAX takes no device of the host
            printed, prints = os.pipe()
            try:
                self._child = subprocess.Popen(
                    [*command, *map(str, handed)],
                    pass_fds=handed,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=prints,
                    stderr=prints,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                os.close(self._memory)
                os.close(printed)
                raise
            finally:
                os.close(prints)
            threading.Thread(target=_copy_to_log, args=(printed,), name="pw-sidecar-log", daemon=True).start()
            self._link = ours

    def _bounds(self) -> str:
        """See `pathways/process/confinement.py`."""
        if self._hidden is None:
            return "{}"
        bounds = {"hide": self._hidden(), "memory": memory_bytes() // 2, "processes": _MOST_PROCESSES}
        return json.dumps(bounds)

    def _request(self, request: dict[str, Any], data: bytes | None, limit_s: float | None, late: str) -> None:
        """Sends a request and waits for its answer.

        Raises:
            _Failed: it failed, or there is no answer in time.
        """
        assert self._link is not None
        until = None if limit_s is None else time.monotonic() + limit_s
        self._requests += 1
        request["id"] = self._requests
        try:
            sidecar.send(self._link, json.dumps(request).encode(), until)
            if data is not None:
                sidecar.send(self._link, data, until)
            answer = json.loads(sidecar.receive(self._link, _MOST_ANSWER_BYTES, until))
            problem = answer.get("error")
            if answer.get("id") != self._requests:
                raise ValueError("an answer to another request")
        except TimeoutError:
            self._end(0.0)
            kept = "its process was ended, with all that functions kept there"
            raise _Failed(f"it {late} within {limit_s:g} s; {kept}") from None
        except (OSError, EOFError, ValueError, AttributeError) as error:
            how = self._end(0.5)
            if self._is_stopped:
                raise _Failed(f"client {self._client}, whose function was running, is gone") from error
            raise _Failed(f"its process {how}, with all that functions kept there") from error
        if problem is not None:
            raise _Failed(str(problem))

    def _end(self, patience_s: float) -> str:
        """Ends the process, which has so long to end by itself. Returns how it ended."""
        with self._ending:
            if self._link is not None:
                self._link.close()
                self._link = None
                os.close(self._memory)
        if self._child is None:
            return "was never there"
        if self._child.returncode is not None:
            return describe_exit(self._child.returncode)
        for left_s in (patience_s, _ENDS_S):
            until = time.monotonic() + left_s
            while not os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                if time.monotonic() >= until:
                    break
                time.sleep(0.005)
            _kill(self._child)
        # The number of its process group stays its own until it is reaped.
        with contextlib.suppress(OSError):
            os.killpg(self._child.pid, signal.SIGKILL)
        return describe_exit(self._child.wait())


def _copy_to_log(printed: int) -> None:
    """What functions print goes to the host's log. Who has the log itself as a descriptor could read and cut it."""
    with open(printed, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 16):
            with contextlib.suppress(OSError):  # a full disk: see LOG-1
                os.write(2, data)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills a process with all that it has started: see `pathways/process/confinement.py`."""
    if child.returncode is None:  # else the number may be another's
        os.kill(child.pid, signal.SIGTERM)
