"""Handles: names that the client gives, or that the door gives, to what a session has.

The client's handles lie below `OWN`, the door's from there on. A table refuses an unknown handle, one that is taken,
and more than its bound (PROXY-4). The session's thread alone uses a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from pathways.proxy.errors import Code, Refused

#: kServerGeneratedHandlesMinValue of the protocol.
OWN = 1 << 60

Kept = TypeVar("Kept")


class HandleTable(Generic[Kept]):
    """What has a handle: a value, or the error in its place, which is raised whenever the handle is used."""

    def __init__(self, what: str, bound: int, numbers: Iterator[int]) -> None:
        """`what` stands in errors; `numbers` are handles of the door's, shared by the tables of a session."""
        self._what, self._numbers = what, numbers
        self.bound = bound
        #: By handle. `UsualRequests` uses it, too.
        self.kept: dict[int, Kept | Refused] = {}

    def __len__(self) -> int:
        return len(self.kept)

    def find(self, handle: int) -> Kept:
        """The value of `handle`. Raises `Refused` when there is none, and the error that is in its place."""
        found = self.kept.get(handle)
        if found is None:
            raise self._unknown(handle)
        if isinstance(found, Refused):
            raise found.again()
        return found

    def find_all(self, handles: Sequence[int]) -> list[Kept]:
        """The values of `handles`; raises as `find`."""
        return [self.find(handle) for handle in handles]

    def pop(self, handle: int) -> Kept:
        """The same as `find`; the handle is free afterwards, also when an error was in its place."""
        found = self.kept.pop(handle, None)
        if found is None:
            raise self._unknown(handle)
        if isinstance(found, Refused):
            raise found.again()
        return found

    def drop(self, handles: Sequence[int]) -> None:
        """Frees handles. Raises `Refused` when some are unknown; the others are free then."""
        unknown = [handle for handle in handles if self.kept.pop(handle, None) is None]
        if unknown:
            raise Refused(Code.NOT_FOUND, f"unknown {self._what} handles: {', '.join(map(str, unknown[:10]))}")

    def check_free(self, handles: Sequence[int], count: int) -> None:
        """Refuses handles that a request gives for `count` results: too few or many, taken, or the door's own."""
        if handles and len(handles) != count:
            raise Refused(Code.INVALID_ARGUMENT, f"{len(handles)} handles for {count} {self._what}s")
        self._check_bound(count)
        for handle in handles:
            if not 0 < handle < OWN:
                raise Refused(Code.INVALID_ARGUMENT, f"{handle} is no handle that a client may give")
        taken = [handle for handle in handles if handle in self.kept]
        if taken or (len(handles) > 1 and len(set(handles)) != len(handles)):
            raise Refused(Code.ALREADY_EXISTS, f"{self._what} handles that are taken: {taken or list(handles)}")

    def add(self, handles: Sequence[int], values: Sequence[Kept]) -> list[int]:
        """Gives `values` the client's handles, or own ones if there are none, and returns them."""
        self.check_free(handles, len(values))
        return self.add_checked(handles, values)

    def add_checked(self, handles: Sequence[int], values: Sequence[Kept]) -> list[int]:
        """The same for handles that `check_free` has let pass."""
        given = list(handles) or [next(self._numbers) for _ in values]
        self.kept.update(zip(given, values, strict=True))
        return given

    def add_error(self, error: Refused) -> int:
        """Gives an error a handle of the door's."""
        self._check_bound(1)
        handle = next(self._numbers)
        self.kept[handle] = error.again()
        return handle

    def fail(self, handles: Sequence[int], error: Refused) -> None:
        """Puts the error in the place of values that could not be made. Handles that a client may not give, or that are
        taken, stay as they are.
        """
        kept = error.again()
        for handle in handles:
            if 0 < handle < OWN and handle not in self.kept and len(self.kept) < self.bound:
                self.kept[handle] = kept

    def values(self) -> list[Kept]:
        """All values without the errors. Any thread may call."""
        return [kept for kept in list(self.kept.values()) if not isinstance(kept, Refused)]

    def clear(self) -> None:
        """Forgets all."""
        self.kept.clear()

    def _check_bound(self, more: int) -> None:
        if len(self.kept) + more > self.bound:
            raise Refused(
                Code.RESOURCE_EXHAUSTED, f"a client has at most {self.bound} {self._what}s; drop some of them"
            )

    def _unknown(self, handle: int) -> Refused:
        return Refused(Code.NOT_FOUND, f"unknown {self._what} handle: {handle}")


def own_handles() -> Iterator[int]:
    """Numbers for the handles that the door gives."""
    return itertools.count(OWN + 1)
