"""Unmodified JAX on a cluster: what a program calls before it uses JAX, instead of being started with variables."""

from __future__ import annotations

import os
import threading

from pathways import _jaxlib, errors
from pathways.api.connect import ADDRESS_VARIABLE
from pathways.cluster.proxy_process import ProxyProcess
from pathways.cluster.proxy_target import INSECURE_VARIABLE, ProxyTarget

#: The proxy that `initialize` takes when it is given no address.
PROXY_VARIABLE = "PATHWAYS_PROXY"

_own: ProxyProcess | None = None  # it ends with this process
_lock = threading.Lock()


def initialize(address: str | None = None) -> str:
    """Gives this process's JAX the devices of a cluster: `jax.devices()` are the cluster's afterwards, and what JAX
    computes, it computes there.

    Call it before JAX is used. It does what the variables do that `pathways proxy` prints, and says at once what JAX
    would find out after minutes. Later calls for the same address do nothing.

    Args:
        address: of a proxy: "HOST:PORT" or "unix:PATH", with or without "grpc://" before it. Or of a cluster, as
            `connect` takes it: "pathways://HOST:PORT", or "unix:/…/control.sock"; then this process gets a proxy of its
            own, which ends with it. None: the proxy in the variable PATHWAYS_PROXY if that is set, else the cluster in
            PATHWAYS_ADDRESS if that is set, else this user's cluster on this machine.

    Returns:
        What JAX connects to, such as "grpc://127.0.0.1:7000".

    Raises:
        ConnectError: JAX has devices already; nobody listens at the address, or no proxy; the proxy refuses this
            program, or did not start.
        UnsupportedVersionError: the proxy and this process's jaxlib have no version of their protocol in common.
    """
    global _own
    asked = address or os.environ.get(PROXY_VARIABLE) or os.environ.get(ADDRESS_VARIABLE) or None
    with _lock:
        if backends := _jaxlib.initialized_backends():
            return _same_as_before(asked, backends)
        if asked is None or ProxyTarget.is_of_cluster(asked):
            if _own is not None:
                _own.close()
            _own = ProxyProcess(asked)
            target = ProxyTarget.parse(_own.variables["JAX_BACKEND_TARGET"])
        else:
            target = ProxyTarget.parse(asked)
            target.check()
        if target.is_insecure:
            os.environ[INSECURE_VARIABLE] = "true"
        _jaxlib.use_proxy(target.text)
        _initialized[asked] = target.text
        return target.text


_initialized: dict[str | None, str] = {}


def _same_as_before(asked: str | None, backends: tuple[str, ...]) -> str:
    if asked in _initialized and _jaxlib.backend_target() == _initialized[asked]:
        return _initialized[asked]
    raise errors.ConnectError(
        f"JAX has devices already in this process ({', '.join(backends)}), and keeps them: call pathways.initialize() "
        "before the first jax.devices(), jax.numpy function or array"
    )
