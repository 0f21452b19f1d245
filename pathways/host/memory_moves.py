"""The host's side of a move: copies an array from its devices to host memory, or back, beside the computations.

JAX calls the two memories of a device "device" and "pinned_host", also on CPU. A copy between them reads its source
when the source exists, and goes its own way: on GPU by the copy engines. So a move is enqueued at its turn in the order
of its devices, as a computation is, and what is behind it goes on meanwhile.

The enqueue thread calls what `load` returns, and `scalar_to_host`; any thread may call `load`.
"""

from __future__ import annotations

import jax

from pathways import errors
from pathways.compiler.ir import Memory
from pathways.host.devices import HostDevices
from pathways.host.executables import Executable, MemoryStats
from pathways.host.own_settings import own_settings
from pathways.plan.resharding import Placement

#: JAX's name of host memory from which devices copy at full speed.
HOST_MEMORY = "pinned_host"


def load(placed: Placement, devices: HostDevices) -> Executable:
    """The callable that copies an array to this placement; its source is the same placement in the other memory.

    Raises:
        ComputationError: the devices have no host memory beside their own.
    """
    device = devices.local[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise errors.ComputationError(
            f"{device} has the memories {kinds}, and offloading needs {HOST_MEMORY!r}: make the program with "
            "offload='none'"
        )
    kind = HOST_MEMORY if placed.type.memory is Memory.HOST else device.default_memory().kind
    sharding = devices.sharding(placed).with_memory_kind(kind)

    @own_settings
    def move(array: jax.Array) -> tuple[jax.Array]:
        return (jax.device_put(array, sharding),)

    return Executable(move, (), (sharding,), MemoryStats(), dict)


@own_settings
def scalar_to_host(scalar: jax.Array) -> jax.Array:
    """A copy of a scalar, of which some local device has the whole, on its way to host memory (`copies_scalars`)."""
    shard = scalar.addressable_shards[0].data
    return jax.device_put(shard, shard.sharding.with_memory_kind(HOST_MEMORY))
