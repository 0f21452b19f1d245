"""`jax.export`: a placed function with its derivatives in the file, and exported functions inside of placed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

X = np.arange(8, dtype=np.float32).reshape(4, 2)
_STRUCT = jax.ShapeDtypeStruct((4, 2), np.float32)


def _symbolic(*constraints: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 2", constraints=constraints), np.float32)


def _reloaded(fun: Any, *args: Any, vjp_order: int) -> Any:
    return jax.export.deserialize(jax.export.export(fun, platforms=["cpu"])(*args).serialize(vjp_order=vjp_order))


def _wave(v: Any) -> Any:
    return jnp.sin(v) * v


def _scanned(v: Any) -> Any:
    return jax.lax.scan(lambda c, row: (c + jnp.sin(row), c * row), jnp.zeros(2), v)[1]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", ["plain", "scan", "calls another", "closes over", "symbolic"])
def test_derivatives_are_exported(add: Callable[..., Any], form: str, order: int) -> None:
    slice_ = add(1)
    inner, three = pw.jit(jnp.tanh, devices=slice_), pw.device_put(np.float32(3), slice_)
    fun, reference = {
        "plain": (_wave, _wave),
        "scan": (_scanned, _scanned),
        "calls another": (lambda v: inner(v) * v, lambda v: jnp.tanh(v) * v),
        "closes over": (lambda v: v * v * three, lambda v: v * v * 3),
        "symbolic": (_wave, _wave),
    }[form]
    call = _reloaded(pw.jit(fun, devices=slice_), _symbolic() if form == "symbolic" else _STRUCT, vjp_order=order).call

    def gradient(of: Callable[[Any], Any], times: int) -> Any:
        for _ in range(times):
            of = jax.grad(lambda v, of=of: jnp.sum(of(v)))
        return of(X)

    for times in range(1, order + 1):
        np.testing.assert_allclose(gradient(call, times), gradient(reference, times), rtol=1e-5)


@pytest.mark.parametrize(
    "form", ["shardings", "constraint", "in a scan", "device_put", "pw.device_put", "calls another"]
)
def test_derivatives_of_a_function_over_several_devices_are_exported(add: Callable[..., Any], form: str) -> None:
    slice_ = add(2)
    rows = slice_.sharding(P("x"))
    inner = pw.jit(jnp.tanh, devices=slice_, in_shardings=P("x"), out_shardings=P("x"))
    constrain: Callable[[Any], Any] = {
        "constraint": lambda v: jax.lax.with_sharding_constraint(v, rows),
        "device_put": lambda v: jax.device_put(v, rows),
        "pw.device_put": lambda v: pw.device_put(v, rows),
    }.get(form, lambda v: v)

    def fun(v: Any) -> Any:
        if form == "calls another":
            return inner(v) * v
        if form == "in a scan":
            step = lambda c, _: (jax.lax.with_sharding_constraint(jnp.sin(c), rows), None)
            return jax.lax.scan(step, v, None, length=3)[0]
        return constrain(_wave(constrain(v)))

    placed = pw.jit(
        fun, devices=slice_, **({"in_shardings": P("x"), "out_shardings": P("x")} if form == "shardings" else {})
    )
    plain = {"calls another": lambda v: jnp.tanh(v) * v, "in a scan": lambda v: jnp.sin(jnp.sin(jnp.sin(v)))}.get(
        form, _wave
    )
    shown = str(placed.trace(_STRUCT).jaxpr)
    assert form not in ("shardings", "constraint") or "sharding_constraint" in shown
    call = _reloaded(placed, _STRUCT, vjp_order=1).call
    np.testing.assert_allclose(call(X), plain(X), rtol=1e-5)
    wanted = jax.grad(lambda v: plain(v).sum())(X)
    np.testing.assert_allclose(jax.grad(lambda v: call(v).sum())(X), wanted, rtol=1e-5)
    np.testing.assert_allclose(
        pw.program(jax.grad(lambda v: pw.jit(call, devices=slice_)(v).sum()))(X), wanted, rtol=1e-5
    )


def test_the_jaxpr_of_a_placed_function_is_the_plain_one(add: Callable[..., Any]) -> None:
    slice_ = add(1)
    inner = pw.jit(lambda v: v + 1, devices=slice_, name="inner")
    shown = pw.jit(lambda v: inner(v) * 2, devices=slice_).trace(X).jaxpr
    assert [eqn.params.get("name") for eqn in shown.eqns] == ["inner", None]


@pytest.mark.parametrize("rows", [4, 6])
def test_an_exported_function_with_symbolic_shapes_is_called(add: Callable[..., Any], rows: int) -> None:
    one, two = add(2), add(2)
    plain = jax.jit(lambda v: jnp.sin(v).sum(0))
    exported = jax.export.deserialize(jax.export.export(plain)(_symbolic()).serialize(vjp_order=1))
    call = exported.call
    x = np.linspace(0, 1, 2 * rows, dtype=np.float32).reshape(rows, 2)
    halved = pw.jit(lambda v: v / 2, devices=two)

    def loop(v: Any) -> Any:
        return jax.lax.scan(lambda c, _: (halved(c) + call(c), None), v, None, length=20)[0]

    def called(v: Any) -> Any:
        return call(v) + jax.pure_callback(lambda a: np.asarray(a).sum(0), jax.ShapeDtypeStruct((2,), np.float32), v)

    expected_loop = x
    for _ in range(20):
        expected_loop = expected_loop / 2 + np.sin(expected_loop).sum(0)
    for found, expected in (
        (pw.jit(call, devices=one, in_shardings=P("x"))(x), np.sin(x).sum(0)),
        (pw.jit(lambda v: jax.lax.map(lambda _: call(v), jnp.arange(3)), devices=one)(x), [np.sin(x).sum(0)] * 3),
        (pw.program(lambda v: halved(call(v * 2)))(pw.device_put(x, one)), np.sin(2 * x).sum(0) / 2),
        (pw.program(jax.grad(lambda v: jnp.sum(halved(call(v)))))(x), np.cos(x) / 2),
        (pw.program(loop)(x), expected_loop),
        (pw.jit(called, devices=one)(x), np.sin(x).sum(0) + x.sum(0)),
        (call(pw.device_put(x, one)), np.sin(x).sum(0)),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_shape_that_breaks_a_constraint(add: Callable[..., Any]) -> None:
    call = jax.export.export(jax.jit(lambda v: v[:4]))(_symbolic("n >= 4")).call
    with pytest.raises(ValueError, match="Input shapes do not match the symbolic shape constraint n >= 4"):
        pw.jit(call, devices=add(1))(X[:3])
