"""A client for test_shares.py: it runs one program as long as it is told to, and checks what comes out.

    python shares_client.py ADDRESS WEIGHT PRIORITY STEP_US AHEAD

It prints "ready", waits for a line, and submits runs, at most AHEAD of them ahead, until another line comes. Then it
prints when each run was over: a JSON list of seconds since the epoch. Each run adds one to each of 1,024
numbers, and takes STEP_US.
"""

from __future__ import annotations

import collections
import json
import os
import select
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import pathways as pw
from pathways.testing import stand_in


def main() -> None:
    """Command line."""
    address, weight, priority, step_us, ahead = sys.argv[1:]
    asked = {"weight": float(weight), "priority": int(priority) or None}
    cluster = pw.connect(address, name=f"client of weight {weight}", **asked)
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=len(cluster.devices))
    f = pw.jit(lambda x: stand_in.step(x + 1, int(step_us)), devices=slice_)
    last = pw.device_put(np.zeros(1024, np.float32), slice_)
    pending: collections.deque[tuple[int, pw.Array]] = collections.deque()
    over: list[float] = []

    def settle() -> None:
        number, value = pending.popleft()
        if number % 100 == 0:
            assert (np.asarray(value) == number).all(), f"run {number}: {np.asarray(value)}"
        value.block_until_ready()
        over.append(time.time())

    last = jax.block_until_ready(f(last))
    count = 1
    print("ready", flush=True)
    sys.stdin.readline()
    while not select.select([sys.stdin], [], [], 0)[0]:
        last = f(last)
        count += 1
        pending.append((count, last))
        if len(pending) >= int(ahead):
            settle()
    while pending:
        settle()
    assert (np.asarray(last) == count).all(), f"after {count} runs: {np.asarray(last)}"
    print(json.dumps(over), flush=True)


if __name__ == "__main__":
    main()
