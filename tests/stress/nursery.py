"""A nursery: a process that has imported everything, and forks a client for each line of its input.

A client so starts within milliseconds, and is a program of its own from there on. The nursery prints a JSON object per
line: {"event": "ready"}; {"event": "started", "pid"} for each client, in the order of the input; {"event": "ended",
"pid", "status"} when one has ended, where a negative status is the number of a signal. It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any

_LOOK_S = 0.005  # how often it looks for clients that ended


def serve(play: Callable[[dict[str, Any]], None]) -> None:
    """Forks a client for each line of the input, and calls `play` with the line's object in it.

    Returns in the nursery at the end of the input, and in a client when `play` has returned: end the program then.
    """
    _say(event="ready")
    children: set[int] = set()
    while True:
        if select.select([0], [], [], _LOOK_S if children else None)[0]:
            line = _line()
            if not line:
                return
            pid = os.fork()
            if pid == 0:
                play(json.loads(line))
                return
            children.add(pid)
            _say(event="started", pid=pid)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                _say(event="ended", pid=pid, status=os.waitstatus_to_exitcode(status))


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _line() -> bytes:
    """One line of the input, read byte by byte: what is buffered would be read again by a child."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line
