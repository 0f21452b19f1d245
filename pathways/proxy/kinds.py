"""The table of requests: what a session does for each field of IfrtRequest."""

from __future__ import annotations

from pathways.proxy import array_making, array_moves, array_reading, array_views, executables, programs, topology
from pathways.proxy.calls import Kind

KINDS: dict[str, Kind] = {
    name: kind
    for room in (topology, array_making, array_views, array_moves, array_reading, programs, executables)
    for name, kind in room.REQUESTS.items()
}
