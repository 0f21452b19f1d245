"""What `drain` and `undrain` are about: a machine by its name, a host or an island by its number."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from pathways import errors
from pathways.protocol import control_pb2 as pb

KINDS = ("machine", "host", "island")


@dataclasses.dataclass(frozen=True)
class DrainTarget:
    """Made by `of`. `str` of it is for people: `host 3`."""

    kind: str  # of KINDS
    which: str | int

    @classmethod
    def of(cls, machine: Any = None, host: Any = None, island: Any = None) -> DrainTarget:
        """The target that one of these names.

        Raises:
            OptionError: none of them, or several, or one of a wrong type.
        """
        given = {kind: which for kind, which in zip(KINDS, (machine, host, island), strict=True) if which is not None}
        if len(given) != 1:
            raise errors.OptionError(
                f"say what to drain by one of machine=, host= and island=, got {given or 'none of them'}"
            )
        kind, which = given.popitem()
        if kind == "machine":
            if not isinstance(which, str):
                raise errors.OptionError(f"machine= expects its name, got {which!r}")
            return cls(kind, which)
        is_number = isinstance(which, numbers.Integral) and not isinstance(which, bool)
        if not (is_number and 0 <= int(which) < 1 << 31):
            raise errors.OptionError(f"{kind}= expects its number, got {which!r}")
        return cls(kind, int(which))

    def request(self, timeout_s: float = 0.0, force: bool = False) -> pb.DrainRequest:
        """The request to drain it."""
        request = pb.DrainRequest(timeout_s=timeout_s, force=force)
        setattr(request, self.kind, self.which)
        return request

    def __str__(self) -> str:
        return f"{self.kind} {self.which}"
