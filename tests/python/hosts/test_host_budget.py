"""MEM-7: what a restore takes of a host's memory for a moment is bounded, and what comes back is right."""

from __future__ import annotations

import logging
import pathlib
import threading
import time
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.host.host_budget import HostBudget


def test_the_limit_holds_and_a_big_one_is_not_starved() -> None:
    budget = HostBudget(100)
    inside: list[int] = []
    most: list[int] = []
    order: list[str] = []
    lock = threading.Lock()

    def work(name: str, nbytes: int) -> None:
        with budget.take(nbytes):
            with lock:
                inside.append(min(nbytes, 100))
                most.append(sum(inside))
                order.append(name)
            time.sleep(0.002)
            with lock:
                inside.remove(min(nbytes, 100))

    threads = []
    for number in range(30):
        threads.append(threading.Thread(target=work, args=(f"{number}", 1000 if number == 5 else 30)))
        threads[-1].start()
        while budget._next <= number:  # they come in this order
            time.sleep(0.0005)
    for thread in threads:
        thread.join(30.0)
    assert len(order) == 30
    assert max(most) <= 100
    assert budget.high_water <= 100
    assert order.index("5") < 12  # it came sixth, and those behind it did not overtake it for ever


def test_batches() -> None:
    budget = HostBudget(10)
    groups = list(budget.batches([3, 3, 3, 3, 20, 1, 9, 1], lambda nbytes: nbytes))
    assert groups == [([3, 3, 3], 9), ([3], 3), ([20], 20), ([1, 9], 10), ([1], 1)]
    assert list(budget.batches([], lambda nbytes: nbytes)) == []


def test_a_restore_within_its_budget(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pw.checkpoint.register()
    logging.disable()
    try:
        with pw.connect() as cluster:
            control: Any = cluster.control()
            budget = HostBudget(4096)
            monkeypatch.setattr(control.driver._tasks, "_budget", budget)  # the process may have had it before
            slice_ = pw.make_virtual_device_set(cluster).add_slice(shape=(2,), axis_names=("x",))
            state = {
                "cut": pw.device_put(np.arange(4096, dtype=np.float32).reshape(64, 64), slice_, P("x")),
                "whole": pw.device_put(np.arange(7, dtype=np.int8), slice_),
            }
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(tmp_path / "state", state)
            template = {"cut": state["cut"], "whole": state["whole"]}
            with ocp.StandardCheckpointer() as checkpointer:
                got = checkpointer.restore(tmp_path / "state", template)
            for name, array in state.items():
                np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(array))
            assert 0 < budget.high_water <= 4096
    finally:
        logging.disable(logging.NOTSET)
