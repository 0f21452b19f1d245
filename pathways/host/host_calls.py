"""The host's side of a computation that is a call of a host function: once per host, with the shards that lie there.

The function runs in the client's process on this host (`pathways/host/sidecars.py`). It gets the number of the host,
and for each input the shards of this host's devices, one behind the other along a first dimension; so it gives results.
Any thread may call `load`; a thread beside the enqueue thread makes the call (`pathways/host/attendants.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pathways import _jaxlib
from pathways.compiler.ir import Computation
from pathways.host.callbacks import Asker
from pathways.host.devices import HostDevices
from pathways.host.executables import Attended, Executable, MemoryStats
from pathways.plan.binding import BoundProgram
from pathways.process.host_functions import Kind

_NOTHING = MemoryStats(0, 0, 0, 0, 0)


def load(bound: BoundProgram, computation: Computation, here: HostDevices, asker: Asker) -> Executable:
    """What makes the call. `asker` makes one call at a time."""
    (function,) = computation.callbacks
    devices = [
        here.device(number) for number in bound.bindings[computation.mesh] if number // here.per_host == here.host
    ]
    kinds: list[Kind] = []
    recipes: list[tuple[Any, Any]] = []
    for type in computation.outputs:
        placed = bound.placement(type)
        shard = tuple(size // parts for size, parts in zip(type.shape, placed.parts(), strict=True))
        kinds.append(((len(devices), *shard), type.dtype))
        recipes.append((_jaxlib.shaped_array(type.shape, type.dtype, False), here.sharding(placed)))

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = [np.stack([np.asarray(shard) for shard in _jaxlib.shards_of(array)]) for array in arrays]
        found = asker(function, [np.asarray(here.host, np.int32), *given], kinds)
        return tuple(
            _jaxlib.assemble(aval, sharding, [parts[number, ...] for number in range(len(devices))], devices)
            for (aval, sharding), parts in zip(recipes, found, strict=True)
        )

    attended: Any = lambda *arrays: Attended(call, asker, arrays)
    return Executable(attended, (), (), _NOTHING, dict)
