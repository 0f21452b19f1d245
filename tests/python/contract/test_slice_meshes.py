"""The mesh of a slice, as JAX's own functions take it: in shardings, and set by `jax.set_mesh(slice.mesh)`."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

X = np.arange(8, dtype=np.float32).reshape(4, 2)


@contextlib.contextmanager
def _statement(mesh: Any) -> Iterator[None]:
    jax.set_mesh(mesh)
    try:
        yield
    finally:
        jax.set_mesh(None)  # type: ignore[arg-type]


#: Ways to set a slice's mesh. `jax.set_mesh` is what it is when it is called, not when this file is imported.
BLOCKS: dict[str, Callable[[Any], Any]] = {
    "block": lambda mesh: jax.set_mesh(mesh),
    "abstract": jax.sharding.use_abstract_mesh,
}


def _is_on(array: Any, slice_: Any, spec: P, value: Any) -> None:
    assert type(array) is pw.Array and array.slice is slice_
    assert array.sharding == slice_.sharding(spec)
    np.testing.assert_allclose(array, value, rtol=1e-6)


def test_a_plain_sharding_over_a_slices_mesh_knows_the_slice(add: Callable[..., Any]) -> None:
    one, two = add(2), add(2)
    assert one.mesh is not two.mesh and one.mesh is copy.copy(one).mesh
    assert NamedSharding(two.mesh, P("x")) != one.sharding(P("x")) == NamedSharding(one.mesh, P("x"))
    for slice_ in (one, two):
        rows = NamedSharding(slice_.mesh, P("x"))
        for array in (
            jax.device_put(X, rows),
            pw.device_put(X, rows),
            jax.lax.with_sharding_constraint(X, rows),
            jax.make_array_from_callback((4, 2), rows, lambda index: X[index]),
            jnp.zeros((4, 2), device=rows) + X,
            pw.program(lambda v, rows=rows: jax.device_put(v, rows))(X),
        ):
            _is_on(array, slice_, P("x"), X)
    axes = pickle.loads(pickle.dumps(one.mesh))
    assert type(axes) is jax.sharding.AbstractMesh and axes.shape == one.mesh.shape


def test_code_for_the_mesh_of_one_slice_runs_on_another(add: Callable[..., Any]) -> None:
    one, two = add(2), add(2)
    plain = jax.sharding.AbstractMesh((2,), ("x",), axis_types=one.mesh.axis_types)
    for mesh in (one.mesh, two.mesh, plain):
        mapped = jax.shard_map(lambda u: jax.lax.psum(u, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
        _is_on(pw.jit(mapped, devices=two)(X), two, P(), X[:2] + X[2:])


def test_each_of_many_equal_slices_gets_what_runs_under_its_mesh(add: Callable[..., Any]) -> None:
    transposed = jax.jit(lambda v: v + 1, in_shardings=P("x"), out_shardings=P(None, "x"))
    summed = jax.shard_map(lambda u: jax.lax.psum(u, "x"), in_specs=P("x"), out_specs=P())
    for one in [add(2) for _ in range(100)]:
        with jax.set_mesh(one.mesh):
            _is_on(jnp.sum(X), one, P(), X.sum())
            _is_on(transposed(X), one, P(None, "x"), X + 1)
            _is_on(jax.jit(summed)(X), one, P(), X[:2] + X[2:])
            _is_on(jax.grad(lambda v: jnp.sum(v**2))(X), one, P(), 2 * X)


@pytest.mark.parametrize("under", [*BLOCKS.values(), _statement], ids=[*BLOCKS, "statement"])
def test_jax_runs_on_the_slice_whose_mesh_is_set(add: Callable[..., Any], under: Callable[[Any], Any]) -> None:
    one, two = add(2), add(2)
    placed = pw.jit(lambda v: jax.lax.with_sharding_constraint(v * 2, P("x")), devices=two)
    with under(one.mesh):
        assert jax.sharding.get_abstract_mesh() is one.mesh
        _is_on(jax.device_put(X, P("x")), one, P("x"), X)
        _is_on(jax.lax.with_sharding_constraint(X, P("x")), one, P("x"), X)
        _is_on(jnp.ones((4, 2)), one, P(), np.ones((4, 2)))
        _is_on(jax.jit(lambda v: v + 1, in_shardings=P("x"), out_shardings=P(None, "x"))(X), one, P(None, "x"), X + 1)
        _is_on(jax.jit(lambda v: jax.lax.with_sharding_constraint(v, P("x")))(X), one, P("x"), X)
        _is_on(jax.jit(lambda v, n: v * n, static_argnums=1)(X, 3), one, P(), X * 3)
        _is_on(jax.grad(lambda v: jnp.sum(v**2))(X), one, P(), 2 * X)
        mapped = jax.shard_map(lambda u: jax.lax.psum(u, "x"), in_specs=P("x"), out_specs=P())
        _is_on(jax.jit(mapped)(X), one, P(), X[:2] + X[2:])
        _is_on(mapped(X), one, P(), X[:2] + X[2:])
        _is_on(placed(X), two, P("x"), 2 * X)  # a placed function, and a program, have their own slices
        _is_on(pw.program(lambda v: placed(v) + 1)(X), two, P("x"), 2 * X + 1)
        given = jax.device_put(X, P("x"))
        _is_on(jax.jit(lambda v: v - 1, donate_argnums=0)(given), one, P("x"), X - 1)
        assert given.is_deleted()
    assert type(jnp.ones(2)) is not pw.Array


@pytest.mark.parametrize("under", BLOCKS.values(), ids=BLOCKS)
def test_it_is_set_inside_a_placed_function(add: Callable[..., Any], under: Callable[[Any], Any]) -> None:
    slice_ = add(2)

    def fun(v: Any) -> Any:
        with under(slice_.mesh):
            return jax.lax.with_sharding_constraint(v * 2, P("x"))

    _is_on(pw.jit(fun, devices=slice_)(X), slice_, P("x"), 2 * X)


def test_explicit_axes_inside_a_placed_function(add: Callable[..., Any]) -> None:
    slice_ = add(2)
    types = []

    def fun(v: Any, w: Any) -> Any:
        types.append(jax.typeof(v).sharding.spec)
        product = jnp.einsum("ij,jk->ik", v, w, out_sharding=P("x"))
        types.append(jax.typeof(product).sharding.spec)
        return jax.sharding.reshard(jnp.sin(product), P(None, "x"))

    explicit = jax.sharding.explicit_axes
    placed = pw.jit(explicit(fun, in_sharding=(P("x"), P())), devices=slice_)
    w = np.eye(2, dtype=np.float32)
    _is_on(placed(X, w), slice_, P(None, "x"), np.sin(X))
    assert types == [P("x", None), P("x", None)]
    loss = pw.jit(explicit(lambda v: jnp.sum(v * v), in_sharding=(P("x"),)), devices=slice_)
    _is_on(pw.program(jax.grad(lambda v: loss(v) * 2))(X), slice_, P("x"), 4 * X)
    wrong = pw.jit(explicit(lambda v, w: v + w, in_sharding=(P("x"), P(None, "x"))), devices=slice_)
    with pytest.raises(Exception, match="illegally sharded result"):
        wrong(X, X)


def test_the_mesh_of_a_slice_that_is_no_more(add: Callable[..., Any]) -> None:
    mesh = add(2).mesh
    with pytest.raises(pw.errors.SliceError, match="no more"):
        jax.device_put(X, NamedSharding(mesh, P("x")))
    slice_ = add(2)
    mesh = slice_.mesh
    slice_.resize((1,))
    with jax.set_mesh(mesh), pytest.raises(pw.errors.SliceError, match="another shape"):
        jnp.ones(2)


class _Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        cut = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "y"))
        self.inner = nnx.Linear(4, 8, kernel_init=cut, rngs=rngs)
        self.outer = nnx.Linear(8, 2, kernel_init=nnx.with_partitioning(nnx.initializers.ones, ("y", None)), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.outer(nnx.relu(self.inner(x)))


def _trained(inputs: Callable[[Any], Any]) -> tuple[list[float], Any]:
    model = _Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    x, y = inputs(np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)), np.ones((8, 2), np.float32)
    return [float(step(model, optimizer, x, y)) for _ in range(3)], nnx.state(model, nnx.Param).inner.kernel.get_value()


def test_flax_nnx_under_a_slices_mesh(add: Callable[..., Any]) -> None:
    with nnx.use_eager_sharding(False):
        expected, kernel = _trained(lambda x: x)
    slice_ = add((2, 2))
    with jax.set_mesh(slice_.mesh):
        losses, there = _trained(lambda x: jax.device_put(x, P("x")))
        _, abstract = nnx.get_abstract_model(lambda: _Model(nnx.Rngs(0)), slice_.mesh)
        assert abstract.inner.kernel.get_value().sharding == slice_.sharding(P(None, "y"))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert there.slice is slice_ and there.sharding == slice_.sharding(P(None, "y"))
    np.testing.assert_allclose(there, kernel, rtol=1e-3)


def test_flax_in_placed_functions(add: Callable[..., Any]) -> None:
    slice_ = add((2, 2))
    x = np.ones((8, 4), np.float32)
    made = pw.jit(lambda key: nnx.state(_Model(nnx.Rngs(key)), nnx.Param), devices=slice_)(jax.random.key(0))
    assert made.inner.kernel.get_value().sharding == slice_.sharding(P(None, "y"))
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(_Model(nnx.Rngs(0)))
    expected = nnx.merge(graph, state)(x)
    state = jax.device_put(state, nnx.get_named_sharding(state, slice_.mesh))
    assert state.inner.kernel.get_value().sharding == slice_.sharding(P(None, "y"))
    found = pw.jit(lambda state, x: nnx.merge(graph, state)(x), devices=slice_, out_shardings=P("x"))(state, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_flax_linen_under_a_slices_mesh(add: Callable[..., Any]) -> None:
    slice_ = add((2, 2))
    dense = linen.Dense(8, kernel_init=linen.with_partitioning(linen.initializers.lecun_normal(), (None, "y")))
    with jax.set_mesh(slice_.mesh):
        specs = linen.get_partition_spec(jax.eval_shape(dense.init, jax.random.key(0), X))
        shardings = jax.tree.map(lambda spec: NamedSharding(slice_.mesh, spec), specs)
        variables = linen.unbox(jax.jit(dense.init, out_shardings=shardings)(jax.random.key(0), X))
    assert variables["params"]["kernel"].sharding == slice_.sharding(P(None, "y"))
