"""What the dashboard shows, as it goes to the browsers: one reader for all of them, who looks once in `PERIOD_S`.

It looks only while a browser is there. All browsers get the same bytes. Who is slow misses no point of the timeline, as
long as it is not more than `MOST_POINTS` behind, and costs nothing but these points, which are kept once.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.cluster.snapshots import Snapshot, Snapshots
from pathways.monitoring.view import point, view
from pathways.protocol import control_pb2 as pb

PERIOD_S = 1.0
MOST_POINTS = 600  # of the timeline: ten minutes
#: A browser hears at least this often, so that it knows of a connection that has broken.
ALIVE_S = 5.0
LOG_PERIOD_S, LOG_LINES, MOST_LOG_BYTES = 2.0, 200, 1 << 16


class Feed:
    """Any thread may call. A context manager, which ends the streams."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._changed = threading.Condition()
        self._points: collections.deque[dict[str, Any]] = collections.deque(maxlen=MOST_POINTS)  # guarded by _changed,
        self._count = 0  # of points that there have been; as is what follows
        self._now = b"{}"
        self._turn = 0  # grows with each look, also with one that has failed
        self._browsers = 0
        self._reader: threading.Thread | None = None
        self._over = threading.Event()

    def stream(self, log: str = "") -> Generator[bytes, None, None]:
        """Server-sent events for one browser: the points that it does not have, and how the cluster is now.

        Args:
            log: whose log it shows: `controller`, `host:NUMBER` or `machine:NAME`; nobody's when empty.

        Raises:
            ValueError: that is nobody's log.
        """
        request = _log_request(log) if log else None
        return self._events(request)

    def _events(self, request: pb.LogsRequest | None) -> Generator[bytes, None, None]:
        turn = seen = 0
        shown, read_at = None, 0.0
        with self._there():
            while not self._over.is_set():
                if not self._wait(turn):
                    yield b": still here\n\n"
                    continue
                with self._changed:
                    new = min(self._count - seen, len(self._points))
                    points = list(self._points)[len(self._points) - new :]
                    turn, seen, now = self._turn, self._count, self._now
                parts = [b'"points":' + _json(points), b'"now":' + now]
                if request is not None and time.monotonic() - read_at >= LOG_PERIOD_S:
                    text, read_at = self._log(request), time.monotonic()
                    if text != shown:
                        parts.append(b'"log":' + _json(text))
                        shown = text
                yield b"data: {" + b",".join(parts) + b"}\n\n"  # no lock is held: the browser may be slow

    def _wait(self, turn: int) -> bool:
        """Whether somebody has looked since a turn, after `ALIVE_S` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._turn != turn or self._over.is_set(), ALIVE_S)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        """While a browser is there, somebody looks at the cluster."""
        with self._changed:
            self._browsers += 1
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="pw-feed", daemon=True)
                self._reader.start()
        try:
            yield
        finally:
            with self._changed:
                self._browsers -= 1

    def _read(self) -> None:
        before: Snapshot | None = None
        while True:
            began = time.monotonic()
            now = new = None
            try:
                after = self._snapshots.look()
                if before is not None:
                    new = point(before, after)
                    now = _json(view(before, after))
                before = after
            except errors.PathwaysError as error:
                before, now = None, _json({"error": str(error)})
            except Exception as error:  # of one look; it must not end all later ones
                before, now = None, _json({"error": f"{type(error).__name__}: {error}"})
            with self._changed:
                if not self._browsers or self._over.is_set():
                    self._reader, self._now = None, b"{}"  # the next browser is told nothing old
                    return
                if now is not None:
                    self._now = now
                    self._turn += 1
                if new is not None:
                    self._points.append(new)
                    self._count += 1
                self._changed.notify_all()
            self._over.wait(max(0.1, began + PERIOD_S - time.monotonic()))

    def _log(self, request: pb.LogsRequest) -> str:
        try:
            text = b"".join(part.text for part in self._snapshots.logs(request))
        except errors.PathwaysError as error:
            return f"({error})"
        return text[-MOST_LOG_BYTES:].decode(errors="replace")

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._changed:
            self._changed.notify_all()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _log_request(log: str) -> pb.LogsRequest:
    kind, _, which = log.partition(":")
    whose: dict[str, Any]
    if log == "controller":
        whose = {"controller": Empty()}
    elif kind == "host" and which.isascii() and which.isdecimal() and len(which) < 10:
        whose = {"host": int(which)}
    elif kind == "machine" and which:
        whose = {"machine": which}
    else:
        raise ValueError("whose log? Expected controller, host:NUMBER or machine:NAME")
    return pb.LogsRequest(lines=LOG_LINES, **whose)
