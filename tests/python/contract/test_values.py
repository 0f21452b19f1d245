"""Values in and out: what `pw.device_put` takes comes back bit for bit, as `jax.device_put` would give it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

NARROW = [
    name
    for name in (
        "int2",
        "int4",
        "uint2",
        "uint4",
        "float4_e2m1fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(jnp, name) and hasattr(ml_dtypes, name)
]
DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    *NARROW,
]
SHAPES = [(), (0,), (8,), (4, 0, 2), (4, 6), (128, 128)]


def sample(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small numbers of any type, not all equal."""
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(count) % 3 % 2).reshape(shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def same(got: Any, want: Any) -> None:
    """Equal in type, shape and every bit."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


@pytest.mark.sampled(0.35)
@pytest.mark.one_island
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(add: Any, dtype: str) -> None:
    slice_ = add(2)
    for shape in SHAPES:
        value = sample(shape, dtype)
        array = pw.device_put(value, slice_)
        expected = jnp.asarray(value)
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        same(array, expected)


@pytest.mark.one_island
@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_64_bits_with_x64(add: Any, dtype: str) -> None:
    with jax.enable_x64(True):
        value = np.arange(8).astype(dtype) + np.array(2**-40 if dtype[0] in "fc" else 2**40).astype(dtype)
        array = pw.device_put(value, add(2), P("x"))
        assert array.dtype == dtype
        same(array, value)
        same(pw.jit(lambda x: x + x, devices=array.slice)(array), value + value)
    assert pw.device_put(value, array.slice).dtype == jnp.asarray(value).dtype != dtype


@pytest.mark.one_island
def test_a_put_goes_by_the_mode_and_the_shape_of_now(add: Any) -> None:
    """Although what is known of a NumPy array's type is kept for the next one."""
    slice_, value = add(2), np.arange(8.0)
    for _ in range(2):
        assert pw.device_put(value, slice_).dtype == np.float32
        with jax.enable_x64(True):
            assert pw.device_put(value, slice_).dtype == np.float64
    for size in (1, 2):
        slice_.resize((size,))
        array = pw.device_put(value, slice_)
        assert len(array.addressable_shards) == size
        same(array, value.astype(np.float32))


@pytest.mark.sampled(0.35)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_through_a_computation_and_a_transfer(add: Any, dtype: str) -> None:
    one, two = add(2), add(1)
    value = sample((4, 6), dtype)
    back = pw.jit(lambda x: x[::-1], devices=one)
    turn = pw.jit(lambda x: x.T, devices=two)
    same(pw.program(lambda x: turn(back(x)))(value), jnp.asarray(value)[::-1].T)


@pytest.mark.one_island
@pytest.mark.parametrize(
    "spec", [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))], ids=str
)
def test_every_sharding_comes_back(add: Any, spec: P) -> None:
    slice_ = add((2, 2))
    for shape in [(4, 8), (64, 64), (4, 8, 3), (0, 4)]:
        value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        array = pw.device_put(value, slice_, spec)
        same(array, value)
        assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(slice_.mesh, spec), len(shape))
        assert array.nbytes == value.nbytes


def test_scalars_keep_their_weak_types(add: Any) -> None:
    slice_ = add(2)
    for number in (True, 3, 2.5, 1j, np.float32(2), np.int8(3), jnp.float16(1)):
        array = pw.device_put(number, slice_)
        expected = jnp.asarray(number)
        assert (array.dtype, array.weak_type) == (expected.dtype, jax.api_util.shaped_abstractify(number).weak_type)
        assert array.item() == expected.item()
    half = pw.device_put(np.ones(2, np.float16), slice_)
    assert pw.jit(lambda x, y: x * y, devices=slice_)(half, 2.0).dtype == np.float16
    assert pw.jit(lambda x, y: x * y, devices=slice_)(half, np.float32(2)).dtype == np.float32


def test_prng_keys_old_and_new(add: Any) -> None:
    slice_ = add(2)
    for key in (
        jax.random.key(7),
        jax.random.split(jax.random.key(7), 4),
        jax.random.key(7, impl="rbg"),
        jax.random.PRNGKey(7),
    ):
        array = pw.device_put(key, slice_)
        assert array.dtype == key.dtype and array.shape == key.shape
        back = jax.device_get(array)
        raw = jax.random.key_data if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else np.asarray
        same(raw(back), raw(key))


def test_pytrees_with_a_prefix_of_specs(add: Any) -> None:
    tree = {"w": np.ones((4, 2), np.float32), "b": (np.zeros(4, np.int32), 3.0, None)}
    put = pw.device_put(tree, add(2), {"w": P("x"), "b": P()})
    assert jax.tree.structure(put) == jax.tree.structure(tree)
    assert put["w"].sharding.spec[0] == "x"
    jax.tree.map(np.testing.assert_array_equal, put, tree)


def test_inputs_of_every_origin(add: Any) -> None:
    slice_ = add(2)
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for value in (
        base.T,
        base[::2, ::3],
        base[:, ::-1],
        np.asfortranarray(base),
        jnp.asarray(base),
        np.broadcast_to(base[0], (4, 6)),
    ):
        same(pw.device_put(value, slice_), np.asarray(value, np.float32))


def test_a_put_copies_before_it_returns(add: Any) -> None:
    slice_ = add(2)
    for count in (4, 1 << 16):
        value = np.zeros(count, np.float32)
        array = pw.device_put(value, slice_)
        run = pw.jit(lambda x: x + 1, devices=slice_)(value)
        value[:] = 7
        assert np.asarray(array).max() == 0
        assert np.asarray(run).max() == 1


def test_what_is_read_cannot_be_written(add: Any) -> None:
    array = pw.device_put(np.zeros(4, np.float32), add(2))
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(array)[0] = 1
    np.array(array)[0] = 1
    assert np.asarray(array)[0] == 0


def test_a_move_between_slices_and_shardings(add: Any) -> None:
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = pw.device_put(value, add(4), P("x"))
    moved = pw.device_put(array, add((2, 2)), P("y", "x"))
    again = pw.device_put(moved, array.slice, P(None, "x"))
    for each in (moved, again, array):
        same(each, value)


def test_large_values(add: Any) -> None:
    value = np.random.default_rng(0).random((1 << 21,), np.float32)
    array = pw.device_put(value, add(4), P("x"))
    same(pw.jit(lambda x: -x, devices=array.slice)(array), -value)
