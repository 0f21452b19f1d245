"""A calibrated stand-in for a computation: it takes the computation's time, but uses no core.

When a machine has more processes than cores, real computations compete with the runtime that a benchmark measures. A
step that sleeps leaves the cores to the runtime. Hosts register the stand-in when they start. `step` is for placed
functions on CPU devices.
"""

from __future__ import annotations

import contextlib

import jax
import numpy as np

from pathways import _native

TARGET = "pathways_stand_in"


def register() -> None:
    """Makes the stand-in known to XLA in this process. Call it before compiling anything that uses the stand-in.

    XLA refuses a handler that was built with the headers of a newer one. Only benchmarks need the stand-in, so a host
    goes on without it; what uses it then fails to compile, and the error names it.
    """
    jax.local_devices()  # before that JAX only keeps the target, and a refused one would end the start of its backend
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.ffi.register_ffi_target(TARGET, _native.stand_in_handler(), platform="cpu")


def step(x: jax.Array, microseconds: int, holds_device: bool = False) -> jax.Array:
    """Returns float32 `x` unchanged, `microseconds` later.

    `holds_device`: such steps of one process take their time one after the other, whatever threads launched them.
    """
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, microseconds=np.int64(microseconds), holds_device=np.bool_(holds_device))
