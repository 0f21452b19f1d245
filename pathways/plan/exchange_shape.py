"""The shape of an exchange of rows on physical devices: which hosts have which shards; see `csrc/plan/exchanges.h`.

Shard n of a slice is on the slice's device n, because the rows are cut over all axes of the slice. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pathways.compiler.ir import Exchange, Node, NodeKind

#: The nodes that send rows.
EXCHANGES = (NodeKind.EXCHANGE, NodeKind.PERMUTE)

#: Shards from `first` up to the next range's are on `host`: (first, host), ascending.
Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ExchangeShape:
    """What is fixed before an exchange runs. It is the same on all hosts.

    `source` and `target` are meshes of the program. `source_rows` are the rows of a source shard, `capacity` those of a
    target shard. `how`: None if the routes are known (a permute).
    """

    source: int
    target: int
    source_shards: int
    target_shards: int
    sources: Ranges
    targets: Ranges
    source_rows: int
    capacity: int
    how: Exchange | None

    def has_source(self, host: int) -> bool:
        """Whether the host has shards that send rows."""
        return any(each == host for _, each in self.sources)

    def has_target(self, host: int) -> bool:
        """Whether the host has shards that take rows."""
        return any(each == host for _, each in self.targets)

    @property
    def source_hosts(self) -> tuple[int, ...]:
        """The hosts that have shards which send rows, ascending."""
        return tuple(sorted({host for _, host in self.sources}))

    @staticmethod
    def count_on(ranges: Ranges, shards: int, host: int) -> int:
        """How many of the shards are on a host."""
        ends = [first for first, _ in ranges[1:]] + [shards]
        return sum(end - first for (first, each), end in zip(ranges, ends, strict=True) if each == host)

    def part(self, node: Node, host: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The inputs and outputs of the node on a host, as values of the program, in the order of the plan's node."""
        sends, takes = self.has_source(host), self.has_target(host)
        inputs = node.inputs[:2] * sends + node.inputs[2:] * takes
        outputs = node.outputs[:4] * takes + node.outputs[4:] * sends
        return inputs, outputs

    def fields(self) -> dict[str, Any]:
        """The fields of the plan's record, by the names that the plan builder gives them."""
        return {
            "source_shards": self.source_shards,
            "sources": self.sources,
            "target_shards": self.target_shards,
            "targets": self.targets,
            "source_rows": self.source_rows,
            "capacity": self.capacity,
            "drops": self.how is not None and self.how.drops,
            "unsent": self.how.unsent if self.how is not None else None,
            "known": self.how is None,
        }

    def text(self) -> str:
        """The shape as words, for a plan that people read."""
        hosts = (sorted({host for _, host in ranges}) for ranges in (self.sources, self.targets))
        rows = f"{self.source_rows} rows per shard to {self.capacity}"
        more = "" if self.how is None else ", dropping more" if self.how.drops else ", failing with more"
        return "of {}, hosts {} to {}{}".format(rows, *hosts, more)


def shard_ranges(devices: Sequence[int], devices_per_host: int) -> Ranges:
    """The ranges of the shards of a slice with these devices."""
    hosts = [device // devices_per_host for device in devices]
    return tuple((n, host) for n, host in enumerate(hosts) if n == 0 or hosts[n - 1] != host)
