"""The goals that `dispatch` decides, and whether a run reached them. See the README's table of goals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Goal:
    """Throughput of Pathways over a rival's, at least `at_least`, on every shape in `shapes` (hosts, devices)."""

    workload: str
    collective: bool
    rival: str
    at_least: float
    shapes: tuple[tuple[int, int], ...]


_SMALL = ((1, 1), (1, 2), (2, 1), (2, 2))
_TWO_HOSTS = ((2, 1),)

GOALS = (
    Goal("OpByOp", True, "jax", 0.9, _SMALL),
    Goal("Chained", True, "jax", 1.0, _SMALL),
    Goal("Fused", True, "jax", 0.99, _SMALL),
    Goal("OpByOp", False, "ray", 20.0, _TWO_HOSTS),
    Goal("OpByOp", False, "ray-graph", 5.0, _TWO_HOSTS),
    Goal("Chained", False, "ray-graph", 4.0, _TWO_HOSTS),
    Goal("Chained", False, "jax", 0.8, _TWO_HOSTS),
)


def judge(ratios: Sequence[dict[str, Any]], goals: Sequence[Goal] = GOALS) -> list[dict[str, Any]]:
    """One row per goal and shape that was measured, from `dispatch.ratios`."""
    rows = []
    for goal in goals:
        for row in ratios:
            same = (row["workload"], row["collective"], row["rival"]) == (goal.workload, goal.collective, goal.rival)
            if same and (row["hosts"], row["devices"]) in goal.shapes:
                rows.append({**row, "goal": goal.at_least, "reached": row["ratio"] >= goal.at_least})
    return rows
