"""Which tests a session plays: all, or some, drawn anew each time with a printed seed.

Two things leave tests out:

* The mark `sampled(share)`: a table whose cases prove much the same plays that share of its cases.
* `PATHWAYS_SHARE`, from 0 to 1 (1 where nobody sets it): of each file about that share of the quick tests is played,
  and a third of that share of the slow ones, but at least one test. Of the contract suite each test function is played
  at least once: in a quick case, if it has one. `make test` sets it, `make test-all` does not.

`PATHWAYS_SAMPLE` is the seed, which draws the same tests again; `all` plays all. The draw for one test or file does not
depend on which others are run. `tests/conftest.py` calls this; pytest-xdist's processes must all draw the same.
"""

from __future__ import annotations

import collections
import math
import os
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest

SEED, SHARE = "PATHWAYS_SAMPLE", "PATHWAYS_SHARE"
SLOW_PART = 1 / 3  # of the share, for slow tests
CONTRACT = "tests/python/contract/"


def set_up() -> None:
    """Settles the seed, which the processes of pytest-xdist inherit.

    Raises:
        pytest.UsageError: `PATHWAYS_SHARE` is no number from 0 to 1.
    """
    if os.environ.get("PATHWAYS_THOROUGHNESS", "1") != "1":
        os.environ[SEED] = "all"
    os.environ.setdefault(SEED, str(random.SystemRandom().getrandbits(32)))
    given = os.environ.get(SHARE, "1")
    if not re.fullmatch(r"0|1|[01]?\.\d+", given) or float(given) > 1:
        raise pytest.UsageError(f"{SHARE}: expected a number from 0 to 1, such as 0.3, got {given!r}")


def share() -> float:
    """The share of its tests that each file plays."""
    return 1.0 if os.environ.get(SEED) == "all" else float(os.environ.get(SHARE, "1"))


def header() -> str:
    """How to draw the same tests again."""
    return f"{SEED}={os.environ[SEED]} {SHARE}={share():g}"


def left_out(tests: list[Any]) -> set[Any]:
    """The tests (`pytest.Item`) of a session that are not played."""
    if os.environ[SEED] == "all":
        return set()
    absent: set[Any] = set()
    for name, cases in _by(tests, _function).items():
        if mark := cases[0].get_closest_marker("sampled"):
            absent |= set(cases) - set(drawn_cases(cases, math.ceil(mark.args[0] * len(cases)), _generator(name)))
    if share() == 1:
        return absent
    played: set[Any] = set()
    rest = [test for test in tests if test not in absent]
    for name, found in _by(rest, lambda test: test.nodeid.partition("::")[0]).items():
        generator = _generator(name)
        if name.startswith(CONTRACT):
            for cases in _by(found, _function).values():
                quick = [case for case in cases if not is_slow(case)]
                played.add(generator.choice(quick or cases))
        for is_of_kind, part in ((False, share()), (True, share() * SLOW_PART)):
            of_kind = [test for test in found if is_slow(test) == is_of_kind]
            played.update(generator.sample(of_kind, math.ceil(part * len(of_kind))))
    return absent | (set(rest) - played)


def is_slow(test: Any) -> bool:
    """Whether the test has the mark `slow`."""
    return test.get_closest_marker("slow") is not None


def drawn_cases(cases: list[Any], count: int, generator: random.Random) -> list[Any]:
    """So many of the cases of one test; their parameters have as many of their values as so many cases can show."""
    rest = {n: set(cases[n].callspec.indices.items()) for n in generator.sample(range(len(cases)), len(cases))}
    drawn: list[Any] = []
    seen: set[tuple[str, int]] = set()
    while rest and len(drawn) < count:
        best = max(rest, key=lambda n: len(rest[n] - seen))  # the first of equals, and so by chance
        drawn.append(cases[best])
        seen |= rest.pop(best)
    return drawn


def _function(test: Any) -> str:
    return str(test.nodeid).partition("[")[0]


def _by(tests: Iterable[Any], key: Any) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = collections.defaultdict(list)
    for test in tests:
        groups[key(test)].append(test)
    return groups


def _generator(name: str) -> random.Random:
    """One for each test or file, so which others are run does not matter."""
    return random.Random(f"{os.environ[SEED]} {name}")
