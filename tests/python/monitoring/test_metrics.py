"""Metrics: what Prometheus reads of a cluster, also while clients and hosts come and go; and whether it is healthy."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from control_clusters import eventually
from prometheus_client.parser import text_string_to_metric_families

from pathways.cli import main
from pathways.cluster.beside_process import BesideProcess
from pathways.cluster.launcher import LocalClusterHandle
from pathways.cluster.snapshots import Snapshots, device_use
from pathways.monitoring import client_labels
from pathways.monitoring.client_labels import MOST, OTHER, UNNAMED, ClientLabels
from pathways.monitoring.local_server import Request
from pathways.monitoring.metric_table import METRICS
from pathways.monitoring.metrics import UP, UP_MEANING, ClusterMetrics, resources
from pathways.protocol import control_pb2 as pb

SECOND = 10**9


def stats(busy: dict[int, int] | None, names: dict[int, str], pid: int = 5) -> pb.StatsReply:
    """Of one host with one device, number 4: the time for which it was busy for each client, if it has answered."""
    counts = None if busy is None else {"busy": [{"client": each, "busy_ns": ns} for each, ns in busy.items()]}
    return pb.StatsReply(
        hosts=[{"host": 0, "pid": pid, "devices": [4], "counts": counts}],
        clients=[{"client": client, "name": name} for client, name in names.items()],
    )


def test_a_counter_only_grows() -> None:
    """While clients of one name come and go, a host is started again, and a host is late to answer."""
    labels, seen = ClientLabels(), 0.0
    for expected, look in (
        (1, stats({1: SECOND}, {1: "a"})),
        (3, stats({1: SECOND, 2: 2 * SECOND}, {1: "a", 2: "a"})),
        (3, stats({2: 2 * SECOND}, {2: "a"})),  # one has left
        (3, stats(None, {2: "a"})),  # late
        (4, stats({2: 3 * SECOND}, {2: "a"})),
        (5, stats({2: SECOND}, {2: "a"}, pid=6)),  # started again
        (5, stats({}, {})),
    ):
        labels.add(look)
        assert dict(labels.busy_seconds()) == {("a", 4): expected} and expected >= seen
        seen = expected


def test_a_late_host_is_no_busy_one() -> None:
    """In `pathways top`, too."""
    late, after = stats(None, {1: "a"}), stats({1: 9 * SECOND}, {1: "a"})
    assert device_use(late, after, 1.0) == {}
    assert device_use(pb.StatsReply(), after, 10.0) == {4: {1: 0.9}}  # it has started meanwhile


def test_labels_are_bounded() -> None:
    now = [0.0]
    labels = ClientLabels(lambda: now[0])
    for first in range(0, 3 * MOST, 10):
        numbers = range(first, first + 10)
        names = {each: f"run-{each}" for each in numbers} | {1000: "", 1001: "x" * 1000, 1002: "a\nb\x00"}
        labels.add(stats(dict.fromkeys(names, SECOND), names))
        now[0] += 1
    known = {label for (label, _), _ in labels.busy_seconds()}
    assert {OTHER, UNNAMED, "x" * 64, "a?b?", "run-0"} <= known and len(known) == MOST + 1
    now[0] += client_labels.KEPT_S + 1
    labels.add(stats({}, {7: "new"}))
    assert list(labels.busy_seconds()) == [] and labels.label(7) == "new" and labels.label(1) == OTHER


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"pathways_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.meaning.endswith(".")


def test_the_page_shows_all(root: pathlib.Path) -> None:
    rows = re.findall(r"^\| `(pathways_.*) \|$", (root / "docs/observing.md").read_text(encoding="utf-8"), re.MULTILINE)
    cells = [(UP, "gauge", "", "", UP_MEANING)]
    cells += [(each.name, each.kind, each.unit, ", ".join(each.labels), each.meaning) for each in METRICS]
    assert [row.replace("| |", "|  |").replace("| |", "|  |") for row in rows] == [
        f"{name}` | {' | '.join(rest)}" for name, *rest in cells
    ]


# -- a cluster -------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(own: LocalClusterHandle) -> Iterator[tuple[str, dict[str, str]]]:
    """`pathways metrics` for a cluster of doubles: where it is, and the headers that it wants."""
    with BesideProcess("metrics", [own.address, "--port", "0"], 1) as process:
        url, _, secret = process.lines[0].partition("  Authorization: ")
        yield url.removesuffix("/metrics"), {"Authorization": secret}


def fetch(url: str, headers: dict[str, str]) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def values(text: str) -> dict[str, float]:
    """By name and labels."""
    return {
        f"{sample.name}{sorted(sample.labels.items()) if sample.labels else ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_prometheus_reads(own: LocalClusterHandle, served: tuple[str, dict[str, str]]) -> None:
    url, headers = served
    assert fetch(f"{url}/metrics", {})[0] == 401
    status, text = fetch(f"{url}/metrics", headers)
    assert status == 200
    if promtool := shutil.which("promtool"):
        done = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr + done.stdout
    found = values(text)
    assert found[UP] == 1 and found["pathways_hosts[('state', 'up')]"] == 2
    device = "[('device', '1'), ('host', '1'), ('island', '0')]"
    assert found[f"pathways_device_memory_bytes{device}"] == 1 << 20
    assert found[f"pathways_device_memory_limit_bytes{device}"] == 1 << 30
    assert fetch(f"{url}/healthz", {}) == (200, "ok: 2 of 2 hosts are up\n")

    os.kill(own.pids()["host 0"], signal.SIGKILL)

    def is_counted() -> bool:
        found = values(fetch(f"{url}/metrics", headers)[1])
        return found["pathways_hosts_lost_total"] == 2 and found["pathways_hosts[('state', 'up')]"] == 2

    eventually(is_counted, "the island was lost, and is back")
    own.close()
    eventually(lambda: fetch(f"{url}/healthz", {})[0] == 503, "nobody is there")
    assert "no cluster answers" in fetch(f"{url}/healthz", {})[1]
    assert values(fetch(f"{url}/metrics", headers)[1]) == {UP: 0}


def test_one_answer_for_many(own: LocalClusterHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of callers is no flood for the controller."""
    with Snapshots(own.address) as snapshots:
        asked, stats_of = [], snapshots._stats
        monkeypatch.setattr(snapshots, "_stats", lambda: asked.append(1) or stats_of())
        monkeypatch.setattr("pathways.monitoring.metrics.MAX_AGE_S", 3600.0)
        served = resources(snapshots, ClusterMetrics(snapshots))
        for each in served.values():
            for _ in range(20):
                assert each.answer(Request({}, "")).status == 200
        assert len(asked) == 1


def test_a_reader_finds_the_next_cluster(own: LocalClusterHandle) -> None:
    """It keeps its connection, and opens another one when that has broken."""
    with Snapshots(own.address) as snapshots:
        first = snapshots.look()
        assert snapshots.look(3600.0) is first
        assert snapshots._open is not None
        snapshots._way = type(snapshots._way)(snapshots._way.control, "the secret of a connection that has broken")
        assert snapshots.look().stats.address == own.address


def test_opentelemetry_gets_the_same(own: LocalClusterHandle) -> None:
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    with Snapshots(own.address) as snapshots:
        provider = importlib.import_module("pathways.monitoring.telemetry").provide(ClusterMetrics(snapshots), reader)
        found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        provider.shutdown()
    by_name: dict[str, Any] = {metric.name: metric for metric in found}
    assert by_name["pathways_device_memory_bytes"].unit == "By"
    points = by_name["pathways_device_memory_bytes"].data.data_points
    assert [(dict(each.attributes)["device"], each.value) for each in points] == [("0", 1 << 20), ("1", 1 << 20)]
    assert by_name["pathways_hosts_lost"].data.is_monotonic


def test_what_is_missing_is_told(own: LocalClusterHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["metrics", own.address, *arguments])
        assert done.exit_code == 1, done.output
        return done.output

    assert "without TLS and without a role" in run("--port", "0.0.0.0:0")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics.export", None)
    assert "pip install opentelemetry-sdk" in run("--port", "0", "--otlp")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "pip install 'pathways-jax[metrics]'" in run("--port", "0")


def test_up_serves_them(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    environment = {**os.environ, "PATHWAYS_SECRET_FILE": str(secret)}
    command = [sys.executable, "-m", "pathways", "up", "--platform", "cpu", "--metrics", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as up:
        try:
            assert up.stdout is not None
            up.stdout.readline()
            url = up.stdout.readline().split()[0]
            headers = {"Authorization": f"Bearer {secret.read_text()}"}
            assert values(fetch(url, headers)[1])[UP] == 1
        finally:
            up.terminate()
            assert up.wait(60) == 0
    with pytest.raises(OSError):  # it has ended, too
        fetch(url, headers)
