"""One request of a client while it is handled, and what there is to know of a kind of request."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from pathways.proxy.contexts import Context
from pathways.proxy.errors import Refused, refusal_of
from pathways.proxy.replies import Fill, Replies
from pathways.proxy.state import State


class Outcome(enum.Enum):
    """What a handler returns instead of a `Fill`."""

    LATER = enum.auto()  # the reply comes later, by the call's `reply` or `fail`


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """A request. Exactly one of `reply` and `fail` is called, once, from any thread."""

    replies: Replies
    name: str  # of the request's field in IfrtRequest
    body: Any
    number: int  # by which the client knows the reply
    context: Context | None
    admitted: Refused | bool | None = None  # what came of asking for room; None: not asked

    def reply(self, fill: Fill = None, is_counted: bool = True) -> None:
        """Answers. `is_counted`: whether the client counts replies of this kind."""
        self.replies.reply(self.name, self.number, fill, is_counted)

    def fail(self, error: BaseException) -> None:
        """Answers with an error."""
        self.replies.fail(self.number, refusal_of(error).within(self.context))


def _nothing(body: Any) -> Sequence[int]:
    return ()


def _at_once(state: State, call: Call) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of request.

    `handle` does it. It returns what writes the response, or `Outcome.LATER`; or it raises.
    `results` are the handles of arrays that the client gives; an error goes there.
    `statuses` are those of futures.
    `may_begin` says whether the request can be handled now. If not, `state.wake` is called when it may be different.
    """

    handle: Callable[[State, Call], Fill | Outcome]
    results: Callable[[Any], Sequence[int]] = _nothing
    statuses: Callable[[Any], Sequence[int]] = _nothing
    may_begin: Callable[[State, Call], bool] = _at_once


def many(field: str) -> Callable[[Any], Sequence[int]]:
    """The handles in a repeated field."""
    return lambda body: list(getattr(body, field))


def one(field: str) -> Callable[[Any], Sequence[int]]:
    """The handle in a field where 0 is none."""
    return lambda body: [handle] if (handle := getattr(body, field)) else []
