"""`pathways proxy` on a cluster: unmodified JAX computes what plain JAX computes, with the layouts that it names, too
(PROXY-6); it is a client like others, and leaves nothing behind (OWN-1)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from control_clusters import eventually
from stock_clients import StockClient, environment, serving

import pathways as pw
from pathways import _core
from pathways.cli import main
from pathways.cluster.operator import inspect, look
from pathways.compiler.ir import Tiling
from pathways.proxy.behind import AllShards
from pathways.proxy.cluster_buffers import form_of_kind, whole
from pathways.proxy.cluster_executables import ClusterExecutable
from pathways.proxy.cluster_kinds import Kind
from pathways.proxy.waiter import Waiter

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

found = {}
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
x = np.arange(32, dtype=np.float32).reshape(8, 4)
y = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
found["sum"] = float(jax.jit(lambda v: (v @ v.T).sum())(y))
found["psum"] = np.asarray(jax.shard_map(
    lambda v: jax.lax.psum(v, "a"), mesh=mesh, in_specs=P("a", "b"), out_specs=P(None, "b"))(y)).tolist()
found["shards"] = [np.asarray(shard.data).tolist() for shard in y.addressable_shards]
found["moved"] = np.asarray(jax.device_put(y, NamedSharding(mesh, P("b")))).tolist()
single = [jax.device_put(x[2 * n : 2 * n + 2], device) for n, device in enumerate(mesh.devices.flat)]
joined = jax.make_array_from_single_device_arrays((8, 4), NamedSharding(mesh, P(("a", "b"))), single)
found["joined"] = np.asarray(jax.jit(lambda v: v * 2)(joined)).tolist()
step = jax.jit(lambda v: v + 1, donate_argnums=0)
z = jnp.zeros(3)
for _ in range(20):
    old, z = z, step(z)
found["steps"], found["donated"] = z.tolist(), old.is_deleted()
cut = jax.device_put(x, NamedSharding(mesh, P(("a", "b"))))
found["one by one"] = [step(shard.data).tolist() for shard in cut.addressable_shards]  # each takes its shard alone
found["random"] = jax.random.normal(jax.random.key(3), (4,)).tolist()
found["complex"] = str(jnp.ones((), jnp.complex64) * 1j)
found["scan"] = jax.lax.scan(lambda c, v: (c + v, c * v), 0.0, jnp.arange(5.0))[1].tolist()
kept, token = jax.jit(lambda v, t: (v + 1, t))(jnp.arange(3.0), jax.lax.create_token(None))
found["token"] = [kept.tolist(), str(type(token.block_until_ready()))]
found["memories"] = [memory.kind for memory in jax.devices()[0].addressable_memories()]
host = jax.device_put(y, jax.memory.Space.Host)
kept, doubled = jax.jit(lambda v: (jax.device_put(v * 2, jax.memory.Space.Host), v * 2))(y)
used = jax.jit(lambda v: jax.device_put(v, jax.memory.Space.Device) + 1)(kept)
back = jax.device_put(kept, y.sharding) - doubled
for name, value in (("host", host), ("kept", kept), ("used", used), ("back", back)):
    found[name] = [value.sharding.memory_kind, value.tolist()]
turned = jax.jit(lambda v: v * 3, out_shardings=Format(Layout((1, 0)), y.sharding))
for name, value in (("first", turned(y)), ("later", turned(y))):
    moved = jax.device_put(value, NamedSharding(mesh, P("b"))).tolist()
    used = jax.jit(lambda v: v + 1)(value).tolist()
    found[name] = [value.tolist(), str(value.format.layout), moved, used]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=2, devices_per_host=2)) as made:
        yield made


def run(variables: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(variables), stdout=subprocess.PIPE, timeout=150
    )
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def clients(address: str) -> list[Any]:
    return [client for client in look(address).clients if client.name.startswith("JAX at")]


def in_use(address: str) -> int:
    """Bytes on all devices of a cluster."""
    return sum(look(address).controller.live_bytes)


@pytest.mark.parametrize("where", [(), ("--listen", "127.0.0.1:0")])
def test_the_same_as_plain_jax(cluster: Any, where: tuple[str, ...]) -> None:
    plain = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    with serving(cluster.address, *where) as variables:
        socket = Path(variables["JAX_BACKEND_TARGET"].removeprefix("grpc://unix:"))
        assert where or socket.is_socket()
        assert run(variables) == run(plain)
        eventually(lambda: not clients(cluster.address), "the client is gone")
    assert not socket.parent.exists() or where


def test_a_client_that_is_killed_leaves_nothing(cluster: Any) -> None:
    program = "import jax, time; x = jax.numpy.ones(1 << 20) + 1; print(x[0], flush=True); time.sleep(600)"
    before = in_use(cluster.address)
    with serving(cluster.address) as variables:
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, env=environment(variables), stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == b"2.0\n"
                (client,) = clients(cluster.address)
                assert client.memory >= 4 << 20 and client.runs == 0
            finally:
                process.kill()
        eventually(lambda: not clients(cluster.address), "the client is gone")
        eventually(lambda: in_use(cluster.address) <= before, "its arrays are gone")


class EndedClient:
    """The native half of a client whose cluster ends while somebody waits."""

    def __init__(self) -> None:
        self.native = self
        self.is_over = False

    def state(self, array: object) -> str:
        if self.is_over:
            raise pw.errors.ControllerLostError("the controller is gone")
        return "pending"

    def wait_raw(self, handle: int, timeout: float) -> str:
        return "pending"


def test_who_waits_is_told_when_the_cluster_ends() -> None:
    client = EndedClient()
    waiter = Waiter(client, SimpleNamespace(loss_of=lambda devices, age_s: None))  # type: ignore[arg-type]
    told: list[Any] = []
    for handle in (1, 2):
        lies = SimpleNamespace(binding=SimpleNamespace(devices=(0,)))
        waiter.add([SimpleNamespace(raw_handle=handle, slice=lies)], told.append)
    client.is_over = True
    eventually(lambda: len(told) == 2, "both are told")
    assert all(isinstance(each, pw.errors.ControllerLostError) for each in told)
    waiter.close()


def test_a_run_that_could_not_take_its_argument_is_no_example() -> None:
    """The next one tries again, instead of making a copy from then on."""
    kind = Kind((4,), np.dtype("float32"), (0,), Tiling((1,), (0,)))
    form, asked, shared = form_of_kind(kind), [], [True, False]
    executable = ClusterExecutable.__new__(ClusterExecutable)
    executable._donated, executable._forms, executable._usual = frozenset({0}), [], None
    executable._programs = SimpleNamespace(last="the program")  # type: ignore[assignment]
    executable._waiter = None  # type: ignore[assignment]

    def run(forms: Any, given: tuple[int, ...], arrays: Any) -> Any:
        asked.append(given)
        return _core.Refusal.SHARED if given and shared.pop(0) else []

    executable._run = run  # type: ignore[method-assign]
    for example in (None, ((form,), "the program")):
        buffer = whole(SimpleNamespace(delete=lambda: None), form, None)  # type: ignore[arg-type]
        executable.execute([AllShards(buffer)], ())
        assert executable._usual == example
    assert asked == [(0,), (), (0,)]


def test_programs_that_are_dropped_leave_the_hosts(cluster: Any) -> None:
    def programs() -> list[int]:
        return [host["programs"] for host in inspect(cluster.address)["hosts"]]

    with serving(cluster.address) as variables, StockClient(variables) as client:
        client.out("x = jax.device_put(np.ones(4, np.float32), on(jax.devices()))")
        before = programs()
        client.out("fs = [jax.jit(lambda v, n=n: v * n) for n in range(3)]; [f(x).block_until_ready() for f in fs]")
        assert programs() != before
        client.out("import gc; del fs; jax.clear_caches(); gc.collect()")
        eventually(lambda: programs() == before, "hosts have dropped the programs")


def test_where_it_listens() -> None:
    for options, words in (
        (["--listen", "0.0.0.0:0"], "other machines could call there"),
        (["--listen", "127.0.0.1:0", "--key", __file__], "are given together"),
        (["--shared-directory", "/nowhere"], "does not exist"),
    ):
        refused = CliRunner().invoke(main, ["proxy", "unix:/nowhere", *options])
        assert refused.exit_code != 0 and words in refused.output, refused.output


def test_arrays_of_a_wrong_shape_end_no_host(cluster: Any) -> None:
    """XLA would end the host's process when devices of one program refuse their arrays (FAULT-1, TRUST-1)."""
    with serving(cluster.address) as variables, StockClient(variables) as client:
        client.out(
            """
            d = jax.devices()
            x = jax.device_put(np.ones((4, 8), np.float32), on(d))
            compiled = jax.jit(lambda v: v @ v.T).lower(x).compile()
            run = compiled._executable.xla_executable
            """
        )
        for wrong in ("np.ones((8, 8), np.float32)", "np.ones((4, 2), np.float32)", "np.ones((4, 8), np.int8)"):
            said = client.error(
                f"[np.asarray(s) for s in run.execute_sharded([jax.device_put({wrong}, on(d))])"
                ".disassemble_into_single_device_arrays()[0]]"
            )
            assert "takes shards" in said, said
        assert client.out("out = np.asarray(compiled(x)).tolist()") == [[8.0] * 4] * 4
    assert [host["restarts"] for host in inspect(cluster.address)["hosts"]] == [0, 0]
