"""A host's tasks, without a host: what it remembers, and holds, of jobs that were given up.

OWN-1: `test_a_job_that_is_given_up_while_it_begins_holds_nothing`.
"""

from __future__ import annotations

import pathlib
import threading
import time
import weakref
from typing import Any

import jax
import numpy as np
import pytest

from pathways import errors
from pathways.host import checkpoint_io


class Core:
    """Takes what tasks say of their ends."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.answered: list[int] = []

    def task_answered(self, task: int) -> None:
        self.answered.append(task)

    def task_done(self, *answer: Any) -> None:
        self.done.append(answer)


def test_given_up_jobs_are_not_remembered_for_ever() -> None:
    host = checkpoint_io.Tasks(Core(), 0)
    host.attach_client(1, None)
    last = 3 * checkpoint_io.GIVEN_UP
    for job in range(1, last + 1):
        host.drop(1, job, early=True)
        host.drop(2, job, early=False)
    assert sum(map(len, host._given_up.values())) == checkpoint_io.GIVEN_UP
    with pytest.raises(errors.CheckpointError, match="given up"):
        host.stage(1, 7, {"job": last, "number": 0}, None)
    host.forget(1)
    assert not host._given_up


@pytest.mark.parametrize("how", ["its client goes", "it is ended"])
def test_a_job_that_is_given_up_while_it_begins_holds_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The first task of a host takes long: it imports tensorstore. What it begins then is nobody's any more."""
    tensorstore, may_go, has_begun = checkpoint_io._tensorstore, threading.Event(), threading.Event()

    def slowly(host: int) -> Any:
        has_begun.set()
        assert may_go.wait(60)
        return tensorstore(host)

    monkeypatch.setattr(checkpoint_io, "_tensorstore", slowly)
    core = Core()
    host = checkpoint_io.Tasks(core, 0)
    host.attach_client(1, None)
    base = {"driver": "ocdbt", "base": f"file://{tmp_path}/"}
    spec = {
        "driver": "zarr",
        "kvstore": {**base, "path": "a/"},
        "metadata": {"shape": [1 << 16], "chunks": [1 << 16], "dtype": "<f4", "compressor": None},
    }
    value = jax.device_put(np.arange(1 << 16, dtype=np.float32))
    seen = weakref.ref(value)
    host.stage(1, 1, {"job": 1, "number": 0}, value)
    fields = {"op": "write", "job": 1, "lead": 0, "arrays": [[0, "a", spec]], "context": {}, "atomic": True}
    taken: list[Any] = []

    class Values(dict[int, Any]):
        """Are given up after they were taken."""

        def pop(self, number: int, *default: Any) -> Any:
            taken.append(number)
            value = super().pop(number, *default)
            host.forget(1) if how == "its client goes" else host.drop(1, 1, early=True)
            return value

    host._jobs[1, 1].values = Values(host._jobs[1, 1].values)
    host.submit(1, 2, fields)
    assert has_begun.wait(60)
    assert (core.answered, core.done) == ([1], [])  # MEM-7: the host keeps what was staged
    del value
    may_go.set()
    deadline = time.monotonic() + 60
    while len(core.done) < 2 or host._running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert taken == [0]
    assert {task for task, *_ in core.done} == {1, 2}
    while seen() is not None:
        assert time.monotonic() < deadline, "the array is held"
        time.sleep(0.01)
    host.stop()
