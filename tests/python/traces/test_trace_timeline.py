"""The timeline of a trace, from records: spans, waits and their reasons, names of clients."""

from __future__ import annotations

import pathlib

import numpy as np
from trace_cases import recorded

from pathways.cluster import trace_file
from pathways.cluster.recording import Recorded
from pathways.cluster.trace_file import TraceFile, events
from pathways.cluster.trace_timeline import Timeline
from pathways.protocol import control_pb2 as pb
from pathways.protocol import trace_records


def test_ends_that_are_noticed_together_are_divided() -> None:
    call = {"kind": 1, "client": 3, "devices": 1, "dispatched_ns": 1_000, "ready_ns": 1_000}
    rows = [{**call, "order": order, "launched_ns": 1_000 + 100 * order, "ended_ns": 100_000} for order in (1, 2, 3)]
    rows.append({**call, "order": 4, "launched_ns": 5_000, "ended_ns": 130_000, "devices": 3})
    timeline = Timeline(recorded(rows))
    spans = [(each.start_ns, each.end_ns, each.is_estimated) for each in timeline.computations]
    assert spans == [
        (1_100, 34_066, True),
        (34_066, 67_033, True),
        (67_033, 100_000, True),
        (100_000, 130_000, False),
    ]


def test_times_of_ends_that_were_noticed_together_are_divided_by_what_is_known() -> None:
    """By the times of the same computations whose ends were noticed alone."""
    nodes = [pb.TracedProgram.Node(name=str(n), maker=-1, computation=n) for n in range(4)]
    b, add, x, n = range(4)
    call = {"kind": 1, "client": 3, "plan": 9, "order": 1}
    rows = [
        {**call, "devices": devices, "node": node, "launched_ns": at, "ended_ns": end}
        for node, devices, at, end in (
            (b, 1, 1_000, 21_000),  # alone: 20 us
            (b, 1, 30_000, 54_000),
            (add, 1, 31_000, 54_000),  # the rest
            (b, 1, 60_000, 90_000),
            (b, 1, 60_500, 90_000),  # both are known, and have less than their usual times
            (x, 1, 101_000, 160_000),
            (b, 1, 100_000, 160_000),  # launched before the other
            (b, 1, 200_000, 260_000),
            (x, 1, 232_000, 260_000),  # launched when the one before was over
            (b, 1, 300_000, 316_000),
            (x, 1, 300_500, 316_000),  # nothing is left for it: a quarter of an equal part
            (n, 2, 1_000, 11_000),
            (n, 2, 1_500, 11_000),  # nothing is known of them
        )
    ]
    plans = {0: {9: pb.TracedProgram(client=3, name="p", nodes=nodes)}}
    timeline = Timeline(recorded(rows, plans=plans))
    times = [(int(each.name), each.devices, each.start_ns, each.end_ns) for each in timeline.computations]
    assert sorted(times) == sorted(
        [
            (b, (0,), 1_000, 21_000),
            (b, (0,), 30_000, 50_000),
            (add, (0,), 50_000, 54_000),
            (b, (0,), 60_000, 75_000),
            (b, (0,), 75_000, 90_000),
            (b, (0,), 100_000, 120_000),
            (x, (0,), 120_000, 160_000),
            (b, (0,), 200_000, 220_000),
            (x, (0,), 232_000, 260_000),
            (b, (0,), 300_000, 314_000),
            (x, (0,), 314_000, 316_000),
            (n, (1,), 1_000, 6_000),
            (n, (1,), 6_000, 11_000),
        ]
    )
    assert {each.usual_ns for each in timeline.computations if each.name == str(b)} == {20_000}
    assert {each.usual_ns for each in timeline.computations if each.name != str(b)} == {0}


def test_a_file_gives_the_same_timeline(tmp_path: pathlib.Path) -> None:
    """The format that Perfetto opens carries the records."""
    call = {"kind": 1, "client": 3, "plan": 9, "devices": 1, "dispatched_ns": 1_000, "ready_ns": 1_000}
    rows = [{**call, "order": order, "launched_ns": 1_000, "ended_ns": 9_000 * order} for order in (1, 2)]
    plans = {0: {9: pb.TracedProgram(client=3, name="p", nodes=[pb.TracedProgram.Node(name="f", maker=-1)])}}
    orders = [{"order": 1, "client": 3, "submitted_ns": 500, "ordered_ns": 900}]
    made = Timeline(recorded(rows, orders, plans=plans, dropped={0: 2, -1: 1}, failure=ValueError("no room")))
    for name in ("trace.json", "trace.json.gz"):
        TraceFile(tmp_path / name).write(made)
        read = trace_file.read(tmp_path / name)
        for what in ("about", "begin_ns", "end_ns", "computations", "transfers", "waits", "runs"):
            assert getattr(read, what) == getattr(made, what), what
        assert sorted(read.remarks) == sorted(made.remarks) and len(made.remarks) == 3


def test_records_of_another_machine_are_put_on_the_controllers_clock() -> None:
    ahead = 7_000_000_000_000
    row = np.zeros(1, trace_records.RUN)
    row["kind"], row["client"], row["order"], row["devices"] = 1, 3, 9, 1
    row["dispatched_ns"], row["launched_ns"], row["ended_ns"] = ahead + 2_000, ahead + 3_000, ahead + 4_000
    found = Recorded()
    found.add(pb.TracePart(host=-1, about=pb.TraceAbout(devices_per_host=1), now_ns=1_000))
    found.add(pb.TracePart(host=1, records=row.tobytes(), clock_ahead_ns=ahead))
    found.add(pb.TracePart(host=-1, about=pb.TraceAbout(devices_per_host=1), now_ns=9_000))
    assert (found.begin_ns, found.end_ns) == (1_000, 9_000)
    moved = np.frombuffer(found.runs[1][0], trace_records.RUN)[0]
    assert (moved["dispatched_ns"], moved["ready_ns"], moved["launched_ns"], moved["ended_ns"]) == (
        2_000,
        0,
        3_000,
        4_000,
    )
    assert (moved["client"], moved["order"], moved["devices"]) == (3, 9, 1)


def test_waits_and_their_reasons() -> None:
    orders = [
        {"order": 7, "client": 3, "waits": 1 | 2, "submitted_ns": 2_000, "next_ns": 40_000, "ordered_ns": 90_000,
         "granted_ns": 150_000},
        {"order": 0, "client": 4, "waits": 4, "outcome": 3, "next_ns": 50_000},
    ]  # fmt: skip
    runs = [
        {"kind": 0, "client": 3, "order": 7, "dispatched_ns": 200_000, "ended_ns": 900_000},
        {"kind": 1, "client": 3, "order": 7, "devices": 1, "dispatched_ns": 200_000, "ready_ns": 300_000,
         "launched_ns": 400_000, "ended_ns": 900_000, "waited_for": 1, "throttled_by": 2},
    ]  # fmt: skip
    found = list(events(Timeline(recorded(runs, orders))))
    reasons = {
        (each["args"]["reason"], each["ts"], each["dur"]) for each in found if each.get("cat") == "wait"
        and "reason" in each["args"]
    }  # fmt: skip
    assert reasons == {
        ("its client's earlier runs", 1.0, 38.0),
        ("its turn, memory", 39.0, 50.0),
        ("room at its hosts", 89.0, 60.0),
        ("its hosts to read it", 149.0, 50.0),
        ("an earlier launch on its device", 199.0, 100.0),
        ("memory", 299.0, 100.0),
    }
    assert any(each["name"] == "waits for its client's runs under way" for each in found)


def test_colours_differ_by_client() -> None:
    timeline = Timeline(recorded([]))
    labels = [timeline.label(client) for client in range(60)]
    without_digits = {"".join(each for each in label if not each.isdigit()) for label in labels}
    assert len(without_digits) == 60  # Perfetto colours by the name without its digits


def test_the_records_are_as_wide_as_the_core_writes_them() -> None:
    assert trace_records.RUN.itemsize == 80
    assert trace_records.ORDER.itemsize == 56
