"""`pw.Variable`: state that programs read and set, against plain Python on NumPy.

Map: ORD-1 (two programs, several threads), MEM-4 (an array that somebody reads is not taken over).
"""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from variables import ONES, same

import pathways as pw


@pytest.fixture
def here(add: Any) -> Any:
    return add(1)


@pytest.fixture
def there(add: Any) -> Any:
    return add(1)


@pytest.fixture
def v(here: Any) -> pw.Variable:
    return pw.Variable(ONES, here, name="v")


def test_a_loop_reads_and_sets(v: pw.Variable, here: Any) -> None:
    double = pw.jit(lambda x: x * 2, devices=here)

    @pw.program
    def step(x: Any) -> Any:
        v.value = v.value + double(x)
        v.value = v.value * 2
        return v.value.sum()

    expected, sums = ONES, []
    x = pw.device_put(ONES, here)
    for _ in range(5):
        expected = (expected + 2) * 2
        sums.append((step(x), expected.sum()))
    for got, wanted in sums:
        same(got, wanted)
    same(v.value, expected)
    assert "donating" in str(step.lower(x).as_text("plan"))
    assert step.eval_shape(x).shape == ()


def test_what_was_read_stays(v: pw.Variable) -> None:
    @pw.program
    def grow() -> None:
        v.value += 1

    kept = [v.value]
    for _ in range(3):
        grow()
        kept.append(v.value)
    same(np.asarray(kept), [ONES + i for i in range(4)])
    same(kept[1] + kept[2], 2 * ONES + 3)


def test_the_old_value_is_a_result(v: pw.Variable) -> None:
    @pw.program
    def swap(x: Any) -> Any:
        old = v.value
        v.value = x
        return old, x, v.value

    for i in range(1, 4):
        before = np.asarray(v.value)
        x = pw.device_put(ONES * 10 * i, v.slice)
        old, given, now = swap(x)
        same(old, before)
        for each in (given, now, x, v.value):
            same(each, ONES * 10 * i)


def test_set_and_never_read(v: pw.Variable) -> None:
    @pw.program
    def fill(x: Any) -> None:
        v.value = jnp.full(4, x, jnp.float32)

    for i in range(3):
        fill(float(i))
        same(v.value, ONES * i)


def test_set_to_what_is_not_traced(v: pw.Variable, here: Any) -> None:
    """Numbers and closed-over arrays; the value is then read in the same trace."""
    count, given = pw.Variable(0.0, here), pw.device_put(ONES * 3, here)

    @pw.program
    def step() -> Any:
        count.value = 2
        v.value = given
        first = v.value * 2
        v.value = np.float32(5) * ONES
        return first, count.value / 4, v.value

    for _ in range(2):
        first, half, now = step()
        same(first, ONES * 6)
        same(half, 0.5)
        same(now, ONES * 5)
        same(v.value, ONES * 5)
        same(given, ONES * 3)
    same(count.value, 2)


def test_two_variables_change_places(v: pw.Variable, there: Any) -> None:
    w = pw.Variable(ONES * 5, there)

    @pw.program
    def swap() -> None:
        v.value, w.value = w.value, v.value

    for i in range(3):
        swap()
        same(v.value, ONES * (5 if i % 2 == 0 else 1))
        same(w.value, ONES * (1 if i % 2 == 0 else 5))
    assert v.slice is not w.slice


def test_two_programs_use_it_in_turn(v: pw.Variable, here: Any, there: Any) -> None:
    far = pw.jit(lambda x: x * 3, devices=there)

    @pw.program
    def one() -> None:
        v.value = far(v.value)

    @pw.program
    def two() -> Any:
        v.value = v.value + 1
        return v.value

    expected = ONES
    for _ in range(4):
        one()
        got = two()
        expected = expected * 3 + 1
        same(got, expected)
    assert v.slice is here


def test_placed_functions_and_loops_read_what_others_set(v: pw.Variable, here: Any) -> None:
    """JAX traces these once: what they read is the value of the run, not that of the trace."""
    inside = pw.jit(lambda x: x + v.value, devices=here)

    @pw.program
    def reads(x: Any) -> Any:
        return inside(x), jax.lax.fori_loop(0, 3, lambda i, y: y + v.value, x)

    @pw.program
    def sets() -> None:
        v.value = v.value * 2

    x = pw.device_put(ONES, here)
    for i in range(3):
        value = ONES * 2**i
        same(inside(x), ONES + value)
        first, second = reads(x)
        same(first, ONES + value)
        same(second, ONES + 3 * value)
        sets()


def test_running_statistics_beside_a_gradient(v: pw.Variable, here: Any) -> None:
    w = pw.Variable(ONES * 2, here, name="w")

    @pw.program
    def train(x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = weights * x - v.value
            return (y**2).sum(), 0.5 * v.value + 0.5 * y

        (got, new), grads = jax.value_and_grad(loss, has_aux=True)(w.value)
        v.value = new
        w.value = w.value - 0.25 * grads
        return got

    weights, x = ONES * 2, ONES * 0.5
    mean: Any = ONES
    for _ in range(4):
        y = weights * x - mean
        expected = (y**2).sum()
        grads = 2 * y * x
        mean, weights = 0.5 * mean + 0.5 * y, weights - np.float32(0.25) * grads
        np.testing.assert_allclose(np.asarray(train(pw.device_put(x, here))), expected, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(w.value), weights, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(v.value), mean, rtol=1e-6)


def test_threads_lose_nothing(v: pw.Variable) -> None:
    w = pw.Variable(ONES * 0, v.slice)

    @pw.program
    def one() -> None:
        v.value += 1
        w.value += v.value * 0 + 1

    @pw.program
    def two() -> None:
        w.value += 2
        v.value = v.value + w.value * 0 + 2

    one()
    two()
    failed: list[BaseException] = []

    def work(program: Any) -> None:
        try:
            for i in range(50):
                program()
                if i % 10 == 0:
                    np.asarray(v.value)
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=work, args=(program,)) for program in (one, two, one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    same(v.value, ONES * (1 + 3 * 101))
    same(w.value, ONES * 3 * 101)


def test_set_while_runs_are_submitted(here: Any) -> None:
    """Each set comes before or behind each run; no array is lost."""
    stride = 10_000_000  # more runs than come between a set and a read on the slowest machine
    v = pw.Variable(np.zeros(4, np.int32), here, name="v")

    @pw.program
    def step() -> None:
        v.value += 1

    step()
    ends = threading.Event()
    failed: list[BaseException] = []

    def submit() -> None:
        try:
            while not ends.is_set():
                step()
        except BaseException as problem:
            failed.append(problem)

    thread = threading.Thread(target=submit)
    thread.start()
    for i in range(200):
        v.value = np.full(4, stride * i, np.int32)
        got = int(v.value[0])
        assert stride * i <= got < stride * (i + 1), (i, got)
    ends.set()
    thread.join()
    assert not failed, failed


def test_sharded_and_from_another_slice(add: Any) -> None:
    wide, far = add(2), add(1)
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    v = pw.Variable(value, wide, P("x"))
    step = pw.jit(lambda x: x * 2, devices=far)

    @pw.program
    def update() -> Any:
        v.value = step(v.value) + 1
        return v.value

    for _ in range(3):
        got = update()
        value = value * 2 + 1
        same(got, value)
        same(v.value, value)
    assert v.sharding.is_equivalent_to(wide.sharding(P("x")), 2)
    v.value = step(v.value)
    same(v.value, value * 2)
    assert v.sharding.is_equivalent_to(wide.sharding(P("x")), 2) and v.slice is wide


def test_set_by_the_client(v: pw.Variable, here: Any) -> None:
    @pw.program
    def grow() -> Any:
        v.value += 1
        return v.value

    grow()
    source = pw.device_put(ONES * 7, here)
    v.value = source
    same(grow(), ONES * 8)
    same(source, ONES * 7)
    v.set(np.zeros(4, np.float32))
    same(grow(), ONES)
    count = pw.Variable(0, here)
    count.value = 5
    assert count.dtype == jnp.int32 and int(count.value) == 5
    shared = pw.Variable(source)
    again = pw.Variable(source)
    shared.value = again.value
    source.delete()
    same(shared.value, ONES * 7)


def test_methods_static_arguments_and_timeouts(here: Any) -> None:
    class Layer:
        def __init__(self) -> None:
            self.scale = pw.Variable(ONES, here)
            self.step = pw.program(self._step, static_argnames="power")

        def _step(self, x: Any, *, power: int) -> Any:
            self.scale.value = self.scale.value * 2
            return self.scale.value * x**power

    layer = Layer()
    step = layer.step
    for i in range(1, 4):
        same(step.with_timeout(60)(pw.device_put(ONES * 3, here), power=2), ONES * 9 * 2**i)
    same(step(pw.device_put(ONES * 3, here), power=1), ONES * 3 * 16)
    same(layer.scale.value, ONES * 16)


def test_with_callbacks_and_value_checks(v: pw.Variable) -> None:
    seen: list[float] = []

    @pw.program
    def step() -> Any:
        v.value += 1
        jax.debug.callback(lambda x: seen.append(float(x)), v.value[0], ordered=True)
        return v.value

    for i in range(3):
        same(step(), ONES * (i + 2))
    jax.effects_barrier()
    assert seen == [2.0, 3.0, 4.0]

    @pw.program
    def root(x: Any) -> Any:
        v.value = jnp.sqrt(v.value - x)
        return v.value

    with jax.debug_nans(True):
        same(root(0.0), ONES * 2)
        with pytest.raises(FloatingPointError):
            root(100.0)


def test_value_checks_set_once(v: pw.Variable) -> None:
    count = pw.Variable(0, v.slice)

    @pw.program
    def step(x: Any) -> Any:
        count.value += 1
        return jnp.log(x - v.value)

    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        step(np.zeros(4, np.float32))
    assert int(count.value) == 1


def test_without_jit(v: pw.Variable) -> None:
    @pw.program
    def step() -> Any:
        v.value += 1
        return v.value * 2

    with jax.disable_jit():
        same(step(), ONES * 4)
    same(step(), ONES * 6)


def test_a_failure_is_in_the_variable_until_it_is_set(cluster: Any, v: pw.Variable, here: Any) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("no")

    @pw.program
    def broken() -> None:
        v.value = jax.pure_callback(fail, jax.ShapeDtypeStruct((4,), np.float32), v.value)

    @pw.program
    def step() -> Any:
        v.value += 1
        return v.value

    same(step(), ONES * 2)
    broken()
    after = step()
    for each in (after, v.value):
        with pytest.raises(pw.errors.PathwaysError, match="no"):
            np.asarray(each)
    v.value = ONES
    same(step(), ONES * 2)


def test_saved_and_restored(v: pw.Variable, tmp_path: pathlib.Path) -> None:
    variables = {"v": v, "w": [pw.Variable(ONES * 3, v.slice)]}

    @pw.program
    def step() -> None:
        for each in jax.tree.leaves(variables):
            each.value *= 2

    def state() -> Any:
        return jax.tree.map(lambda each: each.value, variables)

    step()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", state())
        step()
        checkpointer.wait_until_finished()
        jax.tree.map(pw.Variable.set, variables, checkpointer.restore(tmp_path / "c", state()))
    step()
    same(v.value, ONES * 4)
    same(variables["w"][0].value, ONES * 12)  # type: ignore[index]


def test_nothing_is_left(cluster: Any, here: Any, quiet: Any) -> None:
    kept = quiet()["kept"]

    def use() -> None:
        v = pw.Variable(np.ones(1 << 16, np.float32), here)

        @pw.program
        def step() -> None:
            v.value += 1

        for _ in range(3):
            step()
            np.asarray(v.value)
        v.delete()
        with pytest.raises(pw.errors.DeletedArrayError, match="variable"):
            step()
        v.value = np.zeros(1 << 16, np.float32)
        step()
        same(v.value, np.ones(1 << 16))

    use()
    jax.clear_caches()
    quiet(back_to=kept)
