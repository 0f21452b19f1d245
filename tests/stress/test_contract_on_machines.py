"""Contracts over machines that are network namespaces, with this program on a machine of its own.

`make contract-machines` plays the whole contract suite so; here a part of it, in a process of its own, because the
process moves to another network.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = ["test_runs.py", "test_values.py"]


@pytest.mark.watchdog(400)
def test_a_part_of_the_suite() -> None:
    files = [f"tests/python/contract/{name}" for name in FILES]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", *files],
        cwd=ROOT,
        env={**os.environ, "PATHWAYS_KIND": "namespaces", "PATHWAYS_SHARE": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    print(ran.stdout)
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert passed is not None
    assert int(passed[1]) >= 30
