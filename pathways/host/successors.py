"""The successors of lost hosts, as a host learns of them (ERR-2): `main.py` makes them of the controller's request."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Successor:
    """The successor of a lost host."""

    host: int
    segment: Any  # None: it is reached over a link
    epoch: int  # its incarnation
    loss: int  # it is in force when the order tells of the loss of this number; 0: at once
    stream: str  # where it receives network transfers; empty: it is on this machine
