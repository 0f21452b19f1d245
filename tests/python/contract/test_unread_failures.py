"""Failures of results that nobody reads: told once, in the log and to the hooks of `cluster.on_failure`.

UNREAD-1  once per run; a failure that was read from any of its arrays is not told
UNREAD-2  also of results that were dropped before they failed
UNREAD-3  not of what was cancelled
"""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import pathways as pw

X = np.eye(4, dtype=np.float32)


def failing(add: Callable[..., Any], name: str) -> Any:
    """A function of two results whose runs fail; the error has this name."""
    jax.jit(jnp.linalg.cholesky).lower(X)  # registers LAPACK's handlers, for an embedded cluster

    def body(x: Any) -> Any:
        y = jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return y, y + 1

    return pw.jit(body, devices=add(1), name=name)


class Told:
    """What was told of failures with some words, by a hook and in the log."""

    def __init__(self, cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
        self._cluster, self._caplog = cluster, caplog
        self.errors: list[Exception] = []
        cluster.on_failure(self.errors.append)

    def count(self, words: str) -> tuple[int, int]:
        lines = [record for record in self._caplog.records if record.name == "pathways"]
        return (
            sum(words in str(error) for error in self.errors),
            sum(words in record.getMessage() for record in lines),
        )

    def wait(self, words: str) -> None:
        """Until they are told. What embedded runs need is done meanwhile."""
        deadline = time.monotonic() + 30
        gc.collect()  # a first call may leave its results in a cycle
        while not self.count(words)[0]:
            assert time.monotonic() < deadline, f"nobody tells of {words!r}"
            self._cluster.native.pump()
            time.sleep(0.02)

    def settle(self) -> None:
        """Until everything that is to be told has been."""
        self._cluster.native.pump()
        time.sleep(2.5)


@pytest.fixture
def told(cluster: Any, caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    cluster.failures._paragraphs = 0  # other tests' failures are not counted here
    with caplog.at_level(logging.ERROR, "pathways"):
        yield Told(cluster, caplog)
    cluster.failures._hooks.clear()


def test_what_nobody_reads_is_told_once_per_run(add: Any, told: Told) -> None:
    """The results are dropped before they fail, and after; what depends on them fails with them."""
    f = failing(add, "dropped_at_once")
    f(X)
    told.wait("dropped_at_once")
    g = failing(add, "dropped_later")
    h = pw.jit(lambda one, two: one + two, devices=g.slice)
    one, two = g(X)
    three = h(one, two)
    while not (one.is_ready() and two.is_ready() and three.is_ready()):
        time.sleep(0.01)
    del one, two, three
    told.wait("dropped_later")
    told.settle()
    assert told.count("dropped_at_once") == told.count("dropped_later") == (1, 1)
    assert all(isinstance(error, pw.errors.PathwaysError) for error in told.errors)


@pytest.mark.parametrize("how", ["read", "wait", "repr"])
def test_what_was_read_is_not_told(add: Any, told: Told, how: str) -> None:
    f = failing(add, f"seen_by_{how}")
    one, two = f(X)
    while not (one.is_ready() and two.is_ready()):
        time.sleep(0.01)
    if how == "repr":
        assert "failed" in repr(one)
    else:
        with pytest.raises(pw.errors.PathwaysError, match="seen_by"):
            np.asarray(one) if how == "read" else one.block_until_ready()
    del one, two
    told.settle()
    assert told.count("seen_by") == (0, 0)


def refusing(add: Callable[..., Any], words: str, kind: str) -> Any:
    """A function whose runs fail in a callback; no result of it depends on the call, where that has an effect."""

    def refuse(v: Any) -> Any:
        raise ValueError(f"{words} {float(v):g}")

    def body(x: Any) -> Any:
        if kind == "pure":
            return jax.pure_callback(refuse, jax.ShapeDtypeStruct((), np.float32), x)
        if kind == "io":
            io_callback(refuse, None, x)
        else:
            jax.debug.callback(refuse, x, ordered=kind == "ordered")
        return x + 1

    return pw.jit(body, devices=add(1), name="refused")


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("kind", ["debug", "ordered", "io", "pure"])
def test_a_callback_that_fails_is_told_soon(add: Any, told: Told, kind: str, loop: bool) -> None:
    """And by no later run, nor by the end: nothing else happens here. A barrier raises it all the same."""
    f = refusing(add, f"refused {kind} {loop}", kind)
    run = pw.program(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: f(x), x)) if loop else f
    run(np.float32(0))
    told.wait(f"refused {kind} {loop} 0")
    told.settle()
    assert told.count(f"refused {kind} {loop} 0") == (1, 1)
    if kind != "pure":
        with pytest.raises(pw.errors.CallbackFailedError, match=f"refused {kind} {loop} 0"):
            jax.effects_barrier()
    jax.effects_barrier()


@pytest.mark.parametrize("kind", ["debug", "ordered"])
def test_what_a_barrier_has_raised_is_not_told(add: Any, told: Told, kind: str) -> None:
    f = refusing(add, f"raised {kind}", kind)
    for n in (1, 2):
        f(np.float32(n))
    with pytest.raises(pw.errors.CallbackFailedError, match=f"raised {kind} 1"):
        jax.effects_barrier()
    jax.effects_barrier()
    told.settle()
    assert told.count(f"raised {kind}") == (0, 0)


def test_a_barrier_raises_what_failed_before_other_runs(add: Any, told: Told) -> None:
    """The runs behind it, and the time, do not hide it."""
    f, g = (
        refusing(add, "early", "debug"),
        pw.jit(lambda x: (jax.debug.callback(lambda v: None, x), x)[1], devices=add(1)),
    )
    f(np.float32(1))
    told.wait("early 1")
    for _ in range(5):
        np.asarray(g(np.float32(1)))
    with pytest.raises(pw.errors.CallbackFailedError, match="early 1"):
        jax.effects_barrier()
    jax.effects_barrier()


def test_what_was_cancelled_is_not_told(add: Any, told: Told) -> None:
    slice_ = add(1)
    plain = pw.jit(lambda x: x + 1, devices=slice_)
    x = plain(X).block_until_ready()
    runs = [plain(x) for _ in range(20)]
    pw.cancel(runs, "for the test")
    late = plain.with_timeout(1e-9)(x)
    del runs
    with pytest.raises(pw.errors.DeadlineExceededError):
        np.asarray(late)
    del late
    told.settle()
    assert told.errors == []


def test_a_hook_that_fails_does_no_harm(add: Any, cluster: Any, told: Told, caplog: Any) -> None:
    @cluster.on_failure
    def hook(error: Any) -> None:
        raise KeyError("of the hook")

    f = failing(add, "hooked")
    f(X)
    told.wait("hooked")
    deadline = time.monotonic() + 10
    while not any("on_failure failed" in record.getMessage() for record in caplog.records):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert told.count("hooked")[0] == 1
    with pytest.raises(pw.errors.OptionError, match="a function of one error"):
        cluster.on_failure(3)


SCRIPT = """
import sys, time
import numpy as np, jax
import pathways as pw

def refuse(x):
    raise ValueError(f"boom {float(x):g}")

cluster = pw.connect(pw.LocalCluster(1, 1, 1))
slice_ = pw.make_virtual_device_set().add_slice(devices=1)
f = pw.jit(lambda x: jax.pure_callback(refuse, jax.ShapeDtypeStruct((), np.float32), x), devices=slice_)
kept = [f(np.float32(n)) for n in range(40)]
while not all(each.is_ready() for each in kept):
    time.sleep(0.01)  # the hosts and the client's threads need the processor
if "close" in sys.argv:
    cluster.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "exit"])
def test_the_end_of_a_process_tells_what_is_left_and_is_brief(how: str, root: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120, env=os.environ, cwd=root
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("Nobody has read")]
    assert len(lines) == 6, done.stderr
    assert all("boom" in line for line in lines[:5])
    assert "35 further failures" in lines[5]
    assert sum(map(len, lines)) < 5000
