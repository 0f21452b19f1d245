"""Which bytes of a small result a host writes (READ-1): a recipe says it, and a write over zeros and one over ones show
it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways.host import read_back
from pathways.quirks import quirks_of

SHAPES = [(), (4,), (8, 6), (2, 4, 6), (4, 1, 2), (1, 1), (0, 4), (4, 0)]
SPECS = [P(), P("x"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y", "x"), P("y", None, "x")]


def written(value: jax.Array) -> tuple[np.ndarray, bytes]:
    """Whether each byte is written, and what is written over zeros."""
    zeros, ones = (bytearray([fill]) * (value.size * value.dtype.itemsize) for fill in (0, 255))
    for memory in (zeros, ones):
        read_back.write(value, memoryview(memory))
    return np.frombuffer(zeros, np.uint8) == np.frombuffer(ones, np.uint8), bytes(zeros)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "complex64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_recipe_says_what_is_written(shape: tuple[int, ...], dtype: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    tried = 0
    for spec in SPECS:
        sharding = NamedSharding(mesh, P(*spec[: len(shape)]))
        try:
            sharding.shard_shape(shape)
        except ValueError:
            continue  # a dimension that cannot be cut so
        tried += 1
        whole = np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape).astype(dtype)
        value = jax.device_put(whole, sharding)
        nbytes, pieces, may_copy, shards_of = read_back.recipe(value, quirks_of("cpu"))
        said = np.zeros(value.size * value.dtype.itemsize, bool)
        for _, offset, size in pieces:
            assert not said[offset : offset + size].any(), "no byte twice"
            said[offset : offset + size] = True
        found, memory = written(value)
        assert nbytes == said.size and (said == found).all(), spec
        assert said.all(), "one host has the whole value"
        assert may_copy == (dtype != "int4" and len(pieces) <= len({number for number, _, _ in pieces}))
        if may_copy:
            shards = (value,) if shards_of is None else shards_of(value)
            copied = bytearray(nbytes)
            for number, offset, size in pieces:
                copied[offset : offset + size] = np.asarray(shards[number]).tobytes()[:size]
            assert bytes(copied) == memory
    assert tried > 0
