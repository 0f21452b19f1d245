"""ERR-1: what fails propagates errors to exactly what depends on it, and says what, where and why; the cluster goes
on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

SQUARE = np.ones((4, 4), np.float32)


def at_run_time(x: Any) -> Any:
    """Compiles; when it runs, LAPACK's handler finds fewer results than it gives."""
    return jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def at_compile_time(x: Any) -> Any:
    """Traces; no host knows the target."""
    return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.fixture(autouse=True)
def lapack_is_there(cluster: Any, add: Any) -> None:
    """LAPACK's handlers are registered with the first use of linear algebra in a process."""
    if cluster.is_embedded:
        jax.jit(jnp.linalg.cholesky).lower(SQUARE)


def reason(array: Any) -> str:
    with pytest.raises(pw.errors.ComputationError) as failure:
        np.asarray(array)
    with pytest.raises(pw.errors.ComputationError):
        array.block_until_ready()
    assert array.is_ready() and "failed" in repr(array)
    return str(failure.value)


def test_a_failure_at_run_time_fails_its_dependents_alone(add: Any, cluster: Any) -> None:
    here, there = add(4), add(2)
    bad = pw.jit(at_run_time, devices=here, name="bad")
    good = pw.jit(lambda x: x + 1, devices=here, name="good")
    both = pw.jit(lambda x, y: x + y, devices=there, name="both")

    @pw.program
    def mixed(x: Any) -> Any:
        fine = good(x)
        broken = bad(fine)
        return {
            "fine": [fine, both(fine, fine), good(good(x))],
            "broken": [broken, good(broken), both(fine, broken), both(both(broken, fine), x)],
        }

    out = mixed(SQUARE)
    for array, want in zip(out["fine"], (2, 4, 3), strict=True):
        np.testing.assert_array_equal(np.asarray(array), SQUARE * want)
    for array in out["broken"]:
        text = reason(array)
        for word in ("computation 'bad.", "program 'mixed'", "on host", "cpu:", "Wrong number of results"):
            assert word in text, text
    later = both(out["broken"][0], SQUARE)
    assert "Wrong number of results" in reason(later)
    np.testing.assert_array_equal(np.asarray(both(out["fine"][0], SQUARE)), SQUARE * 3)


def test_gangs_stay_whole_when_an_input_failed(add: Any, cluster: Any) -> None:
    """GANG-1: whoever may have it still runs it, on a stand-in, and the next collective is right."""
    slice_ = add(4)
    bad = pw.jit(at_run_time, devices=add(1), name="bad")
    total = pw.jit(lambda x: x.sum(), devices=slice_, in_shardings=P("x"), name="total")
    through = pw.program(lambda x: total(bad(x)))
    hosts = {device.host for device in slice_.devices}

    def gangs() -> list[int]:
        return [host["gangs"] for host in cluster.stats()["hosts"] if host["host"] in hosts]

    before = gangs()
    for _ in range(5):
        failed = through(SQUARE)
        np.testing.assert_array_equal(np.asarray(total(SQUARE)), 16)
        assert "bad" in reason(failed)
    assert len({after - then for after, then in zip(gangs(), before, strict=True)}) == 1


def test_a_failure_at_compile_time(add: Any, cluster: Any, quiet: Any) -> None:
    slice_ = add(4)
    bad = pw.jit(at_compile_time, devices=slice_, name="missing")
    good = pw.jit(lambda x: x + 1, devices=slice_, name="good")
    before = quiet()["kept"]
    for _ in range(2):
        with pytest.raises(pw.errors.ComputationError, match=r"'missing'.*no_such_target"):
            bad(SQUARE)
        with pytest.raises(pw.errors.ComputationError, match=r"'missing'.*no_such_target"):
            pw.program(lambda x: good(bad(good(x))))(SQUARE)
    quiet(back_to=before)
    np.testing.assert_array_equal(np.asarray(good(SQUARE)), SQUARE * 2)


def test_failures_leave_nothing_behind(add: Any, quiet: Any) -> None:
    bad = pw.jit(at_run_time, devices=add(2), name="bad")
    big = np.ones((200, 200), np.float32)
    reason(bad(big))
    before = quiet()["kept"]
    for _ in range(10):
        array = bad(big)
        array.copy_to_host_async()
        reason(array)
        bad(bad(big))
    del array
    quiet(back_to=before)


def test_cancelled_runs_say_so(add: Any, cluster: Any) -> None:
    f = pw.jit(lambda x: (x + 1, x * 2), devices=add(2))
    x = pw.device_put(SQUARE, f.slice)
    for _ in range(20):
        one, two = f(x)
        pw.cancel(one, "not needed")
        for array in (one, two):
            try:
                assert np.asarray(array).shape == (4, 4)
            except pw.errors.CancelledError as error:
                assert "cancelled" in str(error)
    done = f(x)
    jax.block_until_ready(done)
    pw.cancel(done)
    pw.cancel([])
    np.testing.assert_array_equal(np.asarray(done[1]), 2 * SQUARE)
    with pytest.raises(pw.errors.ProgramError, match=r"leaf 0 is 3 of type int"):
        pw.cancel(3)


def test_debug_nans_raises_at_the_call(add: Any) -> None:
    """As in JAX: the call that makes a NaN raises, and names the computation; what is right goes on."""
    slice_ = add(2)
    bad, good = np.array([-1.0, 1.0], np.float32), np.array([1.0, 4.0], np.float32)
    logs = pw.jit(lambda x: (jnp.log(x), x), devices=slice_, name="logs", donate_argnums=0)
    roots = pw.jit(jnp.sqrt, devices=slice_, name="roots")
    both = pw.program(lambda x: roots(logs(x)[0] * 0 + x), name="both")
    loop = pw.program(lambda x: jax.lax.fori_loop(0, 2, lambda _, c: roots(c), x), name="loop")
    there = pw.jit(lambda x: x - 9, devices=add(1), name="there")
    crossing = pw.program(lambda x: jax.lax.fori_loop(0, 2, lambda _, c: roots(there(c)), x), name="crossing")
    inside = pw.program(lambda x: jax.jit(lambda c: roots(c))(x), name="inside")  # it does not run step by step
    array = pw.device_put(bad, slice_)
    for call in (lambda x: logs(x), lambda x: logs(pw.device_put(x, slice_))):  # the short ways know the calls
        assert np.isnan(call(bad)[0]).tolist() == [True, False]
    with jax.debug_nans(True):
        for call, name in (
            (lambda: logs(bad), "logs"),
            (lambda: logs(array), "logs"),
            (lambda: both(bad), "logs.*in program 'both'"),
            (lambda: both(array), "logs.*in program 'both'"),
            (lambda: loop(array), "scan.*in program 'loop'"),
            (lambda: loop(bad), "scan.*in program 'loop'"),
            (lambda: crossing(array), "scan.*in program 'crossing'"),
            (lambda: crossing(bad), "scan.*in program 'crossing'"),
            (lambda: inside(array), "'inside'"),
            (lambda: inside(bad), "'inside'"),
            (lambda: array**0.5, "power"),
            (lambda: jnp.log(array), "log"),
            (lambda: jax.grad(lambda x: logs(x)[0].sum() + roots(x).sum())(array), "logs|roots"),
            (lambda: both.with_timeout(60)(bad), "logs"),
        ):
            for _ in range(2):
                with pytest.raises(
                    FloatingPointError, match=rf"invalid value \(nan\) encountered in .*{name}"
                ) as raised:
                    call()
                told = "".join(getattr(raised.value, "__notes__", ()))
                assert ("which call made it" in told) == (name == "'inside'")
        for _ in range(2):
            np.testing.assert_allclose(np.asarray(logs(good)[0]), np.log(good), rtol=1e-6)
            np.testing.assert_allclose(np.asarray(both(good)), np.sqrt(good), rtol=1e-6)
        assert not array.is_deleted()
        np.testing.assert_allclose(np.asarray(logs(good * 0)[0]), [-np.inf, -np.inf])
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"invalid value \(inf\) encountered in 'logs'"):
        logs(good * 0)
    assert np.isnan(np.asarray(logs(bad)[0])).tolist() == [True, False]
    assert np.isnan(np.asarray(both(bad))).tolist() == [True, False]
