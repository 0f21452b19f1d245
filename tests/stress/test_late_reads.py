"""Training loops that donate their state and read their losses late: every loss is that of its own step.

    LOOK-1, READ-1  a result is told, and comes with its completion, when its own launch has run, whatever became of the
                    launch's other outputs.

Cases are drawn at random from {donation of none, some, all} x {outputs in each order} x {calls in flight} x {when a
loss is read} x {how it is read} x {its size} x {chained or on fresh arguments} x {size of the state}, on one and two
devices, on one and two hosts, and embedded. The seed is printed, and taken from PATHWAYS_SEED; PATHWAYS_LATE_READS sets
how many cases are drawn for each cluster.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

CASES = int(os.environ.get("PATHWAYS_LATE_READS", "6"))
#: Hosts and devices of a host; None: embedded.
SHAPES = {"embedded": None, "1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2)}
LOSS_BYTES = (4, 64, 4096, 4100, 65536)  # up to 4096 a loss may come with its completion


def by_copy(array: Any) -> np.ndarray:
    array.copy_to_host_async()
    return np.asarray(array)


def by_float(array: Any) -> np.ndarray:
    return np.full(array.shape, float(array)) if array.ndim == 0 else np.asarray(array)


READERS: dict[str, Callable[[Any], Any]] = {
    "asarray": np.asarray,
    "device_get": jax.device_get,
    "copy_to_host_async": by_copy,
    "float": by_float,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One loop; `order` is where state, counter and loss stand among the outputs."""

    donate: tuple[int, ...]
    order: tuple[int, ...]
    ahead: int
    when: str  # now, behind (one step), end, never
    reader: str
    loss_bytes: int
    is_chained: bool
    side: int
    as_program: bool

    @staticmethod
    def draw(generator: random.Random) -> Case:
        ahead = generator.choices((1, 2, 50, 1000), weights=(3, 3, 6, 1))[0]
        is_chained = generator.random() < 0.75
        return Case(
            donate=generator.choice(((), (0,), (0, 1))),
            order=generator.choice(list(itertools.permutations(range(3)))),
            ahead=ahead,
            when=generator.choice(("now", "behind", "end", "end", "never")),
            reader=generator.choice(list(READERS)),
            loss_bytes=generator.choice(LOSS_BYTES),
            is_chained=is_chained,
            side=generator.choice((64, 512) if ahead > 50 or not is_chained else (64, 512, 1024)),
            as_program=generator.random() < 0.5,
        )

    def step(self, slice_: Any) -> Callable[..., Any]:
        shape = () if self.loss_bytes == 4 else (self.loss_bytes // 4,)

        def f(state: Any, counter: Any) -> Any:
            outputs = (state + 1, counter + 1, jnp.full(shape, state.max()))
            return tuple(outputs[i] for i in self.order)

        if not self.as_program:
            return pw.jit(f, devices=slice_, donate_argnums=self.donate)
        placed = pw.jit(f, devices=slice_)
        return pw.program(lambda state, counter: placed(state, counter), donate_argnums=self.donate)

    def run(self, slice_: Any, generator: random.Random) -> tuple[int, int]:
        """How many values were compared, and how many of them were wrong."""
        f, read = self.step(slice_), READERS[self.reader]
        spec = P("x") if generator.random() < 0.5 else P()
        compared, wrong = 0, 0

        def arguments(start: float) -> tuple[Any, Any]:
            return (
                pw.device_put(np.full((self.side, self.side), start, np.float32), slice_, spec),
                pw.device_put(np.int32(start), slice_),
            )

        def check(loss: Any, want: float) -> None:
            nonlocal compared, wrong
            got = read(loss)
            compared += 1
            wrong += not (got == np.float32(want)).all()

        steps = 2 * self.ahead if self.ahead == 50 else max(60, self.ahead)
        given = arguments(0)
        pending: list[tuple[Any, float]] = []
        for i in range(steps):
            if not self.is_chained:
                given = arguments(i)
            results = f(*given)
            state, counter, loss = (results[self.order.index(k)] for k in range(3))
            if self.is_chained:
                given = (state, counter)
            pending.append((loss, float(i)))
            if self.when == "now":
                check(*pending.pop())
            elif self.when == "behind" and len(pending) > 1:
                check(*pending.pop(0))
            elif len(pending) >= self.ahead:
                if self.when == "end":
                    for each in pending:
                        check(*each)
                pending.clear()
        if self.when != "never":
            for each in pending:
                check(*each)
        for got, want in ((np.asarray(state), steps), (np.asarray(counter), steps)):
            compared += 1
            wrong += not (got == want).all()
        return compared, wrong


@pytest.fixture(scope="module", params=list(SHAPES))
def slice_(request: pytest.FixtureRequest) -> Iterator[Any]:
    shape = SHAPES[request.param]
    if shape is None:
        cluster = pw.connect()
        devices = 2
    else:
        cluster = pw.connect(pw.LocalCluster(islands=1, hosts_per_island=shape[0], devices_per_host=shape[1]))
        devices = shape[0] * shape[1]
    yield pw.make_virtual_device_set(cluster).add_slice(devices=devices)
    cluster.close()


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"PATHWAYS_SEED={value}")
    return value


@pytest.mark.slow
@pytest.mark.watchdog(900)
def test_every_loss_is_that_of_its_step(slice_: Any, seed: int) -> None:
    generator = random.Random(seed)
    # The commonest loop of all first: a state that is donated, a loss behind it, read when the loop is over.
    plain = Case((0,), (0, 1, 2), 50, "end", "asarray", 4, True, 1024, False)
    cases = [plain, *(Case.draw(generator) for _ in range(CASES))]
    total = 0
    for case in cases:
        for _ in range(2):  # from the second time on the losses come with their completions
            compared, wrong = case.run(slice_, generator)
            assert wrong == 0, f"{wrong} of {compared} values are wrong: {case}"
            total += compared
    print(f"{len(cases)} cases, {total} values compared, none wrong")
