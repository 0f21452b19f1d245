"""The records of a trace, as the native core writes them: csrc/runs/run_trace.h, csrc/dispatch/order_trace.h.

All times are nanoseconds of the clock `monotonic_ns()`; 0: it did not happen.
"""

from __future__ import annotations

import enum

import numpy as np

#: What a host did: `RunTraceRecord`.
RUN = np.dtype(
    [
        ("kind", "u1"),
        ("waited_for", "u1"),
        ("throttled_by", "u1"),
        ("has_failed", "u1"),
        ("client", "u4"),
        ("order", "u8"),
        ("plan", "u4"),
        ("node", "u4"),
        ("peer", "u4"),
        ("is_end_seen", "u4"),
        ("devices", "u8"),
        ("bytes", "u8"),
        ("dispatched_ns", "i8"),
        ("ready_ns", "i8"),
        ("launched_ns", "i8"),
        ("ended_ns", "i8"),
    ]
)

#: What the controller did: `OrderTraceRecord`.
ORDER = np.dtype(
    [
        ("order", "u8"),
        ("client", "u4"),
        ("plan", "u4"),
        ("group", "u4"),
        ("waits", "u2"),
        ("outcome", "u2"),
        ("submitted_ns", "i8"),
        ("next_ns", "i8"),
        ("ordered_ns", "i8"),
        ("granted_ns", "i8"),
    ]
)


class Kind(enum.IntEnum):
    """The kind of a host's record."""

    RUN = 0
    CALL = 1
    MOVE = 2
    SEND = 3
    RECEIVE = 4


class Outcome(enum.IntEnum):
    """What became of a run at the controller."""

    GRANTED = 0
    DROPPED = 1
    NOT_GRANTED = 2
    NOT_ORDERED = 3


#: What a node waited for last, before it was ready.
WAITED_FOR = ("an input", "an earlier launch on its device", "its compilation")
#: What a ready node still waited for, by bit.
THROTTLES = ("launches in flight", "memory", "earlier transfers", "an earlier gang")
#: What kept a client's next run out of the order, by bit.
ORDER_WAITS = ("its turn", "memory", "its client's runs under way", "lost hosts")


def reasons(bits: int, names: tuple[str, ...]) -> str:
    """The names of the bits that are set."""
    return ", ".join(name for position, name in enumerate(names) if bits >> position & 1)
