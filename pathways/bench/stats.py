"""The arithmetic of repeated measurements. Pure functions; quantiles interpolate linearly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, 0 <= q <= 1, of at least one value."""
    if not values:
        raise ValueError("expected at least one value, got none")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"expected a quantile between 0 and 1, got {q}")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with the least and the greatest of `n` repeats."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(quantile(values, 0.5), min(values), max(values), len(values))


@dataclasses.dataclass(frozen=True)
class Value:
    """One named measurement, in `unit`."""

    name: str
    spread: Spread
    unit: str


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The spread of over[i] / under[i]: repeats that ran next to each other in time are compared with each other."""
    if not over or len(over) != len(under):
        raise ValueError(f"expected two equal numbers of repeats, got {len(over)} and {len(under)}")
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares: (slope, intercept) of y over x. Needs two different x."""
    if len(x) != len(y) or len(set(x)) < 2:
        raise ValueError(f"expected at least two points with different x, got x={list(x)} y={list(y)}")
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    steep = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return steep, mean_y - steep * mean_x


def next_steps(steps: int, seconds: float, target: float, growth: int = 16) -> int:
    """Steps for a run of about `target` seconds, when `steps` took `seconds`; at most `growth` times as many."""
    if seconds <= 0.0:
        return steps * growth
    return max(1, min(steps * growth, round(steps * target / seconds)))
