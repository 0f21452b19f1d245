"""What the controller keeps for people who watch a cluster, and for nobody else: its losses, and a list of its slices.

Owned by the controller's event loop thread.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Mapping

from pathways.plan.topology import SliceBinding
from pathways.protocol import control_pb2 as pb

#: So many losses are told one by one, in texts of so many characters.
MOST_LOSSES, MOST_CHARS = 20, 2000
#: So many devices, of all slices that are listed: an answer stays short however large the cluster is.
MOST_DEVICES = 4096


class Losses:
    """How many hosts and machines were lost since the cluster's start, and the last of them."""

    def __init__(self) -> None:
        self._counts = {"hosts": 0, "machines": 0}
        self._last: collections.deque[tuple[float, str, str]] = collections.deque(maxlen=MOST_LOSSES)

    def hosts(self, island: int, hosts: Iterable[int], why: str) -> None:
        """These hosts of an island are lost."""
        numbers = sorted(hosts)
        self._counts["hosts"] += len(numbers)
        noun = "host" if len(numbers) == 1 else "hosts"
        self._add(f"island {island}, {noun} {', '.join(map(str, numbers))}", why)

    def machine(self, name: str, why: str) -> None:
        """A machine is lost."""
        self._counts["machines"] += 1
        self._add(f"machine {name}", why)

    def _add(self, what: str, why: str) -> None:
        self._last.append((time.monotonic(), what[:MOST_CHARS], why[:MOST_CHARS]))

    def message(self, with_reasons: bool) -> pb.Losses:
        """What is told of them. Reasons have lines of logs, which not everybody may see."""
        now = time.monotonic()
        last = [pb.Loss(age_s=now - at, what=what, why=why if with_reasons else "") for at, what, why in self._last]
        return pb.Losses(**self._counts, last=last)


def slice_stats(slices: Iterable[SliceBinding], owners: Mapping[int, int]) -> list[pb.SliceStats]:
    """The slices, the newest first, until their devices are too many. `owners`: the client of each slice."""
    listed: list[pb.SliceStats] = []
    room = MOST_DEVICES
    for each in sorted(slices, key=lambda each: -each.slice_id):
        if (room := room - len(each.devices)) < 0:
            break
        listed.append(
            pb.SliceStats(
                slice=each.slice_id,
                client=owners.get(each.slice_id, 0),
                shape=each.shape,
                axis_names=each.axis_names,
                island=each.island,
                devices=each.devices,
            )
        )
    return listed
