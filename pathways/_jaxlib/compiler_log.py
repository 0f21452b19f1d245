"""Keeps the log lines of jaxlib's compiler out of the user's terminal.

The compiler writes to file descriptors 1 and 2 themselves, from native code. `partitioner` calls `quiet`.

Threading: one thread at a time is inside `quiet`; another one waits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import threading
from collections.abc import Iterator

_quiet_lock = threading.Lock()
_LOG_LINE = re.compile(rb"[IW]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ [^ ]+\.(cc|h):\d+\] |[^ ]+: (note|warning|remark): ")
_LOG_MORE = re.compile(rb"[\s})%^]|$")  # the beginning of a line that continues a log line: a printed operation


def _without_log(text: bytes) -> bytes:
    """`text` without the compiler's log lines."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if _LOG_LINE.match(line):
            inside = True
        elif not (inside and _LOG_MORE.match(line)):
            inside = False
            kept.append(line)
    return b"".join(kept)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops the log lines that the compiler writes to file descriptors 1 and 2 meanwhile.

    What another thread writes there meanwhile is written to the real ones afterwards. If the compiler kills the
    process, the Python stack still goes to the real stderr.
    """
    with _quiet_lock, contextlib.ExitStack() as stack:
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            try:
                stream.flush()
                stack.enter_context(_caught(fd))
            except (OSError, ValueError, AttributeError):  # no usable stream: nothing to keep clean
                continue
        yield


@contextlib.contextmanager
def _caught(fd: int) -> Iterator[None]:
    kept = os.dup(fd)
    caught = os.memfd_create("pathways-compiler-log", os.MFD_CLOEXEC)
    watch = fd == 2 and not faulthandler.is_enabled()
    if watch:
        faulthandler.enable(kept, all_threads=False)
    os.dup2(caught, fd)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        if watch:
            faulthandler.disable()
        os.lseek(caught, 0, os.SEEK_SET)
        with open(caught, "rb") as log:
            rest = _without_log(log.read())
        if rest:
            os.write(kept, rest)
        os.close(kept)
