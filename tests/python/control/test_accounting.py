"""MEM-6, MEM-7: whatever a client's library does, nothing of it runs or stays that the ledger does not count, and an
innocent client beside it notices nothing. What hosts refuse: contract/test_booked_memory.py."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pathways as pw

CLIENT = pathlib.Path(__file__).parent / "accounting_client.py"
MIB = 1 << 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One device of 64 MiB."""
    with pw.connect(pw.LocalCluster(device_memory=64 * MIB)) as cluster:
        yield cluster


def culprit(cluster: Any, mode: str) -> str:
    """The error of a client that behaves in this way."""
    environ = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(CLIENT), cluster.address, mode],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
        env=environ,
    )
    return str(json.loads(done.stdout.splitlines()[-1])["error"])


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("early", "whose memory is not known: a client must wait"),
        ("dropped", "which its client has dropped"),
        ("replaced", "in the place of a buffer that it has not released"),
    ],
)
def test_a_library_that_runs_what_is_not_counted(cluster: Any, mode: str, why: str) -> None:
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    step = pw.jit(lambda x: x + 1, devices=slice_)
    mine = step(pw.device_put(np.arange(1 << 20, dtype=np.float32), slice_))
    pids = [host["pid"] for host in cluster.stats()["hosts"]]
    assert why in culprit(cluster, mode)
    np.testing.assert_array_equal(np.asarray(step(mine)), np.arange(1 << 20, dtype=np.float32) + 2)
    stats = cluster.stats()
    assert [host["pid"] for host in stats["hosts"]] == pids
    assert [client["client"] for client in stats["clients"]] == [cluster.client_id]


def test_an_honest_client_of_the_same_program(cluster: Any) -> None:
    assert culprit(cluster, "honest") == ""
