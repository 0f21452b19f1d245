"""What tenants and operators give that makes no sense, or that looks odd and does: options, numbers, names of files.

Each refusal names the argument, says what was expected and what came. Quotas and their effects are in
test_client_limits.py, traces in test_traces.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from trace_cases import recorded

import pathways as pw
from pathways.cli import main
from pathways.cluster.launcher import start_local_cluster
from pathways.cluster.operator import client_request, limit_request
from pathways.cluster.trace_timeline import Timeline
from pathways.controller.client_limits import granted
from pathways.process.config import ClusterOptions
from pathways.protocol import control_pb2 as pb

MIB = 1 << 20


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_weight": 0}, "max_weight= is a number from 1 to 1000, got 0"),
        ({"max_weight": 0.5}, "max_weight= is a number from 1 to 1000, got 0.5"),
        ({"max_weight": float("nan")}, "max_weight= is a number"),
        ({"max_priority": -1}, "max_priority= is an integer from 0 to 1000000, got -1"),
        ({"max_priority": 1.5}, "max_priority= is an integer"),
        ({"client_memory": "1GiB"}, "client_memory= is a number of bytes from 1 on, got '1GiB'"),
        ({"client_runs": 16_385}, "client_runs= is a number of runs from 1 to 16384, got 16385"),
        ({"checkpoint_root": ""}, "checkpoint_root= expects a folder that exists, got ''"),
        ({"checkpoint_root": 3}, "checkpoint_root= expects a folder that exists, got 3"),
        ({"checkpoint_root": b"/"}, "checkpoint_root= expects a folder that exists, got b'/'"),
    ],
)
def test_options_of_a_cluster_are_named_as_they_were_given(given: dict[str, Any], words: str) -> None:
    with pytest.raises(pw.errors.OptionError, match=re.escape(words)):
        start_local_cluster(platform="cpu", **given)


@pytest.mark.parametrize("name", ["policy", "when_full"])
def test_a_choice_that_is_no_text(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is one of"):
        pw.LocalCluster(**{name: ["share"]})  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [pw.LocalCluster, pw.RayCluster])
def test_every_field_of_a_cluster_has_its_type(target: Any) -> None:
    """When the cluster is asked for, and not when it is started."""
    for field in dataclasses.fields(target):
        if field.name in ("policy", "when_full"):  # see above
            continue
        wrong = [[1], object(), 1j] + [True] * (field.type != "bool") + ["1"] * ("str" not in field.type)
        wrong += [b"/"] + [3] * (re.match("bool|str|Mapping", field.type) is not None)
        for value in wrong + [None] * ("None" not in field.type):
            with pytest.raises(pw.errors.OptionError) as refusal:
                target(**{field.name: value})
            words = f"{target.__name__} expects {field.name}= of type {field.type}, got {value!r}"
            assert str(refusal.value) == words
    target(islands=np.int64(2), client_memory=None, max_weight=np.float32(2), checkpoint_root=pathlib.Path("/"))


def test_a_number_of_islands_that_is_a_text() -> None:
    with pytest.raises(ValueError, match="islands must be a positive int, got '2'"):
        start_local_cluster("2", platform="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"memory": 32 * MIB + 1}, f"memory={32 * MIB} at most, got memory={32 * MIB + 1}"),
        ({"bytes": 4 * MIB + 1}, f"bytes={4 * MIB} at most, got bytes={4 * MIB + 1}"),
    ],
)
def test_one_more_than_allowed_shows_both_numbers(limits: dict[str, int], words: str) -> None:
    request = pb.JoinRequest(limits=pb.ClientLimits(**limits))
    with pytest.raises(pw.errors.OptionError, match=re.escape(words)):
        granted(request, ClusterOptions(client_memory=32 * MIB))


def test_a_weight_just_above_what_is_allowed() -> None:
    with pytest.raises(pw.errors.OptionError, match=r"weight=10 at most, got weight=10\.0000001"):
        granted(pb.JoinRequest(weight=10.0000001), ClusterOptions(max_weight=10))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"priority": 10**20}, "priority= is an integer from -1000000 to 1000000"),
        ({"runs": 10**20}, "runs= is a number of runs from 1 to 16384"),
        ({"memory": 1 << 80}, "memory= is a number of bytes from 1 on"),
        ({"weight": 0}, "weight= is a number from 0.001 to 1000, got 0"),
        ({"weight": 10**400}, "weight= is a number from 0.001 to 1000, got 1000"),
    ],
)
def test_a_limit_out_of_range_says_the_range(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(pw.errors.OptionError, match=re.escape(words)) as caught:
        limit_request(1, changes)
    assert len(str(caught.value)) < 300


def test_zero_takes_a_quota_away() -> None:
    assert limit_request(1, {"memory": 0, "weight": 2}) == pb.LimitRequest(client=1, memory=0, weight=2)


def test_numbers_of_numpy_are_numbers() -> None:
    assert client_request(pb.ResumeRequest, np.int64(7)).client == 7
    with pytest.raises(pw.errors.ClusterClosedError, match="no client's number"):
        client_request(pb.ResumeRequest, np.bool_(True))


def test_limits_of_numpy(embedded_cluster: Any) -> None:
    # An array is no weight; it is also not compared with "none".
    with pytest.raises(pw.errors.OptionError, match="weight= is a number"):
        embedded_cluster.limit(weight=np.array([1, 2]))
    with pytest.raises(pw.errors.OptionError, match=r"weight= is a number from 0\.001 to 1000, got 'none'"):
        embedded_cluster.limit(weight="none")
    assert pw.connect(max_in_flight=np.int64(1024)) is embedded_cluster  # type: ignore[arg-type]
    with pytest.raises(pw.errors.OptionError, match=r"without memory=, got memory=5"):
        pw.connect(memory=5)


@pytest.mark.parametrize(
    ("command", "option"), [("clients", "--seconds"), ("top", "--interval")], ids=["clients", "top"]
)
def test_a_time_that_is_no_number(command: str, option: str) -> None:
    result = CliRunner().invoke(main, [command, "unix:/nowhere", option, "nan"])
    assert result.exit_code == 2 and option in result.output and "nan" in result.output


@pytest.mark.parametrize("plot", ["trace.docx", "", "missing/trace.png", "trace.json"])
def test_a_picture_that_cannot_be(plot: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["trace", "unix:/nowhere", "--out", "trace.json", "--plot", plot])
    assert result.exit_code == 1, result.output
    assert "picture" in result.output and "unix:/nowhere" not in result.output  # before the cluster is asked
    assert list(tmp_path.iterdir()) == []


def test_a_picture_in_a_folder_with_a_dot(tmp_path: pathlib.Path) -> None:
    from pathways.cli.trace_plot import check_path

    folder = tmp_path / "a.b"
    folder.mkdir()
    for name in ("trace", "trace.PNG", "trace.svg"):
        check_path(str(folder / name))


def test_a_trace_goes_where_a_link_leads(embedded_cluster: Any, tmp_path: pathlib.Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "latest.json"
    target.write_text("old")
    link.symlink_to(target)
    with pw.trace(link, cluster=embedded_cluster):
        pass
    assert link.is_symlink() and json.loads(target.read_text())["traceEvents"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest.json", "target.json"]


def test_a_trace_to_a_name_with_a_nul(embedded_cluster: Any) -> None:
    with pytest.raises(pw.errors.TraceFileError, match="embedded null byte"), pw.trace("a\0b"):
        pytest.fail("it began")


def test_a_trace_of_what_is_no_cluster(tmp_path: pathlib.Path) -> None:
    with pytest.raises(pw.errors.OptionError, match=r"cluster= what pw\.connect returned, got 3"):
        pw.trace(tmp_path / "trace.json", cluster=3)  # type: ignore[arg-type]


def test_a_picture_of_many_clients_with_odd_names(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No letter is warned of (a warning is an error), and the legend hides no row."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from pathways.cli.trace_plot import draw

    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    call = {"kind": 1, "devices": 1, "dispatched_ns": 1_000, "ready_ns": 1_000}
    timeline = Timeline(
        recorded(
            [{**call, "client": each, "order": each + 1, "launched_ns": 1_000, "ended_ns": 9_000} for each in range(14)]
        )
    )
    timeline.about.clients.update({each: "名🚀 " + "x" * 7 * each for each in range(14)})
    draw(timeline, str(tmp_path / "trace.png"))
    (figure,) = drawn
    (axis,) = figure.axes
    with warnings.catch_warnings(action="ignore"):
        figure.canvas.draw()
    legend = axis.get_legend().get_window_extent()
    assert legend.y0 >= axis.get_window_extent().y1
    assert legend.width < 1.2 * figure.bbox.width


def test_what_the_terminal_cannot_show() -> None:
    code = "from pathways.process.console import standard_output; standard_output().print('a 名 b')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "a ? b\n"), done.stderr


@pytest.fixture
def recorder(local_cluster: Any, tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """`pathways trace` for a minute; it records now."""
    command = [sys.executable, "-m", "pathways", "trace", local_cluster.address, "--seconds", "60"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "trace.json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None and "recording" in process.stderr.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_recording_that_is_ended_early_is_written(
    recorder: subprocess.Popen[str], number: int, tmp_path: pathlib.Path
) -> None:
    os.kill(recorder.pid, number)
    output, remarks = recorder.communicate(timeout=60)
    assert recorder.returncode == 0 and "ended early" in remarks, (output, remarks)
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
