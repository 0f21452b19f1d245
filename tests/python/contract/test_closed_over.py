"""Big arrays of this process that functions close over are arguments of their programs: sent once, counted in the
memory of the devices (MEM-1), freed with the function, there again after a loss (ERR-2), moved with the slice (MOVE-1).
The values are those that `jax.jit` has.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways.api.programs import snapshots

BIG = np.random.default_rng(0).normal(size=(64, 256, 4)).astype(np.float32)  # 256 KiB
X = np.arange(4, dtype=np.float32)


def row(table: Any, number: int) -> Any:
    """A row, taken by JAX: NumPy would take it while the function is traced, and that row is small."""
    return jnp.asarray(table)[number]


def module_bytes(lowered: Any) -> int:
    return sum(len(each.module) for each in lowered.logical.computations)


KINDS: dict[str, Callable[[], Any]] = {
    "NumPy": lambda: BIG.copy(),
    "jax.Array": lambda: jnp.asarray(BIG),
    "float64": lambda: BIG.astype(np.float64),
    "a view": lambda: np.repeat(BIG, 2, axis=1)[:, ::2],
    "bfloat16": lambda: jnp.asarray(BIG, jnp.bfloat16),
    "int4": lambda: jnp.asarray(BIG, jnp.int4),
    "complex": lambda: BIG.astype(np.complex64) * 1j,
    "bool": lambda: BIG > 0,
    "keys": lambda: jax.random.split(jax.random.key(0), (64, 256)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_is_an_argument(add: Callable[..., Any], kind: str) -> None:
    table = KINDS[kind]()

    def fun(x: Any) -> Any:
        rows = row(table, 3)
        if kind == "keys":
            rows = jax.vmap(lambda key: jax.random.normal(key, (4,)))(rows)
        if kind == "int4":
            rows = rows.astype(jnp.float32)
        return (rows * x).real.sum(0)

    f = pw.jit(fun, devices=add(2))
    lowered = f.lower(X)
    assert module_bytes(lowered) < 1 << 16
    assert len(lowered.logical.arguments) == 2
    for _ in range(2):
        np.testing.assert_allclose(f(X), jax.jit(fun)(X), rtol=1e-5, atol=1e-6)


def solve(x: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(jax.jit(lambda y: 2 * y + 0 * jnp.asarray(BIG)[0].sum(0)), x, maxiter=3)[0]


def writing_loop(x: Any) -> Any:
    reference = jax.new_ref(x)

    def body(_: Any, c: Any) -> Any:
        reference[...] += c
        return jax.jit(lambda y: y + jnp.asarray(BIG)[2].sum(0))(c)

    return jax.lax.fori_loop(0, 3, body, x) + reference[...]


@pytest.mark.parametrize("construct", [solve, writing_loop], ids=lambda fun: fun.__name__)
def test_what_has_functions_inside_passes_it_on(add: Callable[..., Any], construct: Callable[[Any], Any]) -> None:
    f = pw.jit(construct, devices=add(2))
    assert module_bytes(f.lower(X)) < 1 << 16
    np.testing.assert_allclose(f(X), construct(X), rtol=1e-5, atol=1e-5)


def test_small_arrays_are_compiled_in(add: Callable[..., Any]) -> None:
    small = np.arange(1024, dtype=np.float32)
    f = pw.jit(lambda x: small * x, devices=add(2))
    assert len(f.lower(np.float32(2)).logical.arguments) == 1
    np.testing.assert_array_equal(f(np.float32(2)), small * 2)


def test_the_value_is_that_of_the_trace(add: Callable[..., Any]) -> None:
    """As in `jax.jit`: an array that is written or deleted later changes nothing until the function is traced again."""
    table, given = BIG.copy(), jnp.asarray(BIG)
    f = pw.jit(lambda x: row(table, 0).sum(0) * x + row(given, 1).sum(0), devices=add(2))
    want = BIG[0].sum(0) * X + BIG[1].sum(0)
    lowered = f.lower(X)
    np.testing.assert_allclose(f(X), want, rtol=1e-4)
    table[:] = 0
    given.delete()
    np.testing.assert_allclose(f(X), want, rtol=1e-4)
    np.testing.assert_allclose(lowered.compile()(X), want, rtol=1e-4)
    written = pw.jit(lambda x: row(table, 0).sum(0) * x, devices=add(2))
    np.testing.assert_array_equal(written(X), np.zeros(4, np.float32))


def test_it_is_sent_once_and_shared_and_freed_with_the_functions(add: Callable[..., Any], quiet: Any) -> None:
    slice_ = add(2)
    before = quiet()["kept"]
    table = BIG.copy()
    f, g = (pw.jit(lambda x, n=n: row(table, n).sum(0) * x, devices=slice_) for n in range(2))
    for _ in range(3):
        jax.block_until_ready([f(X), g(X), f(X[None])])
    assert len(snapshots._known) == 1
    objects = [host["objects"] for host in quiet()["hosts"]]
    more = [now - old for now, (old, _) in zip(objects, before[2], strict=True)]
    assert max(more) == 1, more
    del f
    np.testing.assert_allclose(g(X), BIG[1].sum(0) * X, rtol=1e-4)
    gc.disable()
    try:
        del g
        assert len(snapshots._known) == 0  # at once, without the garbage collector
    finally:
        gc.enable()
    quiet(back_to=before)


def test_clearing_caches_frees_it(add: Callable[..., Any], quiet: Any) -> None:
    slice_ = add(2)
    before = quiet()["kept"]
    table = BIG.copy()
    f = pw.jit(lambda x: row(table, 0).sum(0) * x, devices=slice_)
    program = pw.program(lambda x: f(x) + 1)
    for clear in (jax.clear_caches, lambda: (f.clear_cache(), program.clear_cache())):
        for call in (f, program):
            np.testing.assert_allclose(call(X), BIG[0].sum(0) * X + (call is program), rtol=1e-4)
        assert len(snapshots._known) == 1
        clear()
        assert len(snapshots._known) == 0
    quiet(back_to=before)


def test_gradients_outside_of_programs_free_it_too(add: Callable[..., Any], quiet: Any) -> None:
    slice_ = add(2)
    x = jnp.asarray(X)
    before = quiet()["kept"]
    for n in range(3):
        table = BIG + np.float32(n)
        f = pw.jit(lambda x, table=table: (row(table, 0) @ x).sum(), devices=slice_)
        np.testing.assert_allclose(jax.grad(f)(x), table[0].sum(0), rtol=1e-4)
        del f
        gc.collect()
        assert len(snapshots._known) == 0
    quiet(back_to=before)


def test_two_slices_loops_branches_and_gradients(add: Callable[..., Any]) -> None:
    """Each slice that reads it has it: no run sends it from slice to slice."""
    one, two = add(2), add(2)
    table, other = BIG.copy(), jnp.asarray(BIG[:, :4] / 256)
    step = pw.jit(lambda x: jnp.tanh(jax.jit(lambda y: other[0] @ y)(x)), devices=one, name="step")
    last = pw.jit(lambda x: (row(table, 1) @ (x + other[1, 0])).mean(), devices=two, name="last")

    def plain(x: Any, f: Any, g: Any) -> Any:
        x = jax.lax.fori_loop(0, 40, lambda _, c: f(c), x)
        x, _ = jax.lax.scan(lambda c, row: (f(c) + row, None), x, other[2])
        return jax.lax.cond(x[0] > 100, lambda y: g(y) * 0, g, x)

    def unplaced(x: Any) -> Any:
        return plain(x, lambda y: jnp.tanh(other[0] @ y), lambda y: (row(table, 1) @ (y + other[1, 0])).mean())

    whole = pw.program(lambda x: plain(x, step, last))
    np.testing.assert_allclose(whole(X), unplaced(X), rtol=1e-4, atol=1e-5)
    short = pw.program(jax.value_and_grad(lambda x: last(step(x)) + last(pw.device_put(step(x), two))))
    want = jax.value_and_grad(lambda x: 2 * (row(table, 1) @ (jnp.tanh(other[0] @ x) + other[1, 0])).mean())(X)
    for got, expected in zip(jax.tree.leaves(short(X)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    lowered = short.lower(X)
    assert module_bytes(lowered) < 1 << 17
    moved = [node for node in lowered.logical.nodes if node.kind.name == "TRANSFER"]
    assert all(lowered.logical.values[node.inputs[0]].nbytes < 1 << 10 for node in moved)


def test_a_result_that_is_the_array_itself(add: Callable[..., Any]) -> None:
    """MEM-4: whoever donates the result takes a copy."""
    slice_ = add(2)
    table = BIG.copy()
    f = pw.program(lambda x: (pw.jit(lambda y: y + 1, devices=slice_)(x), table))
    take = pw.jit(lambda t: t * 2, devices=slice_, donate_argnums=0)
    for _ in range(2):
        np.testing.assert_array_equal(take(pw.device_put(f(X)[1], slice_)), BIG * 2)


def test_it_moves_with_its_slice(add: Callable[..., Any], cluster: Any) -> None:
    slice_ = add(2)
    table = BIG.copy()
    f = pw.jit(lambda x: row(table, 0).sum(0) * x, devices=slice_)
    np.testing.assert_allclose(f(X), BIG[0].sum(0) * X, rtol=1e-4)
    table[:] = 0
    cluster.remap(slice_, list(reversed(slice_.devices)))
    np.testing.assert_allclose(f(X), BIG[0].sum(0) * X, rtol=1e-4)
    cluster.suspend()
    cluster.resume()
    np.testing.assert_allclose(f(X), BIG[0].sum(0) * X, rtol=1e-4)
    table[:] = BIG
    slice_.resize((1,))
    np.testing.assert_allclose(f(X), BIG[0].sum(0) * X, rtol=1e-4)


@pytest.mark.slow
def test_it_counts_and_what_does_not_fit_is_refused(start: Callable[..., Any]) -> None:
    """MEM-1, MEM-3: beside a budget of 8 MiB on each device."""
    cluster = start(1, 1, 2, device_memory=8 << 20)
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
    table = np.ones((1 << 20,), np.float32)  # 4 MiB, on each device
    f = pw.jit(lambda x: jnp.asarray(table).sum() * x, devices=slice_)
    np.testing.assert_array_equal(f(X), X * table.size)
    assert all(each["bytes"] >= table.nbytes for each in cluster.stats()["hosts"][0]["memory"]["devices"])
    big = np.ones((4 << 20,), np.float32)
    g = pw.jit(lambda x: jnp.asarray(big).sum() * x, devices=slice_)
    with pytest.raises(pw.errors.ResourceExhaustedError):
        np.asarray(g(X))
    np.testing.assert_array_equal(f(X), X * table.size)


@pytest.mark.slow
def test_it_comes_back_after_a_loss(start: Callable[..., Any]) -> None:
    """ERR-2: nothing but the call is said again, and the value is still that of the trace."""
    cluster = start(2, 1, 2)
    devices = pw.make_virtual_device_set(cluster)
    one, two = (devices.add_slice(devices=2, island=island) for island in range(2))
    table = BIG.copy()
    f = pw.jit(lambda x: row(table, 0).sum(0) * x, devices=one, name="f")
    g = pw.jit(lambda x: row(table, 1).sum(0) + x, devices=two, name="g")
    program = pw.program(lambda x: g(jax.lax.fori_loop(0, 20, lambda _, c: f(c) / 100, x)))
    want = [BIG[0].sum(0) * X, np.asarray(program(X))]
    np.testing.assert_allclose(f(X), want[0], rtol=1e-4)
    table[:] = 0
    for island in (0, 1):
        os.kill(cluster.stats()["hosts"][island]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:
            try:
                got = [np.asarray(f(X)), np.asarray(program(X))]
                break
            except pw.errors.HostLostError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for one_value, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one_value, other, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.watchdog(300)
def test_what_200_functions_leave(start: Callable[..., Any]) -> None:
    """Memory of client, controller and hosts over functions with 16 MiB each, made and forgotten: flat."""
    cluster = start(1, 1, 2)
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
    base = np.random.default_rng(0).normal(size=(32, 512, 256)).astype(np.float32)
    v = np.ones(256, np.float32)
    functions = 200 if os.environ.get("PATHWAYS_SAMPLE") == "all" else 60

    def resident() -> dict[int, int]:
        pids = [os.getpid(), cluster.stats()["controller"]["pid"], *(h["pid"] for h in cluster.stats()["hosts"])]
        out = {}
        for pid in pids:
            with open(f"/proc/{pid}/status") as status:
                out[pid] = next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS"))
        return out

    first: dict[int, int] = {}
    for n in range(functions):
        table = base + np.float32(n)
        f = pw.jit(lambda x, table=table, n=n: (table @ x).sum() + n, devices=slice_)
        jax.block_until_ready(f(v))
        del f
        if n == 10:
            first = resident()
    last = resident()
    assert all(last[pid] - first[pid] < 64 for pid in last), (first, last)
