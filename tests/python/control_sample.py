"""Which of the cases of `control_cases` a run of the tests plays.

All of them take minutes. So each run plays a sample of its own. `PATHWAYS_CONTROL_FLOW=all` plays all cases;
`PATHWAYS_CONTROL_FLOW=<seed>` plays the sample of that seed, which a test prints when it fails.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

_CHOICE = os.environ.get("PATHWAYS_CONTROL_FLOW", "")
#: pytest's processes must collect the same tests: the name of their run is the same in each of them.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or os.urandom(4).hex()
SEED = int(_CHOICE) if _CHOICE.isdigit() else zlib.crc32(_RUN.encode()) % 10_000

T = TypeVar("T")


def sampled(cases: Sequence[T], count: int) -> list[T]:
    """Some of the cases, in their order; all if the environment asks for it."""
    if _CHOICE == "all" or count >= len(cases):
        return list(cases)
    chosen = random.Random(SEED).sample(range(len(cases)), count)
    return [cases[n] for n in sorted(chosen)]


def tell() -> None:
    """Prints how to play this sample again; pytest shows it when a test fails."""
    print(f"PATHWAYS_CONTROL_FLOW={_CHOICE if _CHOICE == 'all' else SEED} plays these cases again")
