"""Garbage is collected less often while a program is compiled.

A big program is millions of small objects that all stay until it is compiled. Python's collector would go through all
of them again and again, which takes a third of the time. It is not turned off: a call may wait here for a controller,
or for the user's own function, and the other threads of the process make garbage meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

#: So many new objects, at least, between two collections.
_RARELY = 1_000_000

_lock = threading.Lock()
_depth = 0  # how many threads and blocks are inside; guarded by _lock
_before = gc.get_threshold()  # what was set before the first of them; guarded by _lock


@contextlib.contextmanager
def collection_is_rare() -> Iterator[None]:
    """Inside, Python collects garbage rarely, in all threads. May be entered from any thread, and again inside."""
    global _depth, _before
    with _lock:
        if _depth == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < _RARELY:  # 0: the user has turned it off
                gc.set_threshold(_RARELY, *_before[1:])
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and gc.get_threshold()[0] == _RARELY:  # else the user has set another one meanwhile
                gc.set_threshold(*_before)
