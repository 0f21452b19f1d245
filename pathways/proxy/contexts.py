"""Contexts of requests: the client's numbers of the user's lines that led to a request.

A client keeps a context for each request, until the door says that nothing refers to it any more; then an error can no
longer name it. What a request made refers to its context, so Python's reference counts say when that is.
"""

from __future__ import annotations

import collections


class Context:
    """The context of one request. It may be dropped by any thread."""

    __slots__ = ("_dropped", "number")

    def __init__(self, number: int, dropped: collections.deque[int]) -> None:
        self.number, self._dropped = number, dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)
