"""Memory on real hosts: what a program needs is known, counted and waited for.

Map: MEM-1 `test_a_pipeline_...` (high-water marks), `test_what_a_host_puts_together_...`, `test_stats_of_...`;
MEM-2 `test_a_pipeline_...`, `test_two_clients_...`, `test_a_long_run_...`, `test_a_run_in_flight_...`,
`test_a_state_of_sixty_percent_...`; OWN-1 `test_a_killed_client_...`. What cannot be had: `test_memory_refusals.py`.
The pure half: `../plan/test_memory_profile.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from memory_ledgers import MiB, assert_within_budgets, bytes_of, device

import pathways as pw
from pathways.plan.binding import host_plan
from pathways.plan.memory_profile import Profile, ProgramMemory
from pathways.testing import stand_in

pytestmark = pytest.mark.slow


@pytest.fixture
def other() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`other(code, cluster, ...)`: another client of a cluster; `COMMON` comes before its code."""
    with contextlib.ExitStack() as stack:

        def begin(code: str, cluster: Any, *arguments: str) -> subprocess.Popen[str]:
            whole = textwrap.dedent(COMMON) + textwrap.dedent(code)
            process = subprocess.Popen(
                [sys.executable, "-c", whole, cluster.address, *arguments],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield begin


#: A client whose step needs `kept` MiB on each of two devices for its state, and `wide` MiB more while it runs.
COMMON = """
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pathways as pw

    P = jax.sharding.PartitionSpec
    MiB = 1 << 20

    def sharded(fun, slice_, name, **options):
        return pw.jit(fun, devices=slice_, in_shardings=P("x"), out_shardings=P("x"), name=name, **options)

    def stepper(slice_, factor, wide):
        spread = sharded(lambda x: jnp.broadcast_to(x, (wide, x.size)).T + 1.0, slice_, "spread")
        gather = sharded(lambda y: y.sum(1) * factor - 3.0 * wide * factor, slice_, "gather")
        return pw.program(lambda x: gather(spread(x)), name="step")

    cluster = pw.connect(sys.argv[1])
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
"""

#: Runs of 20 steps until it is told to stop by a line, or so many as argv[2] says.
STEPS = """
    mine = int(sys.argv[3])
    step = stepper(slice_, 1 / 8, 8)  # x -> x - 2
    begin = np.arange(2 * MiB // 4, dtype=np.float32) % 97 + mine  # 1 MiB on each device
    print(cluster.client_id, flush=True)
    count = 0
    while count < int(sys.argv[2]):
        x = pw.device_put(begin, slice_, P("x"))
        for _ in range(20):
            x = step(x)
        np.testing.assert_array_equal(np.asarray(x), begin - 40)
        del x
        count += 20
        print("right", count, flush=True)
    print("done", flush=True)
"""

HOLD = """
    held = [jax.block_until_ready(pw.device_put(np.zeros(8 * MiB, np.uint8), slice_, P("x"))) for _ in range(3)]
    print(cluster.client_id, flush=True)
    sys.stdin.readline()
"""


def profiles(program: Any, *args: Any) -> tuple[list[ProgramMemory], list[int], list[int]]:
    """What the plan says of each host, without XLA's temporaries; and, were nothing ever given back, the bytes that
    would lie on each device and land on each host."""
    bound = program.lower(*args).bound
    parts, devices, receives = [], [0] * (max(max(b) for b in bound.bindings) + 1), []
    for host in bound.hosts():
        plan, profile = host_plan(bound, host, True), Profile(bound, host, receives_on_host=True)
        parts.append(profile.memory(plan, [0] * len(plan.launches)))
        receives.append(0)
        made = [value for node in bound.program.nodes for value in node.outputs]
        for value in [*bound.program.arguments, *made]:
            if host not in bound.hosts_of_value(value):
                continue
            if value in profile._receive_bytes_of:
                receives[-1] += profile._receive_bytes_of[value]
            for number in bound.bindings[bound.program.values[value].mesh]:
                devices[number] += profile.device_bytes(value) if number // bound.devices_per_host == host else 0
    return parts, devices, receives


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (2, 2, 2)], ids=lambda shape: "x".join(map(str, shape)))
def test_a_pipeline_that_needs_many_times_the_budget_finishes(
    start: Callable[..., Any], shape: tuple[int, int, int]
) -> None:
    """MEM-1, MEM-2: 24 microbatches there and back between two islands, twice."""
    device_memory, share, microbatches = 6 * MiB, MiB, 24
    each = shape[1] * shape[2]  # devices of an island
    transfer_memory = 6 * MiB * shape[2]
    cluster = start(*shape, device_memory=device_memory, transfer_memory=transfer_memory)
    devices = pw.make_virtual_device_set(cluster)
    left, right = (devices.add_slice(devices=each, island=island) for island in (0, 1))

    def place(fun: Any, slice_: Any, name: str) -> Any:
        return pw.jit(fun, devices=slice_, name=name)

    first = place(lambda x, k: x * 2 + k, left, "first")
    middle = place(lambda y: y - 1, right, "middle")
    last = place(lambda total, z: total + z * z, left, "last")
    count = place(lambda k: k + 1, left, "count")

    @pw.program
    def pipeline(x: Any, k: Any) -> Any:
        total = x
        for _ in range(microbatches):
            total = last(total, middle(first(x, k)))
            k = count(k)
        return total, k

    value = np.arange(each * share // 4, dtype=np.float32) % 5
    x, k = pw.device_put(value, left, P("x")), pw.device_put(np.float32(0), left)
    parts, on_devices, landed = profiles(pipeline, x, k)
    assert all(total >= 3 * device_memory for total in on_devices), on_devices
    assert all(total >= 3 * transfer_memory for total in landed), landed
    assert all(need.peak + need.eager + share <= device_memory for part in parts for need in part.devices), parts
    assert all(part.receive_peak <= transfer_memory for part in parts), parts

    total = want = value
    for round_ in range(2):
        (total, k), want = pipeline(x, k), value
        for number in range(microbatches):
            want = want + (value * 2 + (round_ * microbatches + number) - 1) ** 2
        np.testing.assert_array_equal(np.asarray(total), want)
    del total
    results = [pipeline(x, k)[0] for _ in range(2)]  # side by side
    np.testing.assert_array_equal(np.asarray(results[0]), np.asarray(results[1]))
    marks = assert_within_budgets(cluster, device_memory, transfer_memory)
    print(f"budgets {device_memory} {transfer_memory}; all buffers {on_devices} {landed}; high water {marks}")


def test_what_a_host_puts_together_for_itself_counts_like_what_comes_to_it(start: Callable[..., Any]) -> None:
    """MEM-1, MEM-2: on CPU, shards that change their extent within a host land in its memory for transfers."""
    transfer_memory = 6 * MiB
    cluster = start(1, 1, 2, device_memory=64 * MiB, transfer_memory=transfer_memory)
    devices = pw.make_virtual_device_set(cluster)
    here, there = devices.add_slice(devices=2), devices.add_slice(devices=1)
    cut = pw.jit(lambda x, k: x + k, devices=here, in_shardings=(P("x"), P()), out_shardings=P("x"), name="cut")
    whole = pw.jit(lambda t, y: t + y, devices=there, name="whole")

    @pw.program
    def many(x: Any, total: Any) -> Any:
        for number in range(12):
            total = whole(total, cut(x, float(number)))
        return total

    value = np.arange(2 * MiB // 4, dtype=np.float32) % 7
    x, total = pw.device_put(value, here, P("x")), pw.device_put(value, there)
    (part,), _, (landed,) = profiles(many, x, total)
    assert landed >= 3 * transfer_memory and 2 * MiB <= part.receive_peak <= transfer_memory
    np.testing.assert_array_equal(np.asarray(many(x, total)), value * 13 + 66)
    mark = cluster.stats()["hosts"][0]["arena_high_water"]
    assert part.receive_peak - MiB <= mark <= transfer_memory, mark
    big = pw.device_put(np.ones(7 * MiB, np.uint8)[: 6 * MiB + 256], here, P("x"))
    with pytest.raises(pw.errors.ResourceExhaustedError, match=r"host 0's memory for transfers.* can never fit"):
        pw.device_put(big, there).block_until_ready()


def test_two_clients_whose_steps_fit_one_at_a_time_both_finish(start: Callable[..., Any], other: Any) -> None:
    """MEM-2: each step needs more than half of each device; both clients' values are exact and nothing is too full."""
    budget = 16 * MiB
    cluster = start(1, 1, 2, device_memory=budget)
    clients = [other(STEPS, cluster, "100", str(number)) for number in (0, 100)]
    for client in clients:
        said, _ = client.communicate(timeout=120)
        assert client.returncode == 0 and said.endswith("right 100\ndone\n"), said
    marks = [each["high_water"] for each in device(cluster)]
    assert all(budget / 2 < mark <= budget for mark in marks), marks
    assert cluster.stats()["hosts"][0]["overfull"] == 0 and cluster.stats()["controller"]["refused"] == 0


def test_a_killed_client_gives_its_bytes_back_while_another_computes(start: Callable[..., Any], other: Any) -> None:
    """OWN-1, MEM-2: what a client held is free after its death, and another can have it."""
    cluster = start(1, 1, 2, device_memory=24 * MiB)
    holder, worker = other(HOLD, cluster), other(STEPS, cluster, "1000000", "7")
    held, working = int(holder.stdout.readline()), int(worker.stdout.readline())
    for number in (20, 40):
        assert worker.stdout.readline() == f"right {number}\n"
    before = cluster.stats()
    assert bytes_of(held, before) == 24 * MiB  # 12 on each of two devices
    assert working in {client["client"] for client in before["clients"]}
    os.kill(holder.pid, signal.SIGKILL)
    killed = time.monotonic()
    while (left := bytes_of(held, cluster.stats())) and time.monotonic() - killed < 30:
        time.sleep(0.01)
    took = time.monotonic() - killed
    print(f"the bytes of a killed client were free after {took:.3f} s")
    assert not left, (left, took)
    seen = worker.stdout.readline()
    for _ in range(3):
        assert seen.startswith("right"), seen
        seen = worker.stdout.readline()
    worker.kill()
    worker.wait()
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
    all_of_it = pw.device_put(np.ones(46 * MiB, np.uint8), slice_, P("x"))  # 23 MiB of 24
    assert np.asarray(all_of_it).all()
    assert cluster.stats()["hosts"][0]["overfull"] == 0


#: Twenty runs in flight of a program that copies 2 MiB between two devices, each 0.1 s of work, until a line comes.
LONG = """
    import threading
    devices = pw.make_virtual_device_set(cluster)
    one, two = devices.add_slice(devices=1), devices.add_slice(devices=1)

    def slow(x):
        square = jnp.broadcast_to(x[:1] * 0 + 0.001, (256, 256))
        return x + 1 + jax.lax.fori_loop(0, 60, lambda _, m: jnp.tanh(m @ m), square)[0, 0] * 0

    first, second = (pw.jit(slow, devices=each, name=f"slow{n}") for n, each in enumerate((one, two)))
    run = pw.program(lambda x: second(first(x)).sum(), name="long")
    value = np.ones(2 * MiB // 4, np.float32)
    x = pw.device_put(value, one)
    assert float(run(x)) == 3 * value.size
    told = []
    threading.Thread(target=lambda: told.append(sys.stdin.readline()), daemon=True).start()
    print(cluster.client_id, flush=True)
    count, waiting = 0, []
    while not told:
        waiting.append(run(x))
        if len(waiting) == 20:
            assert float(waiting.pop(0)) == 3 * value.size
            count += 1
    for each in waiting:
        assert float(each) == 3 * value.size
    print("runs", count + len(waiting), flush=True)
"""


def test_a_long_run_keeps_others_out_only_as_far_as_its_copies_go(start: Callable[..., Any], other: Any) -> None:
    """MEM-2: runs in flight take their eager copies' room beside everybody's peak; nobody starves either way."""
    budget = 48 * MiB
    cluster = start(1, 1, 2, device_memory=budget)
    long = other(LONG, cluster)
    busy = int(long.stdout.readline())
    small, big = (other(STEPS, cluster, count, number) for count, number in (("80", "1"), ("100000", "2")))
    said, _ = small.communicate(timeout=120)  # it comes to its end beside one that never stops and one like itself
    assert small.returncode == 0 and said.endswith("right 80\ndone\n"), said
    lines = [big.stdout.readline() for _ in range(4)]
    assert lines[1:] == ["right 20\n", "right 40\n", "right 60\n"], lines
    stats = cluster.stats()
    assert stats["hosts"][0]["overfull"] == 0 and stats["controller"]["refused"] == 0
    assert max(stats["controller"]["high_water"]) <= budget
    marks = [each["high_water"] for each in device(cluster)]
    assert all(0 < mark <= budget for mark in marks), (marks, budget, cluster.stats()["hosts"][0]["overfull"])
    assert bytes_of(busy, stats) > 0
    said, _ = long.communicate("stop\n", timeout=60)
    assert long.returncode == 0 and int(said.split()[-1]) >= 20, said
    print("long", said.split()[-1], "runs; high water", [each["high_water"] for each in device(cluster)])


def test_a_run_in_flight_counts_with_its_copies_and_not_with_its_peak(start: Callable[..., Any]) -> None:
    """MEM-2: beside it, what fits with its eager copy is admitted at once; what does not is when it is over."""
    cluster = start(1, 1, 2, device_memory=16 * MiB)
    devices = pw.make_virtual_device_set(cluster)
    one, two = devices.add_slice(devices=1), devices.add_slice(devices=1)

    def slow(x: Any) -> Any:
        return x.sum() + stand_in.step(x[:1], 500_000)[0] * 0

    first = pw.jit(lambda x: jnp.zeros(MiB, jnp.float32) + x, devices=one, name="first")
    second = pw.jit(slow, devices=two, name="slow")
    long = pw.program(lambda x: second(first(x)), name="long")  # 4 MiB, and its copy on the other device
    x = pw.device_put(np.float32(3), one)
    assert float(long(x)) == 3 * MiB
    with pw.connect(cluster.address) as neighbour:
        slice_ = pw.make_virtual_device_set(neighbour).add_slice(devices=2)

        def wide(size: int) -> Any:
            """`size` MiB on each device, and their sum."""
            make = pw.jit(
                lambda k: jnp.zeros(size * MiB // 2, jnp.float32) + k, devices=slice_, out_shardings=P("x"), name="make"
            )
            total = pw.jit(lambda y: y.sum(), devices=slice_, in_shardings=P("x"), name="total")
            made = pw.program(lambda k: total(make(k)), name=f"wide{size}")
            assert float(made(k)) == size * MiB // 2
            return made

        def arrived(count: int) -> dict[str, Any]:
            """The controller's numbers, once so many runs have come to it."""
            while (now := cluster.stats()["controller"])["runs"] + now["held"] < count:
                time.sleep(0.005)
            return dict(now)

        k = pw.device_put(np.float32(1), slice_)
        fits, waits = wide(11), wide(14)
        proven = 0
        for _ in range(20):
            before = arrived(0)["runs"]
            running = long(x)
            cluster.native.flush()
            quick = fits(k)
            neighbour.native.flush()
            now = arrived(before + 2)
            held = [now["held"]]
            late = waits(k)
            neighbour.native.flush()
            now = arrived(before + 3)
            held.append(now["held"])
            was_seen = not running.is_ready()  # on a busy machine it may be over by now, which proves nothing
            assert not was_seen or held == [0, 1], now
            proven += was_seen
            assert float(late) == 14 * MiB // 2 and running.is_ready()
            assert float(quick) == 11 * MiB // 2 and float(running) == 3 * MiB
            assert cluster.stats()["controller"]["held"] == 0
            if proven == 3:
                break
        assert proven
    assert max(each["high_water"] for each in device(cluster)) <= 16 * MiB
    assert cluster.stats()["hosts"][0]["overfull"] == 0


def test_a_state_of_sixty_percent_of_the_budget_trains_when_it_is_donated(start: Callable[..., Any]) -> None:
    """MEM-2, MEM-4: a new state beside the old would not fit; 200 steps of one that takes its place do."""
    budget = 20 * MiB
    cluster = start(1, 1, 2, device_memory=budget)
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
    value = np.arange(4 * MiB // 4, dtype=np.float32) % 13  # 2 MiB on each device, six times

    def update(state: Any, grad: Any) -> Any:
        return {name: leaf + grad for name, leaf in state.items()}

    def place(**options: Any) -> Any:
        return pw.jit(update, devices=slice_, in_shardings=P("x"), out_shardings=P("x"), **options)

    donating, keeping = place(donate_argnums=0, name="donating"), place(name="keeping")
    grad = pw.device_put(np.ones(value.size, np.float32), slice_, P("x"))
    state = {f"w{n}": pw.device_put(value, slice_, P("x")) for n in range(6)}
    with pytest.raises(pw.errors.ResourceExhaustedError, match=r"'keeping' needs 12\.0 MiB.*donate arguments"):
        jax.block_until_ready(keeping(state, grad))
    for _ in range(200):
        state = donating(state, grad)
    for leaf in state.values():
        np.testing.assert_array_equal(np.asarray(leaf), value + 200)
    stats = cluster.stats()
    assert stats["controller"]["refused"] == 1 and stats["hosts"][0]["overfull"] == 0
    marks = [each["high_water"] for each in device(cluster)]
    assert all(0.6 * budget <= mark <= budget for mark in marks), marks
    print(f"budget {budget}, high water {marks}")


def test_stats_of_a_device_without_a_budget(cluster: Any) -> None:
    """MEM-1: what has no limit says so, and is no number that stands for one."""

    def numbers(found: Any) -> list[int]:
        if isinstance(found, dict):
            return [number for each in found.values() for number in numbers(each)]
        if isinstance(found, list | tuple):
            return [number for each in found for number in numbers(each)]
        return [found] if isinstance(found, int) else []

    stats = cluster.stats()
    assert max(numbers(stats)) < 1 << 62
    limits = {each["limit"] for host in stats["hosts"] for each in host["memory"]["devices"]}
    assert limits == {None} or all(limit > 0 for limit in limits)
