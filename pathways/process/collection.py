"""Garbage collection waits while a program is compiled.

A big program is millions of small objects that all stay until it is compiled. Python's collector would go through all
of them again and again, which takes a third of the time. What is garbage meanwhile goes at the next collection.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_depth = 0  # how many threads and blocks wait for no collection; guarded by _lock
_was_on = False  # whether collection is to go on behind the last of them; guarded by _lock


@contextlib.contextmanager
def collection_waits() -> Iterator[None]:
    """Inside, Python collects no garbage, in any thread. May be entered from any thread, and again inside."""
    global _depth, _was_on
    with _lock:
        if _depth == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_on:
                gc.enable()
