"""FLOW-1 on a cluster of processes: a client that floods a busy host waits for it; the controller stays small."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import pathways as pw
from pathways.protocol import payloads

COMMANDS, COMMAND_BYTES = 1500, 100_000
MOST_GROWTH = 64 << 20


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_a_flood_of_commands_costs_the_controller_little() -> None:
    """The host runs what it enqueues inline, and so reads nothing meanwhile."""
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=1)) as cluster:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
        slow = pw.jit(lambda m: jax.lax.fori_loop(0, 200, lambda _, a: jnp.tanh(a @ a), m), devices=slice_)
        x = pw.device_put(np.full((512, 512), 0.01, np.float32), slice_)
        slow(x).block_until_ready()
        controller = psutil.Process(cluster.control().controller_pid)
        group, before = x.layout.group, controller.memory_info().rss
        payload = payloads.end(0, False).ljust(COMMAND_BYTES)  # of no job: the host reads it, and that is all
        y = slow(x)
        grown = 0
        for _ in range(COMMANDS):
            cluster.native.command(payloads.BACKEND, group, 0, 0, payload)
            grown = max(grown, controller.memory_info().rss - before)
        z: Any = pw.device_put(np.arange(8, dtype=np.float32), slice_)
        np.testing.assert_array_equal(np.asarray(z), np.arange(8, dtype=np.float32))
        y.block_until_ready()
        print(f"{COMMANDS} commands of {COMMAND_BYTES} bytes: the controller grew by {grown >> 20} MiB")
        assert grown < MOST_GROWTH
