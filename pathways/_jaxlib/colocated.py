"""What a process that calls functions of `jax.experimental.colocated_python` needs of JAX.

`pathways/proxy/colocated_functions.py` calls these functions, in a process that a host has for one client's functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from jax._src import xla_bridge
from jax.experimental.colocated_python import serialization
from jaxlib import _pathways


def use_colocated_devices(own: Collection[int], hosts: Mapping[int, int]) -> None:
    """Gives this process's JAX the devices of a cluster: CPU devices with the cluster's numbers, of which it can use
    its `own`. `hosts`: each device's host, which JAX calls its process. To be called once, before JAX is used.
    """
    xla_bridge.register_backend_factory("cpu", lambda: _pathways._create_cpu_client(set(own), dict(hosts)), priority=0)


@contextlib.contextmanager
def common_objects() -> Iterator[None]:
    """Inside this context, a pickle can be read that JAX has written for such a function: it has each mesh once."""
    state = serialization._common_obj_state
    before, state.common_obj = state.common_obj, []
    try:
        yield
    finally:
        state.common_obj = before
