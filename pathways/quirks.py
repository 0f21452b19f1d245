"""What the devices of a platform do differently from others: the one table of it. A new platform gets a row here.

How devices are found and set up, before JAX has seen them, is in `pathways.process.environment`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Quirks:
    """The habits of one platform's devices. The defaults are those of a device that takes launches into a queue."""

    #: Launches in flight per device of a host that has several; 0: no bound.
    in_flight: int = 0
    #: Launching a gang may hold up the launches behind it (GANG-2), and the gangs of one device and those of several
    #: have no order of their own (GANG-3).
    gangs_block: bool = False
    #: On a host with one device, a launch may compute before it returns.
    computes_in_launch: bool = False
    #: A device's memory is the host's. So an array may use host memory without a copy, native code reads it where it
    #: is, what is received stays where it was received, and a transfer guard has nothing to guard.
    is_host_memory: bool = False
    #: A scalar of a device is read by a copy to host memory, which is waited for. Where it is False, it is read where
    #: it is.
    copies_scalars: bool = True
    #: A device says where it is (`coords`), and has links to the devices beside it alone.
    has_links: bool = False
    #: Collectives run on threads of the process: they need enough of them, and give up when one waits for long.
    collects_on_threads: bool = False
    #: Collectives with other hosts (gloo) listen at the address that they are given, so an agent can carry them.
    collects_by_address: bool = False
    #: XLA's target for callbacks to Python; None: JAX's own way.
    callback_target: str | None = None
    #: The name by which StableHLO is lowered for it; None: the platform's own.
    lowered_as: str | None = None


#: Measured on CPU: the enqueue call blocks at the 32nd launch, for other devices too, so 31. XLA runs a cheap gang on
#: one device inside the launch call, and gangs on several devices one after the other.
_CPU = Quirks(
    in_flight=31,
    gangs_block=True,
    computes_in_launch=True,
    is_host_memory=True,
    copies_scalars=False,
    collects_on_threads=True,
    collects_by_address=True,
    callback_target="xla_ffi_python_cpu_callback",
)
_GPU = Quirks(callback_target="xla_ffi_python_gpu_callback")
#: By JAX's names: "gpu" is what its devices say, of whatever maker they are.
_TABLE = {
    "cpu": _CPU,
    "cuda": _GPU,
    "rocm": _GPU,
    "gpu": dataclasses.replace(_GPU, lowered_as="cuda"),
    "tpu": Quirks(has_links=True),
}


def quirks_of(platform: str) -> Quirks:
    """The quirks of a platform. One that is not in the table is taken for a GPU, by what its callbacks are."""
    return _TABLE.get(platform, _GPU)
