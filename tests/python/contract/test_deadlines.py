"""DEAD-1: a run with a deadline fails when it passes, at once, and leaves nothing behind; others go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

VALUE = np.arange(8, dtype=np.float32)


def slow(x: Any) -> Any:
    """`x + 1` after about a second of work."""
    square = jnp.full((384, 384), 0.001) + x[0] * 0
    square = jax.lax.fori_loop(0, 200, lambda _, m: jnp.tanh(m @ m), square)
    return x + 1 + square[0, 0] * 0


def test_in_time_is_like_without(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(2), name="f")
    timed = f.with_timeout(100.0)
    x = f(VALUE)
    for _ in range(3):
        x = timed(x)
    np.testing.assert_array_equal(np.asarray(x), VALUE + 4)
    assert len(f._compiled) == 1  # what was compiled is shared
    np.testing.assert_array_equal(np.asarray(timed.with_timeout(50)(VALUE)), VALUE + 1)
    assert "100 s" in repr(timed)


def test_what_is_late_fails_at_once_and_the_rest_goes_on(add: Any, quiet: Callable[[], Any]) -> None:
    slice_ = add(2)
    f, g = pw.jit(slow, devices=slice_, name="slow"), pw.jit(lambda x: x * 2, devices=slice_)
    x = jax.block_until_ready(pw.device_put(VALUE, slice_))
    jax.block_until_ready([f(x), g(x)])
    before = quiet()["kept"]
    late = f.with_timeout(0.05)(x)
    other = g(f(x))
    with pytest.raises(pw.errors.DeadlineExceededError, match=r"'slow'.* 0\.05 s") as failure:
        np.asarray(late)
    assert isinstance(failure.value, TimeoutError)
    with pytest.raises(pw.errors.DeadlineExceededError):
        late.block_until_ready()
    assert late.is_ready() and "failed" in repr(late)
    np.testing.assert_array_equal(np.asarray(other), (VALUE + 1) * 2)
    del late, other
    failure = None  # type: ignore[assignment]
    quiet(back_to=before)


def test_reads_that_a_deadline_ends_keep_no_memory(add: Any, quiet: Callable[[], Any]) -> None:
    """The client leaves a read, and uses its token's place again, before the hosts answer it (SPEAK-1, LINK-3)."""
    f = pw.jit(lambda x: jnp.tanh(x @ x), devices=add(1), name="f")
    endless, short = (pw.program(lambda x, n=n: jax.lax.fori_loop(0, n, lambda _, y: f(y), x)) for n in (10**7, 20))
    x = np.full((64, 64), 0.01, np.float32)  # too large to come with its completion
    np.asarray(short(x))
    pw.cancel(endless(x))  # from here on it is compiled
    before = quiet()["kept"]
    for _ in range(6):
        late, behind = endless.with_timeout(0.05)(x), short(x)
        with pytest.raises(pw.errors.DeadlineExceededError):
            np.asarray(late)
        np.asarray(behind)
    del late, behind
    quiet(back_to=before)


def test_a_read_back_under_way_fails_too(add: Any) -> None:
    f = pw.jit(slow, devices=add(1), name="slow")
    jax.block_until_ready(f(VALUE))
    late = f.with_timeout(1e-3)(VALUE)
    late.copy_to_host_async()
    with pytest.raises(pw.errors.DeadlineExceededError):
        np.asarray(late)


def test_a_call_that_must_wait_for_the_compiler_raises_at_its_deadline(add: Any) -> None:
    """A deadline counts from the call on. What was begun for it, a later call finds."""
    traced = []

    def f(x: Any) -> Any:
        traced.append(1)
        return x + 1

    placed = pw.jit(f, devices=add(1), name="f")
    late = r"'f' was not over 1e-09 s .* still (being compiled|waiting for the controller)"
    with pytest.raises(pw.errors.DeadlineExceededError, match=late):
        placed.with_timeout(1e-9)(VALUE)
    np.testing.assert_array_equal(np.asarray(placed(VALUE)), VALUE + 1)
    assert len(traced) == 1


@pytest.mark.watchdog(300)
def test_a_thousand_late_runs_leave_nothing(add: Any, cluster: Any, quiet: Callable[[], Any]) -> None:
    """No future, no buffer, no run; the order goes on for everybody."""
    slice_ = add(2)
    f = pw.jit(lambda x: (x + 1, x * 2), devices=slice_)
    x = jax.block_until_ready(pw.device_put(VALUE, slice_))
    jax.block_until_ready(f(x))
    before = quiet()["kept"]
    hopeless = f.with_timeout(1e-9)  # over before the controller sees it
    brief = f.with_timeout(1e-4)  # over somewhere between there and the end
    late = 0
    for _ in range(20):
        results = [view(x) for _ in range(25) for view in (hopeless, brief)]
        for one, two in results:
            for array, want in ((one, VALUE + 1), (two, VALUE * 2)):
                try:
                    np.testing.assert_array_equal(np.asarray(array), want)
                except pw.errors.DeadlineExceededError:
                    late += 1
        del results, one, two, array
    assert late >= 1000
    np.testing.assert_array_equal(np.asarray(f(x)[0]), VALUE + 1)
    quiet(back_to=before)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, "1", None, True])
def test_a_deadline_is_a_positive_number(embedded_cluster: Any, seconds: Any) -> None:
    f = pw.jit(lambda x: x, devices=pw.make_virtual_device_set(embedded_cluster).add_slice(devices=1))
    with pytest.raises(pw.errors.ProgramError, match="above 0"):
        f.with_timeout(seconds)
