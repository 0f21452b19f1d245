"""What a user has set for this process's own JAX: meshes and transfer guards. And how our code runs without them.

A mesh that is set (`jax.set_mesh`, `jax.sharding.use_abstract_mesh`, `with mesh:`) speaks of devices of this process,
so it does not concern slices. A transfer guard speaks of what the user transfers, so it does not concern what the
library or an embedded host transfers for itself.

Threading: all settings are those of the calling thread, so an embedded host finds its user's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jax._src import config
from jax._src import mesh as mesh_lib
from jax._src.lib import guard_lib

F = TypeVar("F", bound=Callable[..., Any])

#: Since JAX 0.11 these two are in the module of meshes.
abstract_mesh_setting: Any = (
    getattr(mesh_lib, "abstract_mesh_context_manager", None) or config.abstract_mesh_context_manager
)
concrete_mesh_setting: Any = getattr(mesh_lib, "device_context", None) or config.device_context
_legacy = config.mesh_context_manager  # of `with mesh:`; with `mesh_lib.thread_resources`
_guards = {
    "host-to-device": config.transfer_guard_host_to_device,
    "device-to-device": config.transfer_guard_device_to_device,
    "device-to-host": config.transfer_guard_device_to_host,
}


def is_mesh_set() -> bool:
    """Whether a mesh is set for this thread. Takes 0.4 us."""
    for each in (abstract_mesh_setting.value, concrete_mesh_setting.value):
        if each is not None and not each.empty:
            return True
    return bool(_legacy.value)


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """As if no mesh were set for this thread."""
    env = mesh_lib.thread_resources.env
    before = [
        (each, each.swap_local(config.config_ext.unset)) for each in (abstract_mesh_setting, concrete_mesh_setting)
    ]
    before.append((_legacy, _legacy.swap_local(config.config_ext.unset)))
    mesh_lib.thread_resources.env = mesh_lib.EMPTY_ENV
    try:
        yield
    finally:
        mesh_lib.thread_resources.env = env
        for each, value in before:
            each.set_local(value)


def outside_meshes(function: F) -> F:
    """Runs `function` as if no mesh were set for its thread."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_mesh_set():
            return function(*args, **kwargs)
        with no_mesh():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def guard_level(direction: str, is_explicit: bool) -> str:
    """What to do with a transfer that the user makes now: "allow", "log" or "disallow".

    `direction` is "host-to-device", "device-to-device" or "device-to-host". A transfer is explicit, too, inside of
    `jax.device_put` or `jax.device_get`.
    """
    level = _guards[direction].value
    if level is None or level == "allow":
        return "allow"
    if level.endswith("_explicit"):
        return str(level.removesuffix("_explicit"))
    state = guard_lib.thread_local_state()
    inside = state.explicit_device_get if direction == "device-to-host" else state.explicit_device_put
    return "allow" if is_explicit or inside else str(level)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """As if no transfer guard were set for this thread."""
    if all(each.value in (None, "allow") for each in _guards.values()):
        yield
        return
    with contextlib.ExitStack() as stack:
        for each in _guards.values():
            stack.enter_context(each("allow"))
        yield


def has_user_settings() -> bool:
    """Whether a mesh is set or a transfer is guarded on this thread. Takes 0.6 us."""
    return any(each.value not in (None, "allow") for each in _guards.values()) or is_mesh_set()


@contextlib.contextmanager
def no_user_settings() -> Iterator[None]:
    """As if neither a mesh nor a transfer guard were set for this thread."""
    with unguarded(), no_mesh():
        yield
