"""`jax.transfer_guard` for what goes between this process and a slice, on every kind of cluster.

A host value that a call or an operation takes is an implicit transfer from host to device, unless it is a number in an
operation or an index, which is compiled in; `device_put` is an explicit one. Reading is an implicit transfer from
device to host, and `jax.device_get` an explicit one; as in JAX, nothing is transferred where the devices are CPUs. What
a program transfers between slices was compiled, so it is never refused.
"""

from __future__ import annotations

import logging

from pathways import _jaxlib, errors

_log = logging.getLogger(__name__)
_EXPLICIT = {"device-to-host": "jax.device_get(x)"}


def check(direction: str, what: object, value: object, *, is_explicit: bool = False) -> None:
    """Call it before each transfer of a value that the user makes. `direction`: see `_jaxlib.guard_level`.

    Raises:
        TransferGuardError: the guard of this thread does not allow it.
    """
    level = _jaxlib.guard_level(direction, is_explicit)
    if level == "allow":
        return
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if level == "log":
        _log.warning("%s transfer: %s, a %s", direction, what, kind)
    else:
        instead = (
            "" if is_explicit else f"; make it explicit: {_EXPLICIT.get(direction, 'jax.device_put(x, sharding)')}"
        )
        raise errors.TransferGuardError(
            f"Disallowed {direction} transfer: {what}, a {kind}. A jax.transfer_guard of this thread says so{instead}"
        )
