"""The coordination service of an island's `jax.distributed` group, which the controller runs. Imports no JAX."""

from __future__ import annotations

from typing import Any

import jaxlib._jax


def start_service(address: str, members: int) -> Any:
    """Starts the service of one group. It lives as long as the returned object.

    `address` may be a Unix socket (`unix:/path`): then no port is opened. Initialises no backend.
    """
    return jaxlib._jax.get_distributed_runtime_service(address, members)


def stop_service(service: Any) -> None:
    """Ends a service whose members are gone."""
    service.shutdown()
