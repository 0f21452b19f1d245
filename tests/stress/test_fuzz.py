"""TRUST-1 by mutation, against hosts with JAX: a client sends mutated puts, fetches, commands, protobuf messages and
packets (`fuzz_client.py`), while another computes beside it, whose every value is compared; nobody dies of it.

PATHWAYS_FUZZ_SECONDS says for how long, PATHWAYS_SEED repeats a run. Records, shared memory, plans and copy plans:
tests/cpp/cluster/test_fuzz_*.cc. Programs: `test_control_pieces.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import pathways as pw

HERE = pathlib.Path(__file__).parent
SECONDS = float(os.environ.get("PATHWAYS_FUZZ_SECONDS", "8"))


@pytest.mark.slow
@pytest.mark.watchdog(240 + 2 * SECONDS)
def test_a_client_that_sends_mutations_harms_nobody(local_cluster: Any) -> None:
    seed = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"PATHWAYS_SEED={seed}")
    slice_ = pw.make_virtual_device_set(local_cluster).add_slice(devices=4)
    step = pw.jit(lambda x, n: (x * 0 + n, x + n), devices=slice_)
    pids = [host["pid"] for host in local_cluster.stats()["hosts"]]
    command = [sys.executable, str(HERE / "fuzz_client.py"), local_cluster.address, str(seed), str(SECONDS)]
    compared = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as culprit:
        try:
            value = np.arange(64, dtype=np.float32)
            kept = pw.device_put(value, slice_)
            while culprit.poll() is None:
                fresh = np.float32(compared % 1000)
                first, second = step(kept, fresh)
                np.testing.assert_array_equal(np.asarray(second), value + fresh)
                np.testing.assert_array_equal(np.asarray(first), value * 0 + fresh)
                compared += 128
            out, said = culprit.communicate()
        finally:
            culprit.kill()
    assert culprit.returncode == 0, said[-4000:]
    counts = json.loads(out.splitlines()[-1])
    print(f"inputs tried, seed {seed}: {counts}; beside it {compared} values compared, none wrong")
    assert all(count > 0 for target, count in counts.items() if target != "evicted"), counts
    assert [host["pid"] for host in local_cluster.stats()["hosts"]] == pids
    assert compared > 0
