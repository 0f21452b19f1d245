"""Threads in code that must not be left by force, when the interpreter ends.

When the interpreter ends, it ends each other thread at the moment at which that thread wants to run Python again. The
thread is then unwound like by an exception. Code of jaxlib takes the interpreter's lock in destructors, which no
exception may leave: so the whole process aborts. Hence a thread says that it is in such code, and the end waits for it,
as JAX's own end waits for computations.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

#: The end waits for so long at most, in seconds.
EXIT_S = 60.0

_changed = threading.Condition()
# Both guarded by _changed.
_inside = 0
_is_over = False


@contextlib.contextmanager
def in_foreign_code() -> Iterator[None]:
    """Around a call, on a daemon thread, of code that gives the interpreter's lock away and takes it again."""
    global _inside
    with _changed:
        while _is_over:
            _changed.wait()
        _inside += 1
    try:
        yield
    finally:
        with _changed:
            _inside -= 1
            _changed.notify_all()


def _end() -> None:
    global _is_over
    with _changed:
        _changed.wait_for(lambda: _inside == 0, EXIT_S)
        _is_over = True


def _forked() -> None:
    """The threads are not in this process."""
    global _changed, _inside
    _changed, _inside = threading.Condition(), 0


atexit.register(_end)
os.register_at_fork(after_in_child=_forked)
