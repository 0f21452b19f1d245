"""What a save keeps on the devices is counted until the save is over, although its array is deleted; what needs that
memory waits, and the save goes on.

Map: MEM-7, MEM-3. What records alone can do: `tests/cpp/cluster/test_kept_memory.cc`.
"""

from __future__ import annotations

import asyncio
import pathlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from memory_ledgers import MiB

import pathways as pw
from pathways.api.checkpoints import jobs, orbax_handler
from pathways.protocol import payloads

GRACE_S = 0.25  # of MEM-3, see csrc/dispatch/controller_options.h
BUDGET = 16 * MiB


@pytest.fixture
def slice_(start: Callable[..., Any]) -> Any:
    """Two hosts of one device of 16 MiB each."""
    return pw.make_virtual_device_set(start(1, 2, 1, device_memory=BUDGET)).add_slice(devices=2)


def value_of(size: int, number: int) -> np.ndarray:
    """`size` MiB on each device."""
    return np.full(2 * size * MiB // 4, number, np.float32)


def test_a_put_waits_for_a_save_of_a_deleted_array(slice_: Any) -> None:
    array = pw.device_put(value_of(10, 1), slice_, P("x")).block_until_ready()
    job = orbax_handler._Save.__new__(orbax_handler._Save)
    jobs.Job.__init__(job)
    group = job.join(array)
    job.ask(group, payloads.task("stage", job.number, number=0), array)
    asyncio.run(job.settle())
    array.delete()
    small = pw.device_put(value_of(1, 2), slice_, P("x"))
    np.testing.assert_array_equal(np.asarray(pw.jit(lambda x: x + 1, devices=slice_)(small)), value_of(1, 3))
    other = pw.device_put(value_of(10, 4), slice_, P("x"))
    time.sleep(6 * GRACE_S)
    assert not other.is_ready()
    job.end(early=False)
    np.testing.assert_array_equal(np.asarray(other), value_of(10, 4))


@pytest.fixture
def may_go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves ask for their writes when this is set, and not before."""
    may_go = threading.Event()
    paths = orbax_handler._Save.paths

    async def late(save: Any) -> None:
        await paths(save)
        await asyncio.get_running_loop().run_in_executor(None, may_go.wait, 60)

    monkeypatch.setattr(orbax_handler._Save, "paths", late)
    return may_go


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_client_is_suspended_amid_its_save(
    slice_: Any, tmp_path: pathlib.Path, may_go: threading.Event, is_deleted: bool
) -> None:
    """The suspension waits for the save, whose array may be deleted. Then all goes on, also a save after it."""
    cluster = slice_.cluster
    array = pw.device_put(value_of(6, 1), slice_, P("x")).block_until_ready()
    other = pw.device_put(value_of(2, 2), slice_, P("x")).block_until_ready()
    moved: list[int] = []
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", args=ocp.args.StandardSave({"a": array}))
        if is_deleted:
            array.delete()
        while any(host["tasks"] == 0 for host in cluster.stats()["hosts"]):
            time.sleep(0.01)  # a save that no host knows of yet waits for the client's return
        suspends = threading.Thread(target=lambda: moved.append(cluster.suspend()))
        suspends.start()
        time.sleep(2 * GRACE_S)
        assert not moved
        may_go.set()
        suspends.join(30)
        assert moved == [2 * (2 if is_deleted else 8) * MiB]
        cluster.resume()
        np.testing.assert_array_equal(np.asarray(other), value_of(2, 2))
        checkpointer.save(tmp_path / "b", args=ocp.args.StandardSave({"a": other}))
    read_back(slice_, tmp_path, {"a": (6, 1), "b": (2, 2)})


def read_back(slice_: Any, folder: pathlib.Path, targets: dict[str, tuple[int, int]]) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        for name, (size, number) in targets.items():
            target = jax.ShapeDtypeStruct(value_of(size, number).shape, np.float32, sharding=slice_.sharding(P("x")))
            back = checkpointer.restore(folder / name, {"a": target})
            np.testing.assert_array_equal(np.asarray(back["a"]), value_of(size, number))


def test_a_client_is_suspended_when_its_save_begins(slice_: Any, tmp_path: pathlib.Path) -> None:
    """Either the suspension waits for the save, or the save for the client's return. Nothing stays on the devices."""
    generator = random.Random(7)
    cluster = slice_.cluster
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        for n in range(6):
            array = pw.device_put(value_of(6, n), slice_, P("x")).block_until_ready()
            suspends = threading.Timer(generator.uniform(0, 0.05), cluster.suspend)
            suspends.start()
            checkpointer.save(tmp_path / f"{n}", args=ocp.args.StandardSave({"a": array}))
            array.delete()
            suspends.join(30)
            assert [device["bytes"] for host in cluster.stats()["hosts"] for device in host["memory"]["devices"]] == [
                0,
                0,
            ]
            cluster.resume()
    read_back(slice_, tmp_path, {f"{n}": (6, n) for n in range(6)})


def test_a_training_loop_waits_for_its_save(slice_: Any, tmp_path: pathlib.Path, may_go: threading.Event) -> None:
    """The save asks for its writes when a run already waits for the memory that the save keeps."""
    make = pw.jit(lambda x, n: x * 0 + n, devices=slice_, in_shardings=(P("x"), P()), out_shardings=P("x"))
    small = pw.device_put(value_of(6, 0), slice_, P("x"))
    make.lower(small, 5.0).compile()
    state = pw.device_put(value_of(6, 1), slice_, P("x")).block_until_ready()
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ocp.args.StandardSave({"a": state}))
        state.delete()
        state = make(small, 5.0)
        time.sleep(4 * GRACE_S)
        assert not state.is_ready()
        may_go.set()
        np.testing.assert_array_equal(np.asarray(state), value_of(6, 5))
    state.delete()
    small.delete()
    with ocp.StandardCheckpointer() as checkpointer:
        target = jax.ShapeDtypeStruct(value_of(6, 1).shape, np.float32, sharding=slice_.sharding(P("x")))
        back = checkpointer.restore(tmp_path / "c", {"a": target})
    np.testing.assert_array_equal(np.asarray(back["a"]), value_of(6, 1))
