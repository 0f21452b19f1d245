"""`jax.experimental.colocated_python` in unmodified JAX: functions run once per host, beside their arrays, in processes
of their own; whatever becomes of a function fails its own call, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_clusters import eventually
from stock_clients import StockClient, serving

import pathways as pw

#: `each` makes an array of what its function makes of each shard that the host has.
BEGIN = """
import gc, os, signal, time
import ml_dtypes
from jax.experimental.colocated_python import colocated_cpu_devices, colocated_python, colocated_python_class

d = jax.devices()

def each(function):
    def call(x):
        made = [function(shard.data) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, made)
    return call

def same(spec):
    return spec

def move(x):
    return jax.device_put(x, jax.local_devices()[1])

number = jax.device_put(np.float32(3), d[0])
other = jax.device_put(np.float32(3), d[2])  # on the other host
add = colocated_python(lambda x: x + 1)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=2, devices_per_host=2)) as made:
        yield made


@pytest.fixture(scope="module")
def shared(variables: dict[str, str]) -> Iterator[StockClient]:
    with StockClient(variables) as made:
        made.out(BEGIN)
        yield made


@pytest.fixture
def client(shared: StockClient) -> Iterator[StockClient]:
    """A program that many tests share: after each of them, functions run on both hosts."""
    yield shared
    assert shared.out("out = [float(add(number)), float(add(other))]") == [4, 4]


def test_each_host_calls_it_with_its_own_shards(client: StockClient) -> None:
    found = client.out(
        """
        x = np.arange(16, dtype=np.float32).reshape(8, 2)
        f = colocated_python(each(lambda shard: shard * 10 + jax.process_index()))
        g = f.specialize(out_specs_fn=same)
        out = []
        for devices in (d, [d[3], d[0], d[2], d[1]], d[1:3]):
            y = jax.device_put(x, on(devices))
            out.append([np.asarray(h(y)).tolist() for h in (f, f, f, g, g)])
        """
    )
    rows = [[10.0 * (2 * row), 10.0 * (2 * row + 1)] for row in range(8)]
    for hosts, made in zip(([0, 0, 1, 1], [1, 0, 1, 0], [0, 1]), found, strict=True):
        expected = [[value + hosts[row * len(hosts) // 8] for value in values] for row, values in enumerate(rows)]
        assert made == [expected] * 5


def test_it_runs_in_a_process_of_its_own_which_its_functions_share(client: StockClient) -> None:
    found = client.out(
        """
        def who(x):
            command = open("/proc/self/cmdline").read()
            return jnp.array([os.getpid(), "pathways.process.sidecar" in command, len(jax.local_devices())])
        out = [colocated_python(who)(x).tolist() for x in (number, number + 1, other)]
        """
    )
    pids = [pid for pid, _, _ in found]
    assert pids[0] == pids[1] != pids[2]
    assert all(rest == [1, 2] for _, *rest in found)


def test_trees_and_types(client: StockClient) -> None:
    found = client.out(
        """
        names = ("bool", "int8", "uint32", "bfloat16", "float16", "complex64", "int4")
        values = {name: jax.device_put(np.array([0, 1, 1]).astype(jnp.dtype(name)), d[1]) for name in names}
        f = colocated_python(lambda tree, k: {"k": (k["a"], None), "tree": [tree, jnp.zeros((2, 0))]})
        out = []
        for _ in range(3):
            made = f(values, k={"a": values["int8"]})
            tree, empty = made["tree"]
            out.append({name: [str(a.dtype), np.asarray(a).astype(int).tolist()] for name, a in tree.items()})
            out.append([made["k"][0].tolist(), made["k"][1], empty.shape, empty.devices() == {d[1]}])
        """
    )
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first == {name: [name, [0, 1, 1]] for name in first} and len(first) == 7
        assert second == [[0, 1, 1], None, [2, 0], True]


def test_wide_types_and_keys(client: StockClient) -> None:
    assert client.out(
        """
        with jax.enable_x64(True):
            big = jax.device_put(np.int64(1 << 40), d[0])
            out = [int(add(big)) for _ in range(2)]
        f = colocated_python(lambda key: jax.random.split(key))
        key = jax.device_put(jax.random.key(7), d[2])
        out.append([jax.random.key_data(f(key)).tolist() == jax.random.key_data(jax.random.split(key)).tolist()] * 2)
        """
    ) == [(1 << 40) + 1, (1 << 40) + 1, [True, True]]


def test_without_arguments_and_without_results(client: StockClient, tmp_path: Path) -> None:
    path = str(tmp_path / "calls")
    found = client.out(
        f"""
        make = colocated_python(lambda: jnp.arange(3) + jax.process_index()).specialize(devices=d[2:3])
        out = [make().tolist() for _ in range(3)]
        def note(x):
            with open({path!r}, "a") as file:
                file.write(str(float(x)))
        f = colocated_python(note)
        out += [f(number) for _ in range(3)]
        float(add(number))  # it comes after them
        """
    )
    assert found == [[1, 2, 3]] * 3 + [None] * 3
    assert Path(path).read_text() == "3.0" * 3


def test_colocated_cpu_devices(client: StockClient) -> None:
    found = client.out(
        """
        mesh = Mesh(np.array([d[3], d[0]]), "x")
        out = [device.id for device in (*colocated_cpu_devices([d[3], d[1]]), *colocated_cpu_devices(mesh).devices)]
        """
    )
    assert found == [3, 1, 3, 0]


def test_an_object_keeps_what_it_has_until_it_is_dropped(client: StockClient, tmp_path: Path) -> None:
    path = tmp_path / "dropped"
    found = client.out(
        f"""
        @colocated_python_class
        class Counter:
            def __init__(self, start):
                self.value = start
            def add(self, x):
                self.value += 1
                return x + self.value
            def get(self, x):
                return x * 0 + self.value
            def __del__(self):
                open({str(path)!r}, "a").close()
        one, two = Counter(10), Counter(100)
        out = [float(one.add(number)) for _ in range(3)] + [float(two.add(number)), float(one.get(number))]
        out.append(float(one.get(other)))  # another host's own
        del two
        """
    )
    assert found == [14, 15, 16, 104, 13, 10]
    client.out("gc.collect(); del one; gc.collect()")
    eventually(path.exists, "the objects are dropped")


def test_an_error_has_the_users_text_and_line(client: StockClient) -> None:
    client.out(
        """
        def bad(x):
            if jax.process_index() == 1:
                raise KeyError(f"no weights for {x.shape}")
            return x
        f = colocated_python(bad)
        x = jax.device_put(np.arange(4, dtype=np.float32), on(d))
        """
    )
    for call in ("f(x)", "f.specialize(out_specs_fn=same)(x).block_until_ready()", "f(other).block_until_ready()"):
        said = client.error(call)
        assert "KeyError: 'no weights for" in said and "on host 1" in said and " in bad:" in said, said
        assert "/pathways/" not in said.split("KeyError")[1].split("(_compile_to_executable")[0], said
    assert client.out("out = float(f(number))") == 3  # the other host does it


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("colocated_python(lambda x: x * 2)(jax.device_put(np.zeros(4, np.float32), on(d)))", "addressable_shards"),
        ("colocated_python(lambda x: 2.0).specialize(out_specs_fn=same)(number)", "returns JAX's arrays"),
        ("colocated_python(lambda x: x[None]).specialize(out_specs_fn=same)(number)", "float32[] was promised"),
        ("colocated_python(lambda x: (x, x)).specialize(out_specs_fn=same)(number)", "was promised"),
        ("colocated_python(move).specialize(out_specs_fn=same)(number)", "is cut by"),
        ("colocated_python(move)(number)", "on the same devices"),
        ("colocated_python(lambda x, b=big: x)(number)", "give it big arrays as arguments"),
        ("colocated_python(lambda x: only_here)(number)", "ModuleNotFoundError: No module named 'only_here'"),
        ("colocated_python(foreign)(number)", "comes from another Python"),
        ("colocated_python(lambda x: (os.kill(os.getpid(), signal.SIGKILL), x)[1])(number)", "SIGKILL"),
        ("colocated_python(lambda x: os._exit(3))(number)", "its process"),
    ],
)
def test_what_goes_wrong_is_named(client: StockClient, call: str, words: str) -> None:
    client.out(
        """
        import sys, types
        big = np.zeros(65 << 20, np.uint8)
        only_here = sys.modules["only_here"] = types.ModuleType("only_here")
        import importlib.machinery, opcode
        only_here.__spec__ = importlib.machinery.ModuleSpec("only_here", None)
        none = next(number for number, name in enumerate(opcode.opname) if name.startswith('<'))
        def foreign(x):
            return x + 1
        foreign.__code__ = foreign.__code__.replace(co_code=bytes([none, 0]) + foreign.__code__.co_code)
        """
    )
    said = client.error(f"jax.block_until_ready({call})")
    assert words in said, said


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--functions",)])
def test_who_may_run_functions(cluster: Any, options: tuple[str, ...]) -> None:
    """Whoever can reach a proxy would run them as the user of the hosts."""
    with serving(cluster.address, "--listen", "127.0.0.1:0", *options) as variables, StockClient(variables) as client:
        client.out(BEGIN)
        if options:
            assert client.out("out = float(add(number))") == 4
        else:
            said = client.error("add(number)")
            assert "PERMISSION_DENIED" in said and "pathways proxy --functions" in said


@pytest.mark.slow
def test_a_function_that_does_not_end(cluster: Any) -> None:
    """It holds up its devices until its time is over."""
    with serving(cluster.address, "--function-seconds", "10") as variables, StockClient(variables) as client:
        client.out(BEGIN)
        said = client.error("float(colocated_python(lambda x: time.sleep(600)).specialize(out_specs_fn=same)(number))")
        assert "did not end within 10 s" in said
        assert client.out("out = float(add(number))") == 4


def test_a_function_ends_with_its_client(client: StockClient, variables: dict[str, str]) -> None:
    """OWN-1. The devices are free again: another client uses them."""
    with StockClient(variables) as other:
        other.out(BEGIN)
        pid = other.out("out = int(colocated_python(lambda x: jnp.int32(os.getpid()))(number))")
        other.out("y = colocated_python(lambda x: time.sleep(600)).specialize(out_specs_fn=same)(number)")
        assert os.path.exists(f"/proc/{pid}")
    eventually(lambda: not os.path.exists(f"/proc/{pid}"), "the function's process is gone")


def test_two_programs_have_processes_of_their_own(variables: dict[str, str]) -> None:
    """What one keeps, the other does not find (TRUST-1)."""
    code = """
    def note(x):
        import builtins
        builtins.kept = getattr(builtins, "kept", 0) + 1
        return x * 0 + builtins.kept
    f = colocated_python(note)
    out = [float(f(number)) for _ in range(2)]
    """
    with StockClient(variables) as one, StockClient(variables) as two:
        for client in (one, two):
            client.out(BEGIN)
        assert json.dumps([client.out(code) for client in (one, two)]) == "[[1.0, 2.0], [1.0, 2.0]]"
