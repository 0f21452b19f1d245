"""What people do with `jax.jit`'s functions, done with placed functions and programs: methods, decorators, stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

X = np.arange(8, dtype=np.float32)


class Scale:
    """Something with methods; hashed by identity, so it can be a static argument."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def plain(self, x: Any) -> Any:
        return x * self.factor

    def __call__(self, x: Any) -> Any:
        return x + self.factor


def test_methods(add: Callable[..., Any]) -> None:
    on = functools.partial(pw.jit, devices=add(2))

    class Model(Scale):
        @functools.partial(on, static_argnums=0)
        def scaled(self, x: Any) -> Any:
            return x * self.factor

        @functools.partial(pw.program, static_argnums=0)
        def shifted(self, x: Any) -> Any:
            return self.scaled(x) + 1

        late = functools.partial(pw.program, static_argnames="self")(lambda self, x: x - self.factor).with_timeout(60)

        @classmethod
        @functools.partial(on, static_argnums=0)
        def named(cls, x: Any) -> Any:
            return x + len(cls.__name__)

        @staticmethod
        @on
        def loose(x: Any) -> Any:
            return x + 4

    two, three = Model(2.0), Model(3.0)
    x = pw.device_put(X, add(2))
    for _ in range(2):  # compiled, and found again
        np.testing.assert_array_equal(two.scaled(X), X * 2)
        np.testing.assert_array_equal(three.scaled(X), X * 3)
        np.testing.assert_array_equal(two.shifted(X), X * 2 + 1)
        np.testing.assert_array_equal(three.late(x), X - 3)
        np.testing.assert_array_equal(Model.named(X), X + 5)
        np.testing.assert_array_equal(two.named(X), X + 5)
        np.testing.assert_array_equal(Model.loose(X), X + 4)
        np.testing.assert_array_equal(two.loose(X), X + 4)
    np.testing.assert_array_equal(Model.scaled(two, X), X * 2)
    assert Model.scaled.eval_shape(two, X).shape == (8,)


def test_bound_methods_partials_and_callable_objects(add: Callable[..., Any]) -> None:
    on = functools.partial(pw.jit, devices=add(2))
    np.testing.assert_array_equal(on(Scale(3.0).plain)(X), X * 3)
    np.testing.assert_array_equal(on(Scale(3.0))(X), X + 3)
    np.testing.assert_array_equal(on(functools.partial(jnp.subtract, 10.0))(X), 10 - X)
    np.testing.assert_array_equal(pw.program(on(Scale(3.0)))(X), X + 3)


def test_jit_as_a_decorator(add: Callable[..., Any]) -> None:
    slice_ = add(2)

    @pw.jit(devices=slice_, static_argnames="times", name="again")
    def repeated(x: Any, times: int) -> Any:
        """Words."""
        return x * times

    np.testing.assert_array_equal(repeated(X, times=3), X * 3)
    assert repeated.slice is slice_
    assert repeated.__doc__ == "Words."
    assert "again" in repr(repeated)
    with pytest.raises(pw.errors.SliceError, match="devices="):
        pw.jit(name="nowhere")
    with pytest.raises(pw.errors.SliceError, match="devices="):
        pw.jit(lambda x: x)


@pytest.mark.parametrize("make", ["jit", "program"])
def test_arguments_are_donated_by_name_however_they_are_given(add: Callable[..., Any], make: str) -> None:
    slice_ = add(2)

    def update(state: Any, gradient: Any) -> Any:
        return state + gradient

    for donation in ({"donate_argnames": "state"}, {"donate_argnums": 0}, {"donate_argnames": ("state",)}):
        f = pw.jit(update, devices=slice_, **donation) if make == "jit" else pw.program(update, **donation)
        for call in (lambda a, b, f=f: f(a, b), lambda a, b, f=f: f(state=a, gradient=b)):
            state, gradient = pw.device_put(X, slice_), pw.device_put(X, slice_)
            np.testing.assert_array_equal(call(state, gradient), 2 * X)
            assert state.is_deleted()
            assert not gradient.is_deleted()


@pytest.mark.parametrize("make", ["jit", "program"])
@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "shape"}, {"static_argnums": (-1,)}])
def test_a_static_argument_by_position_or_by_keyword(
    add: Callable[..., Any], make: str, static: dict[str, Any]
) -> None:
    slice_ = add(2)

    def reshaped(x: Any, shape: tuple[int, ...] = (8,)) -> Any:
        return x.reshape(shape)  # not for a traced shape

    f = pw.jit(reshaped, devices=slice_, **static) if make == "jit" else pw.program(reshaped, **static)
    assert f(X, (2, 4)).shape == (2, 4)
    if static != {"static_argnums": (-1,)}:  # counted from the end of a call's positional arguments, as in jax.jit
        assert f(X, shape=(4, 2)).shape == (4, 2)
        assert f(x=X, shape=(4, 2)).shape == (4, 2)
        assert f(X).shape == (8,)
    np.testing.assert_array_equal(f(X, (2, 4)), X.reshape(2, 4))


def test_shapes_and_jaxprs(add: Callable[..., Any], cluster: Any) -> None:
    """Nothing is compiled or run for them."""
    f = pw.jit(lambda x, y: {"sum": x + y["z"]}, devices=add(2), name="f")
    whole = pw.program(lambda x, y: f(x, y)["sum"].sum(), name="whole")
    x, y = pw.device_put(X, f.slice), {"z": np.float32(1)}
    before = cluster.stats()["dispatches"], cluster.stats()["compiles"]
    for args in ((X, y), (x, y), (jax.ShapeDtypeStruct((8,), np.float32), y)):
        for shapes in (jax.eval_shape(f, *args), f.eval_shape(*args), f.trace(*args).out_info):
            assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == {"sum": ((8,), np.float32)}
        assert jax.eval_shape(whole, *args).shape == whole.eval_shape(*args).shape == ()
        assert jax.make_jaxpr(f)(*args).out_avals[0].shape == (8,)
        assert whole.trace(*args).jaxpr.out_avals[0].shape == ()
        assert jax.make_jaxpr(whole)(*args).out_avals[0].dtype == np.float32
        assert jax.make_jaxpr(jax.grad(whole))(*args).out_avals[0].shape == (8,)
    assert before == (cluster.stats()["dispatches"], cluster.stats()["compiles"])


def test_stages(add: Callable[..., Any]) -> None:
    f = pw.jit(lambda x, n, *, y: x * n + y, devices=add(2), static_argnames="n", donate_argnames="x", name="f")
    traced = f.trace(X, 3, y=1.0)
    for stage in (traced, traced.lower(), f.lower(X, 3, y=1.0)):
        assert stage.in_tree == jax.tree.structure(((X,), {"y": 1.0}))
        assert stage.out_tree == jax.tree.structure(0)
        (x,), rest = stage.args_info
        assert (x.shape, x.dtype, x.donated, rest["y"].donated) == ((8,), np.float32, True, False)
        assert stage.in_avals[0][0].shape == stage.out_avals.shape == stage.out_info.shape == (8,)
        assert stage.donate_argnums == (0,)
    assert traced.fun_name == "f"
    np.testing.assert_array_equal(traced.lower().compile()(X, y=1.0), X * 3 + 1)


def test_clear_cache(add: Callable[..., Any], cluster: Any) -> None:
    traced = []

    def body(x: Any) -> Any:
        traced.append(1)
        return x + len(traced)

    f = pw.jit(body, devices=add(2))
    g = pw.program(lambda x: f(x) * 2)
    np.testing.assert_array_equal(f(X), X + 1)
    np.testing.assert_array_equal(f(X), X + 1)
    f.clear_cache()
    np.testing.assert_array_equal(f(X), X + 2)
    np.testing.assert_array_equal(g(X), (X + 2) * 2)
    f.clear_cache()
    g.clear_cache()
    np.testing.assert_array_equal(g(X), (X + 3) * 2)


@pytest.mark.parametrize("make", ["jit", "program"])
def test_what_compiles_for_this_process_is_refused(add: Callable[..., Any], make: str) -> None:
    f: Any = pw.jit(lambda x: x + 1, devices=add(2), name="f")
    f = f if make == "jit" else pw.program(lambda x: x + 1, name="f")
    words = "function 'f'" if make == "jit" else "program 'f'"
    for here in (
        jax.jit(f),
        jax.jit(f).lower,
        jax.jit(jax.grad(lambda x: f(x).sum())),
        lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2),
        lambda x: jax.lax.cond(True, f, lambda y: y, x),
    ):
        with pytest.raises(pw.errors.TraceError, match=words):
            here(X)
    np.testing.assert_array_equal(f(X), X + 1)
