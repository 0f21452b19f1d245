"""SCHED-1: the activations that each stage keeps while a pipeline runs, read off the ledgers of its hosts (MEM-1).

What the profile says of the same plans is tested in `tests/python/schedule/test_schedule_memory.py`. Here the
plans run, each stage on a host of its own, and the ledger says how much of a device a program's values took at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from pipeline_cases import inside, layer, network, square

import pathways as pw

STAGES, ROWS = 4, 1 << 14
PART = ROWS * 4 * 4  # bytes of one activation


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=STAGES, devices_per_host=1)) as cluster:
        yield cluster


def peaks(cluster: Any, schedule: str, microbatches: int, chunks: int = 1) -> list[int]:
    """Per stage: the most that the values of a run took at any time, in whole activations."""
    devices = pw.make_virtual_device_set(cluster)
    slices = [devices.add_slice(devices=1) for _ in range(STAGES)]
    stages = [pw.jit(layer, devices=s, name=f"f{n}") for n, s in enumerate(slices * chunks)]
    step = inside(network(stages, pw.jit(square, devices=slices[-1], name="loss")))
    name = f"{schedule}, {microbatches} microbatches"
    program = pw.program(step, name=name, schedule=schedule)
    weights = [pw.device_put(np.eye(4, dtype=np.float32), s) for s in slices * chunks]
    batches = [pw.device_put(np.ones((ROWS, 4), np.float32), slices[0]) for _ in range(microbatches)]
    jax.block_until_ready(program(weights, batches))
    found = {}
    for host in cluster.stats()["hosts"]:
        (account,) = (each for each in host["memory"]["accounts"] if each["program"] == name)
        (device,) = host["devices"]
        found[device] = account["high_water"] // PART
    return [found[s.devices[0].id] for s in slices]


def is_kept(found: list[int], promised: list[int], chunks: int = 1) -> bool:
    """An output lives on while it is sent, also when the next step is launched: one activation more per chunk."""
    return all(most <= got <= most + chunks for got, most in zip(found, promised, strict=True))


def test_1f1b_keeps_by_stages_not_by_microbatches(cluster: Any) -> None:
    for microbatches in (4, 16):
        assert is_kept(found := peaks(cluster, "1F1B", microbatches), [8, 7, 5, 3]), found


def test_a_zero_bubble_keeps_by_stages(cluster: Any) -> None:
    for microbatches in (4, 16):
        assert is_kept(found := peaks(cluster, "ZeroBubbleH1", microbatches), [8, 8, 7, 6]), found


def test_interleaved_keeps_by_stages_and_chunks(cluster: Any) -> None:
    for microbatches in (8, 16):
        assert is_kept(found := peaks(cluster, "Interleaved1F1B", microbatches, 2), [23, 19, 15, 12], 2), found


def test_gpipe_keeps_every_microbatch(cluster: Any) -> None:
    for microbatches in (4, 16):
        every = 2 * microbatches
        assert is_kept(
            found := peaks(cluster, "GPipe", microbatches), [every, every + 1, every + 1, 3 * microbatches]
        ), found
