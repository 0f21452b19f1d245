"""Queries over a trace's file: by Perfetto's own trace processor, or by SQLite over the JSON.

Both give one table `events`: category, name, ts and dur (nanoseconds), track, process, and `args` as JSON.
"""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import sqlite3
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfetto_engine import PerfettoEngine

COLUMNS = ("category", "name", "ts", "dur", "track", "process", "args")


#: Each arrow: its run; category, name and track of the slice that it leaves; category, track and run of the slice that
#: it enters; and the nanoseconds from the begin of the first to the end of the second.
ARROWS = """
SELECT EXTRACT_ARG(a.arg_set_id, 'args.run'), a.category, a.name, whence.name, b.category, whither.name,
       EXTRACT_ARG(b.arg_set_id, 'args.run'), b.ts + b.dur - a.ts
FROM flow JOIN slice a ON flow.slice_out = a.id JOIN slice b ON flow.slice_in = b.id
JOIN thread_track one ON a.track_id = one.id JOIN thread whence ON one.utid = whence.utid
JOIN thread_track two ON b.track_id = two.id JOIN thread whither ON two.utid = whither.utid
ORDER BY 1, a.ts
"""


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


def by_perfetto(engine: PerfettoEngine) -> sqlite3.Connection:
    """The same table, as Perfetto's trace processor understood the file."""
    args: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    for number, key, value in engine.query(
        "SELECT arg_set_id, key, COALESCE(int_value, real_value, string_value) FROM args"
    ):
        args[number][key.removeprefix("args.")] = value
    rows = engine.query(
        "SELECT slice.category, slice.name, slice.ts, slice.dur, thread.name, process.name, slice.arg_set_id "
        "FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) "
        "JOIN process USING (upid)"
    )
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE events ({', '.join(COLUMNS)})")
    database.executemany(
        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", [(*row, json.dumps(args[number])) for *row, number in rows]
    )
    return database


def faults(engine: PerfettoEngine) -> list[tuple[str, int]]:
    """What Perfetto found wrong with the file: its name for each kind of fault, and how often it found that."""
    found: list[tuple[str, int]] = engine.query(
        "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
    )
    return found
