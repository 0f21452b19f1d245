"""Small helpers for processes on Linux: whether a process is alive, how it ended, and the last lines of its log.

A process is monitored by its pidfd. A pidfd always means the same process; the kernel may use a pid again for another.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time

_PR_SET_PDEATHSIG = 1
LOG_TAIL_LINES = 15


class ParentLost(Exception):
    """The parent had ended before `die_with_parent` could ask the kernel for the signal."""


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends; here that is the parent's main thread.

    Raises:
        ParentLost: `parent` is no longer the parent, so the kernel would never send the signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise ParentLost(f"process {parent} ended before its child {os.getpid()} was up")


def is_readable(fd: int) -> bool:
    """Whether a descriptor is readable now; for a pidfd: whether its process has ended. Takes a few microseconds."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Waits until `fd` is readable; False when `timeout_s` passed first."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1e3))


def describe_exit(returncode: int) -> str:
    """How a child ended, from `Popen.returncode`: `was killed by SIGKILL`, `ended with exit status 3`."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def log_tail(path: str | None, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, indented, under a heading. When there are none, a sentence that says why."""
    if path is None:
        return "It has no log."
    try:
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 64 * 1024))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return f"Its log cannot be read: {error}."
    last = [line for line in text.splitlines() if line.strip()][-lines:]
    if not last:
        return "Its log is empty."
    return "The last lines of its log:\n" + "\n".join(f"    {line[:400]}" for line in last)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared memory included; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies too."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    # The name, in parentheses, may contain any character. State and parent follow the last ")".
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == pid:
                found.append(int(entry))
    return found


class Deadline:
    """A moment some seconds from now. With None it never comes."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self, at_most: float) -> float:
        """Seconds left, between 0 and `at_most`."""
        return at_most if self._end is None else min(at_most, max(0.0, self._end - time.monotonic()))

    @property
    def passed(self) -> bool:
        """Whether the moment has come."""
        return self._end is not None and time.monotonic() >= self._end
