"""The arrows of a trace: from the computation that makes a value, by its transfer, to the computations that read it.

`trace_file` writes them as flow events. A flow event belongs to the slice that is open on its track at its time, so
each point of an arrow lies within its slice. Perfetto turns an arrow around if the slice that it leaves begins after
the slice that it enters. A transfer within a host is launched before its value is computed, and may begin first: then
the arrow leads from the computation to the reader, past the transfer. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pathways.cluster.trace_timeline import Computation, Timeline, Transfer


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A point of an arrow: in a slice of a transfer, or of a computation on the track of `device`."""

    of: Computation | Transfer
    at_ns: int
    device: int = -1


def arrows(timeline: Timeline) -> Iterator[list[Point]]:
    """Each arrow of the trace: two or three points. A value that several computations read has an arrow to each."""
    computations = {(each.host, each.order, each.node): each for each in timeline.computations}
    for transfer in timeline.transfers:
        if transfer.has_failed:
            continue
        begin: list[Point] = []
        _extend(begin, computations.get((transfer.host, transfer.order, transfer.maker)), transfer.devices)
        _extend(begin, transfer, ())
        is_read = False
        for reader in transfer.readers:
            arrow = list(begin)
            if _extend(arrow, computations.get((transfer.peer, transfer.order, reader)), transfer.peer_devices):
                if len(arrow) > 1:
                    yield arrow
                is_read, begin = True, begin[-1:]
        if not is_read and len(begin) > 1:
            yield begin


def _extend(arrow: list[Point], to: Computation | Transfer | None, devices: tuple[int, ...]) -> bool:
    """Leads the arrow on to a slice, on one of `devices` where that is possible. False: the slice has no such point."""
    if to is None:
        return False
    at_ns = max(to.start_ns, arrow[-1].at_ns if arrow else 0) + 1
    if at_ns >= to.end_ns or (arrow and arrow[-1].of.start_ns > to.start_ns):
        return False
    device = -1 if isinstance(to, Transfer) else min(set(devices) & set(to.devices) or to.devices)
    arrow.append(Point(to, at_ns, device))
    return True
