"""What a benchmark asks for, and whether it was reached: one kind of row for the table of goals of every bench."""

from __future__ import annotations

import dataclasses
from typing import Any

from pathways.bench.stats import Spread


@dataclasses.dataclass(frozen=True)
class Bound:
    """At least a number, or at most."""

    limit: float
    is_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether `value` is within the bound."""
        return value >= self.limit if self.is_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.limit:g}"


def at_least(limit: float) -> Bound:
    """The value must be `limit` or more."""
    return Bound(limit, True)


def at_most(limit: float) -> Bound:
    """The value must be `limit` or less."""
    return Bound(limit)


def judged(goal: str, bound: Bound, value: float | Spread, **more: Any) -> dict[str, Any]:
    """A row of the table of goals; of a spread the median decides, and the row has its ends. `more`: columns."""
    row: dict[str, Any] = {"goal": goal, **more, "bound": str(bound)}
    if isinstance(value, Spread):
        row |= {"value": value.median, "min": value.low, "max": value.high}
        value = value.median
    else:
        row["value"] = value
    return {**row, "reached": bound.is_met(value)}
