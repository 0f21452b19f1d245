"""GIL-1: threads of the native core never take Python's lock."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from pathways import _native


def test_the_core_knows_nothing_of_python() -> None:
    """GIL-1: what calls nothing of Python cannot wait for its lock. Only the two modules link to Python."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("binutils' nm is not here")
    core = pathlib.Path(_native.__file__).with_name("libpathways_core.so")
    wanted = subprocess.run([nm, "-D", "--undefined-only", core], check=True, capture_output=True, text=True).stdout
    assert "futex" in wanted or "syscall" in wanted, "nm showed no symbols"
    assert not [line for line in wanted.splitlines() if line.split()[-1].startswith(("Py", "_Py"))]


def test_the_sequencer_works_while_python_does() -> None:
    """GIL-1: the controller's thread makes passes while this thread holds the lock and does not give it up."""
    controller = _native.Controller(
        _native.controller_segment(shared=False), [_native.host_segment(0, 1, arena_bytes=0, shared=False)]
    )
    controller.start()
    try:
        before = controller.stats()["passes"]
        for group in range(1, 200):  # each wakes it; the loop itself never waits
            controller.add_group(group, [0])
        assert controller.stats()["passes"] > before
    finally:
        controller.stop()
