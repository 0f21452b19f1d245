"""Rows that go to shards chosen at run time: `pw.exchange` on hosts. Results are those of a dense reference.

`reference` says the result by definition: of the rows that go to a shard, in their order, number k gets slot k. Drawn
cases print their seed (EXCH-1..4); derivatives are those of plain JAX. What is not told apart here from the reference
interpreter (trees, the nodes of a program, what is refused when it is traced) is in `../compiler/test_exchange.py`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

SEED = int(os.environ.get("PATHWAYS_TEST_SEED", "0")) or random.randrange(1 << 31)
DTYPES = (np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16)


def reference(values: Any, to: Any, shards: int, capacity: int, unsent: int | None = None) -> list[np.ndarray]:
    """Rows, numbers, count, offered and slots, row by row."""
    values = np.asarray(values)
    slots, offered = np.full(len(to), -1, np.int32), np.zeros(shards, np.int32)
    rows = np.zeros((shards * capacity, *values.shape[1:]), values.dtype)
    numbers = np.full(shards * capacity, -1, np.int32)
    for row, shard in enumerate(to):
        if shard == unsent:
            continue
        if offered[shard] < capacity:
            slots[row] = shard * capacity + offered[shard]
            rows[slots[row]], numbers[slots[row]] = values[row], row
        offered[shard] += 1
    return [rows, numbers, np.minimum(offered, capacity).astype(np.int32), offered, slots]


def same(got: Any, expected: Any) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), b)


def slices_of(add: Any, draw: random.Random) -> tuple[Any, Any]:
    source = add(draw.choice([1, 2, 4]))
    return source, source if draw.random() < 0.2 else add(draw.choice([1, 2, 4, (2, 2)]))


def sending(to: Any, **how: Any) -> Any:
    return lambda values, destinations: tuple(pw.exchange(values, destinations, to=to, **how))


@pytest.mark.parametrize("case", range(12))
def test_drawn(add: Any, quiet: Any, case: int) -> None:
    """EXCH-2: slots depend on the order of the rows only."""
    print(f"PATHWAYS_TEST_SEED={SEED}")
    draw = random.Random(SEED * 100 + case)
    source, target = slices_of(add, draw)
    shards, here = target.size, source.size
    rows = here * draw.randrange(1, 40)
    capacity = draw.randrange(1, rows + 1)
    unsent = draw.choice([None, None, -1, 99])
    shape = (rows, *draw.choice([(), (3,), (2, 5), (0,)]))
    spec = P(("x", "y")[: len(source.axis_names)]) if draw.random() < 0.5 else P()
    send = pw.program(sending(target, capacity=capacity, overflow="drop", unsent=unsent))
    for turn in range(5):
        kind = draw.choice(["any", "any", "one", "few", "none"])
        to = [draw.randrange(shards) for _ in range(rows)]
        if kind == "one" or (kind == "none" and unsent is None):
            to = [to[0]] * rows
        elif kind == "none":
            to = [unsent] * rows  # type: ignore[list-item]
        elif kind == "few" and unsent is not None:
            to = [each if draw.random() < 0.1 else unsent for each in to]
        dtype = DTYPES[0] if turn % 2 else draw.choice(DTYPES)
        values = (np.random.default_rng(case + turn).normal(size=shape) * 9).astype(dtype)
        where = np.asarray(to, np.int32)
        x = pw.device_put(values, source, spec)
        same(send(x, pw.device_put(where, source)), reference(values, to, shards, capacity, unsent))
        same([x], [values])
        del x
    quiet()


def test_no_rows(add: Any) -> None:
    """An empty batch goes there and back; a loop may come to one."""
    source, target = add(2), add(2)

    @pw.program
    def send(values: Any, to: Any) -> Any:
        sent = pw.exchange(values, to, to=target, capacity=3)
        gradient = jax.grad(lambda values: pw.exchange(values, to, to=target, capacity=3).rows.sum())(values)
        return (*sent[:], sent.back(sent.rows), gradient)

    values, to = np.ones((0, 5), np.float32), np.zeros(0, np.int32)
    expected = reference(values, to, 2, 3)
    same(send(pw.device_put(values, source), to), [*expected, values, values])


def test_back_and_gradients(add: Any) -> None:
    source, target = add(2), add(2)
    to = np.asarray([1, 0, 1, 1, 0, 1, 1, 0], np.int32)

    def loss_on(encode: Any, expert: Any, combine: Any, send: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            h = encode(x)
            sent, back = send(h)
            y = back(expert(sent, w))
            return combine(h, y)

        return loss

    def dense(h: Any) -> Any:
        _, _, _, _, slots = reference(np.zeros((8, 3), np.float32), to, 2, 3)
        into = np.where(slots >= 0, slots, 6)
        sent = jnp.zeros((6, 3)).at[into].set(h, mode="drop")
        return sent, lambda y: jnp.where((slots >= 0)[:, None], y[np.maximum(slots, 0)], 0)

    def on_hosts(h: Any) -> Any:
        sent = pw.exchange(h, to, to=target, capacity=3, overflow="drop")
        return sent.rows, sent.back

    def expert(x: Any, w: Any) -> Any:
        return jnp.sin(x) * w

    def combine(h: Any, y: Any) -> Any:
        return jnp.sum(h * y + y**3)

    placed = (pw.jit(jnp.tanh, devices=source), pw.jit(expert, devices=target), pw.jit(combine, devices=source))
    ours, plain = loss_on(*placed, on_hosts), loss_on(jnp.tanh, expert, combine, dense)
    x, w = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3), np.full((6, 3), 0.7, np.float32)
    got = pw.program(jax.value_and_grad(ours, argnums=(0, 1)))(x, w)
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(jax.value_and_grad(plain, argnums=(0, 1))(x, w)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)

    def curvature(f: Any) -> Any:  # the gradient of a gradient's length
        return jax.grad(lambda x: jnp.sum(jax.grad(f)(x, w) ** 2))

    second = pw.program(curvature(ours))(x)
    np.testing.assert_allclose(np.asarray(second), curvature(plain)(x), rtol=1e-4, atol=1e-5)


def test_several_in_a_program_and_a_tree(add: Any) -> None:
    a, b, c = add(4), add(1), add(2)
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 1, 8).astype(np.int32), rng.integers(0, 2, 8).astype(np.int32)
    values = {"x": rng.normal(size=(8, 4)).astype(np.float32), "n": np.arange(8, dtype=np.int32)}

    @pw.program
    def both(values: Any, first: Any, second: Any) -> Any:
        there = pw.exchange(values, first, to=b, capacity=8)
        on = pw.exchange(there.rows, second, to=c, capacity=8)
        return on.rows, there.back(on.back(on.rows))

    rows, back = both(pw.device_put(values, a), first, second)
    for name, each in values.items():
        there = reference(each, first, 1, 8)[0]
        np.testing.assert_array_equal(np.asarray(rows[name]), reference(there, second, 2, 8)[0])
        np.testing.assert_array_equal(np.asarray(back[name]), each)


def test_in_a_loop_and_a_donated_step(add: Any, quiet: Any) -> None:
    source, target = add(2), add(2)
    rng = np.random.default_rng(5)
    turns = rng.integers(0, 2, (30, 8)).astype(np.int32)
    double = pw.jit(lambda x, n: jnp.where((n >= 0)[:, None], x * 2, x), devices=target)
    add_up = pw.jit(lambda x, y: x + y * 0.25, devices=source)

    def step(x: Any, to: Any) -> Any:
        sent = pw.exchange(x, to, to=target, capacity=8)
        return add_up(x, sent.back(double(sent.rows, sent.numbers))), sent.count

    program = pw.program(lambda x, turns: jax.lax.scan(step, x, turns), donate_argnums=0)
    one = pw.program(step, donate_argnums=0)
    x = rng.normal(size=(8, 2)).astype(np.float32)
    expected = x
    for _ in turns:
        expected = expected + (expected * 2) * np.float32(0.25)
    counts = np.asarray([[np.sum(t == 0), np.sum(t == 1)] for t in turns], np.int32)
    before = None
    for turn in range(3):
        got, seen = program(pw.device_put(x, source), turns)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4)
        np.testing.assert_array_equal(np.asarray(seen), counts)
        y, late = pw.device_put(x, source), []
        for each in turns:
            y, count = one(y, pw.device_put(each, source))
            late.append(count)
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-4)
        np.testing.assert_array_equal(np.stack([np.asarray(each) for each in late]), counts)
        del got, seen, y, late, count
        if turn == 0:
            before = quiet()["kept"]
    quiet(back_to=before)


@pytest.mark.parametrize("loops", [0, 3])
def test_beside_loops_each_exchange_keeps_its_own_rules(add: Any, loops: int) -> None:
    """A program with loops is cut into parts. `loops` exchanges are in loops, before the others."""
    source, target = add(2), add(1)
    one = np.zeros(8, np.int32)
    some = np.where(np.arange(8) % 2, 0, -1).astype(np.int32)
    far = np.where(np.arange(8) % 2, 0, 7).astype(np.int32)
    add_up = pw.jit(lambda x, y: x + y, devices=source)
    before, behind = pw.jit(lambda x: -x, devices=source), pw.jit(lambda x: x * 2, devices=target)

    @pw.program
    def send(x: Any) -> Any:
        x = before(x)
        for _ in range(loops):
            turn = lambda _, x: add_up(x, pw.exchange(x, one, to=source, capacity=8).rows[:8])
            x = jax.lax.fori_loop(0, 17, turn, x)
        x = jax.lax.fori_loop(0, 17, lambda _, x: add_up(x, x), x)
        sent = pw.exchange(x, one, to=target, capacity=5, overflow="drop")
        part = pw.exchange(x, some, to=target, capacity=4, unsent=-1)
        other = pw.exchange(x, far, to=target, capacity=4, unsent=7)
        late = jax.lax.fori_loop(0, 17, lambda _, x: add_up(x, x), x)
        return behind(sent.rows), behind(part.rows), behind(other.rows), late

    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    after = -x * 2.0 ** (17 * (loops + 1))
    cases = ((one, 5, None), (some, 4, -1), (far, 4, 7))
    expected = [2 * reference(after, to, 1, capacity, unsent)[0] for to, capacity, unsent in cases]
    same(send(pw.device_put(x, source)), [each.astype(np.float32) for each in (*expected, after * 2.0**17)])


def test_gangs_between(add: Any) -> None:
    """GANG-2: gangs of both slices, before, between and behind exchanges, all submitted at once."""
    a, b = add(4), add(4)
    spread = {"in_shardings": P("x"), "out_shardings": P("x")}
    share = pw.jit(lambda x: x + jnp.sum(x) / x.size, devices=a, **spread)  # a collective
    there = pw.jit(lambda x: x - jnp.mean(x), devices=b, **spread)
    rng = np.random.default_rng(11)

    @pw.program
    def step(x: Any, to: Any) -> Any:
        x = share(x)
        sent = pw.exchange(x, to, to=b, capacity=16)
        again = pw.exchange(there(sent.rows), jnp.zeros(64, jnp.int32), to=a, capacity=64)
        return share(sent.back(there(sent.rows))), again.count

    x = rng.normal(size=(16, 3)).astype(np.float32)
    draws = rng.integers(0, 4, (40, 16)).astype(np.int32)
    running = [step(pw.device_put(x, a, P("x")), to) for to in draws]
    mixed = x + x.sum() / x.size
    for (got, count), to in zip(running, draws, strict=True):
        rows, *_, slots = reference(mixed, to, 4, 16)
        back = (rows - rows.mean())[slots]
        np.testing.assert_allclose(np.asarray(got), back + back.sum() / back.size, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(count), [64, 0, 0, 0])


def test_bad_rows_fail_the_run(add: Any, quiet: Any) -> None:
    """EXCH-4: on all hosts, with one text."""
    source, target = add(2), add(2)
    values = pw.device_put(np.ones((8, 2), np.float32), source)
    after = pw.jit(lambda x: x + 1, devices=target)
    send = pw.program(lambda v, to: after(pw.exchange(v, to, to=target, capacity=3).rows))
    wrong = [0, 1, 0, 1, 0, 1, 0, 7]
    with pytest.raises(pw.errors.ComputationError, match="row 3 of source shard 1 has destination 7"):
        send(values, np.asarray(wrong, np.int32)).block_until_ready()
    with pytest.raises(pw.errors.ComputationError, match=r"8 rows .*shard 0.*3"):
        send(values, np.zeros(8, np.int32)).block_until_ready()
    before = quiet()["kept"]
    for _ in range(20):
        with pytest.raises(pw.errors.ComputationError):
            send(values, np.asarray(wrong, np.int32)).block_until_ready()
    quiet(back_to=before)
    good = np.asarray([0, 1, 0, 1, 0, 1, 0, 1], np.int32)
    wide = pw.program(lambda v, to: after(pw.exchange(v, to, to=target, capacity=4).rows))
    np.testing.assert_array_equal(np.asarray(wide(values, good)), np.full((8, 2), 2, np.float32))


def test_a_failed_value_fails_the_exchange(add: Any) -> None:
    """ERR-1: with its own error, whether it is rows or destinations."""
    source, target = add(2), add(2)

    def fails(x: Any) -> Any:
        return pw.host_callback(_raise, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    broken = pw.jit(fails, devices=source)(np.ones((4, 2), np.float32))
    for values, to in ((broken, jnp.zeros(4, jnp.int32)), (np.ones((4, 2), np.float32), broken[:, 0].astype(np.int32))):
        for result in pw.program(sending(target, capacity=4))(values, to):
            with pytest.raises(pw.errors.PathwaysError, match="no rows today"):
                result.block_until_ready()


def _raise(x: Any) -> Any:
    raise ValueError("no rows today")


def test_records(add: Any, cluster: Any) -> None:
    """EXCH-1: at most 2 * (pairs of hosts that send + hosts) records. Nothing is said of a pair without rows."""
    source, target = add(4), add(4)
    send = pw.program(sending(target, capacity=16, unsent=-1))
    values = pw.device_put(np.ones((16, 2), np.float32), source)

    def records() -> int:
        return sum(int(host["exchange_records"]) for host in cluster.stats()["hosts"])

    hosts_of = [[device.host for device in slice_.devices] for slice_ in (source, target)]
    hosts = len({host for side in hosts_of for host in side})
    for chosen in ([-1] * 16, [0] * 16, [-1] * 15 + [3], list(range(4)) * 4):
        pairs = {
            (hosts_of[0][row // 4], hosts_of[1][shard])
            for row, shard in enumerate(chosen)
            if shard >= 0 and hosts_of[0][row // 4] != hosts_of[1][shard]
        }
        before = records()
        jax.block_until_ready(send(values, np.asarray(chosen, np.int32)))
        assert records() - before == len(pairs) + 2 * (hosts - 1)


def test_bad_arguments(add: Any) -> None:
    source, target = add(2), add(2)
    values, to = np.ones((4, 2), np.float32), np.zeros(4, np.int32)
    with pytest.raises(pw.errors.ProgramError, match=r"to of pw.exchange is 3 of type int; expected a slice"):
        pw.program(lambda v: pw.exchange(v, to, to=3, capacity=4).rows)(values)  # type: ignore[arg-type]
    with pytest.raises(pw.errors.ProgramError, match=r"capacity of pw\.exchange is 0"):
        pw.program(lambda v: pw.exchange(v, to, to=target, capacity=0).rows)(values)
    with pytest.raises(pw.errors.TraceError, match="outside of a program"):
        pw.exchange(values, to, to=target, capacity=4)
    odd = pw.device_put(np.ones((3, 2), np.float32), source)
    with pytest.raises(pw.errors.ProgramError, match="expected a multiple of 2"):
        pw.program(lambda v: pw.exchange(v, np.zeros(3, np.int32), to=target, capacity=4).rows)(odd)


def test_two_clients(add: Any, cluster: Any) -> None:
    """Another client exchanges between, on the same devices; one fails, the other does not."""
    source, target = add(2), add(2)
    rng = np.random.default_rng(8)
    values = rng.normal(size=(16, 8)).astype(np.float32)
    send = pw.program(sending(target, capacity=16))
    if cluster.address is None:
        pytest.skip("an embedded cluster has one client")
    with pw.connect(cluster.address) as other:
        devices = pw.make_virtual_device_set(other)
        here, there = (devices.add_slice(shape=(2,), axis_names=("x",)) for _ in range(2))
        theirs = pw.program(sending(there, capacity=5))
        for turn in range(40):
            to = rng.integers(0, 2, 16).astype(np.int32)
            ours = send(pw.device_put(values, source), to)
            wrong = turn % 4 == 0
            results = theirs(pw.device_put(values[:8], here), np.asarray([0] * 4 + [1 + wrong] * 4, np.int32))
            same(ours, reference(values, to, 2, 16))
            if wrong:
                with pytest.raises(pw.errors.ComputationError, match="row 0 of source shard 1 has destination 2"):
                    np.asarray(results[0])
            else:
                same(results, reference(values[:8], [0] * 4 + [1] * 4, 2, 5))


@pytest.mark.slow
def test_a_host_is_killed() -> None:
    """ERR-2, at any moment: each result is right or says which host was lost. Then exchanges go on."""
    print(f"PATHWAYS_TEST_SEED={SEED}")
    draw = random.Random(SEED)
    with pw.connect(pw.LocalCluster(2, 2, 1, platform="cpu")) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        source, target = (devices.add_slice(shape=(2,), axis_names=("x",), island=n) for n in range(2))
        values = np.arange(64, dtype=np.float32).reshape(16, 4)
        send = pw.program(sending(target, capacity=16))
        draws = [[draw.randrange(2) for _ in range(16)] for _ in range(30)]
        expected = [reference(values, to, 2, 16) for to in draws]
        same(send(pw.device_put(values, source), np.asarray(draws[0], np.int32)), expected[0])
        for host in draw.sample(range(4), 2):
            pid = cluster.stats()["hosts"][host]["pid"]
            timer = threading.Timer(draw.random() * 0.02, os.kill, (pid, signal.SIGKILL))
            timer.start()
            running = [send(pw.device_put(values, source), np.asarray(to, np.int32)) for to in draws]
            for results, each in zip(running, expected, strict=True):
                for result, value in zip(results, each, strict=True):
                    try:
                        np.testing.assert_array_equal(np.asarray(result), value)
                    except pw.errors.HostLostError as error:
                        assert f"host {host} " in str(error)
            timer.join()
            until_right(lambda: send(pw.device_put(values, source), np.asarray(draws[0], np.int32)), expected[0])


def until_right(run: Any, expected: Any) -> None:
    for _ in range(100):
        try:
            same(run(), expected)
        except pw.errors.HostLostError:
            continue
        return
    raise AssertionError("every run lost a host")
