"""Pairs of faults on a cluster of machines: cables, agents, hosts, machines, clients and the controller, two at a time.

Each pair is drawn by chance, with its machines and the time between the two. Afterwards the cluster is whole by itself,
every value was right, clients were told only errors that the faults explain, and nothing is left. PATHWAYS_FAULT_PAIRS
says how many pairs; the seed is printed, and taken from PATHWAYS_SEED. `fault_pairs.py` is the same as a program, which
goes on after a failure. The machines are network namespaces, so without root the test is skipped.

Map from label to test:
    ERR-2   test_pairs_of_faults
    LINK-1  test_pairs_of_faults
"""

from __future__ import annotations

import os
import pathlib
import random
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

from fault_pairs import FAULTS, Checker, World, draw, told
from namespaces import why_not

PAIRS = int(os.environ.get("PATHWAYS_FAULT_PAIRS", "1"))


@pytest.mark.slow
@pytest.mark.watchdog(180 + 120 * PAIRS)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_pairs_of_faults() -> None:
    seed = int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"PATHWAYS_SEED={seed}")
    generator = random.Random(seed)
    with World() as world:
        checker = Checker(world)
        for _ in range(PAIRS):
            pair = draw(generator, list(FAULTS))
            print(told(pair))
            checker.play(pair)
    assert not world.processes(), f"left: {world.processes()}"
