"""`program.schedule_plot()`: what it says before a run and after it, as data, as text and as a picture."""

from __future__ import annotations

import json
import pathlib
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_cases import expected, inside, network

import pathways as pw
from pathways import errors
from pathways.cluster import trace_file
from pathways.compiler.lengths import Lengths
from pathways.process.config import PROTOCOL_VERSION
from pathways.protocol import trace_records

GIVEN = {"F": 0.01, "B": 0.02}
SIZE = 8

PLOT_1F1B = """\
train: 1F1B (plan, from given lengths)
bubble 27.3 %; the schedule's own bound is 27.3 %
device {0} |F0F1F2F3............B0<<F4B1<<F5B2<<F6B3<<F7B4<<..B5<<..B6<<..B7<<|
device {1} |..F0F1F2........B0<<F3B1<<F4B2<<F5B3<<F6B4<<F7B5<<..B6<<..B7<<....|
device {2} |....F0F1....B0<<F2B1<<F3B2<<F4B3<<F5B4<<F6B5<<F7B6<<..B7<<........|
device {3} |......F0B0<<F1B1<<F2B2<<F3B3<<F4B4<<F5B5<<F6B6<<F7B7<<............|
{pad}            0                                                             330 ms
F forward, B backward, . bubble"""


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def slices_apart(cluster: Any, sizes: Sequence[int]) -> list[Any]:
    """Slices of so many devices each that share none, on a cluster where other tests may have left some."""
    devices = pw.make_virtual_device_set(cluster)
    slices: dict[int, Any] = {}
    crowded = []  # held until the end: devices with more slices are taken later
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):  # so that room is left beside each other
        taken = {device for each in slices.values() for device in each.devices}
        new = devices.add_slice(devices=sizes[n])
        while taken.intersection(new.devices):
            crowded.append(new)
            assert len(crowded) < 100, f"no {sizes[n]} devices beside {taken}"
            new = devices.add_slice(devices=sizes[n])
        slices[n] = new
    return [slices[n] for n in range(len(sizes))]


class Case:
    """A training step over slices of some devices each, its arguments, and the names of its slices."""

    def __init__(self, cluster: Any, sizes: list[int], microbatches: int, **options: Any) -> None:
        self.slices = slices_apart(cluster, sizes)
        stages = [pw.jit(layer, devices=s, name=f"f{n}") for n, s in enumerate(self.slices)]
        loss = pw.jit(lambda y: jnp.sum(y**2), devices=self.slices[-1], name="loss")
        self.train = pw.program(inside(network(stages, loss)), name="train", **options)
        self.arguments = (
            [pw.device_put(np.eye(SIZE, dtype=np.float32), s) for s in self.slices],
            list(np.ones((microbatches, 2, SIZE), np.float32)),
        )

    def plot(self, **options: Any) -> Any:
        return self.train.schedule_plot(*self.arguments, **options)

    def run(self) -> None:
        jax.tree.map(lambda x: x.block_until_ready(), self.train(*self.arguments))


@pytest.fixture
def two_hosts() -> Iterator[Any]:
    """A cluster of two hosts of two devices each, on which nobody else has slices: those of a test share no device.

    With a platform it is not equal to the target of `local_cluster`, which `connect` would give again.
    """
    with pw.connect(pw.LocalCluster(1, 2, 2, platform="cpu")) as cluster:
        assert not cluster.slices
        yield cluster


@pytest.fixture
def case(embedded_cluster: Any) -> Callable[..., Case]:
    return lambda *args, **options: Case(embedded_cluster, *args, **options)


def units(plot: Any) -> list[list[str]]:
    """Per row the units in order; a unit of several computations counts once."""
    rows = []
    for row in plot.rows:
        letters = [
            f"{span.kind[0].upper()}{span.microbatch}" for span in row.spans if span.kind in ("forward", "backward")
        ]
        rows.append([unit for n, unit in enumerate(letters) if not n or letters[n - 1] != unit])
    return rows


def test_a_plan_with_given_lengths_as_text(two_hosts: Any) -> None:
    of = Case(two_hosts, [1] * 4, 8, schedule="1F1B")
    plot = of.plot(lengths=GIVEN)
    assert [row.devices for row in plot.rows] == [(n,) for n in range(4)]
    names = [f"{row.devices[0]} {row.slices[0]}" for row in plot.rows]
    width = max(map(len, names))  # slices are numbered: the next one after s9 has a longer name
    names = [name.ljust(width) for name in names]
    added = width - len("0 s0")
    assert plot.text(80 + added) == PLOT_1F1B.format(*names, pad=" " * added)
    assert str(plot) == plot.text() and max(map(len, str(plot).splitlines())) <= 80
    assert (plot.program, plot.schedule, plot.unit) == ("train", "1F1B", "s")
    assert plot.bubble == pytest.approx(100 * 3 / 11) and plot.bound == pytest.approx(plot.bubble)
    assert plot.end == pytest.approx(0.33)
    assert plot.lengths == (Lengths(0.01, 0.02),)
    assert [row.slices for row in plot.rows] == [(s.mesh_spec.name,) for s in of.slices]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_rows_have_the_schedule_s_order_and_its_formula(case: Callable[..., Case], schedule: str) -> None:
    of = case([1, 1, 1], 5, schedule=schedule, lengths=GIVEN)
    plot = of.plot()
    assert units(plot) == expected(schedule, 3, 5)
    assert plot.bubble == pytest.approx(100 * 2 / 7) and plot.bound == pytest.approx(100 * 2 / 7)
    for row in plot.rows:
        assert all(a.end <= b.start + 1e-12 for a, b in zip(row.spans, row.spans[1:], strict=False))


def test_transfers_take_their_time_and_the_bound_does_not(case: Callable[..., Case]) -> None:
    plot = case([1, 1], 2, schedule="GPipe").plot(lengths={**GIVEN, "T": 0.004})
    assert plot.end == pytest.approx(0.09 + 2 * 0.004)
    assert plot.bound == pytest.approx(100 / 3) and plot.bubble > plot.bound
    assert all(arrow.end - arrow.start == pytest.approx(0.004) for arrow in plot.transfers)
    there = {(arrow.source, arrow.target) for arrow in plot.transfers}
    assert there == {(0, 1), (1, 0)}
    assert "  sends" in plot.text() and plot.text().endswith("- transfer")


def test_without_lengths_flops_count(case: Callable[..., Case]) -> None:
    plot = case([1, 1], 4, schedule="1F1B").plot()
    assert plot.unit == "flops" and "from the flops of its computations" in plot.text()
    assert len(plot.lengths) == 2 and all(each.forward >= 2 * 2 * SIZE * SIZE for each in plot.lengths)
    assert plot.lengths[1].backward > 1.5 * plot.lengths[1].forward  # two products, and one on the first stage
    assert plot.lengths[0].backward < 1.5 * plot.lengths[0].forward
    assert plot.bound is not None and 0 < plot.bound <= plot.bubble < 100


def test_a_program_without_flops_has_assumed_lengths(embedded_cluster: Any) -> None:
    devices = pw.make_virtual_device_set(embedded_cluster)
    one, two = (
        pw.jit(lambda x, n=n: jnp.roll(x, 1), devices=devices.add_slice(devices=1), name=f"f{n}") for n in (0, 1)
    )
    program = pw.program(lambda xs: [two(one(x)) for x in xs], schedule="GPipe", name="rolls")
    plot = program.schedule_plot([np.ones(4, np.int8)] * 3)
    assert (plot.unit, plot.end, plot.bound) == ("forward steps", 4.0, pytest.approx(25.0))
    assert "plan; forward = 1, backward = 2" in plot.text() and "4 forward steps" in plot.text()


def test_slices_of_several_devices_are_one_row_and_count_as_many(case: Callable[..., Case]) -> None:
    plot = case([2, 1], 3, schedule="GPipe").plot(lengths=[{"F": 1, "B": 1}, {"F": 2, "B": 2}])
    assert [len(row.devices) for row in plot.rows] == [2, 1]
    # The pipeline takes 1 + 3 * 4 + 1; two devices work 6, one works 12.
    assert plot.bubble == pytest.approx(100 * (1 - (2 * 6 + 12) / (3 * 14)))


def test_slices_side_by_side_and_a_value_that_passes_through_what_is_no_step(embedded_cluster: Any) -> None:
    slices = slices_apart(embedded_cluster, [1] * 4)
    f = [pw.jit(layer, devices=s, name=f"f{n}") for n, s in enumerate(slices)]

    def loss(ws: Any, x: Any) -> Any:
        h = f[0](x, ws[0])
        return jnp.sum(f[3](f[1](h, ws[1]) + pw.device_put(f[2](h, ws[2]), slices[1]), ws[3]))

    step = pw.program(jax.value_and_grad(lambda ws, xs: sum(loss(ws, x) for x in xs)), schedule="1F1B")
    ws, xs = [np.eye(SIZE, dtype=np.float32)] * 4, [np.ones((2, SIZE), np.float32)] * 3
    plot = step.schedule_plot(ws, xs, lengths={"F": 1, "B": 2})
    assert units(plot)[1] == units(plot)[2] and len(plot.rows) == 4
    assert plot.bound == pytest.approx(plot.bubble)  # transfers take no time, and nothing else is in the way
    assert plot.end == 15


def test_a_pipeline_without_backward_steps(embedded_cluster: Any) -> None:
    f = [pw.jit(layer, devices=s, name=f"f{n}") for n, s in enumerate(slices_apart(embedded_cluster, [1] * 3))]
    infer = pw.program(lambda ws, xs: [network(f, lambda y: y)(ws, x) for x in xs], schedule="auto")
    ws, xs = [np.eye(SIZE, dtype=np.float32)] * 3, [np.ones((2, SIZE), np.float32)] * 4
    plot = infer.schedule_plot(ws, xs, lengths=GIVEN)
    assert units(plot) == [["F0", "F1", "F2", "F3"]] * 3
    assert plot.bubble == pytest.approx(100 * 2 / 6) and plot.bound == pytest.approx(plot.bubble)


def test_without_a_schedule_it_is_the_text_s_order(case: Callable[..., Case]) -> None:
    plot = case([1, 1], 2).plot(lengths=GIVEN)
    assert plot.schedule == "none" and plot.bound is None and plot.lengths == ()
    assert "in the order of its text" in plot.text() and "without a schedule it has no bound" in plot.text()
    assert plot.bubble == pytest.approx(50.0)  # one stage after the other
    assert {span.kind for row in plot.rows for span in row.spans} >= {"forward", "backward"}
    assert xml.etree.ElementTree.fromstring(plot.svg()) is not None
    with pytest.raises(errors.OptionError, match="which has no schedule and so no stages, got 2 items"):
        case([1, 1], 2).plot(lengths=[GIVEN, GIVEN])


def test_the_picture_has_each_computation_once(case: Callable[..., Case], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plot.svg"
    plot = case([1, 1], 3, schedule="1F1B").plot(lengths=GIVEN, path=path)
    assert path.read_text() == plot.svg() == plot._repr_svg_()
    space = "{http://www.w3.org/2000/svg}"
    root = xml.etree.ElementTree.fromstring(path.read_text())
    labels = [each.text for each in root.iter(f"{space}text")]
    for unit in ("F0", "F1", "F2", "B0", "B1", "B2"):
        assert labels.count(unit) == 2, unit
    told = [each.text or "" for each in root.iter(f"{space}title")]
    assert sum("forward, microbatch 1" in text for text in told) == 2
    assert len(list(root.iter(f"{space}circle"))) == len(plot.transfers) == 6
    for box in root.iter(f"{space}rect"):
        assert float(box.get("width", 0)) > 0 and float(box.get("x", 0)) >= 0


def test_names_are_escaped_and_long_ones_cut(embedded_cluster: Any) -> None:
    devices = pw.make_virtual_device_set(embedded_cluster)
    f = pw.jit(lambda x: x @ x, devices=devices.add_slice(devices=1), name="<f&>")
    plot = pw.program(lambda x: f(x), name="<a&b>").schedule_plot(np.ones((2, 2), np.float32))
    assert "&lt;a&amp;b&gt;" in plot.svg() and xml.etree.ElementTree.fromstring(plot.svg()) is not None
    assert plot.text(40).splitlines()[0].startswith("<a&b>")
    assert all(len(line) <= 40 for line in plot.text(40).splitlines())


def test_a_program_of_transfers_only_has_an_empty_plot(embedded_cluster: Any) -> None:
    devices = pw.make_virtual_device_set(embedded_cluster)
    slice_ = devices.add_slice(devices=1)
    plot = pw.program(lambda x: pw.device_put(x, slice_)).schedule_plot(np.ones(2, np.float32))
    assert (plot.end, plot.bubble, plot.bound) == (0.0, 0.0, None)
    assert plot.text() and xml.etree.ElementTree.fromstring(plot.svg()) is not None


def test_bad_input(case: Callable[..., Case], tmp_path: pathlib.Path) -> None:
    of = case([1, 1], 2, schedule="GPipe")
    for options, words in (
        ({"path": tmp_path / "plot.png"}, "expected path= like 'schedule.svg'"),
        ({"lengths": 3}, "lengths: expected"),
        ({"lengths": [GIVEN] * 3}, "one for each of 2 stages, got 3 items"),
        ({"lengths": GIVEN, "measured": "x.json"}, "takes lengths= or measured=, got both"),
        ({"measured": 3}, "measured: expected a file of pw.trace, or a pw.trace, got 3"),
    ):
        with pytest.raises(errors.OptionError, match=words):
            of.plot(**options)
    with pytest.raises(errors.OptionError, match="at least 40 columns wide, got width=39"):
        of.plot(lengths=GIVEN).text(39)
    names = ("absent", "no", "other", "old", "newer", "garbled")
    absent, no_json, other, old, newer, garbled = (tmp_path / f"{name}.json" for name in names)
    no_json.write_text("{")
    other.write_text('{"traceEvents": [{"ph": "X", "cat": "computation"}]}')
    for path, about in (
        (old, {"cluster": "", "remarks": []}),
        (newer, {"protocol": PROTOCOL_VERSION + 1, "records": ""}),
        (garbled, {"protocol": PROTOCOL_VERSION, "records": "AAAA"}),
    ):
        path.write_text(json.dumps({"otherData": about, "traceEvents": []}))
    for path, words in (
        (absent, "cannot be read: No such file"),
        (no_json, "is no trace"),
        (other, "KeyError: 'otherData'"),
        (old, "another release of pathways wrote .*, without its records; .*record it again"),
        (newer, f"with protocol {PROTOCOL_VERSION + 1}; this one reads protocol {PROTOCOL_VERSION}: record it again"),
        (garbled, "is no trace that pw.trace wrote"),
    ):
        with pytest.raises(errors.TraceFileError, match=words):
            of.plot(measured=path)


# ---------------------------------------------------------------------------------------------------------- measured


@pytest.mark.slow
def test_a_measured_run_on_two_hosts(two_hosts: Any, tmp_path: pathlib.Path) -> None:
    of = Case(two_hosts, [1, 1, 2], 4, schedule="1F1B")
    of.run()
    for attempt in range(3):  # on a busy machine, XLA's threads may begin two calls of a device in the other order
        tracing = pw.trace(tmp_path / f"step{attempt}.json.gz", cluster=two_hosts)
        with tracing as same:
            of.run()
            of.run()
        assert same is tracing
        plot = of.plot(measured=tracing)
        if units(plot) == expected("1F1B", 3, 4):
            break
    assert f"measured, run 2 of 2 in step{attempt}.json.gz" in plot.source
    assert plot.unit == "s" and plot.end > 0 and plot.bound is not None
    assert 0 <= plot.bubble <= 100 and 0 <= plot.bound <= 100
    assert units(plot) == expected("1F1B", 3, 4)
    calls = {node.name for node in of.train.lower(*of.arguments).logical.nodes if node.kind.value == "call"}
    assert {span.name for row in plot.rows for span in row.spans} == calls
    assert sorted(device for row in plot.rows for device in row.devices) == [0, 1, 2, 3]
    assert {(arrow.source, arrow.target) for arrow in plot.transfers} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert all(arrow.start <= arrow.end for arrow in plot.transfers)
    assert len(plot.lengths) == 3 and all(each.forward > 0 and each.backward > 0 for each in plot.lengths)
    again = of.plot(lengths=plot.lengths)  # what was measured may be given
    assert again.lengths == plot.lengths
    assert xml.etree.ElementTree.fromstring(plot.svg()) is not None
    with pytest.raises(errors.TraceFileError, match="no whole run of program 'train' for these arguments and this"):
        Case(two_hosts, [1, 1, 2], 5, schedule="1F1B").plot(measured=tracing)
    other = pw.program(lambda x: x + 1, name="other")
    with pytest.raises(errors.TraceFileError, match=r"no run of program 'other'; it has 'train' \(2 runs\)"):
        other.schedule_plot(of.arguments[0][0], measured=tracing.path)


@pytest.mark.slow
def test_a_run_that_failed_or_is_not_over_is_not_plotted(two_hosts: Any, tmp_path: pathlib.Path) -> None:
    of = Case(two_hosts, [1, 1], 2, schedule="GPipe")
    of.run()
    path = tmp_path / "step.json"
    with pw.trace(path, cluster=two_hosts):
        of.run()
    assert of.plot(measured=path).source.startswith("measured, run 1 of 1")
    for name, value in (("ended_ns", 0), ("has_failed", 1)):
        timeline = trace_file.read(path)
        host, chunks = next(iter(timeline.recorded.runs.items()))
        rows = np.frombuffer(b"".join(chunks), trace_records.RUN).copy()
        rows[name][np.flatnonzero(rows["kind"] == trace_records.Kind.CALL)[-1]] = value
        timeline.recorded.runs[host] = [rows.tobytes()]
        broken = tmp_path / f"{name}.json.gz"
        trace_file.TraceFile(broken).write(timeline)
        with pytest.raises(errors.TraceFileError, match="only 1 others; wait for the results within the trace"):
            of.plot(measured=broken)
