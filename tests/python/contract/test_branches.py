"""Branches of JAX around placed functions run on the hosts, as the data decides: values and gradients are plain JAX's.

The cases are those of `control_cases`; a run plays a sample (`@pytest.mark.sampled`). Those with loops are unrolled.

Map: CTL-1 decided by data, without the client (`test_values_and_gradients`, `test_a_client_runs_ahead_of_branches`);
ERR-1 an error in a branch, in its scalar, and in a branch that is not taken (`test_an_error_reaches_what_was_taken`);
DEAD-1 (`test_a_deadline_while_a_branch_waits`); MEM-4 (`test_a_donated_argument_goes_through_a_branch`); OWN-1 and
GANG-1 (`test_gangs_of_another_client_come_between`). A lost host: `test_lost_hosts.py`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import ARGUMENTS, CASES, HOMES, Placed
from control_on_slices import BRANCHES, placed_on
from jax.sharding import PartitionSpec as P

import pathways as pw

#: Other arguments, with which a program takes other branches.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"yes": np.float32(-1.5), "no": np.float32(1.5), "n": np.int32(0), "x": -ARGUMENTS["x"]},
    {"n": np.int32(9), "x": 2 * ARGUMENTS["x"], "no": np.float32(1.5)},
)
X = np.arange(16, dtype=np.float32).reshape(4, 4) / 16


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-4)


@dataclasses.dataclass
class Stage:
    """The slices of the cases: a over both hosts of an island, b on another one, if there is one; c on one device."""

    slices: dict[str, Any]

    def placed(self) -> Placed:
        return placed_on(self.slices)

    def put(self, name: str, value: Any) -> Any:
        home = self.slices[HOMES[name]]
        return pw.device_put(value, home, P("x") if np.ndim(value) else P())


@pytest.fixture
def stage(cluster: Any, add: Any) -> Stage:
    several = len(cluster.islands) > 1
    first, second = (0, 1) if several else (None, None)
    return Stage({"a": add(4 if several else 2, first), "b": add(2, second), "c": add(1, second)})


@pytest.mark.sampled(0.27)
@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("make", ["forward", "backward"])
def test_values_and_gradients(stage: Stage, name: str, make: str) -> None:
    case = CASES[name]
    program = pw.program(getattr(case, make)(stage.placed()))
    plain = jax.jit(getattr(case, make)(Placed()))
    for way in WAYS:
        values = {**ARGUMENTS, **way}
        got = program(*(stage.put(each, values[each]) for each in case.names))
        same(got, plain(*(values[each] for each in case.names)))


def halves(stage: Stage) -> tuple[Any, Any]:
    """A program of a branch over two slices, and the same in plain JAX."""

    def fun(p: Placed) -> Callable[..., Any]:
        def run(w: Any, x: Any, n: Any) -> Any:
            y = jax.lax.cond(n % 3 == 0, lambda x: p.put(p.f(w, x), "b"), lambda x: p.total(p.put(x, "b")) + x, x)
            return p.g(w, p.put(y, "b")), p.count(n)

        return run

    return pw.program(fun(stage.placed()), name="halves"), jax.jit(fun(Placed()))


def test_a_client_runs_ahead_of_branches(stage: Stage, quiet: Callable[..., Any]) -> None:
    """CTL-1: each run depends on the one before; the client looks at none. Nothing is left."""
    program, plain = halves(stage)
    w = stage.put("w", ARGUMENTS["w"])
    x, n = stage.put("x", X), stage.put("n", np.int32(0))
    count = np.int32(0)
    got: list[Any] = []
    jax.block_until_ready(program(w, x, n))
    before = quiet()["kept"]
    for _ in range(20):
        y, n = program(w, x, n)
        got.append((y, n))
    want = []
    for _ in range(20):
        want.append(plain(ARGUMENTS["w"], X, count))
        count = want[-1][1]
    same(got, want)
    del got, y
    n = stage.put("n", np.int32(0))
    quiet(back_to=before)
    assert not n.is_deleted()


def test_a_donated_argument_goes_through_a_branch(stage: Stage, quiet: Callable[..., Any]) -> None:
    """MEM-4: whichever branch is taken, the argument is gone, and the result lives on."""
    f = pw.jit(lambda x: x * 2, devices=stage.slices["a"], name="f")
    program = pw.program(
        lambda x, yes: f(jax.lax.cond(yes > 0, lambda x: f(x) + 1, lambda x: x, x)), donate_argnums=(0,)
    )
    flags = [stage.put("yes", np.float32(value)) for value in (1, -1)]
    x = stage.put("x", X)
    jax.block_until_ready(program(x, flags[0]))
    assert x.is_deleted()
    before = quiet()["kept"]
    for _ in range(3):
        for yes, expected in zip(flags, ((X * 2 + 1) * 2, X * 2), strict=True):
            result = program(stage.put("x", X), yes)
            np.testing.assert_array_equal(np.asarray(result), expected)
    del result
    quiet(back_to=before)


def test_a_result_that_is_an_argument_outlives_it(stage: Stage) -> None:
    f = pw.jit(lambda x: x * 2, devices=stage.slices["a"], name="f")
    program = pw.program(lambda x, yes: jax.lax.cond(yes > 0, f, lambda x: x, x))
    double = pw.jit(lambda x: x * 2, devices=stage.slices["a"], donate_argnums=(0,))
    x = stage.put("x", X)
    y = program(x, stage.put("yes", np.float32(-1)))
    np.testing.assert_array_equal(np.asarray(double(y)), X * 2)
    np.testing.assert_array_equal(np.asarray(x), X), "the argument was not overwritten"
    z = program(x, stage.put("yes", np.float32(-1)))
    x.delete()
    np.testing.assert_array_equal(np.asarray(z), X)


def at_run_time(x: Any) -> Any:
    """Compiles; when it runs, LAPACK's handler finds fewer results than it gives."""
    return jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_an_error_reaches_what_was_taken(stage: Stage, cluster: Any) -> None:
    """ERR-1: an error of the taken branch, or of the scalar, fails the result; one of the other branch cannot be."""
    if cluster.is_embedded:
        jax.jit(jnp.linalg.cholesky).lower(X)  # registers LAPACK's handlers in this process
    bad = pw.jit(at_run_time, devices=stage.slices["b"], name="bad")
    good = pw.jit(lambda x: x + 1, devices=stage.slices["b"], name="good")
    flag = pw.jit(lambda x: at_run_time(x)[0, 0] > 0, devices=stage.slices["c"], name="flag")
    program = pw.program(lambda x, yes: (jax.lax.cond(yes > 0, bad, good, x), good(x)), name="half")
    x = pw.device_put(X, stage.slices["b"])
    for value in (-1, 1, -1):
        result, other = program(x, stage.put("yes", np.float32(value)))
        if value < 0:
            np.testing.assert_array_equal(np.asarray(result), X + 1)
        else:
            with pytest.raises(pw.errors.ComputationError, match=r"computation 'bad.*program 'half'"):
                np.asarray(result)
        np.testing.assert_array_equal(np.asarray(other), X + 1)
    undecided = pw.program(lambda x: (jax.lax.cond(flag(x), good, lambda x: good(good(x)), x), good(x)), name="which")
    for _ in range(3):
        result, other = undecided(x)
        with pytest.raises(pw.errors.ComputationError, match="computation 'flag"):
            np.asarray(result)
        np.testing.assert_array_equal(np.asarray(other), X + 1)


def slow(x: Any) -> Any:
    """`x` after about a second of work."""
    square = jnp.full((384, 384), 0.001) + x.sum() * 0
    square = jax.lax.fori_loop(0, 200, lambda _, m: jnp.tanh(m @ m), square)
    return x + square[0, 0] * 0


def test_a_deadline_while_a_branch_waits(stage: Stage, quiet: Callable[..., Any]) -> None:
    """DEAD-1: the run fails when the deadline passes, the hosts finish it, and the next run is right."""
    wait = pw.jit(slow, devices=stage.slices["c"], name="slow")
    f = pw.jit(lambda x: x + 1, devices=stage.slices["a"], name="f")
    program = pw.program(lambda x, yes: jax.lax.cond(wait(yes) > 0, f, lambda x: x * 2, x), name="late")
    x, yes = stage.put("x", X), pw.device_put(np.float32(1), stage.slices["c"])
    jax.block_until_ready(program(x, yes))
    before = quiet()["kept"]
    late = program.with_timeout(0.05)(x, yes)
    with pytest.raises(pw.errors.DeadlineExceededError, match="'late'"):
        np.asarray(late)
    np.testing.assert_array_equal(np.asarray(program(x, yes)), X + 1)
    del late
    quiet(back_to=before)


@pytest.mark.usefixtures("near")  # from elsewhere, a process has one connection
def test_gangs_of_another_client_come_between(stage: Stage, cluster: Any, quiet: Callable[..., Any]) -> None:
    """Two clients alternate on the same devices: the gangs of the one, and branches of the other (GANG-1, OWN-1)."""
    if cluster.is_embedded or os.environ.get("PATHWAYS_KIND") == "agents":  # there it is connected by its address
        pytest.skip("this process has one connection to the cluster")
    program, plain = halves(stage)
    args = stage.put("w", ARGUMENTS["w"]), stage.put("x", X)
    with pw.connect(cluster.address, name="other") as guest:
        theirs = pw.make_virtual_device_set(guest).add_slice(shape=(4,), axis_names=("x",), island=0)
        total = pw.jit(lambda x: x + x.sum(), devices=theirs, in_shardings=P("x"), out_shardings=P("x"), name="total")
        gang = pw.device_put(np.ones(8, np.float32), theirs, P("x"))
        got, sums = [], []
        for number in range(12):
            got.append(program(*args, stage.put("n", np.int32(number))))
            sums.append(total(gang))
        same(got, [plain(ARGUMENTS["w"], X, np.int32(number)) for number in range(12)])
        for array in sums:
            np.testing.assert_array_equal(np.asarray(array), np.full(8, 9))


def test_branches_are_shown_and_traced(stage: Stage, cluster: Any, tmp_path: pathlib.Path) -> None:
    """A plot of a plan has all branches, that of a trace those that were taken."""
    program, _ = halves(stage)
    args = stage.put("w", ARGUMENTS["w"]), stage.put("x", X), stage.put("n", np.int32(1))
    text = program.lower(*args).as_text("plan")
    assert "choice 0: " in text and " is 1" in text and "select select." in text
    jax.block_until_ready(program(*args))
    with pw.trace(tmp_path / "trace.json", cluster=cluster) as trace:
        jax.block_until_ready([program(*args[:2], stage.put("n", np.int32(n))) for n in (1, 2, 0)])

    def steps(**measured: Any) -> set[str]:
        plot = program.schedule_plot(*args, **measured)
        return {span.name.partition(".")[0] for row in plot.rows for span in row.spans}

    assert {"f", "total", "g", "count"} <= steps()
    taken = steps(measured=trace)
    assert {"f", "g", "count"} <= taken and "total" not in taken
