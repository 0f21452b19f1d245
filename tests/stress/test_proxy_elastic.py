"""Elastic training in unmodified JAX through a proxy: a host is killed at a step drawn by chance, and the training goes
on without its island, and with it when it is back. Each loss has the bits of plain JAX.

ERR-2    a lost host fails what was there, and nothing else; its island comes back.

PATHWAYS_ELASTIC_RUNS is how many trainings, 1 if not given. PATHWAYS_ELASTIC_BY=pathwaysutils lets that package find
out what is up, if it is installed. The seed is printed, and taken from PATHWAYS_SEED.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import pathways as pw
from pathways.cluster.operator import look
from pathways.cluster.proxy_process import ProxyProcess

CLIENT = pathlib.Path(__file__).parent / "elastic_client.py"
RUNS = int(os.environ.get("PATHWAYS_ELASTIC_RUNS", "1"))
BY = os.environ.get("PATHWAYS_ELASTIC_BY", "loop")
SEED = int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)
#: As in `elastic_client.py`: how many steps there are, and how many of them a loss takes back at most.
STEPS, KEPT = 80, 5


pytestmark = pytest.mark.watchdog(180 + 60 * RUNS)


def lines(by: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", **variables}
    return subprocess.Popen([sys.executable, str(CLIENT), by], env=env, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The loss of each step in plain JAX."""
    with lines("plain", {"JAX_PLATFORMS": "cpu"}) as process:
        assert process.stdout is not None
        losses = [json.loads(line)[1] for line in process.stdout]
    assert len(losses) == STEPS
    assert float.fromhex(losses[-1]) < float.fromhex(losses[0]), "it learns"
    return losses


def test_training_goes_on_after_a_lost_island(expected: list[str]) -> None:
    print(f"PATHWAYS_SEED={SEED}")
    chance = random.Random(SEED)
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1)) as cluster:
        proxy = ProxyProcess(cluster.address)
        try:
            for run in range(RUNS):
                while any(host.state != "up" for host in look(cluster.address).hosts):
                    time.sleep(0.1)  # the watchdog ends a wait without end
                host, at = chance.randrange(4), chance.randrange(3, STEPS - 20)
                found = one_training(cluster, proxy.variables, host, at)
                alone = check(found, expected, host // 2)
                what = f"host {host} killed at step {at}, {len(found) - 1} steps, {alone} without its island"
                print(f"training {run + 1} of {RUNS}: {what}", flush=True)
        finally:
            proxy.close()


def one_training(cluster: Any, variables: dict[str, str], host: int, at: int) -> list[Any]:
    """The lines of a training, in which a host is killed after step `at`."""
    found, pid = [], look(cluster.address).hosts[host].pid
    with lines(BY, variables) as process:
        try:
            assert process.stdout is not None
            is_killed = False
            for line in process.stdout:
                found.append(json.loads(line))
                if found[-1][0] == at and not is_killed:
                    is_killed = True
                    os.kill(pid, signal.SIGKILL)
            assert process.wait() == 0, f"the training ended after {found[-3:]}"
        finally:
            process.kill()
    return found


def check(found: list[Any], expected: list[str], lost: int) -> int:
    """The loss was noticed once, as DATA_LOSS, and took back few steps; each loss of the training is right. Returns how
    many steps ran without the island, which may be back before the training asks for it.
    """
    at = [number for number, (what, *_) in enumerate(found) if what == "lost"]
    assert len(at) == 1 and "DATA_LOSS" in found[at[0]][1], [found[number] for number in at]
    steps = found[: at[0]] + found[at[0] + 1 :]
    assert sorted({step for step, _, _ in steps}) == list(range(STEPS))
    assert len(steps) <= STEPS + KEPT
    assert all(loss == expected[step] for step, loss, _ in steps)
    assert all(islands in ([0, 1], [1 - lost]) for _, _, islands in steps)
    return sum(islands != [0, 1] for _, _, islands in steps)
