"""FORK-1: a forked child uses nothing of its parent's, and harms nothing of it.

What a child inherits it may drop, at any moment, and end in any way; arrays that were read already stay what they were
when it was forked; everything else is refused with the reason.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pathways as pw
from pathways import errors

X = np.arange(100_000, dtype=np.float32)

pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


class Child:
    """A forked child that runs `body` and says what it returns, or what it raises."""

    def __init__(self, body: Callable[[], Any]) -> None:
        read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.alarm(60)  # the watchdog's thread is the parent's
                said = repr(body())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
            gc.collect()
            os._exit(0)
        os.close(write)
        self._said = os.fdopen(read)

    def end(self) -> str:
        said = self._said.read()
        self._said.close()
        assert os.waitpid(self._pid, 0)[1] == 0, said
        return said


def test_a_child_drops_what_it_inherited(cluster: Any, add: Any, quiet: Any) -> None:
    f = pw.jit(lambda x: x * 2, devices=add(2))
    np.asarray(f(X))
    before = quiet()["kept"]
    value = np.asarray(f(X))
    put, read, pending = [pw.device_put(X, f.slice)], [f(X)], [f(X)]
    np.asarray(read[0])
    pending[0].copy_to_host_async()
    inherited = [value]

    def drop() -> None:
        for each in (put, read, pending, inherited):
            each.clear()
        gc.collect()

    assert [Child(drop).end() for _ in range(3)] == ["None"] * 3
    others = [np.asarray(f(X + number)) for number in range(1, 6)]
    more = [pw.device_put(X + number, f.slice) for number in range(1, 6)]
    np.testing.assert_array_equal(value, X * 2)
    np.testing.assert_array_equal(np.asarray(read[0]), X * 2)
    np.testing.assert_array_equal(np.asarray(pending[0]), X * 2)
    np.testing.assert_array_equal(np.asarray(put[0]), X)
    for number, (other, array) in enumerate(zip(others, more, strict=True), 1):
        np.testing.assert_array_equal(other, (X + number) * 2)
        np.testing.assert_array_equal(np.asarray(array), X + number)
    del value, other, array, others, more
    drop()
    quiet(back_to=before)


def test_a_child_keeps_what_was_read(cluster: Any, add: Any, quiet: Any) -> None:
    f = pw.jit(lambda x: x * 2, devices=add(2))
    arrays = [f(X)]
    values = [np.asarray(arrays[0]), np.asarray(f(X + 1))]
    before = quiet()["kept"]
    read, write = os.pipe()
    child = Child(
        lambda: (
            os.read(read, 1),
            bool((values[0] == X * 2).all() and (values[1] == (X + 1) * 2).all()),
            bool((np.asarray(arrays[0]) == X * 2).all()),
        )
    )
    values.clear()
    arrays.clear()
    later = [np.asarray(f(X + number)) for number in range(2, 8)]  # they would have lain there
    os.write(write, b"x")
    assert child.end() == "(b'x', True, True)"
    os.close(read)
    os.close(write)
    np.testing.assert_array_equal(later[0], (X + 2) * 2)
    later.clear()
    quiet(back_to=before)


def test_a_child_is_refused_with_the_reason(cluster: Any, add: Any) -> None:
    slice_ = add(2)
    f = pw.jit(lambda x: x + 1, devices=slice_)
    known, unread = f(X), f(X)
    np.asarray(known)
    uses: list[Callable[[], Any]] = [
        lambda: f(X),
        lambda: f(known),
        lambda: pw.jit(lambda x: x + 2, devices=slice_)(X),
        lambda: pw.program(lambda x: f(x) + 1)(known),
        lambda: known + 1,
        lambda: known[3],
        lambda: np.asarray(unread),
        lambda: unread.is_ready(),
        lambda: unread.block_until_ready(),
        lambda: unread.copy_to_host_async(),
        lambda: pickle.dumps(unread),
        lambda: pw.device_put(X, slice_),
        lambda: pw.device_put(known, slice_),
        lambda: pw.make_virtual_device_set(cluster).add_slice(devices=1),
        lambda: pw.cancel(unread),
        cluster.stats,
        lambda: cluster.remap(slice_, [device.id for device in slice_.devices]),
        cluster.suspend,
        lambda: pw.make_virtual_device_set(),
        pw.connect,
        lambda: pw.connect(pw.LocalCluster(1, 1, 1)),
        lambda: pw.connect(pw.LocalCluster(len(cluster.islands), 2, 2)),
    ]

    def answers() -> list[str]:
        found = []
        for use in uses:
            try:
                found.append(repr(use()))
            except errors.ClusterClosedError as error:
                assert f"process {os.getppid()}, which forked this one ({os.getpid()})" in str(error), error
                found.append("closed")
            except errors.ConnectError as error:
                assert f"was forked from process {os.getppid()}, where JAX was up" in str(error), error
                found.append("connect")
        return [*found, repr(cluster), repr(known), repr(unread), str(cluster.is_open), str(cluster.close())]

    said = eval(Child(answers).end())
    assert said[:-5] == ["closed"] * 18 + ["connect"] * 4
    assert "(closed)" in said[-5] and all("float32[100000]" in each for each in said[-4:-2])
    assert said[-2:] == ["False", "None"]
    np.testing.assert_array_equal(np.asarray(unread), X + 1)
    np.testing.assert_array_equal(np.asarray(f(X)), X + 1)


@pytest.mark.parametrize("kind", ["embedded", pytest.param("local", marks=pytest.mark.slow)])
def test_pools_and_children_that_exit(kind: str) -> None:
    """Workers that load data, and children that end through Python's own exit, with all its handlers."""
    code = """
        import gc, multiprocessing, os, signal, sys, threading
        import numpy as np
        import pathways as pw

        cluster = pw.connect(None if sys.argv[1] == "embedded" else pw.LocalCluster(1, 1, 2))
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
        double = pw.jit(lambda x: x * 2, devices=slice_)
        x = np.arange(100_000, dtype=np.float32)
        cache = np.asarray(double(x))
        mine = cache
        held = double(x)

        def load(number):
            global cache, held
            cache = held = None
            return np.full(100_000, number, np.float32)

        with multiprocessing.get_context("fork").Pool(2) as pool:
            batches = [np.asarray(double(batch)) for batch in pool.imap(load, range(6))]
            assert all((batch == 2 * number).all() for number, batch in enumerate(batches))
            assert (mine == x * 2).all()
        for end in (sys.exit, lambda: sys.exit(0), lambda: None, lambda: (_ for _ in ()).throw(KeyError("planned"))):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                del cache, mine
                end()
                sys.exit()
            status = os.waitpid(child, 0)[1]
            assert status in (0, 1 << 8), status
        assert (np.asarray(double(x + 1)) == (x + 1) * 2).all() and (np.asarray(held) == x * 2).all()
        print("right", flush=True)
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), kind],
        text=True,
        env=environment,
        capture_output=True,
        timeout=150,
    )
    assert (done.stdout, done.returncode) == ("right\n", 0), done.stderr
    assert done.stderr.count("Traceback") == 1 and "planned" in done.stderr, done.stderr


def test_who_may_connect_in_a_child() -> None:
    """Before JAX is used a child may; after it none does, whether the parent had heard of pathways or not."""
    code = """
        import os, signal, sys
        {early}
        import jax, numpy as np

        def child():
            if os.fork() != 0:
                return os.wait()[1]
            signal.alarm(60)
            import pathways as pw
            try:
                with pw.connect():
                    slice_ = pw.make_virtual_device_set().add_slice(devices=1)
                    said = float(pw.jit(lambda x: x + 1, devices=slice_)(1.0))
            except pw.errors.ConnectError as error:
                said = str(error).partition(":")[0].replace(str(os.getppid()), "P").replace(str(os.getpid()), "C")
            print(said, flush=True)
            os._exit(0)

        assert child() == 0
        jax.numpy.ones(3) + 1
        assert child() == 0
    """
    for early in ("import pathways", ""):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code.format(early=early))],
            text=True,
            capture_output=True,
            timeout=120,
        )
        assert done.stdout == "2.0\nprocess C was forked from process P, where JAX was up\n", done.stderr
