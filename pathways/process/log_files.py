"""The logs of a cluster's processes on this machine: where they lie, and pieces of them for who reads them from afar.

Each of the controller and the agents has a directory, with the folder `logs/`: its own log and those of the hosts that
it started, one for each incarnation. None grows without bound, whoever prints there (LOG-1): when it is too long, its
last part is kept in `<log>.1`, and it begins anew. A reader asks for one piece after the other and says where the next
one begins, so nobody remembers a reader, and a slow reader makes nothing wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import glob
import os
import re
from typing import BinaryIO

#: The longest piece.
MOST_BYTES = 64 << 10
#: So far back one looks for the last lines.
MOST_BACK = 16 << 20
#: A log that is longer begins anew, and so many of its bytes are kept beside it.
MOST_LOG, KEPT = 32 << 20, 8 << 20
LOOK_S = 1.0
_LOGS = "logs"


@dataclasses.dataclass(frozen=True)
class LogPiece:
    """A part of a log. `end`: where the next one begins; `size`: of the whole log, now."""

    data: bytes
    end: int
    size: int


def own_log(directory: str) -> str:
    """The log of the controller or agent whose directory this is."""
    return os.path.join(directory, _LOGS, "controller.log")


def host_log(directory: str, host: int, incarnation: int) -> str:
    """The log of an incarnation of a host."""
    return os.path.join(directory, _LOGS, f"host-{host}{f'.{incarnation}' if incarnation else ''}.log")


def incarnations(directory: str, host: int) -> list[int]:
    """The incarnations of a host whose logs are there."""
    paths = glob.glob(os.path.join(glob.escape(directory), _LOGS, f"host-{host}*.log"))
    found = (re.fullmatch(rf"host-{host}(?:\.(\d+))?\.log", os.path.basename(path)) for path in paths)
    return sorted(int(match[1] or 0) for match in found if match)


def create(path: str) -> BinaryIO:
    """A new log. What is written goes behind what is there then, also when the log has begun anew meanwhile. Where the
    disk has no room even for its name, what is written is lost.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        return open(os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o666), "wb")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return open(os.open(os.devnull, flags), "wb")


async def keep_short(directory: str) -> None:
    """Looks after the logs of a directory until it is cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        shorten(directory)


def shorten(directory: str) -> None:
    """Lets each log begin anew that is too long."""
    for path in glob.glob(os.path.join(glob.escape(directory), _LOGS, "*.log")):
        with contextlib.suppress(OSError):
            size = os.stat(path).st_size
            if size > MOST_LOG:
                _begin_anew(path, size)


def _begin_anew(path: str, size: int) -> None:
    """Those who write to it know nothing of it, so it stays the same file."""
    with open(path, "r+b") as log:
        try:
            with contextlib.suppress(OSError), open(f"{path}.1", "wb") as kept:  # the disk may be full
                os.sendfile(kept.fileno(), log.fileno(), size - KEPT, KEPT)
        finally:
            os.ftruncate(log.fileno(), 0)
    with open(path, "ab") as log:
        log.write(f"... this log was {size >> 20} MiB long; the end of it is in {path}.1\n".encode())


def read_piece(path: str, offset: int, lines: int) -> LogPiece:
    """A piece of a log.

    Args:
        path: the log.
        offset: where the piece begins. Negative: it begins with the last lines. Behind the end of the log, which has
            been begun anew then: at its beginning.
        lines: how many last lines.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as log:
        size = log.seek(0, os.SEEK_END)
        if offset < 0:
            offset = _start_of_last(log.fileno(), size, lines)
        elif offset > size:
            offset = 0
        data = os.pread(log.fileno(), MOST_BYTES, offset)
    return LogPiece(data, offset + len(data), max(size, offset + len(data)))


def _start_of_last(fd: int, size: int, lines: int) -> int:
    """Where the last lines of a file begin. What follows the last end of a line is a line, too."""
    if lines <= 0:
        return size
    at, left = size, lines
    if size and os.pread(fd, 1, size - 1) != b"\n":
        left -= 1
    while at > max(0, size - MOST_BACK):
        begin = max(0, at - MOST_BYTES)
        block = os.pread(fd, at - begin, begin)
        found = len(block)
        while (found := block.rfind(b"\n", 0, found)) >= 0:
            if left == 0:
                return begin + found + 1
            left -= 1
        at = begin
    return at
