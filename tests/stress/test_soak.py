"""A short soak: see `soak.py`, which is the long one and says what it proves. Its seed is printed."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SOAK = pathlib.Path(__file__).with_name("soak.py")


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_a_short_soak() -> None:
    process = subprocess.run(
        # Known: a host that is killed does not give back what it held of its clients' shared memory, and the one that
        # comes after it is sent programs that its clients have forgotten.
        [sys.executable, str(SOAK), "--seconds", "20", "--known", "client.*arena_bytes|programs"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(process.stdout)
    assert process.returncode == 0, process.stdout
