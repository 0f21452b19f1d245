"""Plugin programs of pathwaysutils through a proxy: a reshard request moves arrays; what is wrong with one, or asks for
something else, is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stock_clients import StockClient

import pathways as pw

#: `request` writes what pathwaysutils' `experimental.reshard` sends, and `call` runs it as its `PluginExecutable` does.
BEGIN = """
import base64, json
from jax.extend import ifrt_programs
from jax.interpreters import pxla
programs = ifrt_programs.ifrt_programs
d = jax.devices()

def described(sharding, ndim):
    proto = sharding._to_xla_hlo_sharding(ndim).to_proto().SerializeToString()
    ids = [device.id for device in sharding._addressable_device_assignment]
    tiles = base64.b64encode(proto).decode()
    return {"devices": {"device_ids": ids}, "xla_hlo_sharding": tiles, "memory_kind": "device"}

def request(arrays, targets, donate=False):
    return {"reshardRequest": {
        "donateInput": donate,
        "inSharding": [described(x.sharding, x.ndim) for x in arrays],
        "outSharding": [described(t, x.ndim) for x, t in zip(arrays, targets)],
    }}

def load(what):
    text = what if isinstance(what, str) else json.dumps(what)
    return d[0].client.compile_ifrt_program(
        programs.make_plugin_program(text), programs.make_plugin_compile_options()
    )

def call(program, arrays, targets):
    made = program.execute_sharded(arrays, with_tokens=True)
    avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in arrays]
    out = made.consume_with_handlers(pxla.global_avals_to_results_handler(avals, targets, True).handlers)
    made.consume_token().block_until_ready()
    return out

def mesh(devices, *shape):
    return Mesh(np.array(devices).reshape(shape), tuple("xyz"[:len(shape)]))

x = np.arange(64, dtype=np.float32).reshape(8, 8)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=2)) as made:
        yield made


@pytest.fixture(scope="module")
def client(variables: dict[str, str]) -> Iterator[StockClient]:
    with StockClient(variables) as made:
        made.out(BEGIN)
        yield made


def test_arrays_are_cut_anew_on_other_devices(client: StockClient) -> None:
    found = client.out(
        """
        one, two = mesh(d[:4], 2, 2), mesh(d[4:], 4)
        arrays = [
            jax.device_put(x, NamedSharding(one, P("x", "y"))),
            jax.device_put(x[0], NamedSharding(one, P(("y", "x")))),
            jax.device_put(np.int8(3), NamedSharding(one, P())),
            jax.device_put(x + 1, NamedSharding(one, P("y"))),
        ]
        targets = [
            NamedSharding(two, P(None, "x")), NamedSharding(two, P()), jax.sharding.SingleDeviceSharding(d[7]),
            NamedSharding(one, P("x")),
        ]
        program = load(request(arrays, targets))
        out = []
        for _ in range(3):
            made = call(program, arrays, targets)
            out.append([np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(arrays, made)])
            out.append([
                all(np.array_equal(np.asarray(s.data), np.asarray(a)[s.index]) for s in b.addressable_shards)
                for a, b in zip(arrays, made)
            ])
        """
    )
    assert found == [[True] * 4] * 6


def test_what_is_given_is_gone(client: StockClient) -> None:
    said = client.error(
        """
        given = [jax.device_put(x, NamedSharding(mesh(d[:4], 4), P("x")))]
        targets = [NamedSharding(mesh(d[:2], 2), P("x"))]
        (made,) = call(load(request(given, targets, donate=True)), given, targets)
        assert np.array_equal(np.asarray(made), x)
        np.asarray(given[0] + 1)
        """
    )
    assert "deleted" in said or "donated" in said, said


def test_wrong_requests(client: StockClient) -> None:
    client.out("arrays = [jax.device_put(x, NamedSharding(mesh(d[:4], 4), P('x')))]\nback = [arrays[0].sharding]")
    for code, words in (
        ("load('no json')", "not one request"),
        ("load('{}')", "not one request"),
        ("load('[' * 100000)", "not one request"),
        ("load({'profileRequest': {}})", "UNIMPLEMENTED: the plugin program 'profileRequest'; this proxy runs reshard"),
        ("load({'bulk_persistence_read_request': {}})", "a bulk_persistence_read_request that is malformed"),
        ("load({'reshardRequest': {}})", "malformed"),
        ("load({'reshardRequest': {'inSharding': [{}], 'outSharding': [1]}})", "malformed"),
        ("load(json.dumps(request(arrays, back)).replace('[0, 1, 2, 3]', '[0, 1, 2, 99]'))", "99"),
        ("load(json.dumps(request(arrays, back)).replace('[0, 1, 2, 3]', '[0, 1, 2, 2]'))", "malformed"),
        ("call(load(request(arrays, back)), arrays * 2, back)", "takes 1 arrays; 2 came"),
        (
            "call(load(request(arrays, back)), [jax.device_put(x, NamedSharding(mesh(d[4:], 4), P('x')))], back)",
            "lies on the",
        ),
        (
            "call(load(request(arrays, back)), [jax.device_put(x, NamedSharding(mesh(d[:4], 4), P(None, 'x')))], back)",
            "is not cut as",
        ),
    ):
        assert words in client.error(code), code
    assert client.out("out = np.array_equal(np.asarray(call(load(request(arrays, back)), arrays, back)[0]), x)")
