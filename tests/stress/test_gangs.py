"""Gangs: two programs with collectives from two threads on one island of two hosts, interleaved at random.

    ORD-1   every result is right, though two crossed collectives would pair up and give wrong numbers without an error.
    GANG-1  both hosts have launched equally many gangs, also when runs are cancelled in flight.

The seed is printed, and taken from PATHWAYS_SEED. With the order broken on purpose the same programs give a wrong
value, which shows that the test can fail: see `gangs_client.py`.
"""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

import gangs_client
import pytest

import pathways as pw

RUNS = 1000
HERE = pathlib.Path(__file__).parent


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"PATHWAYS_SEED={value}")
    return value


def drive(program: Any, generator: random.Random, *, cancels: bool, report: dict[str, Any]) -> None:
    """Submits `RUNS` calls, reads them back in bursts of random length, and cancels some when asked to."""
    pending: deque[tuple[Any, Any]] = deque()
    most = 900 if cancels else 64  # a host is granted 256 runs at a time: the others can still be dropped
    counts = {"right": 0, "cancelled": 0, "wrong": 0}

    def settle(count: int) -> None:
        for _ in range(min(count, len(pending))):
            array, want = pending.popleft()
            try:
                counts["right" if float(array) == want else "wrong"] += 1
            except pw.errors.CancelledError:
                counts["cancelled"] += 1

    try:
        for _ in range(RUNS):
            pending.append(program.call(generator))
            if generator.random() < 0.05:
                time.sleep(generator.random() * 1e-3)
            if cancels and generator.random() < 0.1:
                pw.cancel(generator.choice(pending)[0])
            if len(pending) > generator.randrange(most // 2, most):
                settle(generator.randrange(most))
        settle(RUNS)
        report["counts"] = counts
    except BaseException as error:  # the main thread tells
        report["error"] = error


def settled(cluster: Any) -> list[int]:
    """Gangs by host, once no run is in flight."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stats = cluster.stats()
        if stats["in_flight"] == 0 and all(host["live_runs"] == 0 for host in stats["hosts"]):
            return stats["gangs"]
        time.sleep(0.05)
    raise AssertionError(f"runs are still in flight: {cluster.stats()}")


@pytest.mark.slow
@pytest.mark.watchdog(300)
@pytest.mark.parametrize("cancels", [False, True], ids=["all-run", "some-cancelled"])
def test_two_threads_two_programs(local_cluster: Any, seed: int, cancels: bool) -> None:
    generator = random.Random(seed)
    programs = gangs_client.programs(local_cluster)
    for program in programs:
        array, want = program.call(generator)
        assert float(array) == want
    before = settled(local_cluster)
    dropped = local_cluster.stats()["controller"]["dropped"]
    assert before[0] == before[1]
    reports: list[dict[str, Any]] = [{}, {}]
    threads = [
        threading.Thread(
            target=drive,
            args=(program, random.Random(generator.random())),
            kwargs={"cancels": cancels, "report": report},
        )
        for program, report in zip(programs, reports, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for report in reports:
        assert "error" not in report, report
        assert report["counts"]["wrong"] == 0, reports
        assert report["counts"]["right"] + report["counts"]["cancelled"] == RUNS
        assert cancels or report["counts"]["cancelled"] == 0
    after = settled(local_cluster)
    assert after[0] == after[1], after
    launched = after[0] - before[0]
    dropped = local_cluster.stats()["controller"]["dropped"] - dropped
    assert launched + dropped == 2 * RUNS
    if cancels:
        assert dropped > 0 and all(report["counts"]["cancelled"] for report in reports)
    print(f"gangs {launched}, dropped {dropped}, {[report['counts'] for report in reports]}")


@pytest.mark.slow
@pytest.mark.watchdog(300)
@pytest.mark.parametrize(
    ("swap", "expected"), [("", "every result is right"), ("1:3", "WRONG VALUE")], ids=["in-order", "order-broken"]
)
def test_a_broken_order_gives_a_wrong_value(swap: str, expected: str) -> None:
    """The proof that the tests above can fail: one host of two enqueues some runs the other way round."""
    environment = {**os.environ, "PATHWAYS_TEST_SWAP": swap}
    done = subprocess.run(
        [sys.executable, str(HERE / "gangs_client.py")],
        env=environment,
        text=True,
        timeout=240,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert expected in done.stdout, done.stdout
    assert done.returncode == (0 if swap == "" else 1), done.stdout
