"""Shardings over axes that a slice lacks: refused with a clear word before any compiler sees them, or, where it is
plain which slice is meant, run there. (jaxlib's compiler ends the process for what is let through.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors

X = np.arange(64, dtype=np.float32).reshape(8, 8)
constrain = jax.lax.with_sharding_constraint


@pytest.fixture
def grid(cluster: Any) -> Any:
    return pw.make_virtual_device_set(cluster).add_slice(shape=(2, 2), axis_names=("data", "model"))


def here(devices: int, axis: str) -> jax.sharding.Mesh:
    """A mesh of this process's own devices."""
    return jax.make_mesh((devices,), (axis,), devices=jax.devices()[:devices])


def test_a_slices_sharding_says_where_an_unplaced_operation_runs(add: Any, grid: Any) -> None:
    line = add(2)
    double = pw.jit(lambda x: x * 2, devices=line)
    cut = grid.sharding(P("data"))
    programs: list[Callable[[Any], Any]] = [
        lambda x: constrain(x * 2, cut),
        lambda x: constrain(double(x), cut),
        lambda x: jax.jit(lambda v: v * 2, in_shardings=cut, out_shardings=grid.sharding(P("model", "data")))(x),
        lambda x: constrain({"a": x * 2}, {"a": cut})["a"],
        lambda x: constrain(jnp.ones((8, 8)), cut) * (x * 2),
    ]
    for number, fun in enumerate(programs):
        for given in (X, pw.device_put(X, line), pw.device_put(X, grid, P("model"))):
            got = pw.program(fun)(given)
            np.testing.assert_array_equal(got, X * 2, err_msg=str(number))
    value, grad = pw.program(jax.value_and_grad(lambda x: constrain(double(x), cut).sum()))(X)
    assert float(value) == X.sum() * 2
    np.testing.assert_array_equal(grad, np.full_like(X, 2))
    both = pw.program(lambda x, y: (constrain(x, cut) + 1, double(y)))(X, X)
    np.testing.assert_array_equal(both[0], X + 1)
    np.testing.assert_array_equal(both[1], X * 2)


def test_what_names_only_axes_of_the_slice_works(add: Any, grid: Any) -> None:
    """Axes of the same name and size are the slice's, whoever made the mesh."""
    line = add(2)
    twin = add(2)
    own = here(2, "x")
    bodies: list[Callable[[Any], Any]] = [
        lambda v: constrain(v, twin.sharding(P("x"))),
        lambda v: constrain(v, P("x")),
        lambda v: constrain(v, grid.sharding(P())),
        lambda v: jax.shard_map(lambda q: q + 0, mesh=twin.mesh, in_specs=P("x"), out_specs=P("x"))(v),
        lambda v: jax.shard_map(lambda q: q + 0, mesh=line.mesh, in_specs=P("x"), out_specs=P("x"))(v),
        lambda v: jax.jit(lambda q: q + 0, out_shardings=line.sharding(P("x")))(v),
    ]
    for body in bodies:
        np.testing.assert_array_equal(pw.jit(body, devices=line)(X), X)
        np.testing.assert_array_equal(pw.jit(lambda v, body=body: jax.checkpoint(body)(v), devices=line)(X), X)
    del own


def test_foreign_axes_are_refused(add: Any, grid: Any) -> None:
    line = add(2)
    foo, eight, data = here(2, "foo"), here(8, "x"), grid.sharding(P("data"))
    summed = {"in_specs": P("x"), "out_specs": P()}

    def psum(axis: str, mesh: Any, **specs: Any) -> Callable[[Any], Any]:
        return lambda v: jax.shard_map(lambda q: jax.lax.psum(q, axis), mesh=mesh, **specs)(v)

    over_data = psum("data", grid.mesh, in_specs=P("data"), out_specs=P())
    bodies: dict[str, Callable[[Any], Any]] = {
        "another slice's": lambda v: constrain(v, data),
        "another mesh's": lambda v: constrain(v, NamedSharding(foo, P("foo"))),
        "another size": lambda v: constrain(v, NamedSharding(eight, P("x"))),
        "shard_map, another size": psum("x", eight, **summed),
        "shard_map, another slice": over_data,
        "jit, out": lambda v: jax.jit(lambda q: q * 2, out_shardings=NamedSharding(foo, P("foo")))(v),
        "jit, in": lambda v: jax.jit(lambda q: q * 2, in_shardings=data)(v),
        "in a scan": lambda v: jax.lax.scan(lambda c, r: (constrain(c + r, grid.sharding(P("model"))), r), v[0], v)[0],
        "in a cond": lambda v: jax.lax.cond(v[0, 0] > 0, lambda q: constrain(q, data), lambda q: q, v),
        "under grad": jax.grad(lambda v: constrain(v * v, data).sum()),
        "under vmap": jax.vmap(lambda v: constrain(v, data)),
    }
    for name, body in bodies.items():
        for fun in (pw.jit(body, devices=line), pw.program(lambda v, body=body: pw.jit(body, devices=line)(v))):
            with pytest.raises(ValueError) as caught:
                fun(X)
            assert "axes" in str(caught.value) or "mesh" in str(caught.value), (name, caught.value)
    unplaced: dict[str, Callable[[Any], Any]] = {
        "another mesh's": lambda v: constrain(v * 2, NamedSharding(foo, P("foo"))),
        "shard_map": over_data,
        "two slices": lambda v: jax.jit(
            lambda q: constrain(constrain(q, data) * 2, pw_line), out_shardings=NamedSharding(eight, P("x"))
        )(v),
    }
    pw_line = line.sharding(P("x"))
    for name, fun in unplaced.items():
        with pytest.raises(ValueError) as caught:
            pw.program(fun)(X)
        assert "axes" in str(caught.value) or "mesh" in str(caught.value), (name, caught.value)
    np.testing.assert_array_equal(pw.program(over_data)(pw.device_put(X, grid)), X[:4] + X[4:])
    with pytest.raises(errors.ShardingError, match=r"'spread'.* over the axes \{'data': 2\}, .*'x': 2"):
        pw.jit(lambda v: constrain(v, data), devices=line, name="spread")(X)


def test_shardings_that_cut_alike_are_equal(add: Any) -> None:
    line, thin = add(2), add((2, 1))
    replicated = pw.jit(lambda x: x + 1, devices=line, out_shardings=P())(X).sharding
    rows = pw.device_put(X, line, P("x", None)).sharding
    for spec in (P(), P(None), P(None, None), None):
        assert replicated == line.sharding(spec) and hash(replicated) == hash(line.sharding(spec))
        assert replicated != line.sharding(P("x")) and rows != line.sharding(spec)
    for spec in (P("x"), P(("x",)), P("x", None)):
        assert rows == line.sharding(spec) and hash(rows) == hash(line.sharding(spec))
        assert rows == NamedSharding(line.mesh, spec) and NamedSharding(line.mesh, spec) == rows
    assert rows.spec == P("x") and replicated.spec == P()  # in the shortest form, as JAX's own results have it
    assert rows != line.sharding(P(None, "x")) and rows != add(2).sharding(P("x"))
    assert thin.sharding(P("x", "y")) == thin.sharding(P("x")) == pw.device_put(X, thin, P("x", "y")).sharding


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_from_a_callback(add: Any, implementation: str) -> None:
    rows = add(2).sharding(P("x"))
    keys = jax.random.split(jax.random.key(3, impl=implementation), 4)
    for array in (
        jax.make_array_from_callback((4,), rows, lambda index: keys[index]),
        jax.make_array_from_callback((4,), rows, lambda index: keys[index], dtype=keys.dtype),
        jax.make_array_from_process_local_data(rows, keys),
    ):
        assert array.dtype == keys.dtype and array.sharding == rows
        np.testing.assert_array_equal(jax.random.key_data(jax.device_get(array)), jax.random.key_data(keys))
    with pytest.raises(errors.ShardingError, match="dtype"):
        jax.make_array_from_callback((4,), rows, lambda index: keys[index], dtype=np.uint32)
