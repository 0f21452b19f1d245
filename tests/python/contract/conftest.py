"""For contract tests: `add` gives slices on the cluster under test, `quiet` its numbers when nothing moves any more.
`start` starts a cluster with budgets. Errors of callbacks end with their test."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import pathways as pw

STILL = 5  # looks in a row, 50 ms apart, that must find the same
COLLECTS = 10  # how often to look for garbage: once in so many looks


@pytest.fixture(autouse=True)
def no_errors_left() -> Iterator[None]:
    """Errors of this test's calls are not those of a later test: `jax.effects_barrier` raises the first one."""
    yield
    with contextlib.suppress(pw.errors.PathwaysError):
        jax.effects_barrier()


@pytest.fixture
def add(cluster: Any) -> Callable[..., Any]:
    """`add(4)` or `add((2, 2))`: a slice of so many devices, or of a mesh of that shape with axes "x" and "y"."""
    devices = pw.make_virtual_device_set(cluster)

    def one(shape: int | tuple[int, ...], island: int | None = None) -> Any:
        sizes = (shape,) if isinstance(shape, int) else shape
        return devices.add_slice(shape=sizes, axis_names=("x", "y", "z")[: len(sizes)], island=island)

    return one


@pytest.fixture
def near(cluster: Any) -> None:
    """The test is for a client on the controller's machine, and is skipped where this process is on another one."""
    if not cluster.is_embedded and cluster.address.startswith("pathways"):
        pytest.skip("this process is not on the controller's machine")


def is_no_more(kept: Any, than: Any, but_arenas: bool) -> bool:
    """Whether no number in `kept` is above the same number in `than`. It may be below: `than` may have been counted
    while something from before was still to be released. `but_arenas`: bytes in shared memory do not matter."""
    if but_arenas:
        kept, than = ((each[0], 0, [(objects, 0) for objects, _ in each[2]]) for each in (kept, than))
    hosts = zip(kept[2], than[2], strict=True)
    return (
        kept[0] <= than[0]
        and kept[1] <= than[1]
        and all(a <= b for one, two in hosts for a, b in zip(one, two, strict=True))
    )


@pytest.fixture
def quiet(cluster: Any) -> Callable[..., dict[str, Any]]:
    """`quiet()` waits until nothing is in flight and nothing is left to release; then the cluster's `stats()`, with
    "arena" for the bytes in use of the client's shared memory and "kept" for all that must come back to its start.
    `quiet(back_to=kept)` waits until no more is kept than that, and fails when it does not come to it; with
    `but_arenas=True`, futures and buffers count alone."""

    def wait(back_to: Any = None, but_arenas: bool = False) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        last: Any = None
        looks = same = 0
        while time.monotonic() < deadline:
            if looks % COLLECTS == 0:
                gc.collect()
            looks += 1
            cluster.native.flush()
            stats = cluster.stats()
            busy = stats["in_flight"] or any(host["live_runs"] or host["waiting"] for host in stats["hosts"])
            stats["arena"] = cluster.native.arena_stats()[0]
            stats["kept"] = (
                stats["futures"],
                stats["arena"],
                [(host["objects"], host["arena_bytes"]) for host in stats["hosts"]],
            )
            same = same + 1 if not busy and last == stats["kept"] else 0
            if back_to is None:  # what was dropped may take a moment to be released
                is_over = same >= STILL
            else:
                is_over = not busy and is_no_more(stats["kept"], back_to, but_arenas)
            if is_over:
                return stats
            last = stats["kept"]
            time.sleep(0.05)
        assert back_to is None or is_no_more(last, back_to, but_arenas), f"kept {last}, before {back_to}"
        raise AssertionError(f"work is still in flight: {cluster.stats()}")

    return wait


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """`start(islands, hosts, devices, ...)`: a cluster with budgets, of this test only."""
    with contextlib.ExitStack() as stack:
        yield lambda *shape, **budgets: stack.enter_context(
            pw.connect(pw.LocalCluster(*shape, platform="cpu", **budgets))
        )
