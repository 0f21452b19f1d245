"""Packed bytes on their plan from a client to the hosts: right, written once, and shown by CPU devices as they lie."""

from __future__ import annotations

import math

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways.compiler import specs
from pathways.compiler.ir import ArrayType, MeshSpec
from pathways.host.devices import HostDevices
from pathways.host.host_buffers import LocalPlacement
from pathways.plan.resharding import Placement
from pathways.plan.shard_packing import Packing, aligned

PARTS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=4)


@given(PARTS, st.sampled_from(["float32", "int8", "bfloat16", "bool", "complex64"]))
def test_packing_is_the_cells_one_after_the_other(parts: list[tuple[int, int]], dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    grid, cell = tuple(count for count, _ in parts), tuple(size for _, size in parts)
    shape = tuple(count * size for count, size in parts)
    packing = Packing(shape, kind, grid)
    value = (np.arange(math.prod(shape)) % 13 % 2).reshape(shape).astype(kind)
    memory = np.full(packing.nbytes, 255, np.uint8)
    packing.pack(value, memory)
    view = packing.view(memory)
    assert packing.cell == cell and packing.stride % 64 == 0
    for number, at in enumerate(np.ndindex(*grid)):
        want = value[tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, cell, strict=True))]
        got = view[(*at, ...)]
        assert got.flags.c_contiguous and got.tobytes() == want.tobytes()
        assert memory[number * packing.stride :][: want.nbytes].tobytes() == want.tobytes()


def test_packing_converts_and_takes_any_order() -> None:
    packing = Packing((4, 6), np.dtype(np.float32), (2, 3))
    base = np.arange(24, dtype=np.float64).reshape(6, 4)
    for value in (base.T, np.asfortranarray(base.T), np.broadcast_to(base[0, :, None], (4, 6)), base.T[::-1]):
        memory = np.empty(packing.nbytes, np.uint8)
        packing.pack(value, memory)
        got = packing.view(memory)
        for i, j in np.ndindex(2, 3):
            np.testing.assert_array_equal(got[i, j], value[i * 2 : i * 2 + 2, j * 2 : j * 2 + 2].astype(np.float32))


SPECS = [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]


@pytest.mark.parametrize("theirs", SPECS, ids=str)
def test_a_sharded_jax_array_is_packed_shard_by_shard(theirs: P) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    value = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    source = jax.device_put(value, NamedSharding(mesh, theirs))
    for grid in [(1, 1), (4, 1), (2, 3), (8, 12), (1, 6)]:
        packing = Packing((8, 12), np.dtype(np.float32), grid)
        mine, want = np.empty(packing.nbytes, np.uint8), np.empty(packing.nbytes, np.uint8)
        packing.pack(source, mine)
        packing.pack(value, want)
        np.testing.assert_array_equal(packing.view(mine), packing.view(want))
    assert not hasattr(source, "_npy_value") or theirs == P() or source._npy_value is None, "it was put together"


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool"])
def test_devices_show_packed_memory_as_it_lies(spec: P, dtype: str) -> None:
    """No second copy: each shard's memory is the client's."""
    devices = jax.devices()[:4]
    mesh = MeshSpec("m", (("x", 2), ("y", 2)))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for shape in [(4, 4), (64, 12)]:
        placed = Placement(ArrayType(shape, kind, 0, specs.normalize(spec, shape, mesh, "value")), mesh, (4, 5, 6, 7))
        value = (np.arange(math.prod(shape)) % 5 % 2).reshape(shape).astype(kind)
        entries = specs.to_partition_spec(placed.type.spec)
        sharding = NamedSharding(Mesh(np.array(devices).reshape(2, 2), ("x", "y")), entries)
        inputs = LocalPlacement(placed, HostDevices(1, devices, devices, 4))
        assert inputs.mask == 0b1111
        memory = aligned(placed.packing.nbytes)
        placed.packing.pack(value, memory)
        for array, is_shown in ((inputs.unpack(memory), dtype != "int4"), (inputs.cut(value), False)):
            assert array.sharding == sharding
            np.testing.assert_array_equal(np.asarray(array), value)
            begin = memory.ctypes.data
            for shard in array.addressable_shards:
                if is_shown:
                    assert begin <= shard.data.unsafe_buffer_pointer() < begin + memory.nbytes


def test_an_array_of_no_dimensions_or_no_elements() -> None:
    mesh = MeshSpec("m", (("x", 2),))
    here = HostDevices(0, jax.devices()[:2], jax.devices()[:2], 0)
    for value in (np.float32(3), np.empty((0, 4), np.float32)):
        placed = Placement(ArrayType(value.shape, value.dtype, 0, ((),) * value.ndim), mesh, (0, 1))
        inputs = LocalPlacement(placed, here)
        memory = aligned(placed.packing.nbytes)
        placed.packing.pack(value, memory)
        np.testing.assert_array_equal(np.asarray(inputs.unpack(memory)), value)
        np.testing.assert_array_equal(np.asarray(inputs.cut(np.asarray(value))), value)
