"""`pathways top`: what it prints of a cluster, and how it ends."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import pathways as pw
from pathways.cli import main
from pathways.cluster.snapshots import device_use
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
    used = re.findall(r"client \d+ (\d+)%", text)
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
