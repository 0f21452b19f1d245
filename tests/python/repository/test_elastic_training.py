"""A training on machines that join while it runs, and leave again: parameters and losses have the bits of one that
nothing disturbed. `examples/elastic_training.py` says why. MOVE-1."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from machines import MachineCluster

pytestmark = pytest.mark.slow

STEPS = 30


@pytest.fixture
def elastic(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example as a module."""
    monkeypatch.syspath_prepend(root / "examples")
    yield importlib.import_module("elastic_training")


def test_from_one_machine_to_three_and_back(elastic: Any) -> None:
    """Two machines join after a third of the steps, and leave after another third: their slices move while steps are
    under way, and the machines are gone before the training goes on.
    """
    with MachineCluster(3, 1, 2, agents=1) as machines, machines.connect() as cluster:
        want = elastic.Training(cluster).run(STEPS, {})
        training = elastic.Training(cluster)

        def grow() -> None:
            for name in ("m1", "m2"):
                machines.start_agent(name)
            training.grow()
            assert {worker.island for worker in training.workers} == {0, 1, 2}
            assert training.home.size == 2

        def shrink() -> None:
            names = {machine["island"]: machine["name"] for machine in cluster.stats()["machines"]}
            training.shrink(lambda island: cluster.drain(names[island]))
            assert {worker.island for worker in training.workers} == {0}
            assert training.home.size == 1
            assert [host["state"] for host in cluster.stats()["hosts"]] == ["up", "lost", "lost"]

        got = training.run(STEPS, {STEPS // 3: grow, 2 * STEPS // 3: shrink})
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert float(got[1][-1]) < float(got[1][0]), "it learns"
