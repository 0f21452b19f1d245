"""The dashboard: what goes to browsers, and what one shows of a training, a flood and a lost machine.

Nobody is slowed: a browser that is slow, or stays open for ever, costs a bounded amount, and without one nobody looks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import psutil
import pytest
from control_clusters import eventually
from headless_chromium import CHROMIUM, Browser
from machines import MachineCluster

from pathways import errors
from pathways.cluster.beside_process import BesideProcess
from pathways.cluster.snapshots import Snapshot, Snapshots
from pathways.monitoring import feed as feeds
from pathways.monitoring.dashboard import resources
from pathways.monitoring.feed import MOST_POINTS, Feed
from pathways.monitoring.local_server import Request
from pathways.monitoring.view import MOST_CLIENTS, MOST_LISTED, MOST_PARTS, MOST_ROWS, point, view
from pathways.protocol import control_pb2 as pb
from pathways.trust import Role


def stats(
    hosts: int = 1, devices: int = 2, clients: int = 1, second: int = 0, hosts_per_island: int = 1
) -> pb.StatsReply:
    """Each client uses each device for the same part of each second."""
    topology = pb.Topology(devices_per_host=devices, platform="cpu")
    for island in range(hosts // hosts_per_island):
        topology.islands.add(hosts=range(island * hosts_per_island, (island + 1) * hosts_per_island))
    reply = pb.StatsReply(
        topology=topology,
        clients=[{"client": each, "name": f"<b>client {each}</b>"} for each in range(1, clients + 1)],
        slices=[{"slice": 3, "client": 1, "shape": [2], "axis_names": ["x"], "devices": range(devices)}],
    )
    for host in range(hosts):
        busy = [
            {"client": client, "device": device, "busy_ns": second * 10**9 // clients}
            for client in range(1, clients + 1)
            for device in range(devices)
        ]
        memory = {"devices": [{"bytes": 5, "high_water": 9, "limit": 10}] * devices}
        numbers = range(host * devices, (host + 1) * devices)
        island = host // hosts_per_island
        reply.hosts.add(
            host=host, island=island, pid=7, state="up", devices=numbers, counts={"busy": busy, "memory": memory}
        )
    return reply


class Clock:
    """Snapshots of a cluster in which each look is a second later than the one before."""

    def __init__(self) -> None:
        self.looks = 0
        self.is_there = True
        self.log = b"a line\n"

    def look(self) -> Snapshot:
        self.looks += 1
        if not self.is_there:
            raise errors.ConnectError("nobody is there")
        return Snapshot(stats(second=self.looks), float(self.looks))

    def logs(self, request: pb.LogsRequest) -> Iterator[pb.LogPart]:
        yield pb.LogPart(text=self.log)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(feeds, "PERIOD_S", 0.01)
    monkeypatch.setattr(feeds, "LOG_PERIOD_S", 0.0)
    return Clock()


def event_of(stream: Generator[bytes, None, None]) -> dict[str, Any]:
    while not (part := next(stream)).startswith(b"data: "):
        pass
    assert part.endswith(b"\n\n") and part.count(b"\n") == 2
    return dict(json.loads(part[6:]))


def test_nobody_looks_without_a_browser(clock: Clock) -> None:
    with Feed(clock) as feed:  # type: ignore[arg-type]
        assert clock.looks == 0
        one, other = feed.stream(), feed.stream()
        assert event_of(one)["now"]["busy"] == event_of(other)["now"]["busy"] == 1.0
        one.close()
        event_of(other)
        other.close()
        eventually(lambda: feed._reader is None, "the reader has ended")
        looks = clock.looks
        time.sleep(0.1)
        assert clock.looks == looks
        again = feed.stream()
        assert event_of(again)["points"], "what was seen before is there"
        again.close()


def test_a_slow_browser_misses_nothing_and_keeps_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with Feed(clock) as feed:  # type: ignore[arg-type]
        quick, slow = feed.stream(), feed.stream()
        seen = [each["t"] for each in event_of(slow)["points"]]
        for _ in range(20):
            event_of(quick)
        late = [each["t"] for each in event_of(slow)["points"]]
        assert len(late) >= 19 and sorted({*seen, *late}) == [*seen, *late]
        feed._points = feeds.collections.deque(feed._points, maxlen=5)  # instead of waiting for ten minutes
        for _ in range(20):
            event_of(quick)
        assert len(event_of(slow)["points"]) == 5 < MOST_POINTS
        quick.close()
        slow.close()


def test_a_cluster_that_goes_and_comes(clock: Clock) -> None:
    with Feed(clock) as feed:  # type: ignore[arg-type]
        stream = feed.stream("controller")
        assert event_of(stream)["log"] == "a line\n"
        clock.is_there = False
        while "error" not in (now := event_of(stream)["now"]):
            pass
        assert now["error"] == "nobody is there"
        clock.is_there, clock.log = True, b"\xff</script>"
        event: dict[str, Any] = {}
        while "rows" not in event.get("now", {}) or event.get("log") != "\ufffd</script>":
            event |= event_of(stream)
        assert "log" not in event_of(stream), "a log is sent when it has changed"
        stream.close()


@pytest.mark.parametrize("log", ["host", "host:", "host:-1", "host:" + "1" * 10, "host:²", "machine:", "x", "../etc"])
def test_the_log_of_nobody(clock: Clock, log: str) -> None:
    with Feed(clock) as feed, pytest.raises(ValueError, match="whose log"):  # type: ignore[arg-type]
        resources(feed)["/stream"].answer(Request({"log": log}, ""))


@pytest.mark.parametrize(
    ("hosts", "devices", "per_island", "clients", "rows", "kind"),
    [
        (8, 8, 1, 120, 64, "device"),
        (33, 2, 1, 120, 33, "host"),
        (256, 16, 4, 10, 64, "island"),
        (128, 1, 1, 120, 64, "island"),
    ],
)
def test_a_large_cluster_is_a_small_page(
    hosts: int, devices: int, per_island: int, clients: int, rows: int, kind: str
) -> None:
    before = Snapshot(stats(hosts, devices, clients, 0, per_island), 0.0)
    after = Snapshot(stats(hosts, devices, clients, 2, per_island), 2.0)
    now, new = view(before, after), point(before, after)
    assert len(now["rows"]) == len(new["use"]) == rows <= MOST_ROWS and now["rows"][0] == f"{kind} 0"
    assert all(len(parts) == MOST_PARTS + 1 and sum(part for _, part in parts) == pytest.approx(1, 0.02)
               for parts in new["use"])  # fmt: skip
    assert len(new["names"]) <= MOST_PARTS and len(now["clients"]) == min(clients, MOST_CLIENTS)
    assert now["more"].get("clients", 0) == max(0, clients - MOST_CLIENTS)
    assert now["more"].get("devices", 0) == max(0, hosts * devices - MOST_LISTED)
    assert now["busy"] == pytest.approx(1) and len(json.dumps(now)) < 100_000 and len(json.dumps(new)) < 12_000


def test_the_page_is_whole_and_asks_nobody_else(clock: Clock) -> None:
    """No script or style in the page itself, which the policy forbids; no address of another site; no HTML of texts."""
    with Feed(clock) as feed:  # type: ignore[arg-type]
        served = resources(feed)
    texts = {path: served[path].answer(Request({}, "")).body for path in served if path != "/stream"}
    assert [path for path in served if not served[path].is_open] == ["/stream"]
    for path, text in texts.items():
        assert isinstance(text, bytes)
        found = re.findall(rb"https?://[^\"' ]+", text)
        assert found in ([], [b"http://www.w3.org/2000/svg"]), path
        assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+=\"", text)
        for link in re.findall(rb"(?:src|href)=\"([^\"]+)\"", text):
            assert link.decode() in texts


# -- a browser -------------------------------------------------------------------------------------------------------

CLIENT = """
import sys, time, jax.numpy as jnp, numpy as np, pathways as pw
address, name, island, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
cluster = pw.connect(address, name=name)
devices = pw.make_virtual_device_set().add_slice(devices=2, island=island)
step = pw.jit(lambda w: w - 0.1 * jnp.tanh(w @ w), devices=devices, name="step")
w = np.ones((200, 200), np.float32)
while True:
    try:
        new = step(w)
        if pause:
            np.asarray(new)
            time.sleep(pause)
    except pw.errors.HostLostError:
        time.sleep(0.1)
"""


@contextlib.contextmanager
def client(address: str, name: str, island: int, pause: float) -> Iterator[None]:
    command = [sys.executable, "-c", CLIENT, address, name, str(island), str(pause)]
    with subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.watchdog(600)
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_training_a_flood_and_a_lost_machine() -> None:
    name = "<img src=x onerror=alert(1)>"  # a client's name is what it says of itself
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(MachineCluster(2, 1, 2))
        address = cluster.handle.address
        process = stack.enter_context(BesideProcess("dashboard", [address, "--port", "0"], 1))
        browser = stack.enter_context(Browser())

        browser.open(process.lines[0].partition("#")[0])  # without the secret
        browser.until("document.querySelector('#state')?.textContent === 'not let in'")
        browser.open("about:blank")
        browser.open(process.lines[0])
        browser.until("document.querySelector('#state')?.dataset.is === 'live'")
        assert "#" not in browser.run("location.href")

        stack.enter_context(client(address, name, 0, 0.02))
        browser.until(f"document.querySelector('#legend').innerText.includes({name!r})")
        assert browser.run("document.images.length") == 0
        busy = "[...document.querySelectorAll('#devices tr')].map(row => row.innerText)"
        browser.until(f"{busy}.slice(1, 3).some(text => / [1-9][0-9]* %|[1-9][0-9]* %/.test(text))")

        stack.enter_context(client(address, "flood", 1, 0.0))
        queues = "[...document.querySelectorAll('.tile')].map(tile => tile.innerText.replace(/\\s+/g, ' '))"
        browser.until(f"{queues}.some(text => /^[1-9][0-9,]* runs on hosts/.test(text))")
        browser.until("document.querySelector('#clients').innerText.includes('flood')")
        pixels = "new Set(new Uint32Array(document.querySelector('#timeline').getContext('2d').getImageData(80, 0, "
        browser.until(f"{pixels} document.querySelector('#timeline').width - 80, 130).data.buffer)).size > 4")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")

        browser.run("document.querySelector('#zoom-in').click()")
        assert browser.run("[...document.querySelectorAll('[aria-pressed=true]')].map(each => each.id)") == ["live"]
        browser.run("document.querySelector('#log-of').value = 'controller'")
        browser.run("document.querySelector('#log-of').dispatchEvent(new Event('change'))")
        browser.until("document.querySelector('#log').innerText.includes('m1 has joined')")

        supervisor = psutil.Process(cluster.agents["m1"]._supervised.supervisor_pid)
        next(each for each in supervisor.children() if "pathways.agent.main" in each.cmdline()).kill()
        browser.until("document.querySelector('#losses').innerText.includes('machine m1')")
        browser.until("document.querySelector('#hosts').innerText.includes('lost')")
        browser.until("!document.querySelector('#machines').innerText.includes('m1')")

        with cluster.way_in(Role.CLIENT), Snapshots(cluster.port) as snapshots, Feed(snapshots) as feed:
            stream = feed.stream("controller")
            event = event_of(stream)
            assert "may not read the logs" in event["log"], (
                "who is no operator sees no logs, nor what has lines of them"
            )
            assert event["now"]["losses"]["last"] and not any(each["why"] for each in event["now"]["losses"]["last"])
            stream.close()

        os.kill(process.pid, signal.SIGKILL)
        browser.until("document.querySelector('#state').textContent === 'disconnected'")
        wanted = [each for each in browser.said if "401" not in each and "ERR_" not in each]
        assert wanted == [], "nothing went wrong in the page, nor against its policy"
