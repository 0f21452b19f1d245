"""How clients are called in metrics, and the device time of each, which grows while clients of one name come and go.

A name is what a client says of itself, so their number is bounded: `MOST` at a time; later ones are called "other". A
host forgets the device time of a client that has left. Prometheus would take the smaller sum for a restart, so the
sums are kept here, for `KEPT_S` after the last client of a name has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from pathways.cluster.snapshots import BusyTimes, busy_times
from pathways.protocol import control_pb2 as pb

MOST, MOST_CHARS = 100, 64
KEPT_S = 3600.0
UNNAMED, OTHER = "unnamed", "other"


class ClientLabels:
    """Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_number: dict[int, str] = {}
        self._seen: dict[str, float] = {}  # when, by label
        self._busy: dict[tuple[str, int], float] = {}  # seconds, by label and device of the cluster
        self._before: BusyTimes = {}

    def label(self, number: int) -> str:
        """What the client of this number is called; `OTHER` when nobody knows its name."""
        return self._by_number.get(number, OTHER)

    def busy_seconds(self) -> Iterator[tuple[tuple[str, int], float]]:
        """By label and device of the cluster."""
        return iter(self._busy.items())

    def add(self, stats: pb.StatsReply) -> None:
        """Takes in what has been since the statistics before."""
        now = self._clock()
        self._forget_labels(now - KEPT_S)
        for client in stats.clients:
            self._by_number.setdefault(client.client, self._new_label(client.name))
            self._seen[self._by_number[client.client]] = now
        busy = busy_times(stats)
        devices = {host.host: host.devices for host in stats.hosts}
        for key, busy_ns in busy.items():
            host, _, client_number, device = key
            label = self.label(client_number)
            whole = (label, devices[host][device])
            self._seen[label] = now
            self._busy[whole] = self._busy.get(whole, 0.0) + max(0, busy_ns - self._before.get(key, 0)) / 1e9
        silent = {(host.host, host.pid) for host in stats.hosts if not host.HasField("counts")}
        self._before = {key: ns for key, ns in self._before.items() if key[:2] in silent} | dict(busy)
        there = {client.client for client in stats.clients} | {key[2] for key in self._before}
        self._by_number = {number: label for number, label in self._by_number.items() if number in there}

    def _new_label(self, name: str) -> str:
        label = "".join(each if each.isprintable() else "?" for each in name[:MOST_CHARS]) or UNNAMED
        return label if label in self._seen or len(self._seen) < MOST else OTHER

    def _forget_labels(self, before: float) -> None:
        """Those that were last seen before this time."""
        if old := {label for label, seen in self._seen.items() if seen < before}:
            self._seen = {label: seen for label, seen in self._seen.items() if label not in old}
            self._busy = {key: seconds for key, seconds in self._busy.items() if key[0] not in old}
