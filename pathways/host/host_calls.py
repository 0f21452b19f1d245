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
from pathways.host.host_buffers import LocalPlacement
from pathways.plan.binding import BoundProgram
from pathways.process.host_functions import Kind


def load(bound: BoundProgram, computation: Computation, here: HostDevices, asker: Asker) -> Executable:
    """What makes the call. `asker` makes one call at a time."""
    (function,) = computation.callbacks
    results = [LocalPlacement(bound.placement(type), here) for type in computation.outputs]
    kinds: list[Kind] = [((len(each.devices), *each.placed.packing.cell), each.type.dtype) for each in results]

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = [np.stack([np.asarray(shard) for shard in _jaxlib.shards_of(array)]) for array in arrays]
        found = asker(function, [np.asarray(here.host, np.int32), *given], kinds)
        return tuple(
            result.assemble([parts[number, ...] for number in range(len(result.devices))])
            for result, parts in zip(results, found, strict=True)
        )

    attended: Any = lambda *arrays: Attended(call, asker, arrays)
    return Executable(attended, (), (), MemoryStats(), dict)
