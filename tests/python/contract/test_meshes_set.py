"""A mesh that is set for this process does not concern slices: everything gives what it gives without one.

By all four ways to set one, of automatic and of explicit axes. Nothing is compiled again, and a call under a mesh takes
the short way from the second time on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

X = np.arange(8, dtype=np.float32).reshape(4, 2)
_STRUCT = jax.ShapeDtypeStruct(X.shape, X.dtype)


def _mesh(kind: AxisType, shape: tuple[int, ...] = (2,)) -> jax.sharding.Mesh:
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[: int(np.prod(shape))])


@contextlib.contextmanager
def _statement(mesh: jax.sharding.Mesh) -> Iterator[None]:
    before = jax.sharding.get_mesh()
    jax.set_mesh(mesh)
    try:
        yield
    finally:
        jax.set_mesh(before)


@contextlib.contextmanager
def _legacy(mesh: jax.sharding.Mesh) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "automatic": lambda: jax.set_mesh(_mesh(AxisType.Auto)),
    "explicit": lambda: jax.set_mesh(_mesh(AxisType.Explicit, (4, 2))),
    "statement": lambda: _statement(_mesh(AxisType.Explicit)),
    "abstract": lambda: jax.sharding.use_abstract_mesh(_mesh(AxisType.Auto, (2, 2)).abstract_mesh),
    "legacy": lambda: _legacy(_mesh(AxisType.Auto)),
}
#: Under these all works are done, under the others a few.
THOROUGH, FEW = ("automatic", "explicit"), ("placed", "placed anew", "program", "grad", "operators", "indexing")


def _works(one: Any, two: Any) -> dict[str, Callable[[], Any]]:
    triple = pw.jit(lambda v: v * 3, devices=one)
    plus = pw.jit(lambda v: v + 1, devices=two)
    loss = pw.jit(lambda w, v: jnp.sum(jnp.tanh(v * w) ** 2), devices=one)
    stages = [pw.jit(lambda p, v: jnp.tanh(v @ p), devices=slice_) for slice_ in (one, two)]
    model = pw.pipeline(stages, microbatches=2, schedule="1F1B", loss=lambda y, t: jnp.mean((y - t) ** 2))
    both = pw.program(lambda v: plus(triple(v)))
    counter = pw.Variable(pw.device_put(np.float32(0), one))
    constant = pw.device_put(X, one)

    def x() -> Any:
        return pw.device_put(X, one, P("x"))

    @pw.program
    def loops(v: Any) -> Any:
        total, rows = jax.lax.scan(lambda c, _: (plus(triple(c)) * 0.25, jnp.sum(c)), v, None, length=20)
        chosen = jax.lax.cond(jnp.sum(total) > 0, triple, lambda z: triple(z + 1), total)
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1e4, triple, chosen), rows

    @pw.program
    def count() -> Any:
        counter.value = triple(counter.value) + 1
        return counter.value

    def counted() -> Any:
        counter.value = pw.device_put(np.float32(0), one)
        return count(), count()

    def updated() -> Any:
        optimizer = optax.adam(1e-2)
        state = optimizer.init(x())
        return optax.apply_updates(x(), optimizer.update(x(), state, x())[0])

    def undone() -> Any:
        with jax.disable_jit():
            return triple(x())

    def mapped(v: Any) -> Any:
        return jax.shard_map(lambda u: jax.lax.psum(u, "x"), in_specs=P("x"), out_specs=P())(v)

    def constrained(v: Any) -> Any:
        return jax.lax.with_sharding_constraint(jax.nn.relu(v) + jax.jit(jnp.sin)(v), P("x"))

    def called(v: Any) -> Any:
        return jax.pure_callback(lambda a: np.asarray(a) * 2, _STRUCT, v)

    return {
        "placed": lambda: (triple(x()), triple(X)),
        "placed anew": lambda: pw.jit(constrained, devices=one, out_shardings=P("x"))(X),
        "shard_map": lambda: pw.jit(mapped, devices=one)(x()),
        "closed over": lambda: pw.jit(lambda v: v + constant, devices=one)(X),
        "lowered": lambda: triple.lower(x()).compile()(x()),
        "exported": lambda: jax.export.export(triple)(_STRUCT).nr_devices,
        "without jit": undone,
        "program": lambda: (both(x()), pw.program(lambda v: plus(triple(v)) + v)(x())),
        "loops": lambda: loops(x()),
        "pipeline": lambda: pw.program(jax.value_and_grad(model))([np.eye(2, dtype=np.float32)] * 2, X, X),
        "variable": counted,
        "callback": lambda: pw.jit(called, devices=one)(x()),
        "grad": lambda: jax.grad(loss)(x(), X),
        "grad of a program": lambda: jax.value_and_grad(pw.program(lambda w, v: loss(w, v) * 2))(x(), X),
        "transformed": lambda: (jax.vmap(triple)(x()), jax.jvp(triple, (x(),), (x(),)), jax.vjp(triple, x())[1](x())),
        "operators": lambda: (x() * 3.5, 2 - x(), x() + X, x() @ X.T, -x(), x() > 2, x() + jax.device_put(X)),
        "methods": lambda: (
            x().sum(),
            x().mean(axis=0),
            x().T,
            x().astype(jnp.bfloat16),
            [*x()],
            bool((x() < 9).all()),
        ),
        "indexing": lambda: (x()[1:3], x()[np.array([0, 2])], x().at[0].set(9), x().at[np.array([1, 1])].add(1.0)),
        "jax.numpy": lambda: (
            jnp.where(x() > 3, x(), 0),
            jnp.concatenate([x(), x()]),
            jnp.einsum("ij,kj->ik", x(), x()),
            jnp.pad(x(), 1),
            jnp.linalg.norm(x()),
            jax.nn.softmax(x()),
            jnp.zeros_like(x()),
        ),
        "jax.lax": lambda: (
            jax.lax.add(x(), x()),
            jax.lax.broadcast_in_dim(x(), (4, 2, 3), (0, 1)),
            jax.lax.reduce(x(), np.float32(0), jax.lax.add, (0,)),
            jax.lax.cond(x().sum() > 3, lambda v: v + 1, lambda v: v - 1, x()),
        ),
        "numpy": lambda: (np.sum(x()), np.add(X, x()), np.concatenate([x(), x()])),
        "keys": lambda: jax.random.normal(pw.device_put(jax.random.key(3), one), (4,)),
        "makers": lambda: (jnp.ones((4, 2), device=one.sharding(P("x"))), jnp.arange(8, device=one.sharding(P("x")))),
        "puts": lambda: (
            jax.device_put(X, one.sharding(P("x"))),
            pw.device_put(x(), two),
            jax.device_put(x(), one.sharding(P(None, "x"))),
            jax.lax.with_sharding_constraint(x(), one.sharding(P())),
            jax.make_array_from_callback((4, 2), one.sharding(P("x")), lambda index: X[index]),
        ),
        "reads": lambda: (jax.device_get(x()), [shard.data for shard in x().addressable_shards]),
        "optax": updated,
    }


def _values(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_mesh_that_is_set_does_not_concern_slices(add: Callable[..., Any]) -> None:
    works = _works(add(2), add(2))
    expected = {name: _values(work()) for name, work in works.items()}
    wrong = []
    for setting, enter in SETTINGS.items():
        for name, work in works.items():
            if setting not in THOROUGH and name not in FEW:
                continue
            try:
                with enter():
                    found = work()
                np.testing.assert_equal(_values(found), expected[name])
            except Exception as error:
                wrong.append(f"{name} under {setting}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_compiled_again(add: Callable[..., Any], setting: str) -> None:
    slice_ = add(2)
    traces = []

    def fun(v: Any) -> Any:
        traces.append(setting)
        return v * 3

    placed = pw.jit(fun, devices=slice_)
    x = placed(placed(X))
    placed(x)
    with SETTINGS[setting]():
        y = placed(placed(x)) + x
        slowly = placed._call_slowly
        placed._call_slowly = None  # type: ignore[assignment]
        np.testing.assert_array_equal(placed(x), X * 27)  # the short way
        placed._call_slowly = slowly
    np.testing.assert_array_equal(y, X * 90)
    assert len(traces) == 1
