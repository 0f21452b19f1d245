"""Answers that others owe the controller, by who owes them and the number of the request.

Owned by the controller's event loop thread.

END-1: nothing waits for who is gone, see `gone` and `dropped`.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


class PendingAnswers(Generic[_Answer]):
    """The answers to one kind of request. Who answers has a number: a host, a client."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[tuple[int, int], tuple[int, asyncio.Future[_Answer]]] = {}

    def new_number(self) -> int:
        """A number for a request; one request may go to several."""
        return next(self._numbers)

    def expect(self, who: int, number: int, about: int = 0) -> asyncio.Future[_Answer]:
        """The answer to come; a cancelled one is forgotten. `about`: see `dropped`."""
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._asked[who, number] = about, answer
        answer.add_done_callback(lambda _: self._asked.pop((who, number), None))
        return answer

    def answered(self, who: int, number: int, answer: _Answer) -> None:
        """Takes in an answer. One to a request that `who` was not asked is ignored (TRUST-1)."""
        _, asked = self._asked.get((who, number), (0, None))
        settle(asked, answer)

    def gone(self, who: int, outcome: _Answer | Exception) -> None:
        """Who answers is gone: its answers to come have this outcome."""
        for (each, _), (_, asked) in list(self._asked.items()):
            if each == who:
                settle(asked, outcome)

    def dropped(self, about: int, error: Exception) -> None:
        """The open requests about `about`, such as a client that has left, fail."""
        for each, asked in list(self._asked.values()):
            if each == about:
                settle(asked, error)


def settle(future: asyncio.Future[_Answer] | None, outcome: _Answer | Exception) -> None:
    """Completes a future that is there and not done."""
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
