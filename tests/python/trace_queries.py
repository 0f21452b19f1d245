"""Queries over a trace's file: by Perfetto's own trace processor where its binary is, else by SQLite over the JSON.

Both give one table `events`: category, name, ts and dur (nanoseconds), track, process, and `args` as JSON.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import sqlite3
from typing import Any

COLUMNS = ("category", "name", "ts", "dur", "track", "process", "args")


def load(path: pathlib.Path) -> dict[str, Any]:
    """The file's JSON."""
    data = path.read_bytes()
    loaded: dict[str, Any] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return loaded


def by_sqlite(path: pathlib.Path) -> sqlite3.Connection:
    """The complete events of a trace, read as the format says."""
    events = load(path)["traceEvents"]
    named: dict[tuple[Any, ...], str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            named[event["name"], event["pid"], event.get("tid")] = event["args"]["name"]
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE events ({', '.join(COLUMNS)})")
    database.executemany(
        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (
                event["cat"],
                event["name"],
                round(event["ts"] * 1000),
                round(event["dur"] * 1000),
                named["thread_name", event["pid"], event["tid"]],
                named["process_name", event["pid"], None],
                json.dumps(event["args"]),
            )
            for event in events
            if event["ph"] == "X"
        ],
    )
    return database


def by_perfetto(path: pathlib.Path) -> sqlite3.Connection:
    """The same table, as Perfetto's trace processor understands the file.

    Raises:
        ImportError: the package `perfetto` is not installed.
        Exception: its binary is not there, and cannot be downloaded.
    """
    from perfetto.trace_processor import TraceProcessor

    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE events ({', '.join(COLUMNS)})")
    with TraceProcessor(trace=str(path)) as processor:
        rows = list(
            processor.query(
                "SELECT slice.id AS id, slice.category AS category, slice.name AS name, slice.ts AS ts, "
                "slice.dur AS dur, thread.name AS track, process.name AS process, slice.arg_set_id AS args "
                "FROM slice JOIN thread_track ON slice.track_id = thread_track.id "
                "JOIN thread USING (utid) JOIN process USING (upid)"
            )
        )
        first = min((row.ts for row in rows), default=0)
        for row in rows:
            args = {
                each.key.removeprefix("args."): each.value
                for each in processor.query(
                    "SELECT key, COALESCE(int_value, string_value) AS value FROM args "
                    f"WHERE arg_set_id = {row.args if row.args is not None else -1}"
                )
            }
            database.execute(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
                (row.category, row.name, row.ts - first, row.dur, row.track, row.process, json.dumps(args)),
            )
    return database
