"""The platform "proxy" for JAX of before 0.11, which does not know it: what `pathways proxy` serves.

JAX calls `initialize` of every package with an entry point `jax_plugins`, when a process first asks for devices. So it
does nothing unless the process asks for this platform.
"""

from __future__ import annotations

import os
from typing import Any

import jax
from jax._src import config, xla_bridge

NAME = "proxy"


def initialize() -> None:
    """Registers the platform, if the user has asked for it, and JAX does not know it."""
    asked = (config.jax_platforms.value or "").split(",")
    if NAME in asked and NAME not in xla_bridge._backend_factories:
        xla_bridge.register_backend_factory(NAME, new_client, priority=-1, fail_quietly=False)


def use_proxy(target: str) -> None:
    """Lets this process's JAX, which has no devices yet, and those of its later children connect to a proxy."""
    asked = config.jax_platforms.value or ""
    platforms = asked if NAME in asked.split(",") else NAME
    jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_backend_target", target)
    os.environ.update(JAX_PLATFORMS=platforms, JAX_BACKEND_TARGET=target)


def backend_target() -> str:
    """What this process's JAX connects to; empty when it was not told."""
    return str(xla_bridge.BACKEND_TARGET.value)


def new_client() -> Any:
    """One more client of the proxy that the process was told."""
    from jaxlib import _ifrt_proxy

    target = xla_bridge.BACKEND_TARGET.value
    if not target:
        raise RuntimeError("JAX_PLATFORMS=proxy needs JAX_BACKEND_TARGET=grpc://HOST:PORT, as `pathways proxy` prints")
    return _ifrt_proxy.get_client(target, _ifrt_proxy.ClientConnectionOptions())
