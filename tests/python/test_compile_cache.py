"""JAX's persistent compile cache, as the user's process sets it, works on hosts: across starts and after a loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import pathways as pw

pytestmark = pytest.mark.slow
X = np.arange(8, dtype=np.float32)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A folder for the cache, which takes whatever is compiled."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def compiled_by(cluster: pw.Cluster) -> int:
    """Runs a function. How many of the host's compilations came from the cache."""
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
    np.testing.assert_allclose(pw.jit(lambda x: x * 5 + 2, devices=slice_)(X), X * 5 + 2)
    host = cluster.stats()["hosts"][0]
    assert host["compiles"] == 1
    return int(host["compile_cache_hits"])


def test_the_next_cluster_and_a_new_host_find_what_was_compiled(cache: Path) -> None:
    with pw.connect(pw.LocalCluster(1, 1, 2)) as cluster:
        assert compiled_by(cluster) == 0
    assert any(cache.iterdir())
    with pw.connect(pw.LocalCluster(1, 1, 2)) as cluster:
        assert compiled_by(cluster) == 1
        lost = cluster.stats()["hosts"][0]["pid"]
        os.kill(lost, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while cluster.stats()["hosts"][0]["pid"] == lost or cluster.stats()["hosts"][0]["state"] != "up":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert compiled_by(cluster) == 1
