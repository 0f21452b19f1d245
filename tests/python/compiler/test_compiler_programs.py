"""Programs through the whole compiler path equal plain JAX: the reference interpreter runs the logical program.

Map: chains and counts; two slices; differentiation; batching; what closes over what; results; dtypes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import run
from thoroughness import THOROUGHNESS

from pathways import _jaxlib
from pathways.compiler.ir import MeshSpec, NodeKind
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, device_put, trace

LEFT = MeshSpec("left", (("x", 2),))
RIGHT = MeshSpec("right", (("x", 2),))
WIDE = MeshSpec("wide", (("data", 2), ("model", 2)))


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same(got, expected, rtol=1e-5, atol=1e-6) -> None:
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(expected)
    for a, b in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected), strict=True):
        assert a.shape == np.shape(b) and a.dtype == jnp.asarray(b).dtype, (a.shape, a.dtype, b)
        np.testing.assert_allclose(
            np.asarray(a).astype(np.float64) if a.dtype.kind not in "c" else a,
            np.asarray(b).astype(np.float64) if a.dtype.kind not in "c" else b,
            rtol,
            atol,
        )


def calls(program):
    return [node for node in program.nodes if node.kind is NodeKind.CALL]


def transfers(program):
    return [node for node in program.nodes if node.kind is NodeKind.TRANSFER]


def mesh_of(program, node):
    return program.meshes[program.computations[node.computation].mesh].name


@pytest.mark.parametrize("shards", [2, 8, 4096])
def test_chain_of_two_has_two_calls_for_any_number_of_shards(shards):
    mesh = MeshSpec("m", (("x", shards),))
    f = placed(lambda x: x + 1, mesh, in_shardings=P("x"), out_shardings=P("x"), name="f")
    g = placed(lambda x: x * 2, mesh, in_shardings=P("x"), out_shardings=P("x"), name="g")
    traced = trace(lambda x: g(f(x)), [Argument((4096,), np.float32, False, mesh, (("x",),))])
    program = compile_traced(traced)
    assert [node.kind for node in program.nodes] == [NodeKind.CALL, NodeKind.CALL]
    assert [node.origin for node in program.nodes] == ["f", "g"]
    assert len(program.values) == 3 and sum(len(c.module) for c in program.computations) < 4096


def test_equal_calls_share_a_computation():
    f = placed(lambda x: x + 1, LEFT, name="f")
    g = placed(lambda x: x * 2, LEFT, name="g")

    def chain(x):
        for _ in range(64):
            x = g(f(x))
        return x

    traced = trace(chain, [Argument((4,), np.float32, False, LEFT, (("x",),))])
    program = compile_traced(traced)
    assert len(calls(program)) == 128 and len(program.computations) == 2
    assert len({node.name for node in program.nodes}) == 128


def test_equal_functions_on_equal_slices_share_a_module():
    f, g = (
        placed(lambda x: x * 3, mesh, in_shardings=P("x"), out_shardings=P("x"), name="f") for mesh in (LEFT, RIGHT)
    )
    x = rand(4)
    _, program = run(lambda x: g(f(x)), x, at=[(LEFT, P("x"))])
    assert len({c.fingerprint for c in program.computations}) == 1 and len(transfers(program)) == 1


def test_a_slice_of_which_nothing_is_left_is_no_part_of_the_program():
    here, there, wide = (placed(lambda x: x + 1, mesh, name=mesh.name) for mesh in (LEFT, RIGHT, WIDE))

    def f(x, y):
        there(x)  # nobody reads it
        return wide(here(x)), y

    x = rand(4)
    got, program = run(f, x, x, at=[(LEFT, P("x")), (LEFT, P())])
    same(got, (x + 2, x))
    assert [mesh.name for mesh in program.meshes] == ["left", "wide"]
    assert [mesh_of(program, node) for node in calls(program)] == ["left", "wide"]
    assert program.meshes[program.values[program.results[0]].mesh] == WIDE


def test_two_slices_of_different_size_and_axes():
    f = placed(lambda x, w: jnp.tanh(x @ w), LEFT, in_shardings=(P("x"), P()), out_shardings=P("x"), name="f")
    g = placed(lambda y: y * 2, WIDE, in_shardings=P("data", "model"), out_shardings=P("data", "model"), name="g")
    x, w = rand(4, 8), rand(8, 8, seed=1)
    got, program = run(lambda x, w: g(f(x, w)), x, w, at=[(LEFT, P("x")), (LEFT, P())])
    same(got, jnp.tanh(x @ w) * 2)
    assert [node.kind for node in program.nodes] == [NodeKind.CALL, NodeKind.TRANSFER, NodeKind.CALL]
    result = program.values[program.results[0]]
    assert result.spec == (("data",), ("model",)) and program.meshes[result.mesh] == WIDE


def test_placed_function_alone():
    f = placed(lambda x: x.sum(), LEFT, in_shardings=P("x"), name="f")
    got, program = run(f, rand(4), at=[(LEFT, P("x"))])
    same(got, rand(4).sum())
    assert len(program.nodes) == 1


def test_host_arguments_land_where_they_are_first_used():
    f = placed(lambda x, n: x * n, WIDE, in_shardings=(P("data"), P()), name="f")
    got, program = run(lambda x, n: f(x, n), rand(4), 3.0)
    same(got, rand(4) * 3)
    assert not transfers(program)


# ------------------------------------------------------------------------------------------ differentiation


def two_stage(first=LEFT, second=RIGHT):
    f = placed(lambda x, w: jnp.tanh(x @ w), first, out_shardings=P(first.axes[0][0]), name="f")
    g = placed(lambda y, v: jnp.mean((y @ v) ** 2), second, name="g")
    return lambda w, v, x: g(f(x, w), v), lambda w, v, x: jnp.mean((jnp.tanh(x @ w) @ v) ** 2)


@pytest.mark.parametrize("second", [RIGHT, WIDE])
def test_grad_through_two_slices(second):
    ours, plain = two_stage(LEFT, second)
    w, v, x = rand(8, 8), rand(8, 4, seed=1), rand(4, 8, seed=2)
    got, program = run(jax.grad(ours, argnums=(0, 1)), w, v, x, at=[(LEFT, P()), (second, P()), (LEFT, P("x"))])
    same(got, jax.grad(plain, argnums=(0, 1))(w, v, x))
    where = {(node.origin, node.transposes): mesh_of(program, node) for node in calls(program)}
    assert where[("f", 0)] == where[("f", 1)] == "left"
    assert where[("g", 0)] == where[("g", 1)] == second.name


def test_value_and_grad_with_optimizer_in_one_program():
    ours, plain = two_stage()
    optimizer = optax.adam(1e-2)

    def step(loss):
        def update(params, state, x):
            value, grads = jax.value_and_grad(lambda p: loss(p["w"], p["v"], x))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return update

    params = {"w": rand(8, 8), "v": rand(8, 4, seed=1)}
    state, x = optimizer.init(params), rand(4, 8, seed=2)
    where = {"w": (LEFT, P()), "v": (RIGHT, P())}
    placement = {
        "w": Argument((8, 8), np.float32, False, LEFT, ((), ())),
        "v": Argument((8, 4), np.float32, False, RIGHT, ((), ())),
    }
    traced = trace(step(ours), [placement, jax.tree_util.tree_map(lambda a: a, state), x])
    del where
    program = compile_traced(traced)
    from reference import Reference

    out = Reference(program)(*jax.tree_util.tree_leaves((params, state, x)))
    same(jax.tree_util.tree_unflatten(traced.out_tree, out), step(plain)(params, state, x))
    new = jax.tree_util.tree_unflatten(traced.out_tree, program.results)[0]
    assert program.meshes[program.values[new["w"]].mesh].name == "left"
    assert program.meshes[program.values[new["v"]].mesh].name == "right"


def test_grad_of_device_put_goes_home():
    f = placed(lambda y: jnp.sum(jnp.sin(y)), RIGHT, name="f")
    x = rand(4, 4)
    got, program = run(jax.grad(lambda x: f(device_put(x, RIGHT, P("x")))), x, at=[(LEFT, P("x"))])
    same(got, np.cos(x))
    assert program.meshes[program.values[program.results[0]].mesh].name == "left"
    assert all(node.kind is NodeKind.TRANSFER or node.origin == "f" for node in program.nodes)


def test_custom_vjp_and_custom_jvp():
    @jax.custom_vjp
    def scaled(x):
        return f(x) * 2

    def forward(x):
        return f(x) * 2, x

    def backward(x, ct):
        return (f(ct * x),)

    scaled.defvjp(forward, backward)
    f = placed(lambda x: x * 3, LEFT, name="f")
    x = rand(4)
    got, _ = run(jax.grad(lambda x: scaled(x).sum()), x, at=[(LEFT, P("x"))])
    same(got, x * 3)

    @jax.custom_jvp
    def cube(x):
        return f(x)

    @cube.defjvp
    def _(primals, tangents):
        return f(primals[0]), tangents[0] * 7

    got, _ = run(lambda x: (cube(x), jax.grad(lambda x: cube(x).sum())(x)), x, at=[(LEFT, P())])
    same(got, (x * 3, np.full(4, 7, np.float32)))


def test_remat_and_nested_jit_are_inlined():
    f = placed(jnp.sin, LEFT, name="f")
    g = placed(jnp.cos, RIGHT, name="g")
    inner = jax.checkpoint(jax.jit(lambda x: g(f(x)) * 2))
    x = rand(4)
    got, program = run(jax.grad(lambda x: inner(inner(x)).sum()), x, at=[(LEFT, P())])
    same(got, jax.grad(lambda x: (lambda y: jnp.cos(jnp.sin(y)) * 2)(jnp.cos(jnp.sin(x)) * 2).sum())(x))
    assert {mesh_of(program, node) for node in calls(program)} == {"left", "right"}


def test_vmap_leaves_the_batch_uncut():
    f = placed(lambda x, w: jnp.tanh(x @ w), LEFT, in_shardings=(P("x"), P()), out_shardings=P("x"), name="f")
    x, w = rand(3, 4, 8), rand(8, 8, seed=1)
    got, program = run(lambda x, w: jax.vmap(f, in_axes=(0, None))(x, w), x, w)
    same(got, jnp.tanh(x @ w))
    assert program.values[program.results[0]].spec[1] == ("x",)
    got, _ = run(lambda x, w: jax.vmap(lambda x: device_put(f(x, w), WIDE, P("data", "model")), out_axes=1)(x), x, w)
    same(got, jnp.tanh(x @ w).swapaxes(0, 1))


def test_second_derivative_and_jvp():
    f = placed(lambda x: jnp.sin(x) ** 2, LEFT, name="f")
    g = placed(lambda x: jnp.sum(x**3), RIGHT, name="g")
    x = rand(4)
    ours, plain = (lambda x: g(f(x))), (lambda x: jnp.sum((jnp.sin(x) ** 2) ** 3))
    got, _ = run(lambda x: jax.jvp(jax.grad(ours), (x,), (x,)), x, at=[(LEFT, P("x"))])
    same(got, jax.jvp(jax.grad(plain), (x,), (x,)), rtol=1e-4)


# ------------------------------------------------------------------------------------------ inside functions


def test_scan_inside_a_placed_function():
    f = placed(lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x), LEFT, name="f")
    x = rand(4, 8)
    got, _ = run(jax.grad(lambda x: f(x)[1].sum()), x, at=[(LEFT, P(None, "x"))])
    same(got, jax.grad(lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x)[1].sum())(x), rtol=1e-4)


def test_keys_inside_as_arguments_and_as_results():
    f = placed(lambda k, x: (x + jax.random.normal(k, x.shape), jax.random.split(k, 2)), LEFT, name="f")
    key, x = jax.random.key(3), rand(4)
    (noisy, keys), program = run(lambda k, x: f(k, x), key, x, at=[(LEFT, P()), (LEFT, P("x"))])
    same(noisy, x + jax.random.normal(key, (4,)))
    assert keys.dtype == key.dtype and keys.shape == (2,)
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(jax.random.split(key, 2)))
    assert program.values[program.arguments[0]].shape == (2,)
    moved, _ = run(lambda k: placed(jax.random.normal, RIGHT)(device_put(k, RIGHT)), key, at=[(LEFT, P())])
    same(moved, jax.random.normal(key))


def test_closed_over_constants():
    table = rand(8, 4)
    f = placed(lambda x: x @ table, LEFT, in_shardings=P("x"), name="f")
    g = placed(lambda x, c: x + c, LEFT, name="g")
    x = rand(4, 8, seed=1)
    got, _ = run(lambda x: g(f(x), table[0]) + g(f(x), table[0]), x, at=[(LEFT, P("x"))])
    same(got, (x @ table + table[0]) * 2, rtol=1e-4)


def test_shard_map_collective_inside():
    def body(x):
        return jax.shard_map(lambda y: jax.lax.psum(y, "x"), in_specs=P("x"), out_specs=P())(x)

    f = placed(body, LEFT, in_shardings=P("x"), out_shardings=P(), name="f")
    x = rand(4, 3)
    got, program = run(lambda x: f(f(x).repeat(2, 0)), x, at=[(LEFT, P("x"))])
    once = x[:2] + x[2:]
    same(got, once.repeat(2, 0)[:2] + once.repeat(2, 0)[2:])
    assert program.values[program.results[0]].spec == ((), ())


def test_linear_algebra_inside():
    f = placed(lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(4)), LEFT, name="f")
    a = rand(4, 4)
    got, _ = run(lambda a: f(a), a, at=[(LEFT, P())])
    same(got, np.linalg.cholesky(a @ a.T + np.eye(4, dtype=np.float32)), rtol=1e-4)


def test_keyword_and_static_arguments():
    f = placed(
        lambda x, mode, *, scale: x * scale if mode == "mul" else x + scale["a"], LEFT, static_argnums=1, name="f"
    )
    x = rand(4)
    got, _ = run(lambda x, s: f(x, "mul", scale=s), x, 2.0, at=[(LEFT, P("x"))])
    same(got, x * 2)
    got, _ = run(lambda x, mode, s: f(x, mode, scale={"a": s}), x, "add", 2.0, static_argnums=(1,))
    same(got, x + 2)
    g = placed(lambda x, *, power: x**power, LEFT, static_argnames="power", in_shardings=(P("x"),), name="g")
    got, _ = run(lambda x: g(x, power=2), x)
    same(got, x**2)


# ------------------------------------------------------------------------------------------ results


def test_arguments_as_results_bypass_the_computations():
    f = placed(lambda x: (x, x + 1), LEFT, name="f")
    x, y = rand(4), rand(3, seed=1)
    (a, b, c, d), program = run(lambda x, y, z: (x, *f(x), y), x, y, 1.0, at=[(LEFT, P("x"))])
    same((a, b, c, d), (x, x, x + 1, y))
    assert program.results[0] == program.results[1] == program.arguments[0]
    assert program.results[3] == program.arguments[1]
    assert len(calls(program)) == 1 and len(program.arguments) == 3


def test_duplicated_constant_and_nested_results():
    f = placed(lambda x: x * 2, LEFT, name="f")
    x = rand(4)
    got, program = run(
        lambda x: {"a": (y := f(x)), "b": [y, None], "one": 1.0, "z": jnp.zeros((2, 2))}, x, at=[(LEFT, P("x"))]
    )
    same(got, {"a": x * 2, "b": [x * 2, None], "one": jnp.asarray(1.0), "z": jnp.zeros((2, 2))})
    leaves = jax.tree_util.tree_leaves(program.results)
    assert leaves[0] == leaves[1]


def test_programs_without_arguments_or_results_or_placed_calls():
    f = placed(lambda: jnp.arange(4.0), LEFT, out_shardings=P("x"), name="f")
    got, program = run(lambda: f())
    same(got, np.arange(4.0, dtype=np.float32))
    assert program.values[program.results[0]].spec == (("x",),)
    got, program = run(lambda: None, default_mesh=LEFT)
    assert got is None and not program.nodes
    got, _ = run(lambda x: x + jnp.ones(4), rand(4), at=[(LEFT, P("x"))])
    same(got, rand(4) + 1)
    got, _ = run(lambda x: (x + 1, jnp.ones(3)), rand(4), default_mesh=LEFT)
    same(got, (rand(4) + 1, np.ones(3, np.float32)))


def test_plain_operations_between_slices():
    f = placed(lambda x: x * 2, LEFT, name="f")
    g = placed(lambda x: x - 1, RIGHT, name="g")
    x = rand(4)
    got, _ = run(lambda x: f(x) + g(x) + x.sum(), x, at=[(LEFT, P("x"))])
    same(got, x * 2 + x - 1 + x.sum())


def test_same_slice_other_sharding_is_a_transfer():
    f = placed(lambda x: x + 1, LEFT, in_shardings=P("x"), out_shardings=P("x"), name="f")
    g = placed(lambda x: x * 2, LEFT, in_shardings=P(None, "x"), out_shardings=P(None, "x"), name="g")
    x = rand(4, 4)
    got, program = run(lambda x: g(device_put(f(x), LEFT, P(None, "x"))), x, at=[(LEFT, P("x"))])
    same(got, (x + 1) * 2)
    assert [node.kind for node in program.nodes] == [NodeKind.CALL, NodeKind.TRANSFER, NodeKind.CALL]
    got, program = run(lambda x: device_put(x, LEFT, P("x")), x, at=[(LEFT, P("x"))])
    assert program.results == program.arguments and not program.nodes


def test_a_round_trip_is_no_transfer():
    f = placed(lambda x: x + 1, LEFT, out_shardings=P("x"), name="f")
    x = rand(4, 4)
    got, program = run(
        lambda x: device_put(device_put(f(x), RIGHT, P(None, "x")), LEFT, P("x")), x, at=[(LEFT, P("x"))]
    )
    same(got, x + 1)
    assert [node.kind for node in program.nodes] == [NodeKind.CALL]
    (a, b), program = run(lambda x: (lambda y: (y, device_put(y, LEFT)))(device_put(x, RIGHT)), x, at=[(LEFT, P("x"))])
    same((a, b), (x, x))
    assert all(node.inputs == program.arguments for node in transfers(program)) and len(program.nodes) == 2


def test_slices_of_one_device():
    one, none = MeshSpec("one", (("x", 1),)), MeshSpec("none", ())
    f, g = placed(lambda x: x + 1, one, in_shardings=P("x"), name="f"), placed(lambda x: x * 2, none, name="g")
    got, program = run(lambda x: g(f(x)), rand(4), at=[(one, P())])
    same(got, (rand(4) + 1) * 2)
    assert len(transfers(program)) == 1


@pytest.mark.parametrize(
    "dtype",
    [
        np.float32,
        np.int8,
        np.uint32,
        np.bool_,
        ml_dtypes.int4,
        ml_dtypes.bfloat16,
        np.float16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    ],
)
@pytest.mark.parametrize("shape", [(4, 2), (), (0, 4)])
def test_dtypes_and_shapes(dtype, shape):
    f = placed(lambda x: x.reshape((1, *x.shape)), LEFT, name="f")
    g = placed(lambda x: jnp.concatenate([x, x]), RIGHT, name="g")
    x = np.ones(shape, dtype)
    got, program = run(lambda x: g(f(x)), x, at=[(LEFT, P())])
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got), np.stack([x, x]))
    assert program.values[program.results[0]].dtype == x.dtype


def test_weak_types_and_x64():
    f = placed(lambda x, n: x * n, LEFT, name="f")
    x = np.ones(4, ml_dtypes.bfloat16)
    got, _ = run(lambda x, n: f(x, n), x, 2.0)
    assert got.dtype == ml_dtypes.bfloat16
    with jax.enable_x64(True):
        got, _ = run(lambda x: f(x, 2.0), np.ones(4, np.float64))
        assert got.dtype == np.float64


SPECS = st.lists(st.sampled_from([None, "data", "model", ("data", "model"), ("model", "data")]), max_size=2)


@settings(max_examples=12, deadline=None)
@given(SPECS, SPECS)
def test_any_pair_of_shardings_between_equal_slices(first, second):
    for entries in (first, second):
        names = [a for entry in entries if entry for a in ([entry] if isinstance(entry, str) else entry)]
        if len(set(names)) != len(names):
            return
    twin = MeshSpec("twin", WIDE.axes)
    f = placed(lambda x: x + 1, WIDE, out_shardings=P(*first), name="f")
    g = placed(lambda x: x * 2, twin, in_shardings=P(*second), out_shardings=P(*second), name="g")
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    got, program = run(lambda x: (g(f(x)), device_put(f(x), twin, P(*second))), x, at=[(WIDE, P())])
    same(got, ((x + 1) * 2, x + 1))
    for number in program.results:
        entries = [() if e is None else (e,) if isinstance(e, str) else e for e in [*second, None, None][:2]]
        assert program.values[number].spec == tuple(entries)


@settings(max_examples=12, deadline=None)
@given(SPECS, st.lists(st.sampled_from([None, "x"]), max_size=2))
def test_any_pair_of_shardings(first, second):
    names = [a for entry in first if entry for a in ([entry] if isinstance(entry, str) else entry)]
    if len(set(names)) != len(names) or second.count("x") > 1:
        return
    f = placed(lambda x: x + 1, WIDE, out_shardings=P(*first), name="f")
    g = placed(lambda x: x * 2, LEFT, in_shardings=P(*second), out_shardings=P(*second), name="g")
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    got, program = run(lambda x: (f(x), g(f(x))), x, at=[(WIDE, P())])
    same(got, (x + 1, (x + 1) * 2))
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in [*first, None, None][:2]]
    assert program.values[program.results[0]].spec == tuple(entries)


@settings(max_examples=8 * THOROUGHNESS, deadline=None)
@given(st.data())
def test_gradients_for_any_mix_of_slices_and_undeclared_shardings(data):
    """Three functions on any of four slices, each sharding declared or not: value and gradient equal plain JAX's."""
    meshes = [LEFT, RIGHT, WIDE, MeshSpec("twin", WIDE.axes)]
    bodies = [lambda x: jnp.sin(x) @ x.T, lambda x: (x.reshape(4, 2, 8) * 2).reshape(8, 8) + x.sum(0), lambda x: x**2]
    stages = []
    for number, body in enumerate(bodies):
        mesh = data.draw(st.sampled_from(meshes))
        axes = st.sampled_from([None, P(), P(mesh.axes[0][0]), P(None, mesh.axes[-1][0])])
        stages.append(
            placed(body, mesh, in_shardings=data.draw(axes), out_shardings=data.draw(axes), name=f"f{number}")
        )
    start = data.draw(st.sampled_from([None, (LEFT, P("x")), (WIDE, P("model", "data"))]))

    def loss(*functions):
        def value(x):
            kept = x
            for function in functions:
                x = function(x)
            return jnp.sum(x * kept), x

        return jax.value_and_grad(value, has_aux=True)

    x = rand(8, 8) / 4
    got, _ = run(loss(*stages), x, at=[start])
    same(got, loss(*bodies)(x), rtol=1e-3, atol=1e-4)


def test_nothing_here_left_a_backend_out():
    assert _jaxlib.initialized_backends()  # the reference interpreter did; see test_jaxlib_door for the client
