"""Host values as arguments: copied once, sent once when they cannot change, and never taken for another."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.api.programs import program

pytestmark = pytest.mark.one_island

MiB = 1 << 20


@pytest.fixture
def sent(cluster: Any) -> Callable[[Callable[[], Any]], int]:
    """`sent(work)`: the commands that the controller got for the arrays that `work` makes."""

    def commands() -> int:
        cluster.native.flush()
        last, now = -1, 0
        while last != now:
            time.sleep(0.01)
            last, now = now, int(cluster.stats()["controller"]["commands"])
        return now

    def count(work: Callable[[], Any]) -> int:
        gc.collect()
        before = commands()
        kept = [jax.block_until_ready(work())]  # none of it is released meanwhile
        after = commands()
        del kept
        return after - before

    return count


@pytest.mark.parametrize("spec", [P(), P(None, "x"), P("y", "x")], ids=str)
def test_devices_show_the_clients_memory(add: Any, cluster: Any, quiet: Any, spec: P) -> None:
    """No second copy: the client's block is in use while an array of it lives; over a link it is the host's."""
    is_shared = not cluster.is_embedded and not os.environ.get("PATHWAYS_KIND")
    slice_ = add((2, 2))
    value = np.random.default_rng(0).random((512, 512), np.float32)
    before = quiet()
    for given in (value, jnp.asarray(value), value.T.astype(np.float64)):
        array = pw.device_put(given, slice_, spec)
        array.block_until_ready()
        used = quiet()["arena"] - before["arena"]
        # What earlier tests left may have been counted before, and be released now.
        assert used > 0.9 * MiB if is_shared else used < 0.5 * MiB
        np.testing.assert_array_equal(array, np.asarray(given, np.float32))
        array.delete()
        del array
        quiet(back_to=before["kept"])


def test_scalars_that_repeat_are_sent_once(add: Any, sent: Any) -> None:
    slice_ = add(2)
    x = pw.device_put(np.arange(4, dtype=np.float32), slice_)
    f = pw.jit(lambda x, rate: x * rate, devices=slice_)
    for rate in (2.0, np.float32(0.5), 3, np.int8(7), True):
        f(x, rate)
        assert sent(lambda rate=rate: [f(x, rate) for _ in range(10)]) == 0
        np.testing.assert_array_equal(f(x, rate), np.arange(4) * np.float32(rate))
    assert sent(lambda: [f(x, 10.0 + step) for step in range(10)]) == 10


def test_equal_scalars_are_not_always_the_same(add: Any) -> None:
    """0.0 and -0.0, NaNs, True and 1 and 1.0: each is what was given."""
    f = pw.jit(lambda x: (jnp.signbit(x) if x.dtype == jnp.float32 else x, jnp.asarray(x)), devices=add(2))
    for value in (0.0, -0.0, 0.0, float("nan"), -float("nan"), 1, True, 1.0, 1j, np.float32(1), np.int32(1)):
        sign, same = f(value)
        want = jnp.asarray(value)
        assert same.dtype == want.dtype
        np.testing.assert_array_equal(same, want)
        if same.dtype == jnp.float32:
            assert bool(sign) == bool(np.signbit(value)), value


def test_arrays_that_nobody_can_change_are_sent_once(add: Any, sent: Any) -> None:
    slice_ = add(2)
    f = pw.jit(lambda x, table: x + table, devices=slice_, in_shardings=(P(), P("x")), out_shardings=P("x"))
    x = pw.device_put(np.float32(1), slice_)
    ours = jnp.arange(1024, dtype=jnp.float32)
    for table in (ours, np.asarray(ours), np.asarray(ours)[::-1], np.frombuffer(bytes(4096), np.float32)):
        np.testing.assert_array_equal(f(x, table), np.asarray(table) + 1)
        assert sent(lambda table=table: [f(x, table) for _ in range(10)]) == 0


def test_what_can_change_is_sent_each_time(add: Any, sent: Any) -> None:
    slice_ = add(2)
    f = pw.jit(lambda x, table: x + table, devices=slice_)
    x = pw.device_put(np.float32(1), slice_)
    table = np.zeros(1024, np.float32)
    view = table[:]
    view.flags.writeable = False  # its memory can be written all the same
    for step in range(5):
        table[:] = step
        np.testing.assert_array_equal(f(x, table), np.full(1024, step + 1))
        np.testing.assert_array_equal(f(x, view), np.full(1024, step + 1))
    assert sent(lambda: [f(x, table) for _ in range(10)]) >= 10
    assert sent(lambda: [f(x, view) for _ in range(10)]) >= 10


def test_a_frozen_array_that_changes_is_seen(add: Any, tmp_path: Any) -> None:
    """Read-only is a flag, which its owner clears; and others may write what stands below a read-only array."""
    f = pw.jit(lambda table: table + 1, devices=add(2))
    own = np.zeros(1024, np.float32)
    np.zeros(1024, np.float32).tofile(tmp_path / "table")
    below = np.memmap(tmp_path / "table", np.float32, "r+")
    mapped = np.memmap(tmp_path / "table", np.float32, "r")
    buffer = bytearray(4096)
    over = np.frombuffer(memoryview(buffer).toreadonly(), np.float32)
    small = np.zeros(4, np.float32)
    tables = [own, own[:], own.reshape(2, -1), np.broadcast_to(own[:1], (64,)), np.asarray(mapped), mapped, over, small]
    for step in range(4):
        for table in (own, small):
            table.flags.writeable = True
            table[:] = step
            table.flags.writeable = False
        below[:] = step
        np.frombuffer(buffer, np.float32)[:] = step
        for table in [*tables, own[1:]]:
            if table.base is not None and table.flags.writeable:
                table.flags.writeable = False
            np.testing.assert_array_equal(f(table), np.full(table.shape, step + 1))


def test_another_object_with_the_same_id(add: Any, quiet: Any) -> None:
    """What is kept by identity goes with its object, and what it was on the hosts goes too."""
    slice_ = add(2)
    f = pw.jit(lambda table: table * 2, devices=slice_)
    f(jnp.zeros(256)).block_until_ready()
    gc.collect()
    before = quiet()["kept"]
    ids = set()
    for step in range(300):
        table = jnp.full(256, step, jnp.float32)
        if step % 2 == 0:
            table = np.frombuffer(np.asarray(table).tobytes(), np.float32)
        ids.add(id(table))
        np.testing.assert_array_equal(f(table), np.full(256, 2 * step))
        del table
    assert len(ids) < 300, "no identity came twice: the test shows nothing"
    gc.collect()
    quiet(back_to=before)


def test_what_is_kept_is_bounded(add: Any, quiet: Any) -> None:
    slice_ = add(2)
    f = pw.jit(lambda x: x + 1, devices=slice_)
    f(0.0).block_until_ready()
    for step in range(100):
        f(float(step))
    small = quiet()["kept"]
    for step in range(100):
        f(1000.0 + step)
    quiet(back_to=small)
    tables = [jnp.full((512, 512), step, jnp.float32) for step in range(4)]
    for table in tables:  # big ones: the last alone
        f(table)
    one = quiet()["kept"]
    for table in tables:
        f(table)
    quiet(back_to=one)


def test_donated_positions_keep_nothing(add: Any) -> None:
    slice_ = add(2)
    f = pw.jit(lambda x, y: x + y, devices=slice_, donate_argnums=0)
    frozen = np.frombuffer(np.arange(8, dtype=np.float32).tobytes(), np.float32)
    y = pw.device_put(np.ones(8, np.float32), slice_)
    for _ in range(4):
        np.testing.assert_array_equal(f(frozen, y), np.arange(8) + 1)
        np.testing.assert_array_equal(f(frozen, 2.0), np.arange(8) + 2)


def test_a_deleted_jax_array_is_refused(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(2))
    table = jnp.arange(8.0)
    np.testing.assert_array_equal(f(table), np.arange(8) + 1)
    np.testing.assert_array_equal(f(table), np.arange(8) + 1)
    table.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        f(table).block_until_ready()


def test_kinds_are_told_apart(add: Any) -> None:
    """The short way of host values takes only what the signature is of."""
    slice_ = add(2)
    f = pw.jit(lambda x, y: x + y, devices=slice_)
    x = pw.device_put(np.zeros(4, np.float32), slice_)
    cases: list[Any] = [
        np.ones(4, np.float32),
        np.ones(4, np.int32),
        np.ones((2, 4), np.float32),
        np.ones(4, np.float64),
        1,
        1.0,
        True,
        np.float16(1),
        jnp.ones(4),
        jnp.ones(4, jnp.bfloat16),
        jnp.float32(1),
    ]
    for _ in range(3):
        for given in cases:
            for value in (given, given):
                got, want = f(x, value), jnp.zeros(4) + value
                assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)
                np.testing.assert_array_equal(got, want)
    with jax.enable_x64(True):
        assert f(x, np.ones(4, np.float64)).dtype == np.float64
    assert f(x, np.ones(4, np.float64)).dtype == np.float32
    g = pw.jit(lambda n: n + 1, devices=slice_)
    assert int(g(1)) == 2
    with pytest.raises(OverflowError):
        g(1 << 40)
    assert int(g(2)) == 3


def test_static_arguments_and_keywords_take_the_short_way(add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature is looked for once; calls that come after it only compare. And no value is taken for another."""
    slice_, looked = add(2), []
    find = program.Program._find

    def count(self: Any, args: Any, kwargs: Any) -> Any:
        looked.append((args, kwargs))
        return find(self, args, kwargs)

    monkeypatch.setattr(program.Program, "_find", count)

    def fun(x: Any, times: int = 1, *, how: str = "add", y: Any = 0.0) -> Any:
        for _ in range(times):
            x = x + y if how == "add" else x * y
        return {"x": x}

    both = pw.jit(fun, devices=slice_, static_argnums=1, static_argnames="how")
    single = pw.jit(lambda x, n: x + n, devices=slice_, static_argnums=1)
    whole = pw.program(lambda n, x: single(x, n), static_argnums=0)
    bare = pw.jit(lambda x, *, y: x - y, devices=slice_)
    x, y = pw.device_put(np.float32(3), slice_), pw.device_put(np.float32(2), slice_)
    for number in range(3):
        for times, how, wanted in ((2, "add", 7), (3, "add", 9), (2, "times", 12), (3, "times", 24)):
            assert float(both(x, times, how=how, y=y)["x"]) == wanted
            assert float(both(x, times, y=2.0, how=how)["x"]) == wanted
        assert [float(single(x, n)) for n in (1, 4)] == [4, 7]
        assert [float(whole(n, x)) for n in (1, 4)] == [4, 7]
        assert float(whole.with_timeout(60)(4, x)) == 7
        assert float(bare(x, y=y)) == 1 and float(bare(y, y=x)) == -1
        if number == 0:
            looked.clear()
    assert looked == []
    with pytest.raises(pw.errors.DeletedArrayError):
        y.delete()
        both(x, 2, how="add", y=y)


Named = collections.namedtuple("Named", "a")


@dataclasses.dataclass(frozen=True)
class Setting:
    value: Any


def test_static_arguments_that_are_equal_are_not_always_the_same(add: Any) -> None:
    """The type belongs to the key, also inside of tuples, frozensets and dataclasses."""
    slice_ = add(2)

    def text(static: Any) -> float:
        return float(sum(map(ord, repr(static))))

    f = pw.jit(lambda x, static: x + text(static), devices=slice_, static_argnums=1)
    g = pw.jit(lambda x, *, static: x + text(static), devices=slice_, static_argnames="static")
    inside = pw.program(lambda x, static: f(x, static) - f(x, 0) + f(x, 0.0), static_argnums=1)
    x = pw.device_put(np.zeros(4, np.float32), slice_)
    plain = [
        2,
        2.0,
        np.float32(2),
        np.float64(2),
        np.int32(2),
        2 + 0j,
        1,
        True,
        1.0,
        np.bool_(True),
        0.0,
        -0.0,
        "2",
        None,
    ]
    nested = [kind(value) for value in (2, 2.0, 1, True, 1.0) for kind in (Setting, Named, lambda v: (v, (v,)))]
    nested += [
        frozenset([2]),
        frozenset([2.0]),
        Setting((1, Setting(2))),
        Setting((1, Setting(2.0))),
        (2, "2"),
        (2.0, "2"),
    ]
    for _ in range(2):
        for static in [*plain, *nested]:
            for call in (lambda s: f(x, s), lambda s: g(x, static=s)):
                np.testing.assert_array_equal(call(static), np.full(4, text(static)), err_msg=repr(static))
            want = np.full(4, text(static) - text(0) + text(0.0))
            np.testing.assert_array_equal(inside(x, static), want, err_msg=repr(static))
    known = len(f._compiled)
    for static in (2, 2.0, (2, (2,)), Setting(2), float("nan"), float("nan")):
        f(x, static)
    assert len(f._compiled) == known + 1, "a NaN is itself"
    for unhashable in ([2], (2, [2]), {2: 2}):
        with pytest.raises(pw.errors.ProgramError, match="not hashable"):
            f(x, unhashable)
