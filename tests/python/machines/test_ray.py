"""Clusters on Ray, on a real Ray cluster of two nodes on this machine.

Map from label to test:
    RAY-1 (one use)  test_an_actor_that_is_killed_comes_back
    RAY-2 (healing)  test_an_actor_that_is_killed_comes_back
    RAY-3 (free)     test_closing_frees_everything
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from control_clusters import eventually, is_running
from ray_nodes import RayNodes

import pathways as pw
from pathways.cluster.ray_resources import RayPlacement
from pathways.process import environment
from pathways.process.config import ClusterOptions
from pathways.process.run_directory import authority_folder
from pathways.trust import Tokens

X = np.arange(8, dtype=np.float32)
SHAPE = {"islands": 2, "hosts_per_island": 1, "devices_per_host": 2}
START_S = 240.0  # a busy machine


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayNodes]:
    """Two nodes, each with 4 CPUs and 4 GPUs in name only. This process is not connected to it."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'pathways-jax[ray]'")
    with pytest.MonkeyPatch.context() as patch, RayNodes() as nodes:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        nodes.add(labels={"kind": "second"})
        yield nodes


@pytest.fixture
def target(ray_cluster: RayNodes) -> pw.RayCluster:
    return pw.RayCluster(
        **SHAPE, platform="cpu", resources_per_host={"GPU": 2}, ray_address=ray_cluster.address, start_timeout_s=START_S
    )


@pytest.fixture
def cluster(target: pw.RayCluster) -> Iterator[pw.Cluster]:
    with pw.connect(target) as found:
        yield found


def placed(cluster: pw.Cluster, island: int, function: Any) -> Any:
    return pw.jit(function, devices=pw.make_virtual_device_set(cluster).add_slice(devices=2, island=island))


def states(cluster: pw.Cluster) -> list[str]:
    return [host["state"] for host in cluster.stats()["hosts"]]


def actor_of(host: int) -> psutil.Process:
    """The actor's process, above the hosts, the agent and its supervisor."""
    return next(each for each in psutil.Process(host).parents() if "RayAgent" in each.name() + "".join(each.cmdline()))


def host_pids(cluster: pw.Cluster) -> list[int]:
    return [host["pid"] for host in cluster.stats()["hosts"]]


def free(ray_cluster: RayNodes) -> dict[str, float]:
    """What Ray has free, asked by a process of its own."""
    code = f"import ray, json; ray.init({ray_cluster.address!r}); print(json.dumps(ray.available_resources()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_a_program_on_two_islands_is_plain_jax(cluster: pw.Cluster) -> None:
    def first(w: Any, x: Any) -> Any:
        return jax.numpy.tanh(x * w)

    def second(h: Any) -> Any:
        return (h**2).sum()

    left, right = placed(cluster, 0, first), placed(cluster, 1, second)

    @pw.program
    def loss_and_gradient(w: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda w: right(left(w, x)))(w)

    loss, gradient = loss_and_gradient(np.float32(0.5), X)
    wanted, wanted_gradient = jax.value_and_grad(lambda w: second(first(w, X)))(np.float32(0.5))
    np.testing.assert_allclose(np.asarray(loss), wanted, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(gradient), wanted_gradient, rtol=1e-6)

    # SPREAD: each island on a node of its own; both have the devices that Ray assigned, and no others.
    actors = [actor_of(pid) for pid in host_pids(cluster)]
    assert len({actor.ppid() for actor in actors}) == 2
    for actor, pid in zip(actors, host_pids(cluster), strict=True):
        agent = psutil.Process(pid).parents()[0]
        assigned = agent.environ()["CUDA_VISIBLE_DEVICES"]
        assert assigned == psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"]
        assert len(assigned.split(",")) == 2
        assert actor.is_running()
        on_gpus = environment.host_environment(ClusterOptions(1, 2, 1), "cuda", 1, agent.environ())
        assert on_gpus["CUDA_VISIBLE_DEVICES"] == assigned.split(",")[1]


@pytest.mark.slow
@pytest.mark.watchdog(600)
@pytest.mark.parametrize("for_good", [False, True], ids=["killed", "killed for good"])
def test_an_actor_that_is_killed_comes_back(cluster: pw.Cluster, for_good: bool) -> None:
    """Its island is lost and comes back; the other one goes on. Each start has had a token for one use."""
    here, there = placed(cluster, 0, lambda x: x * 2 + 1), placed(cluster, 1, lambda x: x * 2 + 1)
    kept_here, kept_there = here(X), there(X)
    np.testing.assert_array_equal(np.asarray(kept_there), X * 2 + 1)
    before = host_pids(cluster)
    below = actor_of(before[1]).children(recursive=True)
    handle = cluster._handle
    if for_good:
        handle._ray.kill(handle._actors[1])
    else:
        actor_of(before[1]).kill()
    eventually(lambda: states(cluster)[1] != "up", "island 1 is lost", 30)
    np.testing.assert_array_equal(np.asarray(here(kept_here)), (X * 2 + 1) * 2 + 1)
    with pytest.raises(pw.errors.HostLostError):
        np.asarray(there(kept_there) + 1)
    cluster.wait_for(4, 180)
    np.testing.assert_array_equal(np.asarray(there(X)), X * 2 + 1)
    after = host_pids(cluster)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert "actor" in handle.failures[1]
    _, alive = psutil.wait_procs(below, timeout=15)
    assert not alive
    tokens = Tokens(authority_folder(handle._local.directory)).list()
    assert len(tokens) >= 3
    assert {token.uses for token in tokens} == {1}


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_a_node_that_is_lost(ray_cluster: RayNodes) -> None:
    """Ray starts the actor again on another node that has what the island needs."""
    asked = pw.RayCluster(resources_per_host={"lake": 1}, ray_address=ray_cluster.address, start_timeout_s=START_S)
    nodes = [ray_cluster.add(resources={"lake": 1})]
    try:
        with pw.connect(asked) as cluster:
            slice = pw.make_virtual_device_set(cluster).add_slice(devices=1)
            call = pw.jit(lambda x: x + 1, devices=slice)
            np.testing.assert_array_equal(np.asarray(call(X)), X + 1)
            before = host_pids(cluster)
            nodes.append(ray_cluster.add(resources={"lake": 1}))
            ray_cluster.remove(nodes.pop(0))
            eventually(lambda: states(cluster) != ["up"], "the island is lost", 60)
            cluster.wait_for(1, 180)
            np.testing.assert_array_equal(np.asarray(call(X)), X + 1)
            assert host_pids(cluster) != before
            assert not is_running(before[0])
    finally:
        for each in nodes:
            ray_cluster.remove(each)


@pytest.fixture
def client_address(ray_cluster: RayNodes) -> Iterator[str]:
    """Where the Ray cluster serves `ray://` clients, without Ray's proxy in between."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ray.util.client.server", "--address", ray_cluster.address]
    command += ["--host", "127.0.0.1", "--port", str(port), "--mode", "specific-server"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:

            def listens() -> bool:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    return True
                assert server.poll() is None
                return False

            eventually(listens, "the server listens", 90)
            yield f"ray://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_a_client_of_ray(client_address: str) -> None:
    """`ray://`: this process is no part of the Ray cluster; the agents reach its controller all the same."""
    asked = pw.RayCluster(**SHAPE, labels={"kind": "second"}, ray_address=client_address, start_timeout_s=START_S)
    with pw.connect(asked) as cluster:
        np.testing.assert_array_equal(np.asarray(placed(cluster, 1, lambda x: x + 1)(X)), X + 1)
        assert len({actor_of(pid).ppid() for pid in host_pids(cluster)}) == 1  # both on the node with the label
        pids = host_pids(cluster)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_closing_frees_everything(ray_cluster: RayNodes, target: pw.RayCluster) -> None:
    pattern = os.path.join(tempfile.gettempdir(), f"pathways-ray-{os.getuid()}-*")
    folders = set(glob.glob(pattern))
    with pw.connect(target) as cluster:
        pids = host_pids(cluster)
        actors = [actor_of(pid) for pid in pids]
        everything = [*actors, *(child for actor in actors for child in actor.children(recursive=True))]
        here = psutil.Process(cluster._handle._local.supervisor_pid)
        everything += [here, *here.children(recursive=True)]
        assert len(everything) >= 10
        kept = set(glob.glob(pattern)) - folders
        assert len(kept) == 2
        assert all(pathlib.Path(folder).stat().st_mode & 0o077 == 0 for folder in kept)
        with pytest.raises(pw.errors.ConnectError, match="GPU: 200 are needed, 8 are there"):
            pw.connect(pw.RayCluster(islands=2, resources_per_host={"GPU": 100}, platform="cpu"))
        other = pw.RayCluster(islands=1, resources_per_host={"GPU": 4}, platform="cpu", start_timeout_s=2)
        with pytest.raises(pw.errors.ConnectError, match=r"GPU: 4.* free in all is .*GPU: 4; others use the rest"):
            pw.connect(other)
        assert cluster.is_open
    psutil.wait_procs(everything, timeout=15)
    assert [process.pid for process in everything if is_running(process.pid)] == []
    assert not kept & set(glob.glob(pattern))
    import ray

    assert not ray.is_initialized()
    eventually(lambda: (free(ray_cluster)["CPU"], free(ray_cluster)["GPU"]) == (8.0, 8.0), "everything is free", 60)


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_clusters_share_the_connection_to_ray(target: pw.RayCluster) -> None:
    """The first one has connected this process. Its end does not disconnect the other one."""
    import ray

    with pw.connect(target) as first, pw.connect(dataclasses.replace(target, strategy="PACK")) as other:
        first.close()
        assert ray.is_initialized()
        np.testing.assert_array_equal(np.asarray(placed(other, 1, lambda x: x + 1)(X)), X + 1)
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_a_connection_that_the_program_made_later_stays(ray_cluster: RayNodes, target: pw.RayCluster) -> None:
    """The cluster ended with the connection that it had made. The next connection is not its own."""
    import ray

    with pw.connect(target):
        ray.shutdown()
        ray.init(ray_cluster.address, log_to_driver=False)
    try:
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_a_machine_that_is_drained_stays_away(cluster: pw.Cluster) -> None:
    """Its actor ends, and nobody starts the agent again. Its slices go on elsewhere."""
    call = placed(cluster, 1, lambda x: x + 1)
    kept = call(X)
    actor = actor_of(host_pids(cluster)[1])
    machines = {machine["island"]: machine["name"] for machine in cluster.stats()["machines"]}
    assert cluster.drain(machines[1], timeout=60) == 1
    eventually(lambda: not is_running(actor.pid), "the actor has ended", 30)
    assert "drain" in cluster._handle.failures[1]
    tokens = Tokens(authority_folder(cluster._handle._local.directory)).list()
    np.testing.assert_array_equal(np.asarray(call(kept)), X + 2)
    assert states(cluster)[0] == "up"
    assert states(cluster)[1] != "up"
    assert len(tokens) == 2


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_a_driver_that_is_killed(ray_cluster: RayNodes) -> None:
    """Ray frees what the process had, and no process is left. Here without encryption."""
    code = f"""if True:
        import json, time, pathways as pw
        asked = pw.RayCluster(2, 1, 2, resources_per_host={{"CPU": 2}}, ray_address={ray_cluster.address!r},
                              insecure_plaintext=True, listen="127.0.0.1:0", start_timeout_s={START_S})
        with pw.connect(asked) as cluster:
            print(json.dumps([host["pid"] for host in cluster.stats()["hosts"]]), flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            pids = json.loads(driver.stdout.readline())
            assert len(pids) == 2
        finally:
            driver.kill()
    eventually(lambda: not any(is_running(pid) for pid in pids), "the hosts are gone", 30)
    eventually(lambda: free(ray_cluster)["CPU"] == 8.0, "everything is free", 60)


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_ray_that_ends_as_a_whole() -> None:
    """The cluster can be closed, and the program goes on. Ray would end a program that asks it something then."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'pathways-jax[ray]'")
    with RayNodes() as nodes:
        code = f"""if True:
            import sys, pathways as pw
            cluster = pw.connect(pw.RayCluster(ray_address={nodes.address!r}, start_timeout_s={START_S}))
            print("there", flush=True)
            sys.stdin.readline()
            cluster.close()
            import ray
            print(ray.is_initialized())
        """
        command = [sys.executable, "-c", code]
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "there\n"
            nodes.close()
            assert driver.communicate("go\n", timeout=120)[0] == "False\n"
            assert driver.returncode == 0
        finally:
            driver.kill()
            driver.communicate()


@pytest.mark.slow
@pytest.mark.watchdog(300)
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"islands": 3, "resources_per_host": {"GPU": 3}}, "GPU: 9 are needed, 8 are there"),
        ({"resources_per_host": {"lake": 1}}, "lake: 1 are needed, 0 are there"),
        ({"resources_per_host": {"GPU": 5}}, "on one node; the 2 nodes together have room for 0"),
        ({"islands": 3, "strategy": "STRICT_SPREAD"}, "needs 3 nodes, and 2 of 2"),
        ({"islands": 2, "strategy": "STRICT_PACK", "resources_per_host": {"GPU": 3}}, "one node with room for 2"),
        (
            {"resources_per_host": {"lake": 1}, "wait_for_resources": True, "start_timeout_s": 1},
            "the cluster does not have lake: 1 are needed",
        ),
        ({"labels": {"kind": "third"}, "start_timeout_s": 2}, "labels {'kind': 'third'}"),
    ],
)
def test_what_the_ray_cluster_does_not_have_is_refused(
    ray_cluster: RayNodes, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(pw.errors.ConnectError, match=message):
        pw.connect(pw.RayCluster(platform="cpu", ray_address=ray_cluster.address, **asked))


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_an_island_on_two_nodes(ray_cluster: RayNodes) -> None:
    """One computation runs on hosts of both; when one part dies, the island comes back whole."""
    shape = {"islands": 1, "hosts_per_island": 2, "devices_per_host": 2, "nodes_per_island": 2, "fabric": "lo"}
    asked = {"platform": "cpu", "resources_per_host": {"GPU": 2}, "ray_address": ray_cluster.address}
    with pw.connect(pw.RayCluster(**shape, **asked, start_timeout_s=START_S)) as cluster:
        whole = pw.make_virtual_device_set(cluster).add_slice(devices=4)
        add_sum = pw.jit(lambda x: x + x.sum(), devices=whole)
        np.testing.assert_array_equal(np.asarray(add_sum(X)), X + X.sum())
        actors = [actor_of(pid) for pid in host_pids(cluster)]
        assert len({actor.ppid() for actor in actors}) == 2, "SPREAD: each part on a node of its own"
        machines = cluster.stats()["machines"]
        assert [each["fabric"] for each in machines] == ["127.0.0.1"] * 2
        actors[1].kill()
        with pytest.raises(pw.errors.HostLostError):
            for _ in range(1000):
                np.asarray(add_sum(X))
        cluster.wait_for(4, START_S)
        eventually(lambda: states(cluster) == ["up", "up"], "the island is back", START_S)
        np.testing.assert_array_equal(np.asarray(add_sum(X)), X + X.sum())


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_up_on_ray(ray_cluster: RayNodes) -> None:
    command = [sys.executable, "-m", "pathways", "up", "--on", "ray", "--ray-address", ray_cluster.address]
    command += ["--islands", "2", "--hosts-per-island", "2", "--resource", "GPU=1", "--platform", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        try:
            address = up.stdout.readline().strip()
            with pw.connect(address) as cluster:
                assert states(cluster) == ["up"] * 4
                hosts = host_pids(cluster)
                np.testing.assert_array_equal(np.asarray(placed(cluster, 1, lambda x: x + 1)(X)), X + 1)
        finally:
            up.terminate()
            _, said = up.communicate(timeout=60)
    assert up.returncode == 0, said
    assert not any(is_running(pid) for pid in hosts)


@pytest.mark.slow
@pytest.mark.watchdog(600)
def test_the_try_out_of_the_page_prints_what_it_says(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """docs/ray.md, as a newcomer does it: a file, and a Ray that it starts itself."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'pathways-jax[ray]'")
    page = (root / "docs/ray.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python norun\n(import jax.*?)```", page, re.DOTALL)
    script = tmp_path / "try_out.py"
    script.write_text(program, encoding="utf-8")
    # Ray gives its processes little time beside other work.
    env = {**{key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}, "RAY_worker_niceness": "0"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == program.rpartition("# ")[2].strip()


def test_options_that_make_no_sense() -> None:
    """They are refused before Ray is asked, and without Ray."""
    for asked, message in (
        ({"strategy": "FAR"}, "strategy is one of SPREAD"),
        ({"resources_per_host": {"GPU": "all"}}, "amounts by name"),
        ({"resources_per_host": {"CPU": 0}}, "asks Ray for nothing"),
        ({"resources_per_host": {"GPU": 1}, "devices_per_host": 2}, "ask for GPU: 2"),
        ({"platform": "rocm"}, "ask for GPU: 1"),
        ({"hosts_per_island": 3, "nodes_per_island": 2, "fabric": "lo"}, "the 3 hosts of an island cannot be spread"),
        ({"hosts_per_island": 2, "nodes_per_island": 0}, "cannot be spread"),
        ({"hosts_per_island": 2, "nodes_per_island": 2}, "needs fabric="),
    ):
        with pytest.raises(pw.errors.OptionError, match=message):
            pw.connect(pw.RayCluster(**asked))
    with pytest.raises(ValueError, match="islands"):
        pw.connect(pw.RayCluster(islands=0))
    assert hash(pw.RayCluster(resources_per_host={"GPU": 1})) == hash(pw.RayCluster(resources_per_host={"GPU": 1}))
    assert RayPlacement({"TPU": 4}).platform == "tpu"
    assert RayPlacement({"GPU": 2, "memory": 2**34}).actor_options(2)["memory"] == 2**35
    assert RayPlacement({"GPU": 2}).bundle(3) == {"CPU": 3.0, "GPU": 6}


def test_ray_that_is_not_installed_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(ImportError):
        import ray

        assert not ray.is_initialized()
        with pytest.raises(pw.errors.ConnectError, match="no Ray cluster at ray_address="):
            pw.connect(pw.RayCluster(ray_address="127.0.0.1:1"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(pw.errors.ConnectError, match=r"pip install 'pathways-jax\[ray\]'"):
        pw.connect(pw.RayCluster())
