"""What tests of whole clusters of doubles share: small sizes, programs that say nothing, and looks at processes.

The doubles are in `control_doubles.py`; the fixtures that start clusters of them are in `conftest.py` and in the tests.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import control_doubles
import numpy as np
import psutil

from pathways.cluster.launcher import LocalClusterHandle
from pathways.cluster.remote import RemoteControl
from pathways.compiler.ir import ArrayType, LogicalProgram, MeshSpec
from pathways.process import run_directory
from pathways.process.config import ClientSizes

SMALL = {**control_doubles.OPTIONS, "host_ring_bytes": 4096, "transfer_memory": 4096}
SIZES = ClientSizes(16, 4096, 4096)


def assert_gone(handle: LocalClusterHandle) -> None:
    assert not os.path.exists(handle.directory)
    assert handle.address not in run_directory.live_clusters()
    for name, pid in handle.pids().items():
        assert not is_running(pid), f"{name} is left"


def is_running(pid: int) -> bool:
    """A zombie that nobody reaps is none."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def segments(pid: int, name: str = "pathways-client") -> int:
    """Clients' segments that a process holds; or segments with that in their name."""
    count = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += name in os.readlink(f"/proc/{pid}/fd/{fd}")
    return count


def stats_with_notes(control: RemoteControl) -> dict[str, Any]:
    """The cluster's statistics, with the notes of the doubles beside them, unless a host has not answered."""
    stats = control.cluster_stats()
    for each in (stats["controller"], *stats["hosts"]):
        each.update(control_doubles.notes_of(each["pid"]) if "runs" in each else {})
    return stats


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def program(name: str) -> LogicalProgram:
    value = ArrayType((4,), np.dtype("float32"), 0, (("x",),))
    return LogicalProgram(name, (MeshSpec("m", (("x", 2),)),), (value,), (), (), (0,), (0,), (False,), "text", "text")
