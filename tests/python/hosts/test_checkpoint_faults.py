"""Checkpoints when something goes wrong: a full disk, a path that cannot be written, hosts and clients that die.

ERR-1: a host's error reaches the save that it is of, with host and path, and nothing else.
ERR-2: a host that dies while it writes fails the save; the checkpoint before it is whole.
JOB-1: `test_a_full_disk_is_an_error_that_names_host_and_path` saves again to the same place at once.
OWN-1: `test_a_client_that_dies_while_it_saves_leaves_nothing`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
from control_clusters import eventually
from etils import epath
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.api.checkpoints import jobs, orbax_handler

pytestmark = pytest.mark.slow

pw.checkpoint.register()
VALUE = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)  # does not compress to nothing
TARGET = pw.LocalCluster(islands=1, hosts_per_island=2, devices_per_host=1)


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """orbax logs errors, whose tracebacks know the arrays; pytest would keep them."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """One that a test may break."""
    cluster = pw.connect(TARGET)
    yield cluster
    cluster.close()


def both(cluster: Any) -> Any:
    """A slice over the two hosts."""
    return pw.make_virtual_device_set(cluster).add_slice(devices=2)


def pids(cluster: Any) -> list[int]:
    return [host["pid"] for host in cluster.stats()["hosts"]]


def save(path: pathlib.Path, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restored(path: pathlib.Path, slice_: Any) -> np.ndarray:
    target = {"a": jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype, sharding=slice_.sharding(P("x")))}
    with ocp.StandardCheckpointer() as checkpointer:
        return np.asarray(checkpointer.restore(path, target)["a"])


def await_nothing_left(cluster: Any, objects: int) -> None:
    """Within some seconds no host has a job, a task, or more than `objects` buffers."""
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        cluster.native.flush()
        hosts = cluster.stats()["hosts"]
        left = [(host["checkpoint_jobs"], host["tasks"], host["objects"]) for host in hosts]
        if left == [(0, 0, objects)] * len(hosts):
            return
        assert time.monotonic() < deadline, f"left on the hosts: jobs, tasks, objects = {left}"
        time.sleep(0.05)


def test_a_full_disk_is_an_error_that_names_host_and_path(cluster: Any, tmp_path: pathlib.Path) -> None:
    """The double of a full disk: files of one host may not grow beyond 64 KiB."""
    slice_ = both(cluster)
    state = {"a": pw.device_put(VALUE, slice_, P("x"))}
    save(tmp_path / "before", state)
    victim = psutil.Process(pids(cluster)[1])
    limits = victim.rlimit(resource.RLIMIT_FSIZE)
    victim.rlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    for _ in range(2):
        with pytest.raises(
            pw.errors.CheckpointError, match=rf"{re.escape(str(tmp_path / 'full'))}.* failed on host 1: "
        ):
            save(tmp_path / "full", state)
        assert not (tmp_path / "full").exists()
    np.testing.assert_array_equal(restored(tmp_path / "before", slice_), VALUE)
    victim.rlimit(resource.RLIMIT_FSIZE, limits)
    save(tmp_path / "full", state)
    np.testing.assert_array_equal(restored(tmp_path / "full", slice_), VALUE)
    np.testing.assert_array_equal(np.asarray(state["a"] + 1), VALUE + 1)
    await_nothing_left(cluster, 1)


def test_a_path_that_a_host_cannot_write(cluster: Any, tmp_path: pathlib.Path) -> None:
    slice_ = both(cluster)
    state = {"a": pw.device_put(VALUE, slice_, P("x"))}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "ocdbt.process_pw0host1").write_text("a file where a folder should be")
    with pytest.raises(pw.errors.CheckpointError, match=rf"{re.escape(str(tmp_path / 'c'))}.* failed on host 1: "):
        ocp.PyTreeCheckpointHandler().save(epath.Path(tmp_path / "c"), state)
    await_nothing_left(cluster, 1)


def test_a_host_that_dies_while_it_writes(
    cluster: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.disable(logging.NOTSET)
    slice_ = both(cluster)
    state = {"a": pw.device_put(VALUE, slice_, P("x"))}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        victim = pids(cluster)[1]
        os.kill(victim, signal.SIGSTOP)
        manager.save(2, args=ocp.args.StandardSave(state))
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(pw.errors.HostLostError, match=r"host 1.*SIGKILL"):
            manager.wait_until_finished()
        assert list(manager.all_steps(read=True)) == [1]
    told = [line for line in caplog.messages if "HostLostError" in line or "Traceback" in line]
    assert len(told) == 1 and "was not saved" in told[0], told  # orbax logs a traceback in each of its threads
    assert all(record.exc_info is None for record in caplog.records)
    # The same process goes on.
    again = pw.connect(TARGET)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 1
        target = {"a": jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype, sharding=both(again).sharding(P("x")))}
        state = manager.restore(1, args=ocp.args.StandardRestore(target))
        np.testing.assert_array_equal(np.asarray(state["a"]), VALUE)
        manager.save(2, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert list(manager.all_steps(read=True)) == [1, 2]
    again.close()


@pytest.mark.parametrize("step", ["write", "commit"])
def test_a_host_that_is_started_anew_while_a_save_is_under_way(
    cluster: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The new process has neither what was staged nor what was written: no checkpoint comes of that save."""
    slice_ = both(cluster)
    state = {"a": pw.device_put(VALUE, slice_, P("x"))}
    jax.block_until_ready(state)
    name = {"write": "_ask_for_writes", "commit": "_write_shardings"}[step]
    ask_for_writes, write_shardings = orbax_handler._Save._ask_for_writes, orbax_handler._Save._write_shardings

    def lose_a_host() -> None:
        os.kill(pids(cluster)[1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while [(host["state"], host["restarts"]) for host in cluster.stats()["hosts"]] != [("up", 1)] * 2:
            assert time.monotonic() < deadline, "the island is not started anew"
            time.sleep(0.05)

    def before_the_writes(save: Any) -> None:
        lose_a_host()
        ask_for_writes(save)

    async def after_the_writes(save: Any) -> None:
        await write_shardings(save)
        await asyncio.gather(*(jobs.settled(*each) for each in save._tokens))
        lose_a_host()

    monkeypatch.setattr(orbax_handler._Save, name, before_the_writes if step == "write" else after_the_writes)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        with pytest.raises(pw.errors.HostLostError, match="was started anew with its island"):
            manager.wait_until_finished()
        assert list(manager.all_steps(read=True)) == []


def test_two_clients_save_at_the_same_time(cluster: Any, tmp_path: pathlib.Path) -> None:
    slice_ = both(cluster)
    state = {"a": pw.device_put(VALUE, slice_, P("x"))}
    np.save(tmp_path / "value.npy", VALUE + 1)
    with start_client(cluster, tmp_path, rounds=5) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "saved 0\n"
        client.stdin.write("\n")
        client.stdin.flush()
        for number in range(5):
            save(tmp_path / f"ours-{number}", state)
        assert client.stdout.read().splitlines()[-1] == "saved 5"
        assert client.wait() == 0
    for number in range(5):
        np.testing.assert_array_equal(restored(tmp_path / f"ours-{number}", slice_), VALUE)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        assert list(manager.all_steps()) == list(range(6))
        target = {"a": jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype, sharding=slice_.sharding(P("x")))}
        for number in (0, 5):
            theirs = manager.restore(number, args=ocp.args.StandardRestore(target))["a"]
            np.testing.assert_array_equal(np.asarray(theirs), VALUE + 1)
    del theirs
    await_nothing_left(cluster, 1)


CLIENT = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
import orbax.checkpoint as ocp
import pathways as pw
from jax.sharding import PartitionSpec as P
address, folder, rounds = sys.argv[1:]
cluster = pw.connect(address)
slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
state = {"a": pw.device_put(np.load(folder + "/value.npy"), slice_, P("x"))}
with ocp.CheckpointManager(folder + "/steps") as manager:
    manager.save(0, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    print("saved 0", flush=True)
    sys.stdin.readline()
    for number in range(1, int(rounds) + 1):
        manager.save(number, args=ocp.args.StandardSave(state))
        print("saving", number, flush=True)
        manager.wait_until_finished()
        print("saved", number, flush=True)
cluster.close()
"""


def start_client(cluster: Any, folder: pathlib.Path, rounds: int) -> subprocess.Popen[str]:
    """A client in a process of its own. It saves `value.npy`, says so, and saves again when it gets a line."""
    command = [sys.executable, "-c", CLIENT, cluster.address, str(folder), str(rounds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_client_that_dies_while_it_saves_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATHWAYS_TEST_SLOW_WRITES", "1.5")
    cluster = request.getfixturevalue("cluster")
    slice_ = both(cluster)
    kept = pw.device_put(VALUE, slice_, P("x"))
    jax.block_until_ready(kept)
    np.save(tmp_path / "value.npy", VALUE)
    with start_client(cluster, tmp_path, rounds=1) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "saved 0\n"
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "saving 1\n"
        eventually(lambda: all(host["tasks"] for host in cluster.stats()["hosts"]), "the hosts write", 20)
        client.kill()
        client.wait()
    await_nothing_left(cluster, 1)
    np.testing.assert_array_equal(np.asarray(kept), VALUE)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        assert list(manager.all_steps()) == [0]
        target = {"a": jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype, sharding=slice_.sharding(P("x")))}
        state = manager.restore(0, args=ocp.args.StandardRestore(target))
        np.testing.assert_array_equal(np.asarray(state["a"]), VALUE)
