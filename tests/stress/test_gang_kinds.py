"""Gangs of every kind that share devices, one after the other without a break, against NumPy.

GANG-3: their collectives never meet each other. Without it XLA's CPU client computes, side by side: a gang on one
device of a host and one on several; and one that calls its client back, on a thread of its own, and a long one. Where
the sizes are equal the results are wrong, else the hosts abort.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

SIZE = 120
MODULUS = 97
ROUNDS, AHEAD = 40, 8


def cheap(xp: Any, x: Any) -> Any:
    """So little that it is computed in the call."""
    return x[::-1] + 3


def long(xp: Any, x: Any) -> Any:
    """So much that it is computed beside the call."""
    for _ in range(3):
        x = (x @ x.T) % MODULUS
    return x


def called(xp: Any, x: Any) -> Any:
    """By a function in the client."""
    y = x[::-1] + 5
    return y if xp is np else jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


KINDS: tuple[Callable[[Any, Any], Any], ...] = (cheap, long, called)


def placed(kind: Callable[[Any, Any], Any], where: Any, spec: Any) -> Any:
    """On a slice, such that it must collect what is spread by `spec`."""
    return pw.jit(lambda x: kind(jnp, x), devices=where, in_shardings=(spec,), out_shardings=P(), name=kind.__name__)


@pytest.mark.slow
@pytest.mark.watchdog(300)
@pytest.mark.parametrize("devices", [1, 2])
def test_collectives_meet_their_own(devices: int) -> None:
    draw = random.Random(seed := random.SystemRandom().getrandbits(32))
    print(f"seed {seed}")
    numbers = np.random.default_rng(seed)
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=2, devices_per_host=devices)) as cluster:
        known = pw.make_virtual_device_set(cluster)
        whole, pair = known.add_slice(shape=(devices, 2)), known.add_slice(devices=2)
        if devices == 2:  # the axis y of the whole, as hosts see it, and then the pair: among the same two devices
            cluster.remap(whole, [0, 1, 2, 3])
            cluster.remap(pair, [1, 3])
        x, y = whole.axis_names
        spread = [(whole, P(x)), (whole, P(None, y)), (pair, P(pair.axis_names[0]))]
        steps = [(kind, placed(kind, *where), where) for kind in KINDS for where in spread]
        for _ in range(ROUNDS):
            due = []
            for kind, call, (where, spec) in draw.sample(steps, AHEAD):
                value = numbers.integers(0, MODULUS, (SIZE, SIZE)).astype(np.int32)
                due.append((kind, call, value, pw.device_put(value, where, spec)))
            jax.block_until_ready([put for *_, put in due])
            made = [(kind, value, call(put)) for kind, call, value, put in due]
            for kind, value, result in made:
                np.testing.assert_array_equal(np.asarray(result), kind(np, value), kind.__name__)
