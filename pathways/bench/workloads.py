"""The functions that every system runs: the one place where "a step" is defined.

A step is the computation of the paper's Figure 5: all-reduce a scalar over all devices, then add one. Without
the collective it is only "add one". The value is one float32 per device, an array of shape ``(devices,)`` sharded
over the mesh axis ``d``.

The sum is scaled by ``1 / devices``, so that after N steps from zero every device holds exactly N (up to 2**24,
where float32 stops counting). Each throughput run is checked against that: a lost or doubled step is an error,
not a speed.

A call is what the user's Python writes once: OpByOp has one step per call, Chained a chain of 128 computations,
Fused one computation with 128 steps in a loop (a loop, so that XLA cannot fold the chain away).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable
from typing import Any

AXIS = "d"
CHAIN = 128
COUNTING_LIMIT = 2**24


class Kind(enum.Enum):
    """How the steps reach the system: see the head of this file."""

    OP_BY_OP = "OpByOp"
    CHAINED = "Chained"
    FUSED = "Fused"


@dataclasses.dataclass(frozen=True)
class Workload:
    """One workload: a kind, with or without the all-reduce."""

    kind: Kind
    collective: bool

    @property
    def steps_per_call(self) -> int:
        """Steps that one call of the user's asks for."""
        return 1 if self.kind is Kind.OP_BY_OP else CHAIN

    @property
    def steps_per_computation(self) -> int:
        """Steps inside one compiled computation: only Fused has more than one."""
        return CHAIN if self.kind is Kind.FUSED else 1

    @property
    def computations_per_call(self) -> int:
        """Compiled computations that one call launches, on each host."""
        return self.steps_per_call // self.steps_per_computation

    @property
    def step_text(self) -> str:
        """What a step does, for tables."""
        return "AllReduce + add" if self.collective else "add"

    def calls(self, steps: int) -> int:
        """How many calls make at least `steps` steps."""
        return max(1, math.ceil(steps / self.steps_per_call))


def workloads(kinds: Iterable[Kind] = Kind, collective: Iterable[bool] = (True, False)) -> list[Workload]:
    """All combinations, those with the collective first."""
    return [Workload(kind, with_collective) for with_collective in collective for kind in kinds]


def check_value(system: str, workload: Workload, steps: int, value: float) -> None:
    """Raises ValueError when `value` is not what `steps` steps leave behind."""
    wanted = float(min(steps, COUNTING_LIMIT))
    if not math.isclose(value, wanted, rel_tol=1e-4):
        raise ValueError(
            f"{system} ran {workload.kind.value} ({workload.step_text}) wrongly: "
            f"after {steps} steps expected {wanted:g}, got {value:g}"
        )


def computation(workload: Workload, mesh: Any) -> Callable[[Any], Any]:
    """The function of one computation of `workload` on `mesh` (a Mesh or AbstractMesh with the axis ``d``).

    It takes and returns a float32 array of shape ``(mesh.size,)`` sharded over ``d``, and is not yet jitted.
    """
    import jax

    spec = jax.sharding.PartitionSpec(AXIS)
    scale = 1.0 / mesh.size

    def step(x: Any) -> Any:
        if workload.collective:
            x = jax.lax.psum(x, AXIS) * scale
        return x + 1.0

    def body(x: Any) -> Any:
        if workload.steps_per_computation == 1:
            return step(x)
        return jax.lax.fori_loop(0, workload.steps_per_computation, lambda _, value: step(value), x)

    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
