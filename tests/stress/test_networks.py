"""One machine or far client behind a slow and lossy line, and one whose line is cut for 3 s while much goes over it.

`networks.py` and `network_cuts.py` play all networks and cuts, for an hour, and `spread_islands.py` a hundred faults of
an island over four machines. Without root and TUN devices, these tests are skipped.

Map from label to test:
    LINK-1  test_slow_and_lossy, test_a_short_cut
    ORD-1, GANG-1, ERR-2  test_an_island_over_machines
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

from namespaces import why_not

HERE = pathlib.Path(__file__).parent
NO_TUN = None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "this machine has no TUN devices"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.watchdog(500),
    pytest.mark.skipif(bool(why_not() or NO_TUN), reason=str(why_not() or NO_TUN)),
]


def play(script: str, *arguments: str) -> None:
    env = {**os.environ, "PATHWAYS_NETWORK_MIB": "0.25"}
    played = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    print(played.stdout)
    assert played.returncode == 0


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("side", ["machine", "far"])
def test_slow_and_lossy(side: str) -> None:
    """64 kbit/s, 300 ms, 2 % lost: a put and a fetch at the same time, and a thousand calls, lose no link."""
    play("networks.py", "--rates", "64e3", "--delays", "0.3", "--losses", "0.02", "--sides", side)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("way", ["both ways", "to head", "from head"])
@pytest.mark.parametrize("side", ["machine", "far"])
def test_a_short_cut(side: str, way: str) -> None:
    """Of 3 s, at 1.5 Mbit/s and 50 ms: nothing is lost."""
    play("network_cuts.py", "--seconds", "3", "--sides", side, "--ways", way)


def test_an_island_over_machines() -> None:
    """Gangs of four clients, crossed at random, while lines change and are cut, and then while machines are lost. The
    script prints its seed."""
    play("spread_islands.py", "--seconds", "20", "--faults", "8")
