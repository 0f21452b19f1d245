"""Slices over any devices of any hosts, transfers between them, and collectives, at random: see `slice_programs.py`.

    GANG-2  no program hangs: what one host waits for in a collective is never held up behind another collective.
    ORD-1   every value is what NumPy says.

The seed is printed, and taken from PATHWAYS_SEED; PATHWAYS_SLICE_PROGRAMS is the number of programs on each grid.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import slice_programs
from jax.sharding import PartitionSpec as P

import pathways as pw

PROGRAMS = int(os.environ.get("PATHWAYS_SLICE_PROGRAMS", "4"))


def say_what_hosts_wait_for(cluster: Any, ended: threading.Event) -> None:
    """Shortly before the watchdog ends everything."""
    if not ended.wait(slice_programs.HANGS_S):
        for host in cluster.stats()["hosts"]:
            print(host["oldest_runs"], flush=True)


@pytest.mark.slow
@pytest.mark.watchdog(slice_programs.HANGS_S + 10 + PROGRAMS)
@pytest.mark.parametrize("grid", slice_programs.GRIDS)
def test_random_programs(grid: str) -> None:
    seed = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"PATHWAYS_SEED={seed}")
    hosts, devices = slice_programs.GRIDS[grid]
    ended = threading.Event()
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=hosts, devices_per_host=devices)) as cluster:
        threading.Thread(target=say_what_hosts_wait_for, args=(cluster, ended), daemon=True).start()
        compared = list(slice_programs.campaign(cluster, grid, seed, 0, PROGRAMS))
        ended.set()
    assert len(compared) == PROGRAMS and all(compared)


@pytest.mark.slow
@pytest.mark.watchdog(60)
@pytest.mark.parametrize("target", ["three of four devices", "one device of each host"])
def test_a_collective_on_part_of_a_host(local_cluster: Any, target: str) -> None:
    """The host of which the slice has one device enters the collective in the call."""
    devices = pw.make_virtual_device_set(local_cluster)
    whole = devices.add_slice(devices=4)
    part = devices.add_slice(devices=3 if target.startswith("three") else 2)
    if part.size == 2:
        local_cluster.remap(part, [0, 3])
    x = np.arange(24 * 24, dtype=np.int32).reshape(24, 24)
    for n in range(4):
        turned = pw.jit(lambda v, n=n: v[::-1] + n, devices=part, in_shardings=(P("x"),), out_shardings=P(None, "x"))
        got = turned(pw.device_put(x, whole, P(None, "x")))
        np.testing.assert_array_equal(np.asarray(got), x[::-1] + n)


@pytest.mark.slow
@pytest.mark.watchdog(120)
def test_collectives_on_disjoint_devices(local_cluster: Any) -> None:
    """Two slices have one device of each host each. Which of them has its inputs first differs from host to host."""
    devices = pw.make_virtual_device_set(local_cluster)
    slices = [devices.add_slice(devices=2) for _ in range(2)]
    local_cluster.remap(slices[0], [0, 3])
    local_cluster.remap(slices[1], [2, 1])
    ends = [devices.add_slice(devices=1) for _ in range(2)]
    local_cluster.remap(ends[1], [3])
    x = np.arange(32, dtype=np.int32)
    make = [pw.jit(lambda v: v + 1, devices=end, name=f"make{n}") for n, end in enumerate(ends)]
    total = [
        pw.jit(lambda v: v + jnp.sum(v), devices=s, in_shardings=(P("x"),), out_shardings=P("x"), name=f"total{n}")
        for n, s in enumerate(slices)
    ]
    put = [pw.device_put(x, end) for end in ends]
    results = []
    began = time.monotonic()
    while len(results) < 400 and time.monotonic() - began < 20:
        results += [total[n](make[1 - n](put[1 - n])) for n in (0, 1)]
    for result in results:
        np.testing.assert_array_equal(np.asarray(result), x + 1 + (x + 1).sum())
