"""`pw.host_callback`: functions that run on hosts, each client's in a process of its own.

ERR-1    a call that fails fails what depends on it, by name, and nothing else
TRUST-1  whatever the process answers, or does to what it shares with its host, hurts only its own client
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors

X = np.arange(8, dtype=np.float32)
NUMBER = jax.ShapeDtypeStruct((), np.float32)
PID = jax.ShapeDtypeStruct((), np.int32)


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def pids(cluster: Any) -> set[int]:
    """The processes of all clients' functions."""
    return {pid for host in cluster.stats()["hosts"] for pid in host["sidecars"].values()}


class Pair(NamedTuple):
    left: Any
    right: Any


class Counter:
    """Something that a function keeps."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def up(self, by: Any = 1) -> np.float32:
        self.count += int(by)
        return np.float32(self.count)


def test_trees_and_types(add: Any) -> None:
    def host(pair: Pair, table: dict[str, Any], *, scale: Any) -> Any:
        assert isinstance(pair, Pair) and isinstance(pair.left, np.ndarray) and pair.left.flags.writeable
        return {"sum": pair.left.sum() * scale, "rest": [table["a"] > 3, (None, pair.right[::-1])], "one": 1}

    def f(x: Any, y: Any) -> Any:
        kinds = {
            "sum": NUMBER,
            "rest": [jax.ShapeDtypeStruct(x.shape, np.bool_), (None, like(y))],
            "one": jax.ShapeDtypeStruct((), np.int8),
        }
        return pw.host_callback(host, kinds, Pair(x, y), {"a": x}, scale=jnp.float32(2))

    y = np.arange(6).reshape(2, 3).astype(jnp.bfloat16)
    out = pw.jit(f, devices=add(1))(X, y)
    assert float(out["sum"]) == 2 * X.sum() and int(out["one"]) == 1
    np.testing.assert_array_equal(np.asarray(out["rest"][0]), X > 3)
    assert out["rest"][1][0] is None
    np.testing.assert_array_equal(np.asarray(out["rest"][1][1]), y[::-1])


def test_big_and_empty_arrays(add: Any) -> None:
    f = pw.jit(lambda x: pw.host_callback(lambda v: v[::-1], like(x), x), devices=add(1))
    for value in (np.arange(3 << 18, dtype=np.int32), np.zeros((0, 3), np.float32), np.array(True), X):
        if value.ndim:
            np.testing.assert_array_equal(np.asarray(f(value)), value[::-1])
    assert np.asarray(pw.jit(lambda: pw.host_callback(lambda: 3, NUMBER), devices=add(1))()) == 3


def test_what_is_kept_is_kept_per_client_and_host(add: Any, cluster: Any) -> None:
    here = add(1)
    counter = pw.HostObject(Counter, 10)
    up = pw.jit(lambda by: pw.host_callback(lambda by: counter.up(by), NUMBER, by), devices=here)
    look = pw.jit(lambda: pw.host_callback(lambda: counter.count, NUMBER), devices=here)  # another program
    assert [float(up(n)) for n in (1, 2, 3)] == [11, 13, 16]
    assert float(look()) == 16
    pid = int(pw.jit(lambda: pw.host_callback(os.getpid, PID), devices=here)())
    assert pid in pids(cluster) and pid != os.getpid()


def test_in_loops_branches_and_shard_maps_of_a_computation(add: Any) -> None:
    counter = pw.HostObject(Counter)

    def sums(x: Any) -> Any:
        def body(total: Any, v: Any) -> Any:
            total += pw.host_callback(lambda v: v + 0 * counter.up(), NUMBER, v)
            return total, jax.lax.cond(v > 3, lambda v: pw.host_callback(np.negative, NUMBER, v), lambda v: v, v)

        return jax.lax.scan(body, 0.0, x)

    total, ys = pw.jit(sums, devices=add(1))(X)
    assert float(total) == X.sum()
    np.testing.assert_array_equal(np.asarray(ys), np.where(X > 3, -X, X))
    assert float(pw.jit(lambda: pw.host_callback(lambda: counter.up(0), NUMBER), devices=add(1))()) in (0, len(X))

    four = add(4)
    f = jax.shard_map(
        lambda x: pw.host_callback(lambda v: v + len(v), like(x), x), mesh=four.mesh, in_specs=P("x"), out_specs=P("x")
    )
    np.testing.assert_array_equal(np.asarray(pw.jit(f, devices=four, in_shardings=P("x"))(X)), X + 2)
    whole = pw.jit(lambda x: pw.host_callback(lambda v: v + len(v), like(x), x), devices=four, in_shardings=P("x"))
    np.testing.assert_array_equal(np.asarray(whole(X)), X + 8)


def test_ordered_calls_are_in_order_over_slices(add: Any) -> None:
    one, two = add(1), add(1)

    def note(tag: int) -> Any:
        return lambda x: pw.host_callback(lambda v: (v, time.time())[1] - 1e9, NUMBER, x, ordered=True) * 0 + tag

    f, g = pw.jit(note(1), devices=one), pw.jit(note(2), devices=two)

    @pw.program
    def both(x: Any) -> Any:
        return f(x), g(x)

    assert [float(each) for each in both(np.float32(0))] == [1, 2]
    jax.effects_barrier()


def test_a_program_s_own_body_and_gradients_around_it(add: Any) -> None:
    work = pw.jit(lambda w, x: jnp.sum(jnp.tanh(x * w)), devices=add(1))
    draw = pw.HostObject(np.random.default_rng, 3)

    @pw.program
    def step(w: Any) -> Any:
        x = pw.host_callback(lambda: draw.normal(size=4).astype(np.float32), jax.ShapeDtypeStruct((4,), np.float32))
        return x, jax.grad(work)(w, x)

    known = np.random.default_rng(3)
    for _ in range(3):
        x, grad = step(np.float32(0.5))
        want = known.normal(size=4).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(x), want)
        np.testing.assert_allclose(np.asarray(grad), jax.grad(lambda w, x=want: jnp.sum(jnp.tanh(x * w)))(0.5), 1e-4)


def fails(call: Callable[..., Any], *text: str) -> None:
    with pytest.raises(errors.CallbackFailedError) as found:
        jax.block_until_ready(call())
    for each in ("pw.host_callback", "on host", *text):
        assert each in str(found.value), found.value


def explode(v: Any) -> Any:
    raise KeyError(f"no such state: {v}")


def test_what_fails_fails_by_name_and_nothing_else(add: Any) -> None:
    one = add(1)

    def on_host(function: Any, kinds: Any = NUMBER, **options: Any) -> Any:
        return pw.jit(lambda x: pw.host_callback(function, kinds, x, **options), devices=one)

    zero = np.float32(0)
    double = pw.jit(lambda x: x * 2, devices=one)
    counter = pw.HostObject(Counter)
    good = on_host(lambda v: counter.up())
    assert float(good(zero)) == 1
    bad = on_host(explode)(zero)
    after = double(bad)
    assert float(double(zero + 4)) == 8
    fails(lambda: bad, "explode", "KeyError", "no such state: 0.0", "test_host_callbacks.py", "raise KeyError")
    fails(lambda: after, "explode", "KeyError")
    fails(lambda: on_host(lambda v: np.zeros(3, np.float32))(zero), "shape (3,), but () was promised")
    fails(lambda: on_host(lambda v: np.int16(3))(zero), "dtype int16, but float32 was promised")
    fails(lambda: on_host(lambda v: {"a": v}, [NUMBER])(zero), "a dict", "1 items were promised")
    fails(lambda: on_host(lambda v: {"b": v}, {"a": NUMBER})(zero), "result is a dict with ['b']", "['a'] was promised")
    fails(lambda: on_host(lambda v: exit(3))(zero), "SystemExit")
    assert float(good(zero)) == 2  # the process is the same
    fails(lambda: on_host(lambda v: time.sleep(60), deadline=0.2)(zero), "did not end within 0.2 s")
    assert float(good(zero)) == 1  # and now it is another
    fails(lambda: on_host(lambda v: os.kill(os.getpid(), signal.SIGKILL))(zero), "was killed by SIGKILL")
    assert float(good(zero)) == 1


def test_odd_errors_and_forks_harm_nothing(add: Any, cluster: Any) -> None:
    one = add(1)
    counter = pw.HostObject(Counter)
    pids_before = [host["pid"] for host in cluster.stats()["hosts"] if "pid" in host]

    def odd(what: Any, v: Any) -> Any:
        match int(what):
            case 1:
                raise ValueError(os.fsdecode(b"not UTF-8: \xff"))
            case 2:
                raise ValueError("\N{GRINNING FACE}" * 100_000)
            case 3:
                raise Mute
            case 4 if os.fork() == 0:
                raise ValueError("in a child that the function has forked")
            case 5 if os.fork() == 0:
                return v  # the child goes on as if it were the sidecar
        return 10 * v + 0 * counter.up()

    f = pw.jit(lambda w, x: pw.host_callback(odd, NUMBER, w, x), devices=one)
    for what, text in ((1, "not UTF-8"), (2, "\N{GRINNING FACE}" * 100), (3, "its text cannot be made")):
        fails(lambda what=what: f(np.int32(what), np.float32(1)), text)
    for what in (4, 5, 0, 0):
        for n in range(4):
            assert float(f(np.int32(what), np.float32(n))) == 10 * n
    up = pw.jit(lambda: pw.host_callback(lambda: counter.up(), NUMBER), devices=one)
    assert float(up()) == 17  # nothing was lost
    assert [host["pid"] for host in cluster.stats()["hosts"] if "pid" in host] == pids_before


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_bad_input_is_refused_by_name(add: Any) -> None:
    one = add(1)

    def on_host(*args: Any, **options: Any) -> Any:
        return pw.jit(lambda x: pw.host_callback(*args, x, **options), devices=one)(X)

    lock = threading.Lock()
    with pytest.raises(errors.ProgramError, match=r"cloudpickle cannot write .*lock.*pw.HostObject\(factory\)"):
        on_host(lambda v: lock and v, NUMBER)
    with pytest.raises(errors.ProgramError, match=r"pw.HostObject\(Counter\): cloudpickle cannot write"):
        pw.HostObject(Counter, lock)
    with pytest.raises(errors.OptionError, match="deadline is -1; expected seconds above 0"):
        on_host(np.sin, NUMBER, deadline=-1)
    with pytest.raises(errors.ProgramError, match="result_shape_dtypes has 1"):
        on_host(np.sin, 1.0)
    fails(lambda: on_host(lambda v: 300, jax.ShapeDtypeStruct((), np.int8)), "OverflowError")
    assert int(on_host(lambda v: 200, jax.ShapeDtypeStruct((), np.uint8), deadline=float("inf"))) == 200
    odd = jax.tree_util.Partial(np.sin, X)
    with pytest.raises(errors.ProgramError, match="an argument is in a Partial; expected arrays in dicts"):
        pw.jit(lambda x: pw.host_callback(np.sin, NUMBER, odd), devices=one)(X)
    with pytest.raises(AttributeError, match="the object is on hosts"):
        pw.HostObject(Counter).up()
    with pytest.raises(ValueError, match="do not support JVP"):
        jax.grad(pw.jit(lambda x: pw.host_callback(np.sin, NUMBER, x), devices=one))(np.float32(1))


def test_modules_of_the_client_s_path_are_found(add: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here_for_a_while.py").write_text("def f(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here_for_a_while as module  # type: ignore[import-not-found]

    f = pw.jit(lambda x: pw.host_callback(module.f, like(x), x), devices=add(1))
    np.testing.assert_array_equal(np.asarray(f(X)), X + 1)  # hosts look where the client does


def test_without_a_cluster_it_runs_here() -> None:
    counter = pw.HostObject(Counter)
    f = jax.jit(lambda x: pw.host_callback(lambda v: (os.getpid(), v + counter.up()), (PID, NUMBER), x))
    assert [float(f(np.float32(0))[1]) for _ in range(3)] == [1, 2, 3]
    assert int(f(np.float32(0))[0]) == os.getpid()


ATTACKS = {
    "a long length": lambda fd: os.write(fd, b"\xff" * 64),
    "half a message": lambda fd: os.write(fd, b"\x10" + b"\0" * 7 + b"{"),
    "no JSON": lambda fd: os.write(fd, b"\x02" + b"\0" * 7 + b"}{"),
    "another answer": lambda fd: os.write(fd, b"\x04" + b"\0" * 7 + b"[[]]"),
    "it is closed": os.close,
    "too many answers": lambda fd: [os.write(fd, b"\x02" + b"\0" * 7 + b"{}") for _ in range(100)],
}


def sockets_and_memory() -> tuple[list[int], list[int]]:
    """In the process of host functions: the descriptors that it shares with its host."""
    links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2}
    sockets = [fd for fd, name in links.items() if name.startswith("socket:")]
    return sockets, [fd for fd, name in links.items() if "pathways-sidecar" in name]


def attack(name: str) -> np.float32:
    import contextlib

    (link,), (memory,) = sockets_and_memory()
    for size in (0, 1):
        with contextlib.suppress(PermissionError):
            os.ftruncate(memory, size)
            raise AssertionError("what the host has mapped was taken away from it")
    ATTACKS[name](link)
    return np.float32(-1)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_function_hurts_only_its_client(add: Any, name: str) -> None:
    """Beside a computation of the same devices."""
    one = add(1)
    double = pw.jit(lambda x: x * 2, devices=one)
    f = pw.jit(lambda x: pw.host_callback(lambda v: attack(name), NUMBER, x, deadline=2.0), devices=one)
    for n in range(3):
        outcome = f(np.float32(n))
        assert float(double(np.float32(n))) == 2 * n
        try:
            float(outcome)  # it may be anything that was promised, or an error
        except errors.CallbackFailedError as problem:
            assert "pw.host_callback" in str(problem)
    good = pw.jit(lambda x: pw.host_callback(lambda v: v + 1, NUMBER, x), devices=one)
    for n in range(3):
        try:
            assert float(good(np.float32(n))) == n + 1
            break
        except errors.CallbackFailedError:  # what the process had sent too much was taken for an answer
            continue
    else:
        raise AssertionError("the process was not replaced")


def test_a_campaign_of_calls_that_die(add: Any) -> None:
    """Threads call functions that are right, raise, hang or die, on all devices."""
    seed = int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"PATHWAYS_SEED={seed}")
    slices = [add(1) for _ in range(3)]

    def act(what: Any, v: Any) -> Any:
        if what == 1:
            raise ValueError("as asked")
        if what == 2:
            time.sleep(60)
        if what == 3:
            os._exit(7)
        return v + 1

    calls = [pw.jit(lambda w, x: pw.host_callback(act, NUMBER, w, x, deadline=1.0), devices=s) for s in slices]
    wrong: list[str] = []

    def play(number: int) -> None:
        generator = random.Random(seed + number)
        for n in range(8):
            what = generator.choice([0, 0, 0, 1, 2, 3])
            try:
                got = float(generator.choice(calls)(np.int32(what), np.float32(n)))
                if what or got != n + 1:
                    wrong.append(f"{what}, {n}: {got}")
            except errors.CallbackFailedError as problem:
                # a call beside one that has ended the process waits for its turn, in the next process
                if not what:
                    wrong.append(f"{what}, {n}: {problem}")

    threads = [threading.Thread(target=play, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
