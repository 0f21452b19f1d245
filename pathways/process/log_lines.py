"""How the lines of a log look, and how a process of a cluster begins to write them.

Each process calls `begin` once, before anything else. From then on what it says by Python's `logging` becomes lines
like these. What native code writes by itself, such as XLA or a failed check, stays as it is.

    2026-11-30T16:22:40.123Z WARNING controller [client 3, run 17] what happened
    {"time": "2026-11-30T16:22:40.123Z", "level": "warning", "process": "controller", "client": 3, ...}

Two variables choose what a process writes: PATHWAYS_LOG_LEVEL (info if it is not set) and PATHWAYS_LOG_FORMAT (text, or
json). Children inherit them, so a whole cluster has those of who started it. A record concerns a client or a run if it
was logged with `extra={"client": 3, "run": 17}`.

A line for which the disk has no room is lost; the next one that has room is preceded by how many were lost (LOG-1).
"""

from __future__ import annotations

import datetime
import faulthandler
import io
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from pathways import errors

LEVEL_VARIABLE, FORMAT_VARIABLE = "PATHWAYS_LOG_LEVEL", "PATHWAYS_LOG_FORMAT"
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
#: What a record may concern.
CONCERNS = ("client", "run")


def check(environ: Mapping[str, str]) -> None:
    """Raises:
    OptionError: a variable has no meaning.
    """
    for name, allowed in ((LEVEL_VARIABLE, LEVELS), (FORMAT_VARIABLE, FORMATS)):
        if (text := environ.get(name)) and text not in allowed:
            raise errors.OptionError(f"{name}={text}: expected one of {', '.join(allowed)}")


def begin(process: str) -> None:
    """Lets this process write a log on its standard output and error, which are files: what it logs, prints and warns
    of, and the errors that end its threads.

    Args:
        process: its name for people, such as `host 3`.
    """
    losses = _Losses(process)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = _Prints(fd, losses, process) if _is_json() else _Log(fd, losses)
        setattr(sys, name, _stream(raw))
    _configure(process, _stream(_Log(2, losses)))
    logging.captureWarnings(True)
    faulthandler.enable()
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


def begin_in_foreground(process: str) -> None:
    """Lets a command write its log on its standard error, which may be a terminal: warnings, unless a level is set. See
    `begin`.
    """
    _configure(process, None, logging.WARNING)


def _configure(process: str, stream: Any, default: int = logging.INFO) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonLines(process) if _is_json() else _TextLines(process))
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL_VARIABLE, "").upper(), default)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(max(level, logging.WARNING))  # other people's libraries are told of trouble only
    logging.getLogger("pathways").setLevel(level)


def _is_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE) == "json"


def _stream(raw: io.RawIOBase) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, at: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, SystemExit | KeyboardInterrupt):
        logging.getLogger("pathways").critical("an error that nobody handles", exc_info=(kind, error, at))


def is_routine(line: str) -> bool:
    """Whether a line of a log says what a process of a cluster does as it should, so that no error needs it."""
    if not line.startswith("{"):
        return re.match(r"[-\d]{10}T[:.\d]{12}Z (?:DEBUG|INFO) ", line) is not None
    try:
        entry = json.loads(line)
        return entry["level"] in ("debug", "info") and str(entry["logger"]).startswith("pathways")
    except (ValueError, KeyError):  # somebody else's line, or a part of one
        return False


def time_text(seconds: float) -> str:
    """A moment of `time.time` as the lines have it: UTC, with milliseconds."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _TextLines(logging.Formatter):
    """Lines for people. What follows the first line of a text, as of a traceback, stands on lines of its own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, and its traceback if it has one."""
        concerns = ", ".join(f"{what} {vars(record)[what]}" for what in CONCERNS if what in vars(record))
        about = f" [{concerns}]" if concerns else ""
        return f"{time_text(record.created)} {record.levelname} {self._process}{about} {super().format(record)}"


class _JsonLines(logging.Formatter):
    """An object per line, for programs."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the text has in it."""
        entry: dict[str, Any] = {
            "time": time_text(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            **{what: vars(record)[what] for what in CONCERNS if what in vars(record)},
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Losses:
    """Lines of a log that a full disk had no room for, since the last one that it had room for."""

    def __init__(self, process: str) -> None:
        self._formatter = _JsonLines(process) if _is_json() else _TextLines(process)
        self.lines = 0
        self.why = ""
        self.is_torn = False  # a part of a line was written

    def notice(self) -> bytes:
        """What stands before the next line."""
        text = f"{self.lines} {'line' if self.lines == 1 else 'lines'} of this log were lost: {self.why}"
        record = logging.LogRecord("pathways", logging.WARNING, "", 0, text, None, None)
        return (b"\n" if self.is_torn else b"") + self._formatter.format(record).encode() + b"\n"


class _Log(io.FileIO):
    """A descriptor of a log. What is written to it is written, or lost: who writes never hears of it. Otherwise `print`
    raises, in the middle of what the line is about.
    """

    def __init__(self, fd: int, losses: _Losses) -> None:
        super().__init__(fd, "w", closefd=False)
        self._losses = losses

    def write(self, data: Any) -> int:
        """Writes all of it, or loses what has no room."""
        left = memoryview(data).cast("B")
        losses = self._losses
        try:
            while losses.lines:
                notice = losses.notice()
                written = super().write(notice) or 0
                losses.is_torn = 0 < written < len(notice)
                if written == len(notice):
                    losses.lines = 0
            while left:
                written = super().write(left) or 0
                losses.is_torn = bytes(left[written - 1 : written]) != b"\n"
                left = left[written:]
        except OSError as error:
            losses.lines += max(1, bytes(left).count(b"\n"))
            losses.why = error.strerror or str(error)
        return len(data)


class _Prints(_Log):
    """Where lines are objects: what a process prints, as what clients' functions print, becomes such lines, too."""

    def __init__(self, fd: int, losses: _Losses, process: str) -> None:
        super().__init__(fd, losses)
        self._name = {1: "stdout", 2: "stderr"}[fd]
        self._formatter = _JsonLines(process)
        self._rest = b""

    def write(self, data: Any) -> int:
        """Writes the lines that are whole."""
        *lines, self._rest = (self._rest + bytes(data)).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            record = logging.LogRecord(self._name, logging.INFO, "", 0, text, None, None)
            super().write(self._formatter.format(record).encode() + b"\n")
        return len(data)
