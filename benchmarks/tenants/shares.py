"""Shares over time: the device time of each client of a cluster, sampled from the controller.

The controller counts the device time that each client's runs took (`csrc/dispatch/device_times.h`), summed over
hosts: it is what `pathways clients` shows. A `Sampler` reads it at regular times; `windows` turns samples into shares.
The lengths that steps should have would not do: a step of 0.1 ms takes longer where timers are coarse.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Sample:
    """Device time by name of client, in nanoseconds since its start, as the controller had it at `time` (monotonic).

    `late`: seconds by which the answer came after its time; a machine that is short of cores answers late.
    """

    time: float
    device_ns: Mapping[str, int]
    late: float = 0.0


@dataclasses.dataclass(frozen=True)
class Window:
    """The shares of one window: parts of all device time that was counted in it. `busy`: all of it over its length.
    `late`: of the sample in it that was latest."""

    begin: float
    end: float
    shares: Mapping[str, float]
    busy: float
    late: float = 0.0


class Sampler:
    """Samples a cluster's statistics until `finish`, on a thread of its own, as a process that is no client."""

    def __init__(self, address: str, every: float = 0.25) -> None:
        self._address = address
        self._every = every
        self._samples: list[Sample] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._is_over.wait(max(0.0, due - time.monotonic())):
            taken = sample(self._address)
            self._samples.append(dataclasses.replace(taken, late=max(0.0, time.monotonic() - due)))
            due += self._every

    def samples(self) -> list[Sample]:
        """All samples until now, in order of time."""
        return list(self._samples)

    def finish(self) -> list[Sample]:
        """Ends the sampling. All samples."""
        self._is_over.set()
        self._thread.join()
        return self._samples


def sample(address: str) -> Sample:
    """One sample. Its time is in the middle of the request."""
    from pathways.cluster.operator import inspect

    begin = time.monotonic()
    stats = inspect(address)
    took = {client["name"]: client["device_ns"] for client in stats["clients"] if client["name"]}
    return Sample((begin + time.monotonic()) / 2, took)


def windows(samples: Sequence[Sample], begin: float, end: float, names: Sequence[str], length: float) -> list[Window]:
    """The windows of at least `length` seconds between `begin` and `end` that do not overlap. `names`: the clients that
    share; each must be there in all samples of that time."""
    inside = [each for each in samples if begin <= each.time <= end and all(name in each.device_ns for name in names)]
    found: list[Window] = []
    if not inside:
        return found
    first = inside[0]
    late = 0.0
    for each in inside[1:]:
        late = max(late, each.late)
        if each.time - first.time < length * 0.98:  # a sample may come a little early
            continue
        took = {name: each.device_ns[name] - first.device_ns[name] for name in names}
        total = sum(took.values())
        if total > 0:
            shares = {name: ns / total for name, ns in took.items()}
            found.append(Window(first.time, each.time, shares, total / 1e9 / (each.time - first.time), late))
        first, late = each, 0.0
    return found


def targets(weights: Mapping[str, float]) -> dict[str, float]:
    """The share that each client ought to have."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def worst_error(found: Sequence[Window], weights: Mapping[str, float]) -> float:
    """The greatest distance between a share and its target, over all clients and windows; 0.02: 2 % of all time."""
    wanted = targets(weights).items()
    return max(
        (abs(window.shares[name] - target) for window in found for name, target in wanted),
        default=float("nan"),
    )
