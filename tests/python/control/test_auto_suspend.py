"""SUSP-2: with `when_full="suspend"`, clients whose arrays do not fit together take turns on the devices."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pathways as pw

CLIENT = pathlib.Path(__file__).parent / "room_client.py"
MIB = 1 << 20
pytestmark = pytest.mark.slow


class Guest:
    """A client process; its answers come in the order of the lines."""

    def __init__(self, address: str, *arguments: str) -> None:
        environ = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), address, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.number = self.answer()["client"]

    def tell(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def has_answered(self) -> bool:
        """Whether there is an answer, when all earlier ones were taken."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.tell(do, **fields)
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


@pytest.fixture
def guests(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[..., Guest]]]:
    """A cluster of one device of 64 MiB, and what starts a client of it."""
    options = {"when_full": "suspend", **getattr(request, "param", {})}
    cluster = pw.connect(pw.LocalCluster(device_memory=64 * MIB, **options))
    started: list[Guest] = []

    def start(*arguments: str) -> Guest:
        started.append(Guest(cluster.address, *arguments))
        return started[-1]

    yield cluster, start
    for guest in started:
        guest.end()
    cluster.close()


def suspended(cluster: Any) -> set[int]:
    return {client["client"] for client in cluster.stats()["clients"] if client["suspended"]}


def test_idle_arrays_leave_for_others_and_come_back(guests: Any) -> None:
    cluster, start = guests
    one, two, three = start(), start(), start()
    assert one.ask("hold", mib=40) == {}
    assert suspended(cluster) == set()
    assert two.ask("hold", mib=40, seed=1) == {}
    assert suspended(cluster) == {one.number}
    assert three.ask("hold", mib=20, seed=2) == {}
    assert suspended(cluster) == {one.number}  # they fit together
    for _ in range(3):
        assert one.ask("check") == {"right": True}
        assert suspended(cluster) == {two.number}
        assert two.ask("check") == {"right": True}
        assert suspended(cluster) == {one.number}
    assert three.ask("check") == {"right": True}
    memory = cluster.stats()["hosts"][0]["memory"]["devices"][0]
    assert memory["high_water"] <= memory["limit"]


def test_clients_that_all_work_take_turns(guests: Any) -> None:
    _, start = guests
    both = [start(), start()]
    for seed, guest in enumerate(both):
        guest.tell("hold", mib=40, seed=seed)
    assert [guest.answer() for guest in both] == [{}, {}]
    for guest in both:
        guest.tell("work", seconds=5.0)
    steps = [guest.answer()["steps"] for guest in both]
    assert min(steps) > 0.1 * max(steps), steps
    for guest in both:
        assert guest.ask("check") == {"right": True}


@pytest.mark.parametrize("guests", [{"when_full": "refuse"}], indirect=True)
def test_without_it_work_that_finds_no_room_fails(guests: Any) -> None:
    cluster, start = guests
    one, two = start(), start()
    assert one.ask("hold", mib=40) == {}
    assert "ResourceExhaustedError" in two.ask("hold", mib=40)["error"]
    assert suspended(cluster) == set()
    assert one.ask("check") == {"right": True}


def test_who_is_in_its_own_way_fails(guests: Any) -> None:
    cluster, start = guests
    one = start()
    assert one.ask("hold", mib=40) == {}
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    mine = pw.device_put(numbers(40), slice_)  # sends the idle one away
    mine.block_until_ready()
    began = time.monotonic()
    with pytest.raises(pw.errors.ResourceExhaustedError, match="live arrays"):
        pw.device_put(numbers(40), slice_).block_until_ready()
    assert time.monotonic() - began < 20
    assert one.ask("check") == {"right": True}


def test_who_is_alone_and_in_its_own_way_fails(guests: Any) -> None:
    cluster, _ = guests
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    mine = pw.device_put(numbers(40), slice_)
    with pytest.raises(pw.errors.ResourceExhaustedError, match="live arrays"):
        pw.device_put(numbers(40), slice_).block_until_ready()
    assert float(np.asarray(mine)[-1]) == 7


def numbers(mib: int) -> Any:
    return np.full(mib << 18, 7, np.float32)


@pytest.mark.parametrize("guests", [{"policy": "priority"}], indirect=True)
def test_a_busy_client_does_not_leave_for_one_of_lower_priority(guests: Any) -> None:
    cluster, start = guests
    low, high = start("0"), start("1")
    assert high.ask("hold", mib=40) == {}
    high.ask("work", seconds=0.1)  # compiled
    high.tell("work", seconds=4.0)
    time.sleep(0.2)
    low.tell("hold", mib=40)
    looks: list[tuple[set[int], float]] = []
    while not high.has_answered():
        looks.append((suspended(cluster), time.monotonic()))
        time.sleep(0.1)
    work = high.answer()
    assert work["steps"] > 0
    assert not any(high.number in away for away, at in looks if at < work["stopped"])
    assert low.answer() == {}  # it idles now
    assert high.ask("check") == {"right": True} and low.ask("check") == {"right": True}


def test_a_client_that_is_killed_while_it_is_away_leaves_nothing(guests: Any) -> None:
    cluster, start = guests
    one, two = start(), start()
    assert one.ask("hold", mib=40) == {} and two.ask("hold", mib=40) == {}
    assert suspended(cluster) == {one.number}
    one.process.kill()
    one.process.wait()
    deadline = time.monotonic() + 30
    while len(cluster.stats()["clients"]) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert two.ask("drop") == {} and two.ask("hold", mib=60) == {} and two.ask("check") == {"right": True}


def test_what_an_operator_suspends_stays_away(guests: Any) -> None:
    cluster, start = guests
    one, two = start(), start()
    assert one.ask("hold", mib=20) == {}
    cluster.suspend(one.number)
    one.tell("check")
    assert two.ask("hold", mib=20) == {}
    time.sleep(0.5)
    assert suspended(cluster) == {one.number}
    cluster.resume(one.number)
    assert one.answer() == {"right": True}
    assert two.ask("hold", mib=50) == {}
    assert suspended(cluster) == {one.number}
    cluster.suspend(one.number)  # it is away already, for the other one; from now on it stays away
    one.tell("check")
    time.sleep(0.5)
    assert suspended(cluster) == {one.number}
    with pytest.raises(pw.errors.ResourceExhaustedError):  # there is no room; but now it may come back by itself
        cluster.resume(one.number)
    assert one.answer() == {"right": True}
