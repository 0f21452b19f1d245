"""Finds the hosts of this machine that are stopped or frozen, by their pulses (csrc/host/pulse.h).

Nobody is told when a process is stopped: by a signal, a debugger, or a frozen container. Whoever starts hosts on a
machine, the controller or the machine's agent, looks at their pulses here and kills a host that has none (END-1: what
waits for such a host ends, and its island starts again).

PULSE-1 (nobody is lost by mistake): a host is silent only after `LOOKS` looks in a row that saw no beat.
  * Looks are counted, not seconds. A machine that stood still as a whole (a suspended laptop), and goes on, has lost no
    host: the watcher stood still, too.
  * The pulse comes from a native thread of its own, which needs neither Python's lock nor the host's loop. So a host
    that compiles or computes for long beats on.
  * A host that gets no time of a core is slow, not stopped: one of its threads can run and waits for a core. Such a
    host is not silent. No thread of a stopped process can run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

#: Seconds between two looks, and the looks in a row that must see no beat.
LOOK_S = 0.5
LOOKS = 8
#: What is said of a host that was killed for its silence.
SILENT = f"Nothing had been heard of it for {LOOKS * LOOK_S:g} s."


class _Process(Protocol):
    pid: int


class Watched(Protocol):
    """A host of this machine."""

    @property
    def segment(self) -> Any:
        """Its memory, where its pulse is."""

    @property
    def process(self) -> _Process:
        """Its process."""


_T = TypeVar("_T", bound=Watched)


class Pulses:
    """The pulses of the hosts that one process has started."""

    def __init__(self, pulse_of: Callable[[Any], int]) -> None:
        """`pulse_of`: how often the pulse in a host's segment has beaten; 0: it does not beat yet."""
        self._pulse_of = pulse_of
        self._seen: dict[int, tuple[Any, int, int]] = {}  # by id: the host, its last beat, and the looks since

    def look(self, hosts: Iterable[_T]) -> list[_T]:
        """Looks at all hosts once. Returns those that are silent now, each of them once."""
        seen: dict[int, tuple[Any, int, int]] = {}
        silent = []
        for host in hosts:
            beat = self._pulse_of(host.segment)
            _, last, looks = self._seen.get(id(host), (None, 0, 0))
            looks = looks + 1 if beat and beat == last else 0  # before the first beat, who started it waits for it
            if looks == LOOKS:
                if can_run(host.process.pid):
                    looks = 0
                else:
                    silent.append(host)
            seen[id(host)] = (host, beat, looks)
        self._seen = seen
        return silent

    async def watch(self, hosts: Callable[[], Iterable[_T]], silent: Callable[[_T], object]) -> None:
        """Looks at `hosts()` again and again, until it is cancelled. Calls `silent` for each host that is silent."""
        while True:
            await asyncio.sleep(LOOK_S)
            for host in self.look(hosts()):
                silent(host)


def can_run(pid: int) -> bool:
    """Whether a thread of a process runs, or could run if it had a core."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as stat:
                if stat.read().rpartition(b") ")[2][:1] == b"R":
                    return True
    return False
