"""Meters for the tunnels by which machines and clients elsewhere call the controller: see `transport/call_room.py`."""

from __future__ import annotations

from pathways.process.shared_room import SharedRoom
from pathways.protocol.wire import MAX_METADATA_BYTES
from pathways.transport.call_room import CallMeter
from pathways.trust import Identity


def call_meter(room: SharedRoom, identity: Identity) -> CallMeter:
    """The meter of one tunnel. gRPC takes no more fields than it does."""
    from pathways._native import Http2Fields  # a cluster that does not listen needs none

    return CallMeter(room, str(identity), Http2Fields(2 * MAX_METADATA_BYTES))
