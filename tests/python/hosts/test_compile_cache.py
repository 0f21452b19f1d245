"""Hosts keep their executables: the next cluster, and a host that takes the place of a lost one, compile nothing again.

By default they lie in a folder of their own; if the user has given JAX one for its persistent cache, they lie there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

pytestmark = pytest.mark.slow
X = np.arange(8, dtype=np.float32)


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """JAX's settings, for as long as this lasts."""
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A folder for the cache, which takes whatever is compiled."""
    with configured(
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=0.0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ):
        yield tmp_path


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


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which hosts keep executables by themselves, with a limit that holds them all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PATHWAYS_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with configured(jax_compilation_cache_dir=None):
        yield tmp_path / "pathways" / "executables"


def test_a_second_cluster_compiles_nothing_and_nobody_has_set_anything(kept: Path) -> None:
    """Of an island of two hosts, on both of them together and on each alone. What calls back is compiled anew."""

    def first_calls() -> tuple[list[tuple[int, int]], int]:
        """By host, what it compiled and what of that was there; and what was compiled in the end."""
        target = pw.LocalCluster(1, 2, 2, platform="cpu")  # unlike the one that contract tests leave open
        with pw.connect(target) as cluster:
            devices = pw.make_virtual_device_set(cluster)
            everywhere, one, other = (devices.add_slice(devices=count) for count in (4, 2, 2))
            total = pw.jit(lambda x: jnp.sum(x * 5), devices=everywhere, in_shardings=jax.sharding.PartitionSpec("x"))
            sums = pw.jit(lambda x: jnp.cumsum(x), devices=one), pw.jit(lambda x: jnp.cumsum(x), devices=other)
            np.testing.assert_allclose(total(sums[1](sums[0](X))), 5 * np.cumsum(np.cumsum(X)).sum())
            counts = [(host["compiles"], host["compile_cache_hits"]) for host in cluster.stats()["hosts"]]
            double = pw.jit(lambda x: jax.pure_callback(call_back, jax.ShapeDtypeStruct((8,), x.dtype), x), devices=one)
            np.testing.assert_array_equal(double(X), 2 * X)
            hosts = cluster.stats()["hosts"]
            return counts, sum(host["compiles"] - host["compile_cache_hits"] for host in hosts)

    def call_back(x: np.ndarray) -> np.ndarray:
        calls.append(1)
        return 2 * x

    calls: list[int] = []
    first, _ = first_calls()
    assert all(compiles > 0 and hits == 0 for compiles, hits in first)
    (folder,) = kept.iterdir()
    assert folder.name.startswith("jaxlib-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert first_calls() == ([(compiles, compiles) for compiles, _ in first], 1)
    assert len(calls) == 2


def test_the_users_own_folder_goes_before_it(kept: Path, cache: Path) -> None:
    with pw.connect(pw.LocalCluster(1, 1, 2)) as cluster:
        assert compiled_by(cluster) == 0
    assert any(path.name.startswith("jit_") for path in cache.iterdir())
    assert not kept.exists()


def test_zero_turns_it_off(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATHWAYS_COMPILE_CACHE", "0")
    with pw.connect(pw.LocalCluster(1, 1, 2)) as cluster:
        assert compiled_by(cluster) == 0
    assert not kept.exists()


def test_a_folder_that_cannot_be_used_does_not_stop_a_cluster(kept: Path) -> None:
    kept.parent.mkdir()
    kept.write_text("a file in the place of the folder")
    with pw.connect(pw.LocalCluster(1, 1, 2)) as cluster:
        assert compiled_by(cluster) == 0
