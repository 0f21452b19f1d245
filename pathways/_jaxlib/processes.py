"""This process as JAX sees it: its XLA backends, their threads after a fork, its caches, and its place in an island.

An island is one `jax.distributed` group of host processes. The controller starts the coordination service of each
island, and each of its hosts joins it.

Threading: `join_island` and `drop_tracebacks` change JAX for the whole process; a host calls each once, at its start.
The others may be called from any thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jaxlib._jax
from jax._src import util, xla_bridge
from jax._src.interpreters import mlir as jax_mlir


def initialized_backends() -> tuple[str, ...]:
    """Names of the XLA backends that this process has initialised so far. This call initialises none."""
    return tuple(xla_bridge._backends)


def keep_threads_of_parent() -> None:
    """For a forked child: keeps alive for ever the JAX objects that have threads.

    The threads exist only in the parent. If the child's exit destroyed these objects, JAX would join the threads and
    crash.
    """
    for owner in (*xla_bridge._backends.values(), jax_mlir.global_thread_pool):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def is_forked() -> bool:
    """True if a backend is initialised but its threads are not in this process: the process is a forked child."""
    return bool(xla_bridge._backends) and len(os.listdir("/proc/self/task")) == 1


def collect_garbage() -> None:
    """Frees Python memory that XLA's buffers do not use any more. Otherwise it is freed only at JAX's next call."""
    jaxlib._jax.collect_garbage()


def drop_tracebacks() -> None:
    """From now on, XLA's objects of this process do not record the Python code that made them.

    On a host that code is always the same loop, and recording it costs 0.2 us per call.
    """
    jaxlib._jax.set_tracebacks_enabled(False)


class _ClearedAlso:
    """A cache of ours, as JAX's list of caches wants it."""

    def __init__(self, clear: Callable[[], None]) -> None:
        self.cache_clear = clear

    def cache_info(self) -> str:
        return "a cache of pathways"

    def cache_keys(self) -> list[Any]:
        return []


_cleared_also: list[_ClearedAlso] = []  # JAX's own list is weak


def clear_also(clear: Callable[[], None]) -> None:
    """From now on `jax.clear_caches()` calls `clear` too."""
    _cleared_also.append(_ClearedAlso(clear))
    util.register_cache(_cleared_also[-1], "pathways")


def join_island(
    address: str, members: int, rank: int, timeout_s: int, fabric: str, made: Callable[[], None] | None = None
) -> None:
    """Makes this process member `rank` of the group whose coordination service listens at `address`.

    `jax.distributed.initialize` would start the service in member 0. Our service runs in the controller, or in an
    agent, so that it survives the loss of any member. CPU collectives (gloo) listen at the address `fabric` only
    (FAB-1). Their default is the address that the machine's name resolves to: there may be none, or one that anybody
    can reach. `made`: called when they listen, before this process has a device.
    """
    client = jaxlib._jax.get_distributed_runtime_client(address, rank, init_timeout=timeout_s, use_compression=True)
    client.connect()
    state = jax._src.distributed.global_state
    state.client, state.process_id, state.num_processes, state.coordinator_address = client, rank, members, address
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jaxlib._jax.make_gloo_tcp_collectives = functools.partial(
        _make_polite_collectives, jaxlib._jax.make_gloo_tcp_collectives, fabric, made
    )


def told_by_all(key: str, text: str, timeout_s: int) -> list[str]:
    """Tells the members of this process's group a text under a key, once; returns those of all of them, by rank."""
    state = jax._src.distributed.global_state
    state.client.key_value_set(f"pathways/{key}/{state.process_id}", text)
    keys = [f"pathways/{key}/{rank}" for rank in range(state.num_processes)]
    return [state.client.blocking_key_value_get(each, timeout_s * 1000) for each in keys]


def _make_polite_collectives(
    make: Callable[..., Any], fabric: str, made: Callable[[], None] | None, *, distributed_client: Any
) -> Any:
    """Makes gloo collectives over a fabric whose own thread never preempts the thread that computes.

    Gloo's thread must not preempt a sender on the same core in the middle of a send. The sender would stop while it
    holds the pair's lock, and gloo's thread would poll for that lock in vain until the scheduler's next tick, up to
    4 ms. So gloo's thread gets the batch class: such a thread takes a core only when the core is free or its turn has
    come. A new thread inherits the class of the thread that makes it, so this function sets the class for the call.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        collectives = make(distributed_client=distributed_client, hostname=fabric)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if made is not None:
        made()
    return collectives
