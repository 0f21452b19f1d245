"""Errors of the door: codes, and the StatusProto that the client turns into an exception.

A stock client expands two payloads. `ifrt.UserContext` has the numbers of requests' contexts, of which the client knows
the user's lines. `ObjectStoreDumpProto` is a table of who holds memory (`pathways/proxy/memory_report.py`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

from pathways import errors

USER_CONTEXT = "type.googleapis.com/ifrt.UserContext"
OBJECT_STORE = "type.googleapis.com/ifrt_proxy_contrib_pathways.ObjectStoreDumpProto"
#: The longest text that is sent. XLA's messages may have a whole module.
MAX_TEXT = 1 << 16


class Code(enum.IntEnum):
    """absl's and gRPC's codes."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


#: The first row whose class fits decides.
CODES: tuple[tuple[type[BaseException], Code], ...] = (
    (errors.HostLostError, Code.DATA_LOSS),
    (errors.ControllerLostError, Code.UNAVAILABLE),
    (errors.ClusterClosedError, Code.UNAVAILABLE),
    (errors.ConnectError, Code.UNAVAILABLE),
    (errors.ResourceExhaustedError, Code.RESOURCE_EXHAUSTED),
    (errors.DeletedArrayError, Code.INVALID_ARGUMENT),
    (errors.CancelledError, Code.CANCELLED),
    (errors.DeadlineExceededError, Code.DEADLINE_EXCEEDED),
    (errors.PermissionDeniedError, Code.PERMISSION_DENIED),
    (errors.UnsupportedVersionError, Code.FAILED_PRECONDITION),
    (errors.SliceError, Code.FAILED_PRECONDITION),
    (errors.CheckpointError, Code.FAILED_PRECONDITION),
    (NotImplementedError, Code.UNIMPLEMENTED),
    (MemoryError, Code.RESOURCE_EXHAUSTED),
    (ValueError, Code.INVALID_ARGUMENT),
    (TypeError, Code.INVALID_ARGUMENT),
    (Exception, Code.INTERNAL),
    (BaseException, Code.UNKNOWN),
)
_CODE_IN_TEXT = re.compile(rf"({'|'.join(Code.__members__)}): ")


class Refused(Exception):
    """What the client is told: a code and a text, the contexts of the requests concerned, and payloads by their key."""

    def __init__(
        self, code: Code, text: str, contexts: tuple[Any, ...] = (), payloads: Mapping[str, bytes] | None = None
    ) -> None:
        super().__init__(text)
        self.code, self.text, self.contexts, self.payloads = code, text, contexts, dict(payloads or {})

    def again(self) -> Refused:
        """The same without what Python has noted in it: an error that is kept must keep no frames alive."""
        return Refused(self.code, self.text, self.contexts, self.payloads)

    def within(self, context: Any) -> Refused:
        """The same for the request of `context`, unless it is known already where the error comes from."""
        if self.contexts or context is None:
            return self
        return Refused(self.code, self.text, (context,), self.payloads)

    def fill(self, status: Any) -> None:
        """Writes a StatusProto."""
        status.code, status.message = int(self.code), self.text[:MAX_TEXT]
        if self.contexts:
            numbers = ",".join(str(context.number) for context in self.contexts)
            status.payload[USER_CONTEXT] = numbers.encode()
        for key, value in self.payloads.items():
            status.payload[key] = value


def refusal_of(error: BaseException) -> Refused:
    """What the client is told of any exception. XLA's own messages begin with their code."""
    if isinstance(error, Refused):
        return error
    text = str(error) or type(error).__name__
    if found := _CODE_IN_TEXT.match(text):
        return Refused(Code[found[1]], text[found.end() :])
    return Refused(next(code for kind, code in CODES if isinstance(error, kind)), text)


def refusal_in(status: Any) -> Refused:
    """What a client's StatusProto says, such as the error of MakeErrorArrays."""
    code = Code(status.code) if status.code in Code._value2member_map_ else Code.UNKNOWN
    return Refused(code, status.message[:MAX_TEXT])


def not_implemented(what: str) -> Refused:
    """A request that this release refuses; `what` says what it is, and what can be done instead."""
    return Refused(Code.UNIMPLEMENTED, what)
