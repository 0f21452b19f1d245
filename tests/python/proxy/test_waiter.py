"""Waits for arrays of a session (`Waiter`): a short while by the thread that asks, then by the waiter's own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from control_clusters import eventually

import pathways as pw
from pathways import _core
from pathways.proxy.waiter import Waiter

LIES = SimpleNamespace(binding=SimpleNamespace(devices=(0,)))


def array(handle: int) -> Any:
    return SimpleNamespace(raw_handle=handle, slice=LIES)


class Session:
    """Arrays become ready when the test says so, or when somebody polls for them."""

    def __init__(self) -> None:
        self.native = self
        self.ready: set[int] = set()
        self.polled: list[tuple[int, int]] = []
        self.is_quick = True

    def state(self, array: Any) -> str:
        return "ready" if array.raw_handle in self.ready else "pending"

    def wait_raw(self, handle: int, timeout: float) -> str:
        return "pending"

    def poll_beside(self, native: Any, handle: int, descriptor: int, seconds: float) -> None:
        assert native is self
        self.polled.append((handle, descriptor))
        if self.is_quick:
            self.ready.add(handle)


def test_who_asks_waits_a_short_while_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    monkeypatch.setattr(_core, "poll_beside", session.poll_beside)
    waiter = Waiter(session, SimpleNamespace(loss_of=lambda devices, age_s: None))  # type: ignore[arg-type]
    told: list[int] = []

    def then(error: BaseException | None) -> None:
        assert error is None
        told.append(threading.get_ident())

    waiter.settle(5)  # from now on this thread looks after what it asks for
    assert session.polled == []
    waiter.add([array(1)], then)
    waiter.add([array(2)], then)
    session.ready.add(1)
    assert told == []
    waiter.settle(5)
    assert told == [threading.get_ident()] * 2 and session.polled == [(2, 5)]
    # What takes longer is the waiter's thread's.
    session.is_quick = False
    waiter.add([array(3)], then)
    waiter.settle(5)
    assert len(told) == 2
    session.ready.add(3)
    eventually(lambda: len(told) == 3, "it is told")
    assert told[2] != threading.get_ident()
    # What another thread asks for, too.
    session.is_quick = True
    asker = threading.Thread(target=lambda: waiter.add([array(4)], then))
    asker.start()
    asker.join()
    session.ready.add(4)
    eventually(lambda: len(told) == 4, "it is told")
    # At the end everybody is told.
    errors: list[BaseException | None] = []
    waiter.add([array(5)], errors.append)
    waiter.close()
    assert len(errors) == 1 and isinstance(errors[0], pw.errors.ClusterClosedError)


class EndedSession(Session):
    """The cluster has ended: a wait says so, and nothing becomes ready."""

    def wait_raw(self, handle: int, timeout: float) -> str:
        raise pw.errors.ControllerLostError("the controller is gone")


def test_each_is_told_once_when_the_cluster_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits then, and who asks afterwards, by whatever thread."""
    session = EndedSession()
    session.is_quick = False
    monkeypatch.setattr(_core, "poll_beside", session.poll_beside)
    waiter = Waiter(session, SimpleNamespace(loss_of=lambda devices, age_s: None))  # type: ignore[arg-type]
    told: list[tuple[int, BaseException | None]] = []

    def add(number: int) -> None:
        waiter.add([array(number)], lambda error: told.append((number, error)))

    for number in range(4):
        add(number)
        eventually(lambda: len(told) > number, "the waiter's thread tells it")  # noqa: B023
    waiter.settle(5)
    for number in range(4, 8):
        add(number)
        waiter.settle(5)
        eventually(lambda: len(told) > number, "it is told")  # noqa: B023
    add(8)
    waiter.close()
    assert [number for number, _ in told] == list(range(9))
    assert all(isinstance(error, pw.errors.ControllerLostError) for _, error in told[:8])
    assert isinstance(told[8][1], pw.errors.ClusterClosedError)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=1)) as made:
        yield made


def test_polling_ends_with_the_future_or_with_bytes_that_come(cluster: Any) -> None:
    devices = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    slow = pw.jit(lambda x: jax.lax.fori_loop(0, 3_000_000, lambda _, x: jnp.sin(x), x), devices=devices)
    slow(1.0).block_until_ready()
    native, (out, into) = cluster.native, os.pipe()
    try:

        def took(array: Any, seconds: float) -> float:
            start = time.monotonic()
            _core.poll_beside(native, array.raw_handle, out, seconds)
            return time.monotonic() - start

        result = slow(2.0)
        assert took(result, 0.001) >= 0.001
        assert native.state(result) == "pending"
        assert took(result, 60.0) < 30
        assert native.state(result) == "ready"
        again = slow(3.0)
        os.write(into, b"x")
        took(again, 60.0)
        assert native.state(again) == "pending"
        again.block_until_ready()
    finally:
        os.close(out)
        os.close(into)
