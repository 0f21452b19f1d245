"""Hosts say where their devices are, and slices keep neighbours; on CPU devices that claim to be those of a TPU.

TORUS-1: `test_slices_of_hosts_with_coordinates`. FAULT-1: `test_coordinates_that_make_no_sense`.
"""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors
from pathways.cluster.launcher import start_local_cluster
from pathways.host.devices import HostDevices
from pathways.host.main import start_jax_driver
from pathways.process import environment
from pathways.process.config import ClusterOptions, HostConfig

pytestmark = pytest.mark.usefixtures("surroundings")

#: Two machines with 2 x 2 chips each: x goes from one to the other, and wraps.
PLACES = [[(0, x + 2 * host, y, 0, 0) for x in range(2) for y in range(2)] for host in range(2)]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`start(places)`: a cluster of two hosts whose devices are there."""
    handles = []

    def one(places: Any) -> Any:
        monkeypatch.setenv("FAKE_COORDINATES", json.dumps([list(itertools.chain(*each)) for each in places]))
        monkeypatch.setenv("TPU_TOPOLOGY_WRAP", "true,false,false")
        handles.append(start_local_cluster(1, 2, 4, platform="cpu", driver="control_doubles:start_on_torus"))
        return handles[-1]

    yield one
    for handle in handles:
        handle.close()


@pytest.mark.slow
def test_slices_of_hosts_with_coordinates(start: Any) -> None:
    at = dict(enumerate(itertools.chain(*PLACES)))

    def are_joined(one: Any, other: Any) -> bool:
        (_, x, y, *_), (_, u, v, *_) = at[one.id], at[other.id]
        return abs(y - v) + min(abs(x - u), 4 - abs(x - u)) == 1

    with pw.connect(start(PLACES).address) as cluster:
        assert cluster.stats()["topology"].coordinates == tuple(at.values())
        devices = pw.make_virtual_device_set(cluster)
        ring = devices.add_slice(devices=8)
        assert all(are_joined(*pair) for pair in itertools.pairwise([*ring.devices, ring.devices[0]]))
        assert [device.id for device in ring.devices] != sorted(at)
        rows = devices.add_slice(shape=(2, 4), axis_names=("x", "y"))
        mesh = np.asarray(rows.devices).reshape(2, 4)
        assert all(are_joined(*pair) for row in mesh for pair in itertools.pairwise([*row, row[0]]))
        assert all(are_joined(*pair) for pair in mesh.T)

        x = np.arange(64, dtype=np.float32).reshape(8, 8)
        turn = jax.shard_map(
            lambda x: jax.lax.ppermute(x, "x", [(n, (n + 1) % 8) for n in range(8)]),
            mesh=ring.mesh, in_specs=P("x"), out_specs=P("x"),
        )  # fmt: skip
        np.testing.assert_array_equal(np.asarray(pw.jit(turn, devices=ring)(x)), np.roll(x, 1, 0))
        product = pw.jit(lambda x: (x @ x.T, jnp.cumsum(x, 0)), devices=rows, in_shardings=P("x", "y"))
        for got, want in zip(product(x), (x @ x.T, np.cumsum(x, 0)), strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)
        np.testing.assert_array_equal(np.asarray(pw.device_put(pw.device_put(x, ring, P("x")), rows, P("y", "x"))), x)


@pytest.mark.slow
def test_coordinates_that_make_no_sense(start: Any) -> None:
    with pytest.raises(errors.ConnectError, match="It made no sense: a report of kind stage: coordinates"):
        pw.connect(start([PLACES[0], [(0, -1, 0, 0, 0)] * 4]).address)


def test_what_a_device_says() -> None:
    chips = [types.SimpleNamespace(platform="tpu", coords=[x, 3, 1], core_on_chip=0, slice_index=1) for x in range(2)]
    assert HostDevices(0, chips, chips, 0).coordinates == [1, 0, 3, 1, 0, 1, 1, 3, 1, 0]  # type: ignore[arg-type]
    cores = [types.SimpleNamespace(platform="tpu", coords=[1, 0, 0], core_on_chip=core) for core in range(2)]
    assert HostDevices(0, cores, cores, 0).coordinates == [0, 1, 0, 0, 0, 0, 1, 0, 0, 1]  # type: ignore[arg-type]
    gpu = [types.SimpleNamespace(platform="gpu", coords=[1])]
    assert HostDevices(0, gpu, gpu, 0).coordinates == [], "what a GPU says is not about links"  # type: ignore[arg-type]
    assert HostDevices(0, jax.devices(), jax.devices(), 0).coordinates == []


def test_a_host_that_jax_numbers_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's numbers of processes and ours must agree: else a host would compute with other devices than it is told."""
    both = [
        types.SimpleNamespace(id=n, process_index=n, platform="cpu", memory_stats=lambda: {"bytes_limit": 1})
        for n in range(2)
    ]
    monkeypatch.setattr("pathways._jaxlib.drop_tracebacks", lambda: None)
    monkeypatch.setattr(jax, "devices", lambda: both)
    monkeypatch.setattr(jax, "local_devices", lambda: both[1:])
    config = HostConfig(0, ClusterOptions(1, 2, 1), "cpu", "", "", (0, 1), segment_fds=(-1, -1))
    with pytest.raises(RuntimeError, match="host 0 is number 0 of its island, but JAX calls it process"):
        start_jax_driver(config, [], None, lambda: None)


@pytest.mark.parametrize(
    ("environ", "wraps"),
    [
        ({}, (False, False, False)),
        ({"TPU_TOPOLOGY_WRAP": "true,false,True"}, (True, False, True)),
        ({"TPU_TOPOLOGY_WRAP": "true"}, (False, False, False)),
        ({"TPU_TOPOLOGY_WRAP": "true,true,true", "TPU_TOPOLOGY_ALT": "true"}, (False, False, False)),
        ({"TPU_TOPOLOGY_WRAP": "true,true,true", "TPU_TOPOLOGY_ALT": "false"}, (True, True, True)),
    ],
)
def test_which_axes_wrap(environ: dict[str, str], wraps: tuple[bool, ...]) -> None:
    assert environment.torus_wraps(environ) == wraps
