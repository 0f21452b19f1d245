"""Child processes of a benchmark: start, ask, count their CPU time, end.

A child is an object in a process of its own (`serve`), which answers requests on one socket by its methods.
 It dies with its parent, and `Child.kill` ends its whole tree by process id. Linux only: it reads /proc and
uses per-process CPU clocks, which count in nanoseconds where /proc counts in ticks of 10 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ChildError(RuntimeError):
    """A child failed, died, or did not answer in time; the message carries what is known."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


@contextlib.contextmanager
def orphans_come_home() -> Iterator[None]:
    """Inside, orphaned descendants become children of this process; those left at the end are killed.

    SIGTERM ends the block as Ctrl-C does, so that nothing stays behind. For the main thread.
    """

    def terminate(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = set(tree(os.getpid()))
    handler = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        kill_processes([pid for pid in tree(os.getpid()) if pid not in before])
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _parents(zombies: bool = False) -> dict[int, int]:
    """Every process id on the machine with its parent's; also those that ended and wait to be reaped, if asked."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(entry.path, "stat").read_text()
                state, parent = stat.rpartition(")")[2].split()[:2]
                if zombies or state not in "ZX":
                    parents[int(entry.name)] = int(parent)
    return parents


def tree(root: int) -> list[int]:
    """`root` and all its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time, user and system, that these processes have used; those that are gone count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime_ns((~pid << 3) | 2)  # CPUCLOCK_SCHED of the process, as clock_getcpuclockid
    return total / 1e9


def kill_processes(pids: Sequence[int], timeout: float = 10.0) -> None:
    """Kills these processes and waits until they are gone, and reaped where that is for us to do."""
    me = os.getpid()
    waiting = {pid for pid in pids if pid != me}
    for pid in waiting:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for pid in waiting:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        alive, present = _parents(), _parents(zombies=True)
        # What ended stays until its parent reaps it: ours to do when the parent is we, or ends too and leaves it to us.
        waiting = {pid for pid in waiting if pid in alive or present.get(pid) in {me, *waiting}}
        if waiting:
            time.sleep(0.01)


class Child:
    """One child process and the only conversation with it: `ask` or `send` + `receive`, one at a time."""

    def __init__(self, target: str, *arguments: str, environment: Mapping[str, str] | None = None):
        """Makes the object ``module:Class`` with these arguments; `environment` is added to this process's own."""
        self.name = " ".join([target.rpartition(":")[2], *arguments])
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 -- lives as long as the child
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), target, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """The process id, also after its end."""
        return self._process.pid

    def send(self, *request: Any) -> None:
        """Sends a request; its answer comes with `receive`. Raises ChildError when the child is gone."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise ChildError(f"{self.name}: the process is gone ({error})\n{self.log_tail()}") from None

    def receive(self, timeout: float) -> Any:
        """The answer to the oldest `send`. Raises ChildError on failure, death or after `timeout` seconds."""
        try:
            if not self._connection.poll(timeout):
                raise ChildError(f"{self.name}: no answer within {timeout:.0f} s\n{self.log_tail()}")
            ok, answer = self._connection.recv()
        except (EOFError, OSError):
            raise ChildError(f"{self.name}: the process ended\n{self.log_tail()}") from None
        if not ok:
            raise ChildError(f"{self.name}: {answer}")
        return answer

    def ask(self, *request: Any, timeout: float) -> Any:
        """`send`, then `receive`."""
        self.send(*request)
        return self.receive(timeout)

    def log_tail(self, lines: int = 12) -> str:
        """The last lines that the child wrote."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def freeze(self) -> None:
        """Stops the child's whole tree, until `thaw`."""
        self._signal_tree(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen tree go on."""
        self._signal_tree(signal.SIGCONT)

    def _signal_tree(self, number: signal.Signals) -> None:
        for pid in tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends it; kills it when the block failed."""
        if kind is None:
            self.end()
        else:
            self.kill()

    def end(self, grace: float = 10.0) -> None:
        """Asks the child to stop, waits up to `grace` seconds, then kills what is left of its tree. Idempotent."""
        if self._connection.closed:
            return
        pids = tree(self.pid)
        with contextlib.suppress(ChildError):
            self.ask("stop", timeout=grace)
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self._finish(pids)

    def kill(self) -> None:
        """Kills the child and its whole tree now. Idempotent."""
        if not self._connection.closed:
            self._connection.close()
            self._finish(tree(self.pid))

    def _finish(self, pids: Sequence[int]) -> None:
        ours = set(tree(os.getpid()))  # a number that has left our tree may be somebody else's by now
        kill_processes([pid for pid in pids if pid in ours])
        self._process.wait()
        self._log.close()


def serve(descriptor: str, target: str, *arguments: str) -> None:
    """The child's side: makes its object and answers requests by its methods, until "stop" or the parent's end.

    The object has a method `stop` if there is something to end.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us
    module, _, name = target.partition(":")
    served = getattr(importlib.import_module(module), name)(*arguments)
    connection = Connection(int(descriptor))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            is_last = request[0] == "stop"
            answer: tuple[bool, Any]
            try:
                method = getattr(served, "stop", lambda: None) if is_last else getattr(served, request[0])
                answer = (True, method(*request[1:]))
            except Exception as error:
                traceback.print_exc()
                answer = (False, f"{type(error).__name__}: {error}")
            connection.send(answer)
            if is_last:
                return


if __name__ == "__main__":
    serve(*sys.argv[1:])
