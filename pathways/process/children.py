"""Small helpers for processes on Linux: whether a process is alive, and how it ended. `supervisor.py` has more.

A process is monitored by its pidfd. A pidfd always means the same process; the kernel may use a pid again for another.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time

from pathways.process.log_lines import is_routine
from pathways.process.supervisor import last_lines, wait_readable

_PR_SET_PDEATHSIG = 1
_MOST_DESCRIPTORS = 1 << 16


class ParentLost(Exception):
    """The parent had ended before `die_with_parent` could ask the kernel for the signal."""


def die_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel for a signal to this process when the thread that started it ends, its parent's main thread.

    Raises:
        ParentLost: `parent` is no longer the parent, so the kernel would never send the signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise ParentLost(f"process {parent} ended before its child {os.getpid()} was up")


def take_descriptors() -> None:
    """Asks for as many descriptors as this process may have, up to 65,536. Most systems give it 1,024."""
    descriptors, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors, min(most, _MOST_DESCRIPTORS)), most))


def is_readable(fd: int) -> bool:
    """Whether a descriptor is readable now; for a pidfd: whether its process has ended. Takes a few microseconds."""
    return wait_readable(fd, 0.0)


def describe_exit(returncode: int) -> str:
    """How a child ended, from `Popen.returncode`: `was killed by SIGKILL`, `ended with exit status 3`."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def log_tail(path: str, lines: int = 15) -> str:
    """The last lines of a log, indented, under a heading. When there are none, a sentence that says why."""
    try:
        return quoted(last_lines(path, lines))
    except OSError as error:
        return f"Its log cannot be read: {error}."


def quoted(lines: list[str]) -> str:
    """The lines of a log that are not routine, indented, under a heading."""
    indented = "".join(f"\n    {line}" for line in lines if not is_routine(line))
    if indented:
        return f"The last lines of its log:{indented}"
    return "Its log has no warning." if lines else "Its log is empty."


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared memory included; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


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
