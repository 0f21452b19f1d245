"""MPMD programs in IFRT IR through a proxy: made by jaxlib's MPMD compiler, sent by stock JAX (`compile_mpmd`), run by
the cluster as one program. What is wrong with one fails its own request."""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import signal
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_clusters import eventually
from stock_clients import StockClient

import pathways as pw
from pathways.cluster.operator import look

P = jax.sharding.PartitionSpec

#: `partition` makes IFRT IR of StableHLO with named computations, `read` parses what is IFRT IR already, and `load`
#: compiles it; `outs` has a shape and a sharding per result.
BEGIN = """
import sys
import jaxlib, jaxlib._jax
sys.modules["jax.jaxlib"], sys.modules["jax.jaxlib._jax"] = jaxlib, jaxlib._jax  # jaxlib's own import needs these names
import jaxlib._sdy_mpmd as mpmd_compiler
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import mpmd, sdy

d = jax.devices()
context = mlir.make_ir_context()
mpmd.register_dialect(context)
sdy.register_dialect(context)
EMPTY = 'func.func public @main() attributes {topology = #mpmd.topology<<"m" : <["x"=1]>>>} { return }'

def partition(text, meshes, assignment, inputs, outputs, donated=()):
    with context, ir.Location.unknown(context):
        made = mpmd_compiler.apply_mpmd_partitioning(
            ir.Module.parse(text), "main", meshes, assignment, inputs, outputs, list(donated),
            fragment_merge_rules=[], fragment_schedule_rules=[], phases=mpmd_compiler.PartitioningPhase.ALL
        ).mpmd_module
        mpmd_compiler.lower_to_ifrt(made)
        return made

def read(text):
    with context, ir.Location.unknown(context):
        mpmd_compiler.lower_to_ifrt(ir.Module.parse(EMPTY))  # now the context knows IFRT IR
        return ir.Module.parse(text)

def load(program, devices, outs, **options):
    avals = [jax.core.ShapedArray(shape, np.float32) for shape, _ in outs]
    return mpmd_compiler.compile_mpmd(d[0].client, program, devices, avals, [each for _, each in outs], **options)

def mesh(devices, *shape):
    return Mesh(np.array(devices).reshape(shape), tuple("xyz"[:len(shape)]))
"""
#: (x @ w) on the left, and the sum of its rows on the right.
TWO = """
module {
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%a: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
                         %w: tensor<8x8xf32>) -> tensor<8xf32> {
    %0 = mpmd.named_computation<"matmul"> (%a, %w) (%p: tensor<4x8xf32>, %q: tensor<8x8xf32>) {
      %1 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0]
        : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      mpmd.return %1 : tensor<4x8xf32>
    } : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
    %2 = mpmd.named_computation<"sum"> (%0) (%p: tensor<4x8xf32>) {
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %s = stablehlo.reduce(%p init: %z) applies stablehlo.add across dimensions = [0]
        : (tensor<4x8xf32>, tensor<f32>) -> tensor<8xf32>
      mpmd.return %s : tensor<8xf32>
    } : (tensor<4x8xf32>) -> tensor<8xf32>
    return %2 : tensor<8xf32>
  }
}
"""
LOAD_TWO = f"""
two = partition({TWO!r}, [("left", [("x", 2)]), ("right", [("x", 4)])],
                {{"matmul": ("left", 0), "sum": ("right", 1)}}, ["left", "left"], ["right"])
left, right = mesh(d[:2], 2), mesh(d[4:], 4)
six = [*d[:2], *d[4:]]
a, w = np.arange(32, dtype=np.float32).reshape(4, 8), np.eye(8, dtype=np.float32) * 2
given = [jax.device_put(a, NamedSharding(left, P("x"))), jax.device_put(w, NamedSharding(left, P()))]
outs = [((8,), NamedSharding(right, P()))]
"""
COLUMNS = (np.arange(32, dtype=np.float32).reshape(4, 8).sum(0) * 2).tolist()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=2)) as made:
        yield made


@pytest.fixture(scope="module")
def shared(variables: dict[str, str]) -> Iterator[StockClient]:
    with StockClient(variables) as made:
        made.out(BEGIN)
        yield made


@pytest.fixture
def client(shared: StockClient) -> Iterator[StockClient]:
    """A program that many tests share: after each of them, it still computes."""
    yield shared
    assert shared.out("out = float(jax.jit(lambda x: x + 1)(jax.device_put(2.0, d[5])))") == 3


def test_two_meshes_of_different_size(client: StockClient) -> None:
    client.out(LOAD_TWO)
    found = client.out(
        """
        run = load(two, six, outs)
        made = [run.execute(given)[0] for _ in range(3)]
        out = [np.asarray(x).tolist() for x in made], sorted(x.id for x in made[0].devices())
        """
    )
    assert found == [[COLUMNS] * 3, [4, 5, 6, 7]]
    assert client.out("out = [np.asarray(x).tolist() for x in given]")[1][0][0] == 2, "what is given stays"


def test_the_program_of_the_page(variables: dict[str, str], root: pathlib.Path) -> None:
    (program,) = re.findall(r"```python norun\n(import sys\n.*?)```", (root / "docs/proxy.md").read_text(), re.DOTALL)
    with StockClient(variables) as client:
        assert client.out(f"{program}out = y.tolist()") == [4.0 * n * n for n in range(8)]


def test_what_it_says_of_its_programs(client: StockClient) -> None:
    client.out(LOAD_TWO)
    costs, memory, shardings = client.out(
        """
        run = load(two, six, outs)
        stats = run.get_compiled_memory_stats()
        out = (
            {name: each["flops"] for name, each in run.cost_analysis().items()},
            {name: each.argument_size_in_bytes for name, each in stats.items()},
            [str(each) for each in run.input_shardings()],
        )
        """
    )
    assert sorted(costs) == sorted(memory) and len(costs) == 2 and min(costs.values()) > 0
    assert sorted(memory.values()) == [4 * 8 * 4, (2 * 8 + 8 * 8) * 4] and len(shardings) == 2


def test_meshes_of_several_axes_and_random_cuts(client: StockClient) -> None:
    """What the types of a program say of its arrays is what their shards are, in whatever order axes cut them."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"PATHWAYS_SEED={seed}")
    generator = random.Random(seed)
    cuts = ["{}", '{"x"}', '{"y"}', '{"x", "y"}', '{"y", "x"}']
    for _ in range(6):
        source, target = (_two_cuts(generator, cuts) for _ in range(2))
        text = f"""
        module {{
          sdy.mesh @mesh = <["x"=2, "y"=2]>
          func.func public @main(%a: tensor<8x4xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{source}]>}})
              -> (tensor<8x4xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{target}]>}}) {{
            %0 = mpmd.named_computation<"one"> (%a) (%p: tensor<8x4xf32>) {{
              %1 = stablehlo.add %p, %p : tensor<8x4xf32>
              mpmd.return %1 : tensor<8x4xf32>
            }} : (tensor<8x4xf32>) -> tensor<8x4xf32>
            %2 = mpmd.named_computation<"two"> (%0) (%p: tensor<8x4xf32>) {{
              %c = sdy.sharding_constraint %p <@mesh, [{target}]> : tensor<8x4xf32>
              %1 = stablehlo.multiply %c, %c : tensor<8x4xf32>
              mpmd.return %1 : tensor<8x4xf32>
            }} : (tensor<8x4xf32>) -> tensor<8x4xf32>
            return %2 : tensor<8x4xf32>
          }}
        }}
        """
        specs = [cut.replace("{", "(").replace("}", ",)").replace("(,)", "None") for cut in (source, target)]
        found = client.out(
            f"""
            axes = [("x", 2), ("y", 2)]
            stages = {{"one": ("m", 0), "two": ("n", 1)}}
            program = partition({text!r}, [("m", axes), ("n", axes)], stages, ["m"], ["n"])
            m, n = mesh(d[:4], 2, 2), mesh(d[4:], 2, 2)
            a = np.arange(32, dtype=np.float32).reshape(8, 4)
            own = NamedSharding(n, P({specs[1]}))
            run = load(program, d, [((8, 4), own)])
            (made,) = run.execute([jax.device_put(a, NamedSharding(m, P({specs[0]})))])
            out = [np.asarray(made).tolist(), [
                np.array_equal(np.asarray(shard.data), (4 * a * a)[shard.index]) for shard in made.addressable_shards
            ]]
            """
        )
        expected = 4 * np.arange(32, dtype=np.float32).reshape(8, 4) ** 2
        assert found == [expected.tolist(), [True] * 4], (source, target)


def _two_cuts(generator: random.Random, cuts: list[str]) -> str:
    """How two dimensions are cut: no axis cuts both."""
    while True:
        first, second = generator.choice(cuts), generator.choice(cuts)
        if not any(axis in first and axis in second for axis in "xy"):
            return f"{first}, {second}"


def _first(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def _loss(w: Any, h: Any, y: Any) -> Any:
    return jnp.mean((h @ w - y) ** 2)


def _parameters() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=size).astype(np.float32) for size in ((4, 8), (8, 2), (16, 4), (16, 2))]


def test_a_training_over_two_islands(client: StockClient) -> None:
    """A step with derivatives, whose fragments donate what they have made: jaxlib's compiler has made it of a program
    of Pathways. Losses are those of plain JAX."""
    values = _parameters()
    with pw.connect():
        both = pw.make_virtual_device_set()
        slices = [both.add_slice(devices=1, axis_names=("x",)) for _ in range(2)]
        first, loss = pw.jit(_first, devices=slices[0]), pw.jit(_loss, devices=slices[1])
        updates = [pw.jit(lambda w, g: w - 0.1 * g, devices=each, name="update") for each in slices]

        @pw.program
        def step(w1: Any, w2: Any, x: Any, y: Any) -> Any:
            value, grads = jax.value_and_grad(lambda w1, w2: loss(w2, first(w1, x), y), (0, 1))(w1, w2)
            return updates[0](w1, grads[0]), updates[1](w2, grads[1]), value

        placed = [pw.device_put(value, slices[n % 2], P()) for n, value in enumerate(values)]
        text = step.lower(*placed).as_text("ifrt")
    found = client.out(
        f"""
        devices = [d[1], d[6]]
        on = [jax.sharding.SingleDeviceSharding(each) for each in devices]
        w1, w2, x, y = [
            jax.device_put(np.array(each, dtype=np.float32), on[n % 2])
            for n, each in enumerate({json.dumps([value.tolist() for value in values])})
        ]
        run = load(read({text!r}), devices, [((4, 8), on[0]), ((8, 2), on[1]), ((), on[1])])
        out = []
        for _ in range(20):
            w1, w2, loss = run.execute([w1, w2, x, y])
            out.append(float(loss))
        """
    )
    w1, w2, x, y = values
    losses = []
    plain = jax.jit(jax.value_and_grad(lambda w1, w2: _loss(w2, _first(w1, x), y), (0, 1)))
    for _ in found:
        value, (g1, g2) = plain(w1, w2)
        w1, w2 = w1 - 0.1 * g1, w2 - 0.1 * g2
        losses.append(float(value))
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    assert losses[-1] < losses[0] / 2


def test_what_a_move_may_share_is_not_taken_over(client: StockClient) -> None:
    """A moved array and its source may be the same memory on a device that both are on. A call that may take the source
    leaves the moved one as it is (MEM-4)."""
    found = client.out(
        """
        one, two = (
            f"!ifrt.array<tensor<4096xf32>, #ifrt.sharding_param<2 to [0] on 2>, [{devices}]>"
            for devices in ("0, 1", "0, 2")
        )
        program = read(f'''
          func.func @main(%x: {one}) -> ({one}, {two}) attributes {{ifrt.function}} {{
            %a, %c = ifrt.Call @add::@main(%x) on devices [0, 1] : ({one}) -> {one}
            %m, %d = ifrt.CopyArrays(%a) : ({one}) -> {two}
            %b, %e = ifrt.Call @take::@main(%a) after %d on devices [0, 1]
              {{io_aliases = [array<i32: 0, 0>]}} : ({one}) -> {one}
            return %b, %m : {one}, {two}
          }}
          module @add attributes {{sym_visibility = "private"}} {{
            func.func @main(%x: tensor<4096xf32>) -> tensor<4096xf32> {{
              %0 = stablehlo.add %x, %x : tensor<4096xf32>
              return %0 : tensor<4096xf32>
            }}
          }}
          module @take attributes {{sym_visibility = "private"}} {{
            func.func @main(%x: tensor<4096xf32> {{tf.aliasing_output = 0 : i32}}) -> tensor<4096xf32> {{
              %0 = stablehlo.multiply %x, %x : tensor<4096xf32>
              return %0 : tensor<4096xf32>
            }}
          }}
        ''')
        cuts = [on([d[0], d[1]]), on([d[0], d[2]])]
        run = load(program, d[:3], [((4096,), cuts[0]), ((4096,), cuts[1])])
        x = np.arange(4096, dtype=np.float32)
        out = []
        for _ in range(5):
            b, m = run.execute([jax.device_put(x, cuts[0])])
            out += [np.array_equal(np.asarray(b), 4 * x * x), np.array_equal(np.asarray(m), 2 * x)]
        """
    )
    assert found == [True] * 10


def test_an_island_that_is_lost(client: StockClient, cluster: Any) -> None:
    """Its part fails, the other island goes on, and the same program runs again when the island is back (ERR-2)."""
    client.out(LOAD_TWO + "\nrun = load(two, six, outs)\nout = np.asarray(run.execute(given)[0]).tolist()")
    pid = look(cluster.address).hosts[3].pid
    os.kill(pid, signal.SIGKILL)
    said = client.error("while True: np.asarray(run.execute(given)[0])")
    assert "DATA_LOSS" in said and (f"host 3 (pid {pid}) was killed" in said or "island 1 is down" in said), said
    assert client.out("out = float(jax.jit(lambda v: v.sum())(given[0]))") == 496
    eventually(lambda: {host.state for host in look(cluster.address).hosts} == {"up"}, "the island is back")
    assert client.out("out = [np.asarray(run.execute(given)[0]).tolist() for _ in range(3)]") == [COLUMNS] * 3


def test_what_is_given_away_is_gone(client: StockClient) -> None:
    client.out(LOAD_TWO)
    said = client.error(
        """
        program = partition(TWO, [("m", [("x", 2)]), ("n", [("x", 2)])], {"matmul": ("m", 0), "sum": ("n", 1)},
                            ["m", "m"], ["n"], donated=[0, 1])
        text = str(program)
        assert "ifrt.donated" in text, text
        run = load(program, d[:4], [((8,), NamedSharding(mesh(d[2:4], 2), P()))])
        (made,) = run.execute(given)
        assert np.asarray(made).tolist() == (a.sum(0) * 2).tolist(), made
        run.execute(given)
        """.replace("TWO", repr(TWO))
    )
    assert "deleted" in said or "donated" in said, said


@pytest.mark.parametrize(
    ("devices", "arrays", "words"),
    [
        ("six[:5]", "given", "names"),
        ("d[:6]", "given", "p1_stage1.main.* of the islands"),
        ("six", "given[:1]", "takes 2 arrays"),
        ("six", "given[::-1]", r"argument 0 of mpmd is float32\[8, 8\], but the program takes float32\[4, 8\]"),
        ("six", "[jax.device_put(a, d[0]), given[1]]", "lies on the devices"),
    ],
)
def test_wrong_use(client: StockClient, devices: str, arrays: str, words: str) -> None:
    client.out(LOAD_TWO)
    assert re.search(words, client.error(f"load(two, {devices}, outs).execute({arrays})"))


def test_a_program_of_another_kind(client: StockClient) -> None:
    """What jaxlib's compiler does not make is refused by its name; so is what nobody can read."""
    client.out(LOAD_TWO)
    said = client.error(
        """
        program = read('''
          func.func @main(%0: !ifrt.array<tensor<4xf32>, #ifrt.sharding_param<1 to [0] on 1>, [0]>)
              -> !ifrt.array<tensor<4xi32>, #ifrt.sharding_param<1 to [0] on 1>, [0]> attributes {ifrt.function} {
            %1, %c = ifrt.BitcastArrays(%0) : (!ifrt.array<tensor<4xf32>, #ifrt.sharding_param<1 to [0] on 1>, [0]>)
              -> !ifrt.array<tensor<4xi32>, #ifrt.sharding_param<1 to [0] on 1>, [0]>
            return %1 : !ifrt.array<tensor<4xi32>, #ifrt.sharding_param<1 to [0] on 1>, [0]>
          }
        ''')
        load(program, d[:1], [((4,), jax.sharding.SingleDeviceSharding(d[0]))])
        """
    )
    assert "ifrt.BitcastArrays" in said


def test_results_that_are_arguments_or_come_twice(client: StockClient) -> None:
    """They are arrays of their own: what becomes of one becomes of no other."""
    found = client.out(
        """
        type = "!ifrt.array<tensor<4xf32>, #ifrt.sharding_param<1 to [0] on 1>, [0]>"
        other = type.replace("[0]>", "[1]>")
        program = read(f'''
          func.func @main(%0: {type}) -> ({type}, {type}, {other}, {other}) attributes {{ifrt.function}} {{
            %1, %c = ifrt.CopyArrays(%0) : ({type}) -> {other}
            return %0, %0, %1, %1 : {type}, {type}, {other}, {other}
          }}
        ''')
        on = [jax.sharding.SingleDeviceSharding(each) for each in (d[1], d[4])]
        run = load(program, [d[1], d[4]], [((4,), on[0]), ((4,), on[0]), ((4,), on[1]), ((4,), on[1])])
        x = jax.device_put(np.arange(4, dtype=np.float32), d[1])
        made = run.execute([x])
        jax.jit(lambda x: x + 1, donate_argnums=0)(made[0])
        out = [np.asarray(each).tolist() for each in (x, *made[1:])]
        """
    )
    assert found == [[0, 1, 2, 3]] * 4
