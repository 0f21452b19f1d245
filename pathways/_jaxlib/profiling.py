"""XLA's profiler in this process. For hosts, and for `pw.profile` in the client."""

from __future__ import annotations

import threading
from typing import Any

from jax._src import profiler as jax_profiler
from jaxlib import _profiler

_lock = threading.Lock()
_session: Any = None  # guarded by _lock


def start_profile(python: bool) -> None:
    """Begins to record. It makes no backend: a client must not seize accelerators for it, and a host has its own.

    Args:
        python: whether calls of Python functions are recorded, too.

    Raises:
        RuntimeError: this process records a profile already, also by `jax.profiler`.
    """
    global _session
    options = _profiler.ProfileOptions()
    options.python_tracer_level = 1 if python else 0
    with _lock:
        state = vars(jax_profiler._profile_state)
        if _session is not None or state.get("session", state.get("profile_session")) is not None:  # JAX 0.12; 0.10
            raise RuntimeError("this process records a profile already; end that one first")
        _session = _profiler.ProfilerSession(options)


def stop_profile() -> bytes:
    """Ends the profile; returns an XSpace. Empty if none is on."""
    global _session
    with _lock:
        session, _session = _session, None
        return b"" if session is None else bytes(session.stop())
