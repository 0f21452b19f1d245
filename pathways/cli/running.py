"""What the commands share that run in the foreground until they are told to end: `proxy`, `metrics`, `dashboard`."""

from __future__ import annotations

import os
import signal
import sys
import threading


def until_told_to_end(until_input_ends: bool) -> threading.Event:
    """An event that SIGTERM and Ctrl-C set; if wanted, so does the end of standard input: of who started this."""
    over = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: over.set())
    if until_input_ends:
        threading.Thread(target=_read_to_the_end, args=(over,), daemon=True).start()
    return over


def _read_to_the_end(over: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    over.set()
