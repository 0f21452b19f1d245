"""`pathways top`: what it prints of a cluster, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import pathways as pw
from pathways.cli import main
from pathways.cli.top import _look
from pathways.cluster.snapshots import Snapshot, device_use
from pathways.protocol import control_pb2 as pb


def keep_busy(local_cluster: Any) -> Any:
    """A function that keeps the first devices busy for a while."""
    slice_ = pw.make_virtual_device_set().add_slice(devices=2)
    work = pw.jit(lambda x: x @ x / 300, devices=slice_, name="work")
    x = jnp.ones((300, 300))
    return lambda: np.asarray(work(x))


def test_once(local_cluster: Any) -> None:
    busy = keep_busy(local_cluster)
    busy()
    command = subprocess.Popen(
        [sys.executable, "-m", "pathways", "top", local_cluster.address, "--interval", "2"],
        stdout=subprocess.PIPE,
        text=True,
    )
    while command.poll() is None:  # its output is no terminal: it prints one look
        busy()
    text = command.communicate()[0]
    assert command.returncode == 0
    assert "1 island x 2 hosts x 2 cpu devices" in text and "runs/s" in text
    used = re.findall(r"(\d+)% client \d+", text)
    assert used and all(0 < int(percent) <= 105 for percent in used), text
    assert re.search(rf"^\s*{local_cluster.client_id}\s+{os.getpid()}\b", text, re.MULTILINE), text


def test_it_ends_with_q(local_cluster: Any) -> None:
    ours, theirs = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-m", "pathways", "top", local_cluster.address, "--interval", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while b"runs/s" not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 1 << 16)
    os.write(ours, b"q")
    while command.poll() is None:
        assert time.monotonic() < deadline
        if select.select([ours], [], [], 0.05)[0]:
            try:
                os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
    assert command.wait(30) == 0
    os.close(ours)


@pytest.mark.parametrize("interval", ["0", "-1", "soon"])
def test_an_interval_that_cannot_be(interval: str) -> None:
    result = CliRunner().invoke(main, ["top", "unix:/nowhere", "--interval", interval])
    assert result.exit_code == 2 and "--interval" in result.output


def test_an_address_that_does_not_answer() -> None:
    result = CliRunner().invoke(main, ["top", "unix:/nowhere"])
    assert result.exit_code == 1 and "no cluster listens" in result.output


def test_use_is_of_the_time_between() -> None:
    def stats(busy_ns: int, pid: int = 5) -> pb.StatsReply:
        counts = {"busy": [{"client": 3, "device": 1, "busy_ns": busy_ns}]}
        return pb.StatsReply(hosts=[{"host": 0, "pid": pid, "devices": (4, 5), "counts": counts}])

    assert device_use(stats(10**9), stats(2 * 10**9), 2.0) == {5: {3: 0.5}}
    assert device_use(stats(10**9), stats(10**9), 2.0) == {}
    # A host that was started again counts from 0.
    assert device_use(stats(10**9), stats(10**9, pid=6), 2.0) == {5: {3: 0.5}}


def screen(width: int, height: int | None, devices: int = 4, color: str | None = None) -> list[str]:
    """A look at a busy cluster of two machines, on a terminal of this size."""
    counts = {
        "busy": [
            {"client": client, "device": device, "busy_ns": 2 * 10**8} for client in (1, 2) for device in range(2)
        ],
        "memory": {"devices": [{"bytes": 3 << 20, "limit": 16 << 30}] * devices},
    }
    hosts = [
        {
            "host": number,
            "devices": range(number * devices, (number + 1) * devices),
            "machine_name": name,
            "state": "up",
            "counts": counts,
        }
        for number, name in enumerate(("a-machine-with-a-long-name", "m1", "-"))
    ]
    clients = [{"client": number, "name": "a training with a long name", "pid": 41_000 + number} for number in (1, 2)]
    stats = pb.StatsReply(topology={"machines": (1, 1, 1)}, hosts=hosts, clients=clients)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=color)  # type: ignore[arg-type]
    console.print(_look(Snapshot(pb.StatsReply(), 0.0), Snapshot(stats, 1.0), width, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (40, 24)])
def test_a_look_fits_the_terminal(width: int, height: int) -> None:
    """Each device and client has one line, with its numbers whole."""
    lines = screen(width, height)
    assert all(len(line) <= width for line in lines) and len(lines) < height
    rows = [line for line in lines if re.search(r"[█·]{3}", line)]
    assert len(rows) == 8 and all(re.search(r"\d%\s+3 MiB", row) for row in rows), (
        "each device, of machines that are there"
    )
    assert "█" in rows[0] and "40%" in rows[0] and "█" not in rows[2] and "0%" in rows[2]
    of_clients = [line for line in lines if re.match(r"\s*[12]\s+a train", line)]
    assert len(of_clients) == 2 and all("5.0%" in line for line in of_clients)
    if width >= 80:
        assert "20% a t" in rows[0] and " m1 " in rows[4] and "16.0 GiB" in rows[0] and "41001" in of_clients[0]
        assert re.search(r"a-mach\S*…", rows[0])


def test_of_many_devices_so_many_are_shown_as_fit_and_all_clients() -> None:
    lines = screen(80, 20, devices=100)
    assert len(lines) <= 20 and "41002" in lines[-1]
    shown = sum("█" in line or "··" in line for line in lines)
    assert any(f"and {200 - shown} more devices" in line for line in lines) and shown > 5
    assert sum("··" in line or "█" in line for line in screen(80, None, devices=100)) == 200


def test_a_terminal_without_colors() -> None:
    assert "\x1b" not in "".join(screen(80, 24)) and "\x1b[" in "".join(screen(80, 24, color="standard"))


def test_a_terminal_that_only_prints(local_cluster: Any) -> None:
    """TERM=dumb: rich's live view shows nothing there."""
    ours, theirs = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-m", "pathways", "top", local_cluster.address, "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while shown.count(b"runs/s") < 3:
        assert time.monotonic() < deadline, shown
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 1 << 16)
    assert b"\x1b" not in shown
    command.send_signal(signal.SIGINT)
    assert command.wait(30) == 0
    os.close(ours)
