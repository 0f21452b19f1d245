"""Reading many small results, leaf by leaf or as a tree, of hosts on another machine and from there.

READ-3  one round trip: while all answers are held, everything is asked for, and nothing more when they have come; what
        was asked for ahead changes nothing for arrays that are donated, deleted, failed or moved, and nothing is kept
        of it when nobody reads it
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from control_clusters import eventually
from held_wire import DIALER, PORT, HeldWire
from machines import MachineCluster

import pathways as pw
from pathways.api.arrays import host_transfer
from pathways.trust import Role

LEAVES = 300
X = np.float32(1)


class World:
    """A client, and the wire between it and the hosts of its slice."""

    def __init__(self, cluster: Any, wire: HeldWire, asks: str) -> None:
        self.cluster, self.wire, self.asks = cluster, wire, asks
        self.answers = PORT if asks == DIALER else DIALER
        self.slice = pw.make_virtual_device_set(cluster).add_slice(devices=2, island=0)

    def new(self) -> Callable[[Any], list[Any]]:
        """A function whose results nobody has read: they do not come with their completions."""
        return pw.jit(lambda x: [x + n for n in range(LEAVES)], devices=self.slice)

    def trips_of(self, read: Callable[[], Any], least: int) -> Any:
        """What `read` gives. It has asked for `least` values before any answer, and for next to nothing after it."""
        in_use = self.cluster.native.arena_in_use
        gc.collect()
        before, sent_before = in_use(), self.wire.sent[self.asks]
        found: list[Any] = []
        self.wire.hold(self.answers)
        reader = threading.Thread(target=lambda: found.append(read()), daemon=True)
        try:
            reader.start()
            eventually(lambda: in_use() - before >= 64 * least, f"{least} values are asked for before any answer", 4)
            while (asked := self.wire.sent[self.asks]) - sent_before < 64 * least:
                time.sleep(0.01)
            time.sleep(0.2)  # the last of them
            asked = self.wire.sent[self.asks]
        finally:
            self.wire.let_go()
        reader.join(60)
        assert found, "the read has ended"
        more = self.wire.sent[self.asks] - asked
        print(f"asked with {asked - sent_before} bytes, then sent {more}")
        assert more < (asked - sent_before) / 5
        return found[0]


@pytest.fixture(scope="module", params=["far", "agents"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    is_far = request.param == "far"
    with MachineCluster(1, 1, 2, agents=1 if is_far else 0) as machines, HeldWire(machines.port) as wire:
        if is_far:
            with machines.way_in(Role.CLIENT):
                cluster = pw.connect(wire.address)
        else:
            machines.start_agent("m0", port=wire.address).wait_joined(120)
            cluster = machines.connect()
        cluster.wait_for(2, 120)
        try:
            yield World(cluster, wire, DIALER if is_far else PORT)
        finally:
            cluster.close()


WAYS: dict[str, Callable[[Any], Any]] = {
    "device_get": jax.device_get,
    "asarray": lambda tree: [np.asarray(leaf) for leaf in tree],
    "float": lambda tree: [float(leaf) for leaf in tree],
    "tree_map": lambda tree: jax.tree.map(np.asarray, {"a": tree[:9], "b": tuple(tree[9:])}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_tree_of_one_run(world: World, way: str) -> None:
    tree = world.new()(X)
    jax.block_until_ready(tree)
    got = world.trips_of(lambda: WAYS[way](tree), LEAVES)
    np.testing.assert_array_equal(jax.tree.leaves(got), np.arange(LEAVES, dtype=np.float32) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["losses", "puts"])
def test_a_list_of_many_runs(world: World, kind: str) -> None:
    if kind == "losses":  # the first read asks for the same result of all runs
        step = pw.jit(lambda x: (x + 1, x * 0), devices=world.slice)
        losses, x = [], X
        for _ in range(LEAVES):
            loss, x = step(x)
            losses.append(loss)
            x = loss
        want = np.arange(LEAVES, dtype=np.float32) + 2
    else:  # the second read in a row does
        losses = [pw.device_put(np.float32(n), world.slice) for n in range(LEAVES + 1)]
        want = np.arange(1, LEAVES + 1, dtype=np.float32)
    jax.block_until_ready((losses, world.new()(X)))  # a run, so that the next read is the first in a row
    if kind == "puts":
        assert float(losses.pop(0)) == 0
    np.testing.assert_array_equal(world.trips_of(lambda: [float(each) for each in losses], LEAVES), want)


@pytest.fixture
def local(local_cluster: Any) -> tuple[Any, Any]:
    """A cluster on this machine, and a slice of it."""
    return local_cluster, pw.make_virtual_device_set(local_cluster).add_slice(devices=2)


@pytest.mark.slow
def test_what_was_asked_for_ahead_stays_the_users(local: Any) -> None:
    """It is donated, deleted, cancelled and freed as if nobody had asked, and read afterwards if it is still there."""
    cluster, slice_ = local
    gate = threading.Event()

    def wait(x: Any) -> Any:
        gate.wait(20)
        return np.asarray(x)

    def new() -> Any:
        return pw.jit(lambda x: (x, x + 1, x + 2, jax.pure_callback(wait, x, x), x + 4), devices=slice_)

    take = pw.jit(lambda x: x * 10, devices=slice_, donate_argnums=0)
    a, b, c, late, d = new()(X)
    assert float(a) == 1
    assert [each.cached for each in (b, c, late, d)] == [None] * 4
    assert all(each.ahead is not None for each in (b, c, late, d))
    donated = take(b)
    with pytest.raises(pw.errors.DeletedArrayError):
        np.asarray(b)
    gives = take(late)  # which is still being computed
    c.delete()
    with pytest.raises(pw.errors.DeletedArrayError):
        np.asarray(c)
    gate.set()
    assert (float(d), float(donated), float(gives)) == (5, 20, 10)
    with pytest.raises(pw.errors.DeletedArrayError):
        np.asarray(late)

    gate.clear()
    before = cluster.native.futures_in_use
    a, b, c, late, d = new()(X)
    np.asarray(a)
    del b, c, d
    pw.cancel(late)
    with pytest.raises(pw.errors.CancelledError):
        np.asarray(late)
    gate.set()
    del a, late
    gc.collect()
    cluster.native.flush()
    eventually(lambda: cluster.native.futures_in_use <= before, "nothing is kept", 10)


@pytest.mark.slow
def test_what_is_asked_for_ahead(local: Any) -> None:
    """Small values of the same run, and none that is here, comes by itself, or failed."""
    _, slice_ = local
    f = pw.jit(lambda x: (x, x + 1, np.zeros(2000, np.float32) + x, x - 1), devices=slice_)
    other = pw.jit(lambda x: x + 7, devices=slice_)(X)
    a, b, big, c = f(X)
    np.asarray(c)
    assert b.ahead is not None and a.ahead is not None and big.ahead is None and other.ahead is None
    eventually(lambda: "2." in repr(b), "its value has come", 20)
    assert float(b) == 2 and b.ahead is None
    a, b, big, c = f(X)
    assert b.is_inline and not a.is_inline, "what was not read is not learned"
    np.asarray(big)
    assert a.ahead is not None and c.ahead is None and b.ahead is None
    assert float(other) == 8 and float(a) == 1


@pytest.mark.slow
def test_reads_between_runs_do_not_look_at_many_arrays(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look costs as much as the client has arrays. Whoever reads a tree finds it at the second leaf."""
    _, slice_ = local
    looks: list[Any] = []
    plain = pw.Array._beside
    monkeypatch.setattr(pw.Array, "_beside", lambda self, *how: looks.append(self) or plain(self, *how))
    monkeypatch.setattr(host_transfer, "MANY", 0)
    step = pw.jit(lambda x: np.zeros(2000, np.float32) + x, devices=slice_)
    for n in range(5):
        np.testing.assert_array_equal(np.asarray(step(np.float32(n))), np.full(2000, n, np.float32))
    assert len(looks) == 1
    for is_found in (False, True):  # now, and when the last look was not in vain
        tree = jax.block_until_ready(pw.jit(lambda x: [x + n for n in range(9)], devices=slice_)(X))
        assert float(tree[0]) == 1
        assert (tree[2].ahead is not None) == is_found
        np.testing.assert_array_equal([float(each) for each in tree], np.arange(9) + 1)
    assert len(looks) == 3


@pytest.mark.slow
def test_what_nobody_reads_is_dropped(local: Any) -> None:
    cluster, slice_ = local
    native = cluster.native
    values = jax.block_until_ready([pw.device_put(np.float32(n), slice_) for n in range(20)])
    kept = values[2:]
    gc.collect()
    native.flush()
    before = native.futures_in_use, native.arena_in_use()
    for n in (0, 1):  # the second read in a row asks for all
        assert float(values[n]) == n
    assert any(each.ahead is not None for each in kept)
    del values
    gc.collect()
    eventually(lambda: all(each.ahead is None for each in kept), "what was asked for ahead is dropped", 20)
    native.flush()
    eventually(lambda: (native.futures_in_use, native.arena_in_use()) <= before, "nothing is kept", 20)
    assert [float(each) for each in kept] == list(range(2, 20))


@pytest.mark.slow
def test_nothing_is_dropped_while_values_are_on_their_way(local: Any) -> None:
    """On a slow line, what was asked for first comes long before the last of it."""
    _, slice_ = local
    first, *rest, last = jax.block_until_ready([pw.device_put(np.float32(n), slice_) for n in range(20)])
    assert (float(first), float(rest.pop(0))) == (0, 1)
    assert all(each.ahead is not None for each in (*rest, last))
    last.ahead._client = NeverComes(last.ahead._client)
    time.sleep(4)
    assert all(each.ahead is not None for each in rest)
    last.ahead._client = last.ahead._client.client
    eventually(lambda: all(each.ahead is None for each in (*rest, last)), "what nobody reads is dropped", 20)


@pytest.mark.slow
def test_a_run_that_is_not_over_keeps_no_values(local: Any) -> None:
    """What it still computes may take hours: that is no slow line."""
    _, slice_ = local
    gate = threading.Event()
    now = pw.jit(lambda x: (x + 1, x + 2), devices=slice_)
    later = pw.jit(lambda x: jax.pure_callback(lambda v: (gate.wait(60), v)[1], x, x), devices=slice_)
    try:
        a, b, late = pw.program(lambda x: (*now(x), later(x)))(X)
        assert float(a) == 2
        assert b.ahead is not None and late.ahead is not None
        eventually(lambda: b.ahead is None, "what nobody reads is dropped", 20)
        assert late.ahead is not None
    finally:
        gate.set()
    assert (float(b), float(late)) == (3, 1)


class NeverComes:
    """A client's native core, as the read-back of a value sees it that is on a slow line."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def wait_raw(self, *_: Any) -> str:
        return "pending"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@pytest.mark.slow
def test_ctrl_c_between_any_two_steps_of_a_read_leaves_nothing(local: Any) -> None:
    """END-1: a KeyboardInterrupt comes once wherever Python looks for signals in `host_transfer.py`: after a call."""
    cluster, slice_ = local
    native = cluster.native

    @functools.cache
    def after_calls(code: types.CodeType) -> set[int]:
        steps = list(dis.get_instructions(code))
        return {after.offset for step, after in itertools.pairwise(steps) if step.opname.startswith("CALL")}

    def interrupted_at(step: int) -> bool:
        """Reads two arrays in a row, so that the second read reads ahead. Whether there was such a step."""
        values = jax.block_until_ready([pw.device_put(np.float32(n), slice_) for n in range(4)])
        steps = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal steps
            if not frame.f_code.co_filename.endswith("host_transfer.py") or frame.f_code.co_name == "__del__":
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_lasti in after_calls(frame.f_code):
                steps += 1
                if steps == step:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert [float(each) for each in values[:2]] == [0, 1]
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert [float(each) for each in values] == [0, 1, 2, 3], "they can still be read"
        return steps >= step

    def kept() -> tuple[int, int]:
        native.flush()
        return native.futures_in_use, native.arena_in_use()

    while interrupted_at(1 << 30):  # warm
        pass
    gc.collect()
    before = kept()
    step = 1
    while interrupted_at(step):
        step += 1
    gc.collect()
    print(f"{step - 1} steps")
    assert step > 20
    eventually(lambda: kept() <= before, "nothing is kept", 20)
