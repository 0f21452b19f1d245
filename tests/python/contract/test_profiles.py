"""A profile has what XLA did on every host, in files that TensorBoard reads; what is missing is told, and nothing that
a host does or does not do holds up its end. TRUST-1: what a host sends is data, and guests get no profile of hosts."""

from __future__ import annotations

import gzip
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways import errors
from pathways.api import profiling
from pathways.cluster import trace_file

X = np.ones((32, 32), np.float32)
#: Another process of the same user, which did not start the cluster.
GUEST = """
import pathlib, sys
import pathways as pw

cluster = pw.connect(sys.argv[1])
try:
    with pw.profile(pathlib.Path(sys.argv[2], "guest"), cluster=cluster):
        print("a profile")
except pw.errors.PermissionDeniedError as error:
    print(type(error).__name__)
print([*pathlib.Path(sys.argv[2], "guest").glob("plugins/profile/*")])
"""


def events_of(file: pathlib.Path) -> set[str]:
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    return {event.name for plane in planes for line in plane.lines for event in line.events}


def test_a_profile_has_every_host(cluster: Any, add: Any, near: None, tmp_path: pathlib.Path) -> None:
    islands = len(cluster.islands)
    steps = [pw.jit(lambda x: jnp.sin(x @ x), devices=add(1, island=n), name="sines") for n in range(islands)]
    for step in steps:
        step(X).block_until_ready()
    with pw.profile(tmp_path, cluster=cluster) as profile:
        for step in steps:
            step(X).block_until_ready()
    assert profile.remarks == []
    assert profile.folder is not None and profile.folder.parent == tmp_path / "plugins" / "profile"
    hosts = [] if cluster.is_embedded else [f"host{host}.xplane.pb" for host in range(len(cluster.hosts))]
    names = sorted(file.name for file in profile.folder.iterdir())
    assert names == sorted(["client.xplane.pb", *hosts, "pathways.trace.json.gz"])
    computed = [file for file in profile.folder.glob("*.pb") if any("sine" in name for name in events_of(file))]
    assert len(computed) == islands  # a device of each
    timeline = trace_file.read(profile.folder / "pathways.trace.json.gz")
    assert [each.name for each in timeline.computations].count("sines.0") == islands


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_a_lost_and_a_stopped_host_hold_up_nothing(start: Any, tmp_path: pathlib.Path) -> None:
    cluster = start(2, 1, 1)
    devices = pw.make_virtual_device_set(cluster)
    step = pw.jit(lambda x: jnp.sin(x @ x), devices=devices.add_slice(1, island=0), name="sines")
    for how in (signal.SIGKILL, signal.SIGSTOP):
        cluster.wait_for(2, timeout=120)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pw.profile(tmp_path, cluster=cluster) as profile:
                step(X).block_until_ready()
                os.kill(cluster.stats()["hosts"][1]["pid"], how)
                began = time.monotonic()
            took = time.monotonic() - began
        assert took < profiling.END_S + 10, took  # a busy machine may write the files late
        assert any("sine" in name for name in events_of(profile.folder / "host0.xplane.pb"))
        assert any("host 1" in remark for remark in profile.remarks), profile.remarks
        assert [str(each.message) for each in seen if "is not whole" in str(each.message)]
        assert trace_file.read(profile.folder / "pathways.trace.json.gz").computations
    done = subprocess.run(
        [sys.executable, "-c", GUEST, cluster.address, str(tmp_path)], text=True, capture_output=True, timeout=150
    )
    assert done.stdout.split() == ["PermissionDeniedError", "[]"], done.stderr


@pytest.mark.one_process
def test_what_cannot_be_profiled_is_told(cluster: Any, near: None, tmp_path: pathlib.Path) -> None:
    with pw.profile(tmp_path / "one", cluster=cluster):
        for other in (
            pw.profile(tmp_path / "two", cluster=cluster),
            pw.trace(tmp_path / "three.json", cluster=cluster),
        ):
            with (
                pytest.raises(errors.TraceFileError, match=r"already|one (trace|profile) is recorded at a time"),
                other,
            ):
                pass
    assert not [*(tmp_path / "two" / "plugins" / "profile").iterdir()]
    jax.profiler.start_trace(str(tmp_path / "own"))
    try:
        with pytest.raises(errors.TraceFileError, match="this process records a profile already"), pw.profile(tmp_path):
            pass
    finally:
        jax.profiler.stop_trace()
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.TraceFileError, match="a profile cannot be written to"), pw.profile(tmp_path / "file"):
        pass
    with pytest.raises(errors.TraceFileError, match="written to a folder, got 3"):
        pw.profile(3)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="profile expects cluster="):
        pw.profile(tmp_path, cluster="x")  # type: ignore[arg-type]
    with pw.profile(tmp_path / "after", cluster=cluster) as profile:  # nothing was left on
        pass
    assert profile.remarks == []


def test_a_hosts_bytes_are_data(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiling._unpacked(b"no gzip") is None
    packed = gzip.compress(bytes(1000))
    assert profiling._unpacked(packed) == bytes(1000)
    assert profiling._unpacked(packed[:-9]) is None
    monkeypatch.setattr(profiling, "MOST_BYTES", 999)
    assert profiling._unpacked(packed) is None
