"""A host's tasks, without a host: what it remembers of jobs that were given up."""

from __future__ import annotations

from typing import Any

import pytest

from pathways import errors
from pathways.runtime import tasks


class Core:
    """Takes what tasks say of their ends."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def task_done(self, *answer: Any) -> None:
        self.done.append(answer)


def test_given_up_jobs_are_not_remembered_for_ever() -> None:
    host = tasks.Tasks(Core(), 0, lambda function: function)
    last = 3 * tasks.GIVEN_UP
    for job in range(1, last + 1):
        host.drop(1, job, early=True)
        host.drop(2, job, early=False)
    assert sum(map(len, host._given_up.values())) == tasks.GIVEN_UP
    with pytest.raises(errors.CheckpointError, match="given up"):
        host.stage(1, 7, {"job": last, "number": 0}, None)
    host.forget(1)
    assert not host._given_up
