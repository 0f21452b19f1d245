"""Memory on real hosts: what a program needs is known, counted, waited for, and refused by name when it cannot be had.

Map: MEM-1 `test_a_pipeline_...` (high-water marks), `test_status_shows_...`; MEM-2 `test_a_pipeline_...`,
`test_two_clients_...`, `test_a_long_run_...`, `test_a_state_of_sixty_percent_...`; MEM-3 `test_what_...`,
`test_puts_...`, `test_a_transfer_...`; OWN-1 `test_a_killed_client_...`. The pure half: `../test_memory_profile.py`.
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

import pathways as pw
from pathways.runtime.binding import host_plan
from pathways.runtime.memory import Profile, ProgramMemory

pytestmark = pytest.mark.slow

MiB = 1 << 20
GRACE_S = 0.25  # of MEM-3, see csrc/runtime/controller.h


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """`start(islands, hosts, devices, ...)`: a cluster with budgets, of this test only."""
    with contextlib.ExitStack() as stack:
        yield lambda *shape, **budgets: stack.enter_context(
            pw.connect(pw.LocalCluster(*shape, platform="cpu", **budgets))
        )


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


def device(cluster: Any) -> list[dict[str, int]]:
    """Ledger of every device: bytes, high water, limit."""
    return [each for host in cluster.stats()["hosts"] for each in host["memory"]["devices"]]


def bytes_of(client: int, stats: dict[str, Any]) -> int:
    """What a client holds on all devices."""
    accounts = (account for host in stats["hosts"] for account in host["memory"]["accounts"])
    return sum(account["bytes"] for account in accounts if account["client"] == client)


def assert_within_budgets(cluster: Any, device_memory: int, transfer_memory: int) -> dict[str, list[int]]:
    """MEM-1: no high-water mark above its budget, as the hosts counted and as the order did; gives the marks."""
    stats = cluster.stats()
    marks = {"devices": [each["high_water"] for each in device(cluster)], "arenas": []}
    assert all(0 < mark <= device_memory for mark in marks["devices"]), marks
    for host in stats["hosts"]:
        assert host["overfull"] == 0
        marks["arenas"].append(host["arena_high_water"])
    assert all(mark <= transfer_memory for mark in marks["arenas"]), marks
    order = stats["controller"]["high_water"]
    count = len(marks["devices"])
    assert all(mark <= device_memory for mark in order[:count]), order
    assert all(mark <= transfer_memory for mark in order[count:]), order
    return marks


def profiles(program: Any, *args: Any) -> tuple[list[ProgramMemory], list[int], list[int]]:
    """What the plan says of each host, without XLA's temporaries; and, were nothing ever given back, the bytes that
    would lie on each device and land on each host."""
    bound = program.lower(*args).bound
    parts, devices, landings = [], [0] * (max(max(b) for b in bound.bindings) + 1), []
    for host in bound.hosts():
        plan, profile = host_plan(bound, host, True), Profile(bound, host, lands_on_host=True)
        parts.append(profile.memory(plan, [0] * len(plan.launches)))
        landings.append(0)
        made = [value for node in bound.program.nodes for value in node.outputs]
        for value in [*bound.program.arguments, *made]:
            if host not in bound.hosts_of_value(value):
                continue
            if value in profile._landing:
                landings[-1] += profile._landing[value]
            for number in bound.bindings[bound.program.values[value].mesh]:
                devices[number] += profile.device_bytes(value) if number // bound.devices_per_host == host else 0
    return parts, devices, landings


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
    assert all(part.landing_peak <= transfer_memory for part in parts), parts

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


def test_two_clients_whose_steps_fit_one_at_a_time_both_finish(start: Callable[..., Any], other: Any) -> None:
    """MEM-2: each step needs more than half of each device; both clients' values are exact and nothing is too full."""
    budget = 16 * MiB
    cluster = start(1, 1, 2, device_memory=budget)
    clients = [other(STEPS, cluster, "200", str(number)) for number in (0, 100)]
    for client in clients:
        said, _ = client.communicate(timeout=120)
        assert client.returncode == 0 and said.endswith("right 200\ndone\n"), said
    marks = [each["high_water"] for each in device(cluster)]
    assert all(budget / 2 < mark <= budget for mark in marks), marks
    assert cluster.stats()["hosts"][0]["overfull"] == 0 and cluster.stats()["controller"]["refused"] == 0


def test_a_killed_client_gives_its_bytes_back_while_another_computes(start: Callable[..., Any], other: Any) -> None:
    """OWN-1, MEM-2: what a client held is free within a second of its death, and another can have it."""
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
    while (left := bytes_of(held, cluster.stats())) and time.monotonic() - killed < 5:
        time.sleep(0.01)
    took = time.monotonic() - killed
    print(f"the bytes of a killed client were free after {took:.3f} s")
    assert not left and took < 1, (left, took)
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


# ------------------------------------------------------------------------------------------------------------- refused


class Refusals:
    """Programs on one cluster of two islands whose sizes are told in MiB per device; `kept` is 1."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        devices = pw.make_virtual_device_set(cluster)
        self.left, self.right = (devices.add_slice(devices=2, island=island) for island in (0, 1))
        self.kept = self.put(1)
        self.add = self.compiled(self.jit(lambda x: x + 1, "add"), self.kept)

    def jit(self, fun: Any, name: str, **options: Any) -> Any:
        return pw.jit(fun, devices=self.left, in_shardings=P("x"), out_shardings=P("x"), name=name, **options)

    def compiled(self, program: Any, *args: Any) -> Any:
        program.lower(*args).compile()
        return program

    def put(self, size: int) -> Any:
        return pw.device_put(np.ones(2 * size * MiB // 4, np.float32), self.left, P("x"))

    def wide(self, size: int) -> Any:
        """A program that makes `size` MiB on each device."""
        return self.compiled(self.jit(lambda x: jnp.zeros(size * x.size, x.dtype) + 5, f"wide{size}"), self.kept)

    def refused(self, use: Callable[[], Any], *words: str, least_s: float = 0.0) -> str:
        """The words of the refusal of `use`, which comes within a second."""
        begin = time.monotonic()
        with pytest.raises(pw.errors.ResourceExhaustedError) as caught:
            jax.block_until_ready(use())
        took = time.monotonic() - begin
        print(f"refused after {took:.3f} s")
        assert least_s <= took < 1, took
        for word in words:
            assert word in str(caught.value), (word, str(caught.value))
        return str(caught.value)

    def assert_undisturbed(self) -> None:
        np.testing.assert_array_equal(np.asarray(self.add(self.kept)), np.full(2 * MiB // 4, 2, np.float32))


@pytest.fixture
def refusals(start: Callable[..., Any]) -> Refusals:
    """Two islands of one host of two devices, 16 MiB each; 4 MiB of memory for transfers."""
    return Refusals(start(2, 1, 2, device_memory=16 * MiB, transfer_memory=4 * MiB))


def test_what_can_never_fit_is_refused_at_once(refusals: Refusals) -> None:
    """MEM-3: by name, with what depends on it; nothing else notices."""
    wide = refusals.wide(20)
    total = pw.jit(lambda x: x.sum(), devices=refusals.left, name="total")
    running = [refusals.add(refusals.kept) for _ in range(5)]
    refused = wide(refusals.kept)
    depending = total(refused)
    running += [refusals.add(refusals.kept) for _ in range(5)]
    words = refusals.refused(
        lambda: refused,
        "program 'wide20' needs 20.0 MiB (20971520 bytes)",
        "on device 0 of host 0",
        "budget is 16.0 MiB (16777216 bytes)",
        "its biggest buffers: float32[10485760] made by 'wide20",
        "can never fit",
    )
    assert refusals.refused(lambda: depending) == words
    assert refusals.refused(lambda: np.asarray(refused)) == words
    for each in running:
        np.testing.assert_array_equal(np.asarray(each), np.asarray(running[0]))
    refusals.refused(lambda: wide(refusals.kept), "wide20", "can never fit")
    refusals.assert_undisturbed()
    assert refusals.cluster.stats()["controller"]["refused"] == 2
    assert all(each["high_water"] <= 16 * MiB for each in device(refusals.cluster))


def test_what_live_arrays_keep_out_is_refused_after_a_grace(refusals: Refusals) -> None:
    """MEM-3: with the holders' names and sizes; goes through when they are deleted, even while it is waiting."""
    wide = refusals.wide(8)
    total = pw.jit(lambda x: x.sum(), devices=refusals.left, name="total")
    held = jax.block_until_ready(wide(refusals.kept))
    refused = wide(refusals.kept)
    depending = total(refused)
    words = refusals.refused(
        lambda: refused,
        "program 'wide8' needs 8.0 MiB",
        "budget is 16.0 MiB",
        "9.0 MiB are held there by live arrays: 8.0 MiB results of program 'wide8' by this client; 1.0 MiB put there",
        "Delete arrays, or donate",
    )
    assert refusals.refused(lambda: depending) == words
    refusals.refused(lambda: wide(refusals.kept), "results of program 'wide8'", least_s=GRACE_S / 2)
    refusals.assert_undisturbed()
    waiting = wide(refusals.kept)
    held.delete()
    assert float(total(waiting)) == 5 * 8 * 2 * MiB / 4
    del waiting
    for _ in range(5):
        assert np.asarray(wide(refusals.kept))[-1] == 5
    assert device(refusals.cluster)[0]["high_water"] <= 16 * MiB


def test_puts_are_refused_like_runs(refusals: Refusals) -> None:
    """MEM-3 of a `device_put`."""
    refusals.refused(lambda: refusals.put(20), "a buffer put needs 20.0 MiB", "budget is 16.0 MiB", "can never fit")
    held = refusals.put(10)
    total = pw.jit(lambda x: x.sum(), devices=refusals.left, name="total")
    words = ("a buffer put needs 10.0 MiB (10485760 bytes)", "11.0 MiB are held", "11.0 MiB put there by this client")
    refused = refusals.put(10)
    depending = total(refused)
    text = refusals.refused(lambda: refused, *words)
    assert refusals.refused(lambda: depending) == text
    refusals.assert_undisturbed()
    held.delete()
    np.testing.assert_array_equal(np.asarray(refusals.put(10))[-2:], [1, 1])


def test_a_transfer_bigger_than_the_memory_for_transfers_is_refused(refusals: Refusals) -> None:
    """MEM-3 of the memory that transfers land in: never, and only while others are there."""
    big, half = refusals.put(5), refusals.put(1)
    text = refusals.refused(
        lambda: pw.device_put(big, refusals.right, P("x")),
        "needs 10.0 MiB",
        "on host 1's memory for transfers, whose budget is 4.0 MiB",
        "can never fit",
    )
    assert "float32[2621440]" in text
    landed = jax.block_until_ready(pw.device_put(half, refusals.right, P("x")))
    refusals.refused(
        lambda: [pw.device_put(half, refusals.right, P("x")) for _ in range(2)],
        "on host 1's memory for transfers",
        "held there by live arrays",
        "results of program 'device_put' by this client",
    )
    refusals.assert_undisturbed()
    landed.delete()
    np.testing.assert_array_equal(np.asarray(pw.device_put(half, refusals.right, P("x")))[-2:], [1, 1])
    assert refusals.cluster.stats()["hosts"][1]["arena_high_water"] <= 4 * MiB
