"""Coming and going: connecting again, several clients at once, Ctrl-C, and what a client or cluster leaves behind."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import pathways as pw
from pathways import errors

X = np.arange(8, dtype=np.float32)

#: Another client: joins the cluster at argv[1], says "ready", and computes for ever, checking every value.
NEIGHBOUR = """
    import sys
    import numpy as np
    import pathways as pw

    cluster = pw.connect(sys.argv[1])
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=4)
    total = pw.jit(lambda x: x + x.sum(), devices=slice_, in_shardings=pw_spec, out_shardings=pw_spec)
    x = pw.device_put(np.ones(1 << 14, np.float32), slice_)
    number = 0
    while True:
        results = [total(x) for _ in range(20)]
        assert np.asarray(results[-1])[0] == 1 + (1 << 14)
        number += 1
        if number == 3:
            print("ready", flush=True)
        if len(sys.argv) > 2 and number == int(sys.argv[2]):
            cluster.close()
            sys.exit(0)
""".replace("pw_spec", "__import__('jax').sharding.PartitionSpec('x')")


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        text=True,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def owned(cluster: Any) -> list[int]:
    """Buffers on each host, once their number stays."""
    last: list[list[int]] = []
    while len(last) < 4 or last[-1] != last[-4]:
        gc.collect()
        cluster.native.flush()
        last.append([host["objects"] for host in cluster.stats()["hosts"]])
        time.sleep(0.05)
    return last[-1]


def test_connecting_again_gives_the_same_cluster(cluster: Any, kind_of_cluster: str) -> None:
    target: Any = None if cluster.is_embedded else pw.LocalCluster(len(cluster.islands), 2, 2)
    if kind_of_cluster not in ("embedded", "local", "islands"):
        target = cluster.address
    assert pw.connect(target) is cluster
    assert pw.make_virtual_device_set().cluster is cluster
    assert "cluster" in repr(cluster).lower() and "closed" not in repr(cluster)


def test_a_closed_cluster_is_refused_everywhere() -> None:
    cluster = pw.connect(pw.LocalCluster(1, 1, 2))
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
    f = pw.jit(lambda x: x + 1, devices=slice_)
    x = pw.device_put(X, slice_)
    seen, unseen, pending = f(x), f(x), f(x)
    np.asarray(seen)
    pending.copy_to_host_async()
    pids = [host["pid"] for host in cluster.stats()["hosts"]]
    cluster.close()
    cluster.close()
    assert not cluster.is_open and not cluster.is_alive() and "closed" in repr(cluster)
    np.testing.assert_array_equal(np.asarray(seen), X + 1)
    for use in (
        lambda: f(x),
        lambda: f(X),
        lambda: pw.device_put(X, slice_),
        lambda: x + 1,
        lambda: pw.make_virtual_device_set(cluster).add_slice(devices=1),
        lambda: pw.program(lambda x: f(x))(X),
        lambda: pw.cancel(unseen),
    ):
        with pytest.raises(errors.ClusterClosedError, match="closed"):
            use()
    for use in (unseen.block_until_ready, lambda: np.asarray(unseen), lambda: np.asarray(pending)):
        try:  # what had come before the end is there, also what was read ahead
            use()
        except errors.ClusterClosedError as error:
            assert "closed" in str(error)
    assert "pw.Array" in repr(unseen)
    x.delete()
    unseen = pending = None
    deadline = time.monotonic() + 10
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "host processes are left"
        time.sleep(0.05)
    with pw.connect(pw.LocalCluster(1, 1, 2)) as again:
        assert again is not cluster
        with pytest.raises(errors.PlacementError, match="another cluster"):
            pw.jit(lambda x: x, devices=pw.make_virtual_device_set(again).add_slice(devices=1))(
                x if not x.is_deleted() else seen
            )


def test_an_embedded_cluster_can_be_closed_and_opened(embedded_cluster: Any) -> None:
    x = pw.device_put(X, pw.make_virtual_device_set(embedded_cluster).add_slice(devices=2))
    embedded_cluster.close()
    with pytest.raises(errors.ClusterClosedError):
        np.asarray(x)
    with pw.connect() as again:
        f = pw.jit(lambda x: x + 1, devices=pw.make_virtual_device_set(again).add_slice(devices=2))
        np.testing.assert_array_equal(np.asarray(f(X)), X + 1)


def test_threads_share_a_client(add: Any) -> None:
    """One array and one program used from several threads at once, first calls included."""
    f, g = pw.jit(lambda x: x + 1, devices=add(2)), pw.jit(lambda x: x * 2, devices=add(2))
    both = pw.program(lambda x: g(f(x)))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            for number in range(60):
                value = X[: 1 << (number + seed) % 3] + seed
                got = np.asarray(both(value) if number % 2 else g(f(pw.device_put(value, f.slice))))
                if not np.array_equal(got, (value + 1) * 2):
                    wrong.append((value, got))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_a_client_that_leaves_or_dies_disturbs_nobody(local_cluster: Any) -> None:
    """OWN-1: what it owned is freed; its neighbour's collectives on the same devices stay right."""
    slice_ = pw.make_virtual_device_set(local_cluster).add_slice(devices=4)
    total = pw.jit(lambda x: x * x.sum(), devices=slice_, in_shardings=jax.sharding.PartitionSpec("x"))
    x = pw.device_put(X, slice_)
    float(total(x)[0])
    objects = owned(local_cluster)
    leaver, victim = start(NEIGHBOUR, local_cluster.address, "6"), start(NEIGHBOUR, local_cluster.address)
    killed = False
    try:
        deadline = time.monotonic() + 140
        while time.monotonic() < deadline:
            results = [total(x) for _ in range(10)]
            np.testing.assert_array_equal(np.asarray(results[-1]), X * X.sum())
            if not killed and leaver.poll() is not None:
                assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
                victim.kill()
                killed = True
                deadline = time.monotonic() + 2
        assert killed, leaver.communicate()[0] if leaver.poll() is not None else "nobody came"
        assert leaver.returncode == 0, leaver.stdout.read() if leaver.stdout else ""
    finally:
        for process in (leaver, victim):
            process.kill()
            process.communicate()
    deadline = time.monotonic() + 10
    while len(local_cluster.stats()["clients"]) != 1:
        assert time.monotonic() < deadline, local_cluster.stats()["clients"]
        time.sleep(0.05)
    del results
    assert owned(local_cluster) == objects
    assert len(set(local_cluster.stats()["gangs"])) == 1


def test_a_process_ends_in_order_while_its_devices_compute() -> None:
    code = """
        import signal
        import jax
        import jax.numpy as jnp
        import numpy as np
        import pathways as pw

        def heavy(x):
            square = jnp.full((384, 384), 0.001) + x[0] * 0
            return x + 1 + jax.lax.fori_loop(0, 600, lambda _, m: jnp.tanh(m @ m), square)[0, 0] * 0

        with pw.connect() as cluster:
            slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
            x = pw.device_put(np.arange(4, dtype=np.float32), slice_)
            work = pw.jit(heavy, devices=slice_).lower(x).compile()
            y = work(x)
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            try:
                y.block_until_ready()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
    """
    process = start(code)
    assert process.communicate(timeout=120)[0].split() == ["interrupted"]
    assert process.returncode == 0


@pytest.mark.parametrize("kind", ["embedded", pytest.param("local", marks=pytest.mark.slow)])
def test_ctrl_c_stops_the_wait_and_nothing_else(kind: str) -> None:
    code = """
        import sys
        import jax
        import jax.numpy as jnp
        import numpy as np
        import pathways as pw

        def heavy(x):
            square = jnp.full((256, 256), 0.001) + x[0] * 0
            return x + 1 + jax.lax.fori_loop(0, 1000, lambda _, m: jnp.tanh(m @ m), square)[0, 0] * 0

        with pw.connect(None if sys.argv[1] == "embedded" else pw.LocalCluster(1, 1, 2)) as cluster:
            slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
            x = pw.device_put(np.arange(4, dtype=np.float32), slice_)
            work = pw.jit(heavy, devices=slice_).lower(x).compile()
            y = work(x)
            for wait in (lambda: y.block_until_ready(), lambda: np.asarray(y)):
                print("waiting", flush=True)
                try:
                    while True:
                        wait()
                        y = work(x)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
            print(np.asarray(y).tolist(), np.asarray(work(y)).tolist(), flush=True)
        print("closed", flush=True)
    """
    process = start(code, kind, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if lines[-1] == "waiting":
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, lines
    finally:
        process.kill()
        process.communicate()
    assert lines == ["waiting", "interrupted"] * 2 + ["[1.0, 2.0, 3.0, 4.0] [2.0, 3.0, 4.0, 5.0]", "closed"]


def test_ctrl_c_is_no_failure_of_what_it_comes_amid(cluster: Any, add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedded, the thread that waits does the host's work; Ctrl-C there is the user's, and the work goes on."""
    x = np.arange(4, dtype=np.float32)
    one = add(1)
    double = pw.jit(lambda x: x * 2, devices=one)
    np.testing.assert_array_equal(double(x), x * 2)
    handler = signal.getsignal(signal.SIGINT)
    amid: list[str] = []

    def interrupted(name: str, work: Any) -> Any:
        def do(*args: Any) -> Any:
            if name not in amid:
                amid.append(name)
                signal.raise_signal(signal.SIGINT)
            return work(*args)

        return do

    if cluster.driver is not None:
        for name in ("put", "fetch"):
            monkeypatch.setattr(cluster.driver.values, name, interrupted(name, getattr(cluster.driver.values, name)))
    interrupts = 0

    def insist(call: Any) -> Any:
        nonlocal interrupts
        while True:
            try:
                return call()
            except KeyboardInterrupt:
                interrupts += 1

    array = insist(lambda: pw.device_put(x + 1, one))
    result = insist(lambda: double(array))
    np.testing.assert_array_equal(insist(lambda: np.asarray(result)), (x + 1) * 2)
    assert insist(lambda: np.asarray(double(np.zeros((0, 3))))).shape == (0, 3)  # empty values are always fetched
    assert interrupts == len(amid) == (2 if cluster.driver is not None else 0)
    # Handlers that are set later, and call the one before, see it as well.
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def mine(number: int, frame: Any) -> None:
        seen.append(number)
        assert callable(before)
        before(number, frame)

    signal.signal(signal.SIGINT, mine)
    try:
        np.asarray(double(x))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert seen == [signal.SIGINT]
