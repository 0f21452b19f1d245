"""Waits for arrays of a session (`Waiter`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from control_clusters import eventually

import pathways as pw
from pathways.proxy.waiter import Waiter


def array(handle: int) -> Any:
    return SimpleNamespace(raw_handle=handle, slice=SimpleNamespace(binding=SimpleNamespace(devices=(0,))))


class EndedSession:
    """The cluster has ended: a wait says so, and nothing becomes ready."""

    def __init__(self) -> None:
        self.native = self

    def state(self, array: Any) -> str:
        return "pending"

    def wait_raw(self, handle: int, timeout: float) -> str:
        raise pw.errors.ControllerLostError("the controller is gone")


def test_each_is_told_once_when_the_cluster_ends() -> None:
    """Who waits then, and who asks afterwards."""
    waiter = Waiter(EndedSession(), SimpleNamespace(loss_of=lambda devices, age_s: None))  # type: ignore[arg-type]
    told: list[tuple[int, BaseException | None]] = []
    for number in range(8):
        waiter.add([array(number)], lambda error, number=number: told.append((number, error)))  # type: ignore[misc]
        eventually(lambda: len(told) > number, "it is told")  # noqa: B023
    waiter.close()
    assert [number for number, _ in told] == list(range(8))
    assert all(isinstance(error, pw.errors.ControllerLostError) for _, error in told)
