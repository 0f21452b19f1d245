"""A calibrated stand-in for a computation: takes its time and no core.

Where more processes than cores share a machine, real computations compete with the runtime that is being measured; a
step that sleeps leaves it the cores. Hosts register it when they start; `step` is for placed functions on CPU devices.
"""

from __future__ import annotations

import jax
import numpy as np

from pathways import _native

TARGET = "pathways_stand_in"


def register() -> None:
    """Makes the stand-in known to XLA in this process; before anything that uses it is compiled here."""
    jax.ffi.register_ffi_target(TARGET, _native.stand_in_handler(), platform="cpu")


def step(x: jax.Array, microseconds: int) -> jax.Array:
    """float32 `x`, unchanged, `microseconds` later."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, microseconds=np.int64(microseconds))
