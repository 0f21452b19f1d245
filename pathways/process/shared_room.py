"""Room that many share, such as the memory for what waits for others: no one of them takes the part of another.

FLOW-1: what all have together is bounded, and each of n may always have an n-th of that.
"""

from __future__ import annotations


class SharedRoom:
    """Who has how much of it. Used by one thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: dict[str, int] = {}  # of each that has some
        self.sum = 0

    def has(self, who: str, more: int) -> bool:
        """Whether one may have so much more."""
        mine = self.taken.get(who, 0) + more
        return self.sum + more <= self.most or mine <= self.most // len(self.taken.keys() | {who})

    def add(self, who: str, count: int) -> None:
        """One has so much more, or less."""
        self.sum += count
        if mine := self.taken.get(who, 0) + count:
            self.taken[who] = mine
        else:
            self.taken.pop(who, None)
