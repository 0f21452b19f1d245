"""What the tests of traces trace: a program on a cluster, or records without one; and the shape of each trace."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np

import pathways as pw
from pathways.cluster.recording import Recorded
from pathways.protocol import control_pb2 as pb
from pathways.protocol import trace_records

RUNS = 5


def run_program(left: Any, right: Any, runs: int = RUNS) -> None:
    """A program of two computations with a transfer between: on `left`, then on `right`."""
    double = pw.jit(lambda x: x * 2, devices=left, name="double")
    add_one = pw.jit(lambda x: x + 1, devices=right, name="add_one")

    @pw.program
    def both(x: Any) -> Any:
        return add_one(pw.device_put(double(x), right))

    both(jnp.arange(64.0)).block_until_ready()  # compiled; and no part of a trace that begins now
    for run in range(runs):
        np.testing.assert_array_equal(np.asarray(both(jnp.full(64, run))), np.full(64, 2.0 * run + 1))


def check_shape(database: Any, computations: int) -> None:
    """What must hold for every trace, and how many computations this one has."""
    (count,) = database.execute("SELECT COUNT(*) FROM events WHERE category = 'computation'").fetchone()
    assert count == computations
    overlaps = database.execute(
        "SELECT COUNT(*) FROM events a JOIN events b ON a.track = b.track AND a.process = b.process "
        "AND a.rowid < b.rowid AND a.category = 'computation' AND b.category = 'computation' "
        "AND a.ts < b.ts + b.dur - 1 AND b.ts < a.ts + a.dur - 1"
    ).fetchone()
    assert overlaps == (0,)
    for (text,) in database.execute("SELECT args FROM events WHERE category = 'computation'"):
        args = json.loads(text)
        times = ("submitted", "ordered", "granted", "dispatched", "launched", "start", "end")
        values = [args[f"{name}_ns"] for name in times]
        assert values == sorted(values), args
    inside = database.execute(
        "SELECT COUNT(*) FROM events c WHERE c.category = 'computation' AND EXISTS (SELECT 1 FROM events p WHERE "
        "p.category = 'program' AND p.track = c.track AND p.process = c.process AND p.ts <= c.ts + 1 "
        "AND p.ts + p.dur >= c.ts + c.dur - 1)"
    ).fetchone()
    assert inside == (computations,)


def recorded(runs: list[dict[str, int]], orders: list[dict[str, int]] = (), **more: Any) -> Recorded:  # type: ignore[assignment]
    """A recording of one host with two devices, of records with these fields."""

    def table(rows: list[dict[str, int]], dtype: np.dtype[Any]) -> bytes:
        made = np.zeros(len(rows), dtype)
        for at, row in enumerate(rows):
            for name, value in row.items():
                made[at][name] = value
        return made.tobytes()

    about = pb.TraceAbout(cluster="a test", devices_per_host=2, hosts=1, clients={3: "ann"})
    return Recorded(
        about=about,
        orders=[table(list(orders), trace_records.ORDER)],
        runs={0: [table(runs, trace_records.RUN)]},
        begin_ns=1_000,
        end_ns=2_000_000,
        **more,
    )
