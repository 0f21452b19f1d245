"""Finds the hosts of this machine that are stopped or frozen, by their pulses (csrc/host/pulse.h).

Nobody is told when a process is stopped: by a signal, a debugger, or a frozen container. Whoever starts hosts on a
machine, the controller or the machine's agent, looks at their pulses here and kills a host that has none (END-1: what
waits for such a host ends, and its island starts again).

PULSE-1 (nobody is lost by mistake): a host is silent only after so many looks in a row that saw no beat:
`STOPPED_LOOKS` if the kernel says at each of them that the host is stopped or frozen, else `LOOKS`.
  * Looks are counted, not seconds. A machine that stood still as a whole (a suspended laptop), and goes on, has lost no
    host: the watcher stood still, too.
  * The kernel knows for certain: the state of a process is "stopped", or its control group is frozen. Between the first
    and the last of these looks the host has not run for a moment, because the kernel has not switched to it. So a tool
    that stops and continues a host many times a second, such as cpulimit, loses no host.
  * A host that a debugger holds is not silent at all: who holds it lets it go.
  * The pulse comes from a native thread of its own, which needs neither Python's lock nor the host's loop. So a host
    that compiles or computes for long beats on.
  * A host that gets no time of a core, or whose memory must come from a disk first, is slow, not stopped: one of its
    threads can run, or waits in the kernel.
  * Hosts are in the process group of who started them, which is not that of a terminal. So Ctrl-Z stops a client and
    nothing else, and a signal that stops the whole group stops the watcher, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

#: Seconds between two looks, and the looks in a row that must see no beat: of any host, and of one that is stopped.
LOOK_S = 0.15
LOOKS = 27
STOPPED_LOOKS = 3
#: What is said of a host that was killed for its silence.
SILENT = f"Nothing had been heard of it for {LOOKS * LOOK_S:.0f} s."
STOPPED = "It was stopped or frozen."
_CGROUPS = "/sys/fs/cgroup"


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


@dataclasses.dataclass
class _Seen(Generic[_T]):
    """What the looks at one host have seen."""

    host: _T
    beat: int = 0
    looks: int = 0  # in a row that saw no beat
    stopped: int = 0  # of these, how many in a row found it stopped, and not run since the one before
    switches: int | None = None  # at the last look: see `stopped_since`

    def look(self, beat: int) -> str:
        """Why the host is silent now; empty: it is not, or it was said. `beat`: its pulse; before the first one, who
        started the host waits for it.
        """
        pid = self.host.process.pid
        self.looks = self.looks + 1 if beat and beat == self.beat else 0
        switches = stopped_since(pid) if self.looks else None
        self.stopped = 0 if switches is None else self.stopped + 1 if switches == self.switches else 1
        self.beat, self.switches = beat, switches
        if self.stopped >= STOPPED_LOOKS:
            return STOPPED if self.stopped == STOPPED_LOOKS else ""
        if self.looks == LOOKS and is_held_up(pid):
            self.looks = 0
        return SILENT if self.looks == LOOKS else ""


class Pulses:
    """The pulses of the hosts that one process has started."""

    def __init__(self, pulse_of: Callable[[Any], int]) -> None:
        """`pulse_of`: how often the pulse in a host's segment has beaten; 0: it does not beat yet."""
        self._pulse_of = pulse_of
        self._seen: dict[int, _Seen[Any]] = {}  # by id of the host

    def look(self, hosts: Iterable[_T]) -> list[tuple[_T, str]]:
        """Looks at all hosts once. Returns those that are silent now, each of them once, and why."""
        self._seen = {id(host): self._seen.get(id(host)) or _Seen(host) for host in hosts}
        looks = [(seen.host, seen.look(self._pulse_of(seen.host.segment))) for seen in self._seen.values()]
        return [(host, why) for host, why in looks if why]

    async def watch(self, hosts: Callable[[], Iterable[_T]], silent: Callable[[_T, str], object]) -> None:
        """Looks at `hosts()` again and again, until it is cancelled. Calls `silent` for each host that is silent, with
        the reason."""
        while True:
            await asyncio.sleep(LOOK_S)
            for host, why in self.look(hosts()):
                silent(host, why)


def stopped_since(pid: int) -> int | None:
    """How often the kernel had switched away from a process, if it is stopped or frozen now; None: it is neither.

    Two equal answers: it has not run between them.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = dict(line.split(b":", 1) for line in file.read().splitlines())
        if status[b"State"].split()[0] == b"T" or is_frozen(pid):
            return int(status[b"voluntary_ctxt_switches"]) + int(status[b"nonvoluntary_ctxt_switches"])
    except (OSError, LookupError, ValueError):  # it has ended
        pass
    return None


def is_frozen(pid: int) -> bool:
    """Whether the control group of a process is frozen, of either version, where this process can see it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "freezer":
                if _has_line(f"{_CGROUPS}/freezer{path}/freezer.state", "FROZEN"):
                    return True
            elif not controllers and any(
                _has_line(f"{_CGROUPS}{at}{path}/cgroup.events", "frozen 1") for at in ("", "/unified")
            ):
                return True
    return False


def _has_line(file: str, line: str) -> bool:
    with contextlib.suppress(OSError), open(file) as lines:
        return line in lines.read().splitlines()
    return False


def is_held_up(pid: int) -> bool:
    """Whether a thread of a process runs or could run if it had a core ("R"), waits in the kernel, as for a page from a
    disk ("D"), or is held by a debugger ("t").
    """
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as stat:
                if stat.read().rpartition(b") ")[2][:1] in (b"R", b"D", b"t"):
                    return True
    return False
