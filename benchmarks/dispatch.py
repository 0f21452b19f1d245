"""`python -m benchmarks.dispatch`: the paper's Figure 5: `pathways bench dispatch`, with Ray beside it. With
`--systems pathways,pathways-machines` also an island whose hosts are on machines of their own (loopback addresses).
"""

from __future__ import annotations

import dataclasses
import functools

from pathways.bench import dispatch
from pathways.bench.command import as_command, option
from pathways.bench.dispatch import Goal
from pathways.bench.systems import SYSTEMS

RAY = {
    "ray": "benchmarks.rivals.ray_actors:RayActors",
    "ray-graph": "benchmarks.rivals.ray_graph:RayGraph",
}
MACHINES = {"pathways-machines": "benchmarks.machines.systems:OverMachines"}
GOALS = (
    *dispatch.GOALS,
    Goal("OpByOp", False, "ray", 20.0, ((2, 1),)),
    Goal("OpByOp", False, "ray-graph", 5.0, ((2, 1),)),
    Goal("Chained", False, "ray-graph", 4.0, ((2, 1),)),
)


@dataclasses.dataclass(frozen=True)
class Settings(dispatch.Settings):
    """As those of `pathways bench dispatch`."""

    rivals: tuple[str, ...] = option(("jax", *RAY), "Whom to measure beside it; may be empty.")


run = functools.partial(dispatch.run, known=SYSTEMS | RAY | MACHINES, goals=GOALS)
command = as_command("dispatch", Settings, run, dispatch.picture, text=dispatch.run.__doc__)

if __name__ == "__main__":
    command()
