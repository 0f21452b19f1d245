"""The settings of JAX under which a host runs its Python code: with 64-bit types, without a mesh, without guards.

JAX's settings are per thread, so each entry into JAX sets them. An embedded host runs on its user's threads, whose own
settings (`jax.set_mesh`, `jax.transfer_guard`) are about what the user does, not about what the host does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from pathways import _jaxlib

F = TypeVar("F", bound=Callable[..., Any])


def own_settings(function: F) -> F:
    """Runs `function` under the host's settings. The client's x64 mode has already decided the types of a program."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _jaxlib.has_user_settings():
            if jax.config.jax_enable_x64:  # a host process's threads: entered once
                return function(*args, **kwargs)
            with jax.enable_x64(True):
                return function(*args, **kwargs)
        with jax.enable_x64(True), _jaxlib.no_user_settings():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
