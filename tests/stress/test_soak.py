"""A short soak (`soak.py`, `make soak`): random programs against NumPy while hosts are killed. So it is known to run.

Map from label to test:
    ERR-2   test_a_short_soak
    OWN-1   test_a_short_soak
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.watchdog(900)
@pytest.mark.skipif(os.environ.get("PATHWAYS_KILLS") != "all", reason="`make campaigns` plays it")
def test_a_short_soak() -> None:
    soak = pathlib.Path(__file__).with_name("soak.py")
    command = [sys.executable, str(soak), "--seconds", "30", "--shape", "2,1,2,1"]
    played = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=840)
    print(played.stdout)
    assert played.returncode == 0 and "all was right" in played.stdout
