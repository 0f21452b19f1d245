"""Chunks of network transfers as hosts send them (csrc/bulk/network_transfer.h), for tests that are such a host."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def chunk(order: int, node: int, host: int, payload: bytes, at: int = 0, copy_plan: Sequence[int] = ()) -> bytes:
    """One chunk. `tests/cpp/bulk/test_network_transfer.cc` has the same bytes."""
    record = struct.pack("<8sQIIQQQ", b"pwchunk1", order, node, host, at, len(copy_plan), len(payload))
    return record + struct.pack(f"<{len(copy_plan)}Q", *copy_plan) + payload
