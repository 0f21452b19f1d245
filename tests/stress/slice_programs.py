"""Random slices, transfers and collectives against NumPy; see `test_slices.py`. Run by hand for a long campaign:

    python tests/stress/slice_programs.py --grid 3x2 --programs 1000 --seed 7

A block of programs shares some slices, each over any devices of the island in any order, and a kit of placed functions:
each with collectives, on one of the slices, in any shardings. A program is two to six of them, each of values made
before, wherever those are; so most need a transfer first. It runs as one `pw.program` or as calls of their own, several
times, ahead of the reader; now and then a slice moves elsewhere between two calls. All values are small integers.

Everything that is drawn hangs on the seed, the grid and the block.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways as pw

GRIDS = {"2x2": (2, 2), "4x1": (4, 1), "3x2": (3, 2)}  # hosts x devices of each
BLOCK = 40  # programs
SIZE = 60  # what is divisible by every number of devices that an axis has
MODULUS = 97
SLICES, KIT = 5, 12
#: A program that takes longer than this hangs: where every thread of the client is, and what the hosts wait for.
HANGS_S = 150.0


def reverse(xp: Any, x: Any, c: int) -> Any:
    return x[::-1] + c


def total(xp: Any, x: Any, c: int) -> Any:
    return x + xp.sum(x, dtype=x.dtype) + c


def turn(xp: Any, x: Any, c: int) -> Any:
    return x.T * c


def roll(xp: Any, x: Any, c: int) -> Any:
    return xp.roll(x, c, axis=c % 2)


def product(xp: Any, x: Any, c: int) -> Any:
    return x @ x.T + c


def scale(xp: Any, x: Any, c: int) -> Any:
    return x * c + 1


def both(xp: Any, x: Any, y: Any, c: int) -> Any:
    return x + y[:, ::-1] * c


OPERATIONS: tuple[Callable[..., Any], ...] = (reverse, total, turn, roll, product, scale, both, both)


class Placed:
    """One function of a kit: what it computes, of how many values, and the same on a slice."""

    def __init__(self, draw: random.Random, slices: Sequence[Any]) -> None:
        self.operation, self.constant = draw.choice(OPERATIONS), draw.randrange(1, 5)
        self.arguments = 2 if self.operation is both else 1
        where = draw.choice(slices)
        specs = [draw_spec(draw, where) for _ in range(self.arguments + 1)]

        def run(*operands: Any) -> Any:
            return self.compute(jnp, *operands)

        name = self.operation.__name__
        self.call = pw.jit(run, devices=where, in_shardings=tuple(specs[:-1]), out_shardings=specs[-1], name=name)

    def compute(self, xp: Any, *operands: Any) -> Any:
        """On JAX or NumPy arrays."""
        return self.operation(xp, *operands, self.constant) % MODULUS


def draw_devices(draw: random.Random, cluster: Any, count: int) -> list[int]:
    return draw.sample(range(len(cluster.devices)), count)


def draw_block(draw: random.Random, cluster: Any) -> tuple[list[Any], list[Placed]]:
    """Slices of every size, most of them over devices that lie anywhere; and a kit on them."""
    devices = pw.make_virtual_device_set(cluster)
    slices = []
    for _ in range(SLICES):
        count = draw.randint(1, len(cluster.devices))
        splits = [(count,), *((n, count // n) for n in (2, 3) if count % n == 0 and count > n)]
        slices.append(devices.add_slice(shape=draw.choice(splits)))
        if draw.random() < 0.7:
            cluster.remap(slices[-1], draw_devices(draw, cluster, count))
    return slices, [Placed(draw, slices) for _ in range(KIT)]


def draw_spec(draw: random.Random, chosen: Any) -> Any:
    x, y = (chosen.axis_names * 2)[:2]
    specs = [P(), P(x), P(None, x), P(x)]
    return draw.choice(specs if x == y else [*specs, P(y, x), P((x, y)), P(None, (y, x))])


def check(draw: random.Random, cluster: Any, slices: Sequence[Any], kit: Sequence[Placed]) -> int:
    """One program. Returns the number of arrays that were compared; raises AssertionError for one that is wrong."""
    count = draw.choice((1, 2))
    steps: list[tuple[Placed, tuple[int, ...]]] = []  # and what it takes
    for known in range(count, count + draw.randint(2, 6)):
        placed = draw.choice(kit)
        steps.append((placed, tuple(draw.randrange(known) for _ in range(placed.arguments))))
    places = [(where, draw_spec(draw, where)) for where in draw.choices(slices, k=count)]
    results = sorted({len(steps) + count - 1, *draw.choices(range(count, count + len(steps)), k=2)})

    def run(*given: Any) -> list[Any]:
        values = list(given)
        for placed, inputs in steps:
            values.append(placed.call(*(values[n] for n in inputs)))
        return [values[n] for n in results]

    call = pw.program(run) if draw.random() < 0.5 else run
    pending = []
    for again in range(draw.choice((1, 2, 4))):
        given = [np.asarray(draw.choices(range(MODULUS), k=SIZE * SIZE), np.int32) for _ in range(count)]
        want = [x.reshape(SIZE, SIZE) for x in given]
        if again and draw.random() < 0.05:
            moved = draw.choice(slices)
            cluster.remap(moved, draw_devices(draw, cluster, moved.size))
        put = [pw.device_put(x, where, spec) for x, (where, spec) in zip(want, places, strict=True)]
        for placed, inputs in steps:
            want.append(placed.compute(np, *(want[n] for n in inputs)))
        pending.append((call(*put), [want[n] for n in results]))
    draw.shuffle(pending)
    for got, wanted in pending:
        for array, expected in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(array), expected)
    return sum(len(wanted) for _, wanted in pending)


def campaign(cluster: Any, grid: str, seed: int, first: int, programs: int) -> Iterator[int]:
    """Runs so many programs from the block of number `first` on; yields the arrays compared after each."""
    for number in range(first - first % BLOCK, first + programs):
        if number % BLOCK == 0:
            draw = random.Random(f"{seed} {grid} {number // BLOCK}")
            slices, kit = draw_block(draw, cluster)
        try:
            yield check(draw, cluster, slices, kit)
        except Exception as error:
            error.add_note(f"program {number} of seed {seed} on {grid}: --grid {grid} --seed {seed} --first {number}")
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, required=True)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the program to begin with; its block's come before it")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, and say how far it is")
    given = parser.parse_args()
    hosts, devices = GRIDS[given.grid]
    print(f"grid {given.grid}, PATHWAYS_SEED={given.seed}, from program {given.first}", flush=True)
    began, done, compared = time.monotonic(), 0, 0
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=hosts, devices_per_host=devices)) as cluster:
        for arrays in campaign(cluster, given.grid, given.seed, given.first, given.programs):
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            done, compared = done + 1, compared + arrays
            if done % 100 == 0:
                print(f"{done} programs, {time.monotonic() - began:.0f} s", flush=True)
            if time.monotonic() - began > given.seconds:
                break
        faulthandler.cancel_dump_traceback_later()
    print(f"grid {given.grid}: {done} programs, {compared} arrays, none wrong, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
