"""What JAX is doing on the calling thread, and under which settings.

The API asks before each call whether the call is traced, and whether an earlier compilation still holds: `trace_modes`
and `is_top_level` are on that path. Settings may differ from thread to thread, so the answers are the calling thread's.

Threading: `_recording` is shared by all threads, and each thread adds and removes only its own ident.
"""

from __future__ import annotations

import threading
from typing import Any

from jax._src import config, core, source_info_util
from jax._src.interpreters import partial_eval

_recording: set[int] = set()  # idents of threads that record; see `is_recording`
_debug_nans, _debug_infs = config.debug_nans, config.debug_infs


def trace_modes() -> Any:
    """All global JAX settings that change what a call does, as one comparable value. Takes 0.2 us."""
    if _recording:
        return config.trace_context(), is_recording()
    if _debug_nans.value or _debug_infs.value:
        return config.trace_context(), _debug_nans.value, _debug_infs.value
    return config.trace_context()


def is_recording() -> bool:
    """Whether this thread is inside `checkify`, which records a function in order to change it before it runs.

    `checkify` records on values, not on tracers. So what is computed meanwhile belongs to the record.
    """
    return bool(_recording) and threading.get_ident() in _recording


def value_checks() -> tuple[str, ...]:
    """The values that no result may have: "nan" under `jax.debug_nans`, "inf" under `jax.debug_infs`."""
    return ("nan",) * bool(_debug_nans.value) + ("inf",) * bool(_debug_infs.value)


def current_level() -> Any:
    """What JAX does now with each operation of this thread, as an object to compare."""
    return core.trace_ctx.trace


def staging_level() -> Any:
    """The innermost record (of a `jax.jit`, a loop body or the like) that this thread's operations go into; None:
    they are recorded nowhere.
    """
    trace = core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, partial_eval.DynamicJaxprTrace):
            return trace
        trace = getattr(trace, "parent_trace", None)
    return None


def is_staging() -> bool:
    """Whether JAX now records what this thread does, to run it later (in a `jax.jit` or the like)."""
    return staging_level() is not None


def staged_constant(value: Any) -> Any:
    """`value` as a constant of the record that this thread's operations go into."""
    return staging_level().to_jaxpr_tracer(value, source_info_util.current())


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is on, for this thread."""
    return bool(config.disable_jit.value)


def is_top_level() -> bool:
    """Whether no JAX transformation is under way on this thread. Takes 0.1 us."""
    return bool(core.trace_state_clean())


class NotesRecording:
    """Wraps JAX's tracing function: while it traces for `checkify`, its thread is in `_recording`."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __call__(self, fun: Any, in_avals: Any, debug_info: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if debug_info.traced_for != "checkify" or thread in _recording:
            return self._plain(fun, in_avals, debug_info, *args, **kwargs)
        _recording.add(thread)
        try:
            return self._plain(fun, in_avals, debug_info, *args, **kwargs)
        finally:
            _recording.discard(thread)
