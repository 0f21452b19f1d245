"""Two programs with collectives on one island of two hosts, whose results say whether they met each other's.

As a program: runs both by turns on a cluster of its own, and tells the first wrong value. See `test_gangs.py`.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways as pw


class Collective:
    """A sum over all devices, times a factor of its own; called on one of several arrays."""

    def __init__(self, slice_: Any, factor: int) -> None:
        total = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(), "x") * factor, mesh=slice_.mesh, in_specs=P("x"), out_specs=P()
        )
        self._program = pw.program(
            pw.jit(total, devices=slice_, in_shardings=P("x"), out_shardings=P(), name=f"times{factor}")
        )
        values = [np.arange(4, dtype=np.float32) + 10 * n + factor for n in range(8)]
        self._arguments = [(pw.device_put(value, slice_, P("x")), float(value.sum()) * factor) for value in values]

    def call(self, generator: random.Random) -> tuple[Any, float]:
        """One call: the array to come, and what it should be."""
        array, want = generator.choice(self._arguments)
        return self._program(array), want


def programs(cluster: Any) -> tuple[Collective, Collective]:
    """The two, on all four devices of one island."""
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=4, island=0)
    return Collective(slice_, 3), Collective(slice_, 1000)


def main() -> int:
    """Runs them by turns until a value is wrong."""
    generator = random.Random(0)
    with pw.connect(pw.LocalCluster(1, 2, 2)) as cluster:
        both = programs(cluster)
        for _ in range(40):
            results = [program.call(generator) for _ in range(8) for program in both]
            for array, want in results:
                if (got := float(array)) != want:
                    print(f"WRONG VALUE: {got}, expected {want}", flush=True)
                    return 1
    print("every result is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
