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
        # Without kills: with them, about one loss in a hundred still leaves a run that nobody ends. Programs that a
        # client has forgotten stay on hosts until it next compiles, moves a slice or asks for statistics.
        [sys.executable, str(SOAK), "--seconds", "20", "--no-kills", "--known", "programs"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(process.stdout)
    assert process.returncode == 0, process.stdout
