"""Reading results: small ones come with their completion once a call's results have been read (READ-1); every other way
of reading gives the same."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

LARGEST = 4096  # bytes that come with a completion
DTYPES = ["bool", "int8", "int32", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn", "int4", "uint4"]


def same(got: Any, want: Any) -> None:
    """Equal in type, shape and every bit."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


def carries(cluster: Any) -> bool:
    """Whether values come with completions there: in one process they are handed over as they are."""
    return not cluster.is_embedded


def test_a_call_learns_and_forgets(add: Any, cluster: Any) -> None:
    slice_ = add(2)
    program = pw.jit(lambda x: (x + 1, x * 2, jnp.tile(x, 4096)), devices=slice_)
    x = pw.device_put(np.arange(4, dtype=np.float32), slice_)
    a, b, _ = program(x)
    assert not a.is_inline and not b.is_inline
    np.testing.assert_array_equal(a, [1, 2, 3, 4])
    a, b, big = program(x)
    assert (a.is_inline, b.is_inline, big.is_inline) == (carries(cluster), False, False)
    np.testing.assert_array_equal(a, [1, 2, 3, 4])
    np.testing.assert_array_equal(big, np.tile(np.arange(4), 4096))
    b.copy_to_host_async()
    a, b, big = program(x)
    assert (a.is_inline, b.is_inline, big.is_inline) == (carries(cluster), carries(cluster), False)
    for _ in range(100):
        a, b, _ = program(x)
        np.asarray(b)
    assert (a.is_inline, b.is_inline) == (False, carries(cluster))
    np.testing.assert_array_equal(a, [1, 2, 3, 4])
    assert program(x)[0].is_inline == carries(cluster)


@pytest.mark.sampled(0.35)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(add: Any, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    slice_ = add((2, 2))
    for shape in [(), (0,), (4, 4), (4, 0)]:
        count = int(np.prod(shape, dtype=np.int64))
        value = (np.arange(count) % 3 % 2).reshape(shape).astype(kind)
        for spec in (P(), P("x"), P(None, "y")) if len(shape) == 2 else (P(),):
            f = pw.jit(lambda x: x[...], devices=slice_, in_shardings=spec, out_shardings=spec)
            for _ in range(3):
                same(f(value), value)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("spec", [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("y", "x"))], ids=str)
def test_every_sharding(add: Any, cluster: Any, spec: P) -> None:
    f = pw.jit(lambda x, n: x + n, devices=add((2, 2)), out_shardings=spec)
    for shape in [(8, 4), (16, 4, 4), (32, 32), (64, 32)]:
        value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for step in range(3):
            result = f(value, np.float32(step))
            assert result.is_inline == (carries(cluster) and step > 0 and value.nbytes <= LARGEST)
            np.testing.assert_array_equal(result, value + step)
            assert not np.asarray(result).flags.writeable


def test_keys(add: Any) -> None:
    f = pw.jit(lambda key: jax.random.split(key, 4), devices=add(2))
    want = jax.random.split(jax.random.key(3), 4)
    for _ in range(3):
        got = jax.device_get(f(jax.random.key(3)))
        assert got.dtype == want.dtype
        same(jax.random.key_data(got), jax.random.key_data(want))


def test_scalars_in_every_way(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(2))
    for number in range(4):
        x = f(np.int32(number))
        assert (int(x), float(x), bool(x), x.item(), x.tolist(), f"{x}") == (
            number + 1, number + 1.0, True, number + 1, number + 1, str(number + 1),
        )  # fmt: skip
        assert [10, 11, 12, 13, 14, 15][x] == number + 11
    with pytest.raises(TypeError, match="only scalar arrays"):
        float(f(np.zeros(3, np.float32)))


def test_passed_through_and_twice(add: Any) -> None:
    """Results that no computation of the run makes, and one value as two results."""
    f = pw.jit(lambda x: x + 1, devices=add(2))

    @pw.program
    def program(x: Any) -> Any:
        y = f(x)
        return x, y, y

    for step in range(4):
        x, y, again = program(np.float32(step))
        assert (float(x), float(y), float(again)) == (step, step + 1, step + 1)


def test_across_slices(add: Any, cluster: Any) -> None:
    one, two = add(2, island=0), add(2, island=len(cluster.islands) - 1)
    f, g = pw.jit(lambda x: x + 1, devices=one), pw.jit(lambda x: (x * 2).sum(), devices=two)

    @pw.program
    def program(x: Any) -> Any:
        y = f(x)
        return y, g(y), pw.device_put(y, two)

    for step in range(4):
        y, total, moved = program(np.full(4, step, np.float32))
        np.testing.assert_array_equal(y, np.full(4, step + 1))
        np.testing.assert_array_equal(moved, np.full(4, step + 1))
        assert float(total) == 8 * (step + 1)


def test_a_failed_run_says_why(add: Any, cluster: Any) -> None:
    """ERR-1: also when the value was to come with the completion."""
    if cluster.is_embedded:  # registers LAPACK's handlers
        jax.jit(jnp.linalg.cholesky).lower(np.eye(2, dtype=np.float32))
    slice_ = add(2)
    good = pw.jit(lambda x: x + 1, devices=slice_)
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct((4, 4), np.float32))
    bad = pw.jit(call, devices=slice_, name="bad")
    program = pw.program(lambda x: (good(x), bad(x)))
    for step in range(4):
        fine, broken = program(np.full((4, 4), step, np.float32))
        broken.copy_to_host_async()
        np.testing.assert_array_equal(fine, np.full((4, 4), step + 1))
        for _ in range(2):
            with pytest.raises(pw.errors.ComputationError, match=r"computation 'bad.*Wrong number of results"):
                np.asarray(broken)
        assert broken.is_inline == (carries(cluster) and step > 0)


def test_deleted_and_donated_arrays(add: Any) -> None:
    """An index whose future was dropped while it was pending is used again at once, and never shows the old value."""
    slice_ = add(2)
    f = pw.jit(lambda x: x + 1, devices=slice_)
    take = pw.jit(lambda x, y: x + y, devices=slice_, donate_argnums=0)
    one = pw.device_put(np.float32(1), slice_)
    for step in range(300):
        x = f(np.float32(step))
        if step % 3 == 0:
            x.delete()
            with pytest.raises(pw.errors.DeletedArrayError):
                float(x)
            continue
        if step % 3 == 1:
            x.copy_to_host_async()
        else:
            assert float(x) == step + 1
        y = take(x, one)  # as a copy when it is being read
        if step % 2:
            assert float(y) == step + 2
        with pytest.raises(pw.errors.DeletedArrayError):
            float(x)


def test_read_while_others_are_pending(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(4))
    float(f(np.float32(0)))
    kept = [f(np.float32(step)) for step in range(500)]
    for x in kept[::2]:
        x.copy_to_host_async()
    for step in reversed(range(500)):
        assert float(kept[step]) == step + 1


def test_threads_read_one_array(add: Any) -> None:
    f = pw.jit(lambda x: x + jnp.arange(8), devices=add(2))
    np.asarray(f(np.float32(0)))
    wrong: list[Any] = []

    def read(x: Any, want: Any, gate: threading.Barrier) -> None:
        gate.wait()
        try:
            np.testing.assert_array_equal(x, want)
        except BaseException as error:
            wrong.append(error)

    for step in range(50):
        x = f(np.float32(step))
        gate = threading.Barrier(4)
        threads = [threading.Thread(target=read, args=(x, np.arange(8) + step, gate)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


def test_reading_each_step_keeps_memory(add: Any, quiet: Any) -> None:
    """Client and hosts keep nothing: futures, objects, shared memory."""
    f = pw.jit(lambda x: (x + 1, (x * x).sum()), devices=add(2))
    x, loss = f(np.zeros(4, np.float32))
    float(loss)
    del loss
    before = quiet()["kept"]
    process = psutil.Process()
    begin = 0
    for step in range(3000):
        x, loss = f(x)
        assert float(loss) == 4.0 * (step + 1) ** 2
        if step == 1000:
            begin = process.memory_info().rss
    assert process.memory_info().rss - begin < 16 << 20
    del loss
    gc.collect()
    quiet(back_to=before)
