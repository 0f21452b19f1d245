"""What people do with JAX's arrays and shardings, done with a slice's: where values go, and what an array says."""

from __future__ import annotations

import contextlib
import gc
import io
import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

X = np.arange(8, dtype=np.float32)
TABLE = np.arange(16, dtype=np.float32).reshape(4, 4)


def is_on(array: Any, sharding: Any, value: Any) -> None:
    assert type(array) is pw.Array
    assert array.slice is sharding.slice
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize("put", [jax.device_put, pw.device_put], ids=["jax", "pw"])
def test_put_by_sharding(add: Callable[..., Any], put: Callable[..., Any]) -> None:
    first, second = add((2, 2)), add((2, 2))  # two slices whose meshes are equal
    rows, all_of_it = first.sharding(P("x", "y")), second.sharding(P(None, None))
    is_on(put(TABLE, rows), rows, TABLE)
    array = put(put(TABLE, rows), all_of_it)
    is_on(array, all_of_it, TABLE)
    tree = put({"a": TABLE, "b": [jnp.asarray(TABLE), array]}, {"a": rows, "b": all_of_it})
    is_on(tree["a"], rows, TABLE)
    is_on(tree["b"][0], all_of_it, TABLE)
    is_on(tree["b"][1], all_of_it, TABLE)
    assert put(3.0, first.sharding()).slice is first
    with pytest.raises(ValueError, match="divi"):
        put(np.arange(7), first.sharding(P("x")))


def test_jax_device_put(add: Callable[..., Any]) -> None:
    sharding, other = add(2).sharding(P("x")), add(2).sharding(P())
    array = jax.device_put(X, sharding)
    assert jax.device_put(array, sharding) is array
    assert jax.device_put(array, array.format) is array
    is_on(jax.device_put(X, array.device), sharding, X)
    here, there = jax.device_put([X, X], [jax.local_devices()[0], sharding])
    assert isinstance(here, jax.Array)
    assert type(here) is not pw.Array
    is_on(there, sharding, X)
    taken = jax.device_put(array, other, donate=True)
    np.testing.assert_array_equal(taken, X)
    assert array.is_deleted()
    is_on(jax.lax.with_sharding_constraint(taken, taken.slice.sharding(P("x"))), taken.slice.sharding(P("x")), X)
    key = jax.device_put(jax.random.key(7), sharding.slice.sharding())
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))


def test_put_by_sharding_in_programs(add: Callable[..., Any]) -> None:
    first, second = add((2, 2)), add((2, 2))
    f = pw.jit(lambda x: x * 2, devices=first, out_shardings=P("x"))
    g = pw.jit(lambda x: x + 1, devices=second)
    there = second.sharding(P("y"))

    def chain(x: Any) -> Any:
        moved = jax.device_put({"h": f(x)}, there)["h"]
        return g(moved) + jnp.ones(8, device=there) + pw.device_put(jnp.zeros(8), there)

    program = pw.program(chain)
    assert "= transfer " in program.lower(X).as_text("program")
    np.testing.assert_array_equal(program(X), 2 * X + 2)
    np.testing.assert_array_equal(pw.program(jax.grad(lambda x: chain(x).sum()))(X), np.full(8, 2))
    np.testing.assert_array_equal(jax.grad(lambda x: chain(x).sum())(X), np.full(8, 2))
    with pytest.raises(pw.errors.ProgramError, match="calls device_put"):
        pw.jit(lambda x: jax.device_put(x, there), devices=first)(X)
    for put in (jax.device_put, pw.device_put):
        with pytest.raises(pw.errors.TraceError, match="put to a slice"):
            jax.jit(lambda x, put=put: put(x, there) + 1)(X)


def test_put_within_the_slice_of_a_placed_function_is_a_sharding_constraint(add: Callable[..., Any]) -> None:
    slice_ = add((2, 2))
    rows, host = slice_.sharding(P("x")), slice_.sharding(P("x")).with_memory_kind("pinned_host")
    devices = {"devices": slice_}
    for put in (jax.device_put, pw.device_put):
        made = pw.jit(lambda x, put=put: {"a": put({"h": x * 2}, rows)}, devices=slice_)(X)["a"]["h"]
        is_on(made, rows, 2 * X)
        loss = pw.jit(lambda x, put=put: (put(x, rows) ** 2).sum(), devices=slice_)
        np.testing.assert_array_equal(pw.program(jax.grad(loss))(X), 2 * X)
        each = pw.jit(jax.vmap(lambda x, put=put: put(x, rows) + 1), devices=slice_)
        np.testing.assert_array_equal(each(np.stack([X] * 3)), np.stack([X] * 3) + 1)
    there_and_back = pw.jit(lambda x: jax.device_put(jax.device_put(x * 2, host), rows) + 1, **devices)
    np.testing.assert_array_equal(there_and_back(X), 2 * X + 1)
    space = pw.jit(lambda x: jax.device_put(x, jax.memory.Space.Host), **devices)
    np.testing.assert_array_equal(space(X), X)
    made = pw.jit(lambda x: x + jnp.zeros(8, device=rows), **devices)(X)
    np.testing.assert_array_equal(made, X)
    keys = pw.jit(lambda k: jax.random.key_data(jax.device_put(jax.random.split(k, 4), rows)), **devices)
    wanted = jax.random.key_data(jax.random.split(jax.random.key(1), 4))
    np.testing.assert_array_equal(keys(jax.random.key(1)), wanted)
    np.testing.assert_array_equal(pw.program(lambda x: there_and_back(x) - 1)(X), 2 * X)


def test_arrays_are_made_where_their_sharding_says(add: Callable[..., Any], cluster: Any) -> None:
    sharding = add((2, 2)).sharding(P("x"))
    for made, value in (
        (jnp.zeros((4, 4), device=sharding), np.zeros((4, 4))),
        (jnp.ones((4, 4), jnp.bfloat16, device=sharding), np.ones((4, 4))),
        (jnp.full((4,), 2.5, device=sharding), np.full(4, 2.5)),
        (jnp.zeros_like(X, device=sharding), np.zeros(8)),
        (jnp.full_like(X, 3, device=sharding), np.full(8, 3)),
        (jnp.empty_like(X, device=sharding), np.zeros(8)),
        (jax.lax.empty((4, 4), jnp.float32, out_sharding=sharding), np.zeros((4, 4))),
        (jnp.arange(8, device=sharding), np.arange(8)),
        (jnp.arange(2.0, 10.0, device=sharding), np.arange(2.0, 10.0)),
        (jnp.eye(4, device=sharding), np.eye(4)),
        (jnp.asarray(X, device=sharding), X),
        (jnp.array([1, 2, 3, 4], device=sharding), [1, 2, 3, 4]),
    ):
        assert type(made) is pw.Array
        assert made.slice is sharding.slice
        np.testing.assert_array_equal(np.asarray(made), value)
    assert jnp.zeros((4, 4), device=sharding).sharding.spec[0] == "x"
    assert jnp.zeros(4, device=sharding).dtype == np.float32
    rows = jax.device_put(X, sharding)
    for like in (jnp.zeros_like(rows), jnp.full_like(rows, 2, jnp.int8), jnp.empty_like(rows)):
        assert type(like) is pw.Array and like.sharding == sharding and like.shape == rows.shape
    other = add((2, 2)).sharding(P("x"))  # of an equal mesh: JAX's caches must not take it for the first
    assert jnp.zeros((4, 4), device=other).slice is other.slice
    before = cluster.stats()["compiles"]
    jnp.zeros((4, 4), device=sharding).block_until_ready()
    assert cluster.stats()["compiles"] == before
    with pytest.raises(pw.errors.TraceError, match="put to a slice"):
        jnp.linspace(0, 1, 8, device=sharding)


def test_arrays_of_callbacks_and_of_the_process(add: Callable[..., Any]) -> None:
    asked: list[Any] = []

    def part(index: Any) -> Any:
        asked.append(index)
        return TABLE[index]

    sharding = add((2, 2)).sharding(P("y"))
    is_on(jax.make_array_from_callback((4, 4), sharding, part), sharding.slice.sharding(P("y", None)), TABLE)
    assert len(asked) == 2  # each part once, however many devices hold it
    made = jax.make_array_from_callback((4, 4), sharding, part, dtype=np.float16)
    assert made.dtype == np.float16
    with pytest.raises(pw.errors.ShardingError, match=r"shape \(2, 4\), but gave shape \(4, 4\)"):
        jax.make_array_from_callback((4, 4), sharding, lambda index: TABLE)
    whole = jax.make_array_from_process_local_data(sharding, TABLE)
    is_on(whole, sharding.slice.sharding(P("y", None)), TABLE)
    with pytest.raises(pw.errors.ShardingError, match="whole array"):
        jax.make_array_from_process_local_data(sharding, TABLE, (8, 4))
    with pytest.raises(pw.errors.ShardingError, match="make_array_from_callback"):
        jax.make_array_from_single_device_arrays((4, 4), sharding, [])


def test_shardings(add: Callable[..., Any]) -> None:
    first, second = add((2, 2)), add((2, 2))
    sharding = first.sharding(P("x", "y"))
    assert sharding == first.sharding(P("x", "y"))
    assert sharding == NamedSharding(first.mesh, P("x", "y"))
    assert sharding != second.sharding(P("x", "y"))
    assert sharding != "text"
    assert hash(sharding) == hash(first.sharding(P("x", "y")))
    assert sharding.device_set == sharding.addressable_devices == set(first.devices)
    assert sharding.is_fully_addressable
    assert sharding.num_devices == 4
    indices = sharding.devices_indices_map((4, 6))
    assert list(indices) == list(first.devices)
    assert [TABLE[:, :][index[0], index[1]].shape for index in sharding.devices_indices_map((4, 4)).values()] == [
        (2, 2)
    ] * 4
    assert list(indices.values())[1] == (slice(0, 2), slice(3, 6))
    swapped = first.sharding(P(("y", "x")))
    assert [index[0].start for index in swapped.devices_indices_map((8,)).values()] == [0, 4, 2, 6]
    assert first.island == first.devices[0].island


def test_shards(add: Callable[..., Any]) -> None:
    slice_ = add((2, 2))
    array = pw.device_put(TABLE, slice_, P("y"))
    shards = array.addressable_shards
    assert [shard.device for shard in shards] == list(slice_.devices)
    assert [shard.replica_id for shard in shards] == [0, 0, 1, 1]
    for number, shard in enumerate(shards):
        assert isinstance(shard.data, jax.Array)
        np.testing.assert_array_equal(shard.data, TABLE[shard.index])
        np.testing.assert_array_equal(array.addressable_data(number), TABLE[shard.index])
    assert shards[1].index == (slice(2, 4), slice(None))
    assert len(array.global_shards) == 4
    loss = array.sum()
    assert float(loss.addressable_data(0)) == TABLE.sum()
    assert array.device == array.sharding
    assert array.on_device_size_in_bytes() == 2 * TABLE.nbytes
    assert loss.on_device_size_in_bytes() == 16
    assert array.format.layout.major_to_minor == (0, 1)
    assert array.format.sharding == array.sharding
    array.delete()
    with pytest.raises(pw.errors.DeletedArrayError, match="addressable_shards"):
        array.addressable_data(0)


def test_dlpack(add: Callable[..., Any]) -> None:
    slice_ = add((2, 2))
    for value in (TABLE, TABLE.astype(np.int8), TABLE.astype(np.float16), TABLE > 3, TABLE + 1j, np.float32(3)):
        array = pw.device_put(value, slice_)
        assert array.__dlpack_device__() == (1, 0)
        taken = np.from_dlpack(array)
        np.testing.assert_array_equal(taken, value)
        assert not taken.flags.writeable
        np.testing.assert_array_equal(jnp.from_dlpack(array), value)
        assert "dltensor" in repr(array.__dlpack__())  # for who knows nothing of read-only memory: a copy
    narrow = pw.device_put(jnp.asarray(TABLE, jnp.bfloat16), slice_, P("x"))
    np.testing.assert_array_equal(jnp.from_dlpack(narrow), jnp.asarray(TABLE, jnp.bfloat16))


def test_visualize(add: Callable[..., Any]) -> None:
    slice_ = add((2, 2))
    array = pw.device_put(TABLE, slice_, P("x", "y"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        jax.debug.visualize_array_sharding(array, use_color=False)
    for device in slice_.devices:
        assert f"CPU {device.id}" in out.getvalue()
    seen: list[Any] = []
    jax.debug.inspect_array_sharding(array, callback=seen.append)
    assert seen == [array.sharding]


def test_repr_shows_what_is_here(add: Callable[..., Any], cluster: Any) -> None:
    slice_ = add(2)
    total = pw.jit(lambda x: x.sum(), devices=slice_)
    for _ in range(3):  # read every time, so it comes with its completion from now on
        float(total(X))
    loss = total(X).block_until_ready()
    assert repr(loss) == f"pw.Array(28., float32[] on {slice_.mesh_spec.name}, spec=())"
    assert loss._repr_mimebundle_() == {"text/plain": repr(loss)}
    array = pw.device_put(X, slice_).block_until_ready()
    if not cluster.is_embedded:  # there its value is in another process
        assert repr(array) == f"pw.Array(float32[8] on {slice_.mesh_spec.name}, spec=((),))"
    array.copy_to_host_async()
    np.asarray(array)
    assert repr(array).startswith("pw.Array([0., 1., 2., 3., 4., 5., 6., 7.], float32[8] on s")
    big = pw.device_put(np.zeros((1000, 1000), np.float32), slice_).block_until_ready()
    assert repr(big) == f"pw.Array(float32[1000,1000] on {slice_.mesh_spec.name}, spec=((), ()))"
    np.asarray(big)
    assert "0., 0." in repr(big)
    assert len(repr(big)) < 500
    key = pw.device_put(jax.random.key(0), slice_)
    jax.random.key_data(key)
    assert "key<fry>[]" in repr(key)
    array.delete()
    assert "deleted" in repr(array)


def test_repr_never_waits(add: Callable[..., Any], cluster: Any) -> None:
    """While the client is suspended nothing that it asks for comes."""
    slice_ = add(2)
    total = pw.jit(lambda x: x.sum(), devices=slice_)
    array = pw.device_put(X, slice_).block_until_ready()
    float(total(array))
    fetched = pw.device_put(X, slice_).block_until_ready()
    cluster.suspend()
    try:
        fetched.copy_to_host_async()
        pending = total(array)
        assert "float32[8]" in repr(array)
        assert "float32[8]" in repr(fetched)
        assert "pending" in repr(pending)
        assert "[0., 1." not in repr(array) + repr(fetched)
    finally:
        cluster.resume()
    assert float(pending) == 28
    np.testing.assert_array_equal(fetched, X)
    assert "[0., 1." in repr(fetched)


def outcome(convert: Callable[[Any], Any], array: Any) -> tuple[Any, ...]:
    """What a conversion gives, or the kind of error that it raises."""
    try:
        value = convert(array)
    except Exception as error:
        return (type(error),)
    return type(value), value


@pytest.mark.parametrize("convert", [int, float, complex, bool, operator.index, "{}".format, "{:.1f}".format])
def test_conversions_and_refusals_are_those_of_jax(add: Callable[..., Any], convert: Callable[[Any], Any]) -> None:
    one = add(1)
    for dtype in (bool, jnp.int4, np.int32, jnp.bfloat16, np.float32, np.complex64):
        for shape in ((), (1,), (2,), (0,)):
            value = np.full(shape, 3, dtype)
            mine, theirs = outcome(convert, pw.device_put(value, one)), outcome(convert, jnp.asarray(value))
            assert mine == theirs, f"{dtype} of shape {shape}: {mine}, but JAX {theirs}"


def test_weak_references(add: Callable[..., Any]) -> None:
    array = pw.device_put(X, add(1))
    gone: list[int] = []
    weakref.finalize(array, gone.append, 1)
    seen = weakref.ref(array)
    assert seen() is array
    del array
    gc.collect()
    assert seen() is None
    assert gone == [1]
