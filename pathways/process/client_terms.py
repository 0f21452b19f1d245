"""What a client asks for when it joins, or gets from the operator while it runs: its name, how it shares devices with
other clients, and its quotas. A value; `pathways.controller.client_limits` grants and changes it.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from pathways import errors

#: What becomes of a run or put that only the client's own live arrays keep out of its quota of memory.
AT_LIMIT = ("error", "wait")

_LEAST_WEIGHT, _MOST_WEIGHT = 1e-3, 1e3  # so that what clients are charged can be compared (csrc/policy)
_MOST_PRIORITY = 1_000_000
_MOST_NAME = 100
#: The bounds of csrc/ledger/client_limits.h.
_MOST_RUNS = 1 << 14
_LEAST_BYTES = 1 << 21
_MOST_SIZE = 1 << 62


@dataclasses.dataclass(frozen=True)
class ClientTerms:
    """A client's name, weight, priority and quotas. Where 0 is no value, it means: no limit of its own.

    Args:
        name: for people.
        weight: from 0.001 to 1000.
        priority: a higher one goes first.
        memory: bytes that its arrays and runs may take on each device.
        runs: runs under way, from 1 to 16,384.
        bytes: of the records of runs and commands under way, at least 2 MiB.
        at_limit: "error" or "wait": what becomes of a run or put that only its own live arrays keep out of `memory`.
    """

    name: str = ""
    weight: float = 1.0
    priority: int = 0
    memory: int = 0
    runs: int = 0
    bytes: int = 0
    at_limit: str = "error"

    @classmethod
    def checked(
        cls,
        name: Any = None,
        weight: Any = None,
        priority: Any = None,
        memory: Any = None,
        runs: Any = None,
        bytes: Any = None,
        at_limit: Any = None,
    ) -> ClientTerms:
        """The terms of a user or of another process. None: the default.

        Raises:
            OptionError: one of them has the wrong type, or is out of range.
        """
        name = "" if name is None else name
        if not isinstance(name, str) or len(name) > _MOST_NAME or not name.isprintable():
            raise errors.OptionError(
                f"a client's name= is a text of at most {_MOST_NAME} printable characters, got {name!r:.200}"
            )
        if at_limit is not None and at_limit not in AT_LIMIT:
            raise errors.OptionError(f'a client\'s at_limit= is "error" or "wait", got {at_limit!r}')
        return cls(
            name,
            _checked_weight(1.0 if weight is None else weight),
            _checked_priority(0 if priority is None else priority),
            0 if memory is None else _checked_size("a client's memory=", memory, 1, _MOST_SIZE, "a number of bytes"),
            0 if runs is None else _checked_size("a client's runs=", runs, 1, _MOST_RUNS, "a number of runs"),
            0
            if bytes is None
            else _checked_size("a client's bytes=", bytes, _LEAST_BYTES, _MOST_SIZE, "a number of bytes"),
            at_limit or "error",
        )


def check_allowance(max_weight: Any, max_priority: Any, client_memory: Any, client_runs: Any) -> None:
    """Checks what an operator allows every client; None: no bound.

    Raises:
        OptionError: one of them has the wrong type, or is out of range. A client that asks for no weight or priority
            has weight 1 and priority 0, so the operator must allow at least these.
    """
    if max_weight is not None:
        _checked_weight(max_weight, "max_weight=", 1.0)
    if max_priority is not None:
        _checked_priority(max_priority, "max_priority=", 0)
    if client_memory is not None:
        _checked_size("client_memory=", client_memory, 1, _MOST_SIZE, "a number of bytes")
    if client_runs is not None:
        _checked_size("client_runs=", client_runs, 1, _MOST_RUNS, "a number of runs")


def _checked_weight(weight: Any, name: str = "a client's weight=", least: float = _LEAST_WEIGHT) -> float:
    is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    if not (is_number and least <= weight <= _MOST_WEIGHT):
        raise errors.OptionError(f"{name} is a number from {least:g} to {_MOST_WEIGHT:g}, got {weight!r:.100}")
    return float(weight)


def _checked_priority(priority: Any, name: str = "a client's priority=", least: int = -_MOST_PRIORITY) -> int:
    is_integer = isinstance(priority, numbers.Integral) and not isinstance(priority, bool)
    if not (is_integer and least <= priority <= _MOST_PRIORITY):
        raise errors.OptionError(f"{name} is an integer from {least} to {_MOST_PRIORITY}, got {priority!r:.100}")
    return int(priority)


def _checked_size(name: str, value: Any, least: int, most: int, what: str) -> int:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (is_integer and least <= value <= most):
        upto = f"to {most}" if most < _MOST_SIZE else "on"
        raise errors.OptionError(f"{name} is {what} from {least} {upto}, got {value!r:.100}")
    return int(value)
