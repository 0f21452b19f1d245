"""What a client's functions, or their absence, cannot do to others: OWN-1 of callbacks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import pathways as pw
from pathways import errors
from pathways.host import callbacks
from pathways.host.executables import Attended
from pathways.host.sidecars import Sidecars
from pathways.protocol import callback_messages
from pathways.protocol import control_pb2 as pb

X = np.arange(8, dtype=np.float32)

#: A client that computes on a slice like ours, and whose function never answers.
WAITS = """
    import sys, threading, time
    import jax, numpy as np
    import pathways as pw

    asked = threading.Event()

    def never(v):
        print("asked", flush=True)
        asked.set()
        time.sleep(600)

    cluster = pw.connect(sys.argv[1])
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=int(sys.argv[2]))
    body = lambda c, _: (jax.pure_callback(never, jax.ShapeDtypeStruct((8,), np.float32), c), None)
    f = pw.jit(lambda x: jax.lax.scan(body, x, None, length=1000)[0] + x.sum(), devices=slice_)
    y = [f(np.ones(8, np.float32)) for _ in range(3)]
    print("submitted", flush=True)
    if sys.argv[3] == "close":
        asked.wait()
        cluster.close()
    while True:
        time.sleep(0.1)  # a Ctrl-C that comes just before a sleep is seen after it
"""


#: A client with a loop over two slices, in the middle of which it is asked; it answers at once.
LOOPS = """
    import sys, threading, time
    import jax, numpy as np
    import pathways as pw
    from jax.experimental import io_callback

    asked = threading.Event()

    def note(v):
        if v == 20:
            print("asked", flush=True)
            asked.set()

    cluster = pw.connect(sys.argv[1])
    devices = pw.make_virtual_device_set(cluster)
    f, g = (pw.jit(lambda x: x + 1, devices=devices.add_slice(devices=n)) for n in (int(sys.argv[2]), 1))

    def turn(_, x):
        x = f(x)
        io_callback(note, None, x, ordered=True)
        return g(x) - 1

    y = pw.program(lambda x: jax.lax.fori_loop(0, 100_000, turn, x))(np.float32(0))
    print("submitted", flush=True)
    if sys.argv[3] == "close":
        asked.wait()
        cluster.close()
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def other() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`other(cluster, devices, what)`: that client, once it has been asked."""
    with contextlib.ExitStack() as stack:

        def begin(cluster: Any, devices: int, what: str, program: str = WAITS) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", textwrap.dedent(program), cluster.address, str(devices), what]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            words = {process.stdout.readline().strip() for _ in range(2)}
            assert words == {"asked", "submitted"}
            return process

        yield begin


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("how", ["kill", "interrupt", "close"])
def test_a_client_that_goes_leaves_nobody_waiting(other: Any, local_cluster: Any, devices: int, how: str) -> None:
    pids = [host["pid"] for host in local_cluster.stats()["hosts"]]
    slices = [pw.make_virtual_device_set(local_cluster).add_slice(devices=n) for n in (4, 1, 1, 1, 1)]
    steps = [pw.jit(lambda x: x + 1, devices=slice_) for slice_ in slices]
    for step in steps:
        np.testing.assert_array_equal(np.asarray(step(X)), X + 1)
    process = other(local_cluster, devices, how)
    waiting = [step(X) for step in steps]  # some behind what waits for the answer
    if how != "close":
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
    for _ in range(20):
        for at, step in enumerate(steps):
            waiting[at] = step(waiting[at])
    for value in waiting:
        np.testing.assert_array_equal(np.asarray(value), X + 21)
    assert [host["pid"] for host in local_cluster.stats()["hosts"]] == pids


@pytest.mark.slow
@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("how", ["kill", "interrupt", "close"])
def test_a_client_that_goes_in_the_middle_of_its_loop(other: Any, local_cluster: Any, devices: int, how: str) -> None:
    """A loop of another client on the same hosts goes on, and is called once for each iteration, in order."""
    pids = [host["pid"] for host in local_cluster.stats()["hosts"]]
    slices = [pw.make_virtual_device_set(local_cluster).add_slice(devices=n) for n in (4, 1)]
    f, g = (pw.jit(lambda x: x + 1, devices=slice_) for slice_ in slices)
    seen: list[float] = []

    def turn(_: Any, x: Any) -> Any:
        x = f(x)
        io_callback(lambda v: seen.append(float(v)), None, x, ordered=True)
        return g(x) - 1

    run = pw.program(lambda x: jax.lax.fori_loop(0, 200, turn, x))
    run.lower(np.float32(0)).compile()
    process = other(local_cluster, devices, how, LOOPS)
    y = run(np.float32(0))
    if how != "close":
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
    assert float(y) == 200
    jax.effects_barrier()
    assert seen == [float(n) for n in range(1, 201)]
    assert [host["pid"] for host in local_cluster.stats()["hosts"]] == pids


def test_nobody_is_called_for_what_has_failed(local_cluster: Any) -> None:
    """GANG-1: the hosts of a gang launch it anyway, with stand-ins for what failed, but call nobody with them."""
    slice_ = pw.make_virtual_device_set(local_cluster).add_slice(devices=4)
    seen: list[float] = []

    def picky(v: Any) -> Any:
        seen.append(float(v))
        if v == 25:
            raise ValueError("twenty-five is too much")
        return np.asarray(v)

    f = pw.jit(lambda x: jax.pure_callback(picky, jax.ShapeDtypeStruct((), np.float32), x) + 1, devices=slice_)
    loop = pw.program(lambda x: jax.lax.fori_loop(0, 40, lambda _, x: f(x), x))
    with pytest.raises(errors.CallbackFailedError, match="twenty-five is too much"):
        np.asarray(loop(np.float32(0)))
    assert seen == [float(n) for n in range(26)]
    seen.clear()
    with pytest.raises(errors.CallbackFailedError, match="twenty-five is too much"):
        np.asarray(f(f(f(np.float32(24)))))
    assert seen == [24, 25]
    assert float(loop(np.float32(26))) == 66


@pytest.mark.slow
def test_a_host_that_is_lost_in_the_middle_of_a_loop() -> None:
    """ERR-2: the loop fails, its client is called no more, and a loop on the other island goes on."""
    with pw.connect(pw.LocalCluster(2, 1, 1, platform="cpu")) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        steps = [pw.jit(lambda x: x + 1, devices=devices.add_slice(devices=1, island=n)) for n in range(2)]
        seen: list[list[float]] = [[], []]

        def program(n: int) -> Any:
            def turn(_: Any, x: Any) -> Any:
                x = steps[n](x)
                io_callback(lambda v: seen[n].append(float(v)), None, x)
                return x

            return pw.program(lambda x: jax.lax.fori_loop(0, 2000, turn, x))

        runs = [program(n) for n in range(2)]
        for run in runs:
            run.lower(np.float32(0)).compile()
        lost, whole = (run(np.float32(0)) for run in runs)
        while len(seen[0]) < 50:
            time.sleep(0.01)
        os.kill(cluster.stats()["hosts"][0]["pid"], signal.SIGKILL)
        with pytest.raises(errors.HostLostError, match="SIGKILL"):
            np.asarray(lost)
        assert float(whole) == 2000
        with pytest.raises(errors.HostLostError):
            jax.effects_barrier()
        assert seen[1] == [float(n) for n in range(1, 2001)]
        assert seen[0] == [float(n) for n in range(1, len(seen[0]) + 1)] and len(seen[0]) < 2000
        cluster.wait_for(2)
        seen[0].clear()
        assert float(program(0)(np.float32(0))) == 2000
        jax.effects_barrier()
        assert len(seen[0]) == 2000


@pytest.mark.slow
def test_the_order_of_calls_does_not_depend_on_a_host_of_calls_that_are_over() -> None:
    """ERR-2: what comes behind them elsewhere goes on when their host is lost."""
    with pw.connect(pw.LocalCluster(2, 1, 1)) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        calls: list[float] = []

        def body(x: Any) -> Any:
            jax.debug.callback(lambda v: calls.append(float(v)), x, ordered=True)
            return x + 1

        here, there = (pw.jit(body, devices=devices.add_slice(devices=1, island=n)) for n in (0, 1))
        for each in (there, here):
            assert float(each(np.float32(1))) == 2
        jax.effects_barrier()
        os.kill(cluster.stats()["hosts"][0]["pid"], signal.SIGKILL)
        assert float(there(np.float32(3))) == 4
        jax.effects_barrier()
        assert calls == [1, 1, 3]


def test_big_arrays_and_many_calls_at_once(local_cluster: Any) -> None:
    slices = [pw.make_virtual_device_set(local_cluster).add_slice(devices=1) for _ in range(4)]
    meet = threading.Barrier(len(slices))
    shape = jax.ShapeDtypeStruct((6 << 20,), np.float32)  # more than any piece

    def together(v: Any) -> Any:
        meet.wait(60)  # all four are asked at the same time
        return np.asarray(v) * 2

    runs = [pw.jit(lambda x: jax.pure_callback(together, shape, x), devices=slice_) for slice_ in slices]
    x = np.arange(6 << 20, dtype=np.float32)
    for _ in range(2):
        for y in [run(x) for run in runs]:
            np.testing.assert_array_equal(np.asarray(y), x * 2)


def test_deadlines_pass_while_a_function_takes_its_time(local_cluster: Any) -> None:
    slice_ = pw.make_virtual_device_set(local_cluster).add_slice(devices=1)
    go = threading.Event()

    def slow(v: Any) -> Any:
        go.wait(60)
        return np.asarray(v)

    f = pw.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((8,), np.float32), x), devices=slice_)
    f.lower(X).compile()
    with pytest.raises(errors.DeadlineExceededError):
        np.asarray(pw.program(f).with_timeout(0.2)(X))
    go.set()
    np.testing.assert_array_equal(np.asarray(f(X)), X)


def test_a_callback_may_use_the_cluster(local_cluster: Any) -> None:
    """On other devices than those that wait for it."""
    one, two = (pw.make_virtual_device_set(local_cluster).add_slice(devices=1) for _ in range(2))
    double = pw.jit(lambda x: x * 2, devices=two)
    f = pw.jit(
        lambda x: jax.pure_callback(
            lambda v: np.asarray(double(np.asarray(v))), jax.ShapeDtypeStruct((8,), np.float32), x
        ),
        devices=one,
    )
    np.testing.assert_array_equal(np.asarray(f(X)), X * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "complex64"])
def test_calls_as_bytes(dtype: str) -> None:
    arrays = [np.zeros((2, 3), jnp.dtype(dtype)), np.ones((), jnp.dtype(dtype)), np.empty((0, 4), jnp.dtype(dtype))]
    number, back = callback_messages.unpack(
        b"".join(data for data, _ in callback_messages.chunks(callback_messages.pack(7, arrays)))
    )
    assert number == 7
    for array, copy in zip(arrays, back, strict=True):
        assert copy.dtype == array.dtype and copy.shape == array.shape and copy.tobytes() == array.tobytes()


def test_answers_are_not_trusted() -> None:
    """A host believes nothing that does not fit what it asked for."""
    kind = ((2,), np.dtype(np.float32))
    good = callback_messages.pack(1, [np.ones(2, np.float32)])
    answers = {
        b"": "bytes that should be a call",
        good[:-1]: "answered with",
        good + b"x": "takes",
        callback_messages.pack(1, [np.ones(3, np.float32)]): "expected",
        callback_messages.pack(1, [np.ones(2, np.int32)]): "expected",
        callback_messages.pack(1, []): "expected",
        bytes(1 << 20): "more than was asked for",
    }
    for answer, words in answers.items():
        questions = callbacks.Questions(0, Sidecars(0))
        questions.send = lambda part, q=questions, a=answer: q.answer(  # type: ignore[misc]
            pb.CallbackPart(call=part.call, data=a, last=True)
        )
        with pytest.raises(errors.CallbackFailedError, match=words):
            questions.ask(1, 1, [], [kind])
    questions = callbacks.Questions(0, Sidecars(0))
    questions.send = lambda part: questions.answer(pb.CallbackPart(call=part.call, data=good, last=True))
    np.testing.assert_array_equal(questions.ask(1, 1, [], [kind])[0], [1, 1])
    questions.forget(1)
    with pytest.raises(errors.CallbackFailedError, match="gone"):
        questions.ask(1, 1, [], [kind])


def test_a_computation_that_never_ends_without_its_answers_ends() -> None:
    said: list[str] = []

    def ask(*_: Any) -> Any:
        raise errors.CallbackFailedError("no")

    asker = callbacks.Asker(ask, 2, said.append)
    asker.begin()
    for _ in range(callbacks.MOST_VAIN_CALLS):
        (zeros,) = asker(1, [], [((2,), np.dtype(np.float32))])
        assert zeros.tolist() == [0, 0]
    with pytest.raises(errors.CallbackFailedError):
        asker(1, [], [])
    assert "goes on" in said[0]


class Given:
    """Stands for an array."""


def test_a_computation_whose_call_failed_keeps_nothing_of_what_it_was_given() -> None:
    def ask(*_: Any) -> Any:
        raise errors.CallbackFailedError("no")

    asker = callbacks.Asker(ask, 1, print)
    array: Any = Given()
    launch = Attended(lambda x: asker(1, [x], []), asker, (array,))
    with pytest.raises(errors.CallbackFailedError, match="no"):
        launch.run()
    is_there = weakref.ref(array)
    del array, launch
    gc.collect()
    assert is_there() is None  # though the executable, and with it the asker, lives on


#: A program that ends while its runs still call it: one result that nobody waits for, and one that fails.
ENDS = """
    import sys
    import jax, numpy as np
    import pathways as pw

    def tell(n):
        print("told", int(n), flush=True)
        if n == 19 and "fail" in sys.argv:
            raise ValueError("the last one")

    def body(c, n):
        jax.debug.callback(tell, n, ordered=True)
        return f(c), None

    pw.connect(pw.LocalCluster(1, 1, 1))
    f = pw.jit(lambda c: c + 1, devices=pw.make_virtual_device_set().add_slice(devices=1))
    pw.program(lambda x: jax.lax.scan(body, x, np.arange(20)))(np.float32(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "fail"])
def test_the_end_of_a_process_waits_for_what_has_effects(how: str) -> None:
    """Of its own runs, as JAX does. A failure is told as any that nobody has read: no exit handler raises it."""
    command = [sys.executable, "-c", textwrap.dedent(ENDS), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for n in range(20) for word in ("told", str(n))]
    assert "atexit" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("Nobody has read")]
    assert len(told) == bool(how) and all("the last one" in line for line in told), done.stderr
