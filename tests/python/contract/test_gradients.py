"""JAX's transformations through programs: gradients, optimisers, batching, scans and random numbers equal plain JAX."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import pathways as pw

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
Y = RNG.integers(0, 4, 8)
PARAMS = {
    "w1": RNG.normal(size=(6, 16)).astype(np.float32) * 0.3,
    "w2": RNG.normal(size=(16, 4)).astype(np.float32) * 0.3,
}


def near(got: Any, want: Any, rtol: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=1e-6)


def hidden(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def cost(h: Any, w: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, y).mean()


def plain(params: Any, x: Any, y: Any) -> Any:
    return cost(hidden(x, params["w1"]), params["w2"], y)


@pytest.fixture
def stages(add: Any) -> Any:
    """A two-stage model: (loss of params, x and y; first slice; second slice)."""
    first, second = add(4), add((2, 2))
    one = pw.jit(hidden, devices=first, in_shardings=(P("x"), P()), out_shardings=P("x"), name="hidden")
    two = pw.jit(cost, devices=second, in_shardings=(P("x"), P(None, "y"), P("x")), name="cost")
    return lambda params, x, y: two(one(x, params["w1"]), params["w2"], y), first, second


def test_grad_through_two_slices(stages: Any) -> None:
    """Equals plain JAX's, and each backward step runs where its forward step ran."""
    loss, first, second = stages
    grad = pw.program(jax.grad(loss))
    near(grad(PARAMS, X, Y), jax.grad(plain)(PARAMS, X, Y))
    text = grad.lower(PARAMS, X, Y).as_text("plan")
    where = {name: set() for name in ("hidden", "cost")}
    backward = set()
    for name, _, back, slice_ in re.findall(r"call (\w+)\.(\d+)( \(backward\))? on (\w+):", text):
        if name in where:
            where[name].add(slice_)
            if back:
                backward.add(name)
    assert where == {"hidden": {first.mesh_spec.name}, "cost": {second.mesh_spec.name}}, text
    assert backward == {"hidden", "cost"}, text


def test_training_step_with_an_optimizer_in_one_program(stages: Any, cluster: Any) -> None:
    loss, _, _ = stages
    optimizer = optax.adam(1e-2)

    def step(loss: Any) -> Any:
        def run(params: Any, state: Any, x: Any, y: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x, y)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return run

    mine, theirs = pw.program(step(loss)), jax.jit(step(plain))
    got = want = (PARAMS, optimizer.init(PARAMS))
    before = cluster.stats()["dispatches"]
    for _ in range(5):
        *got, value = mine(*got, X, Y)
        *want, expected = theirs(*want, X, Y)
        near(value, expected)
    near(got, want, rtol=1e-4)
    assert cluster.stats()["dispatches"] == before + 5


def test_training_that_donates(stages: Any) -> None:
    loss, _, _ = stages
    step = pw.program(
        lambda p, x, y: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x, y)), donate_argnums=0
    )
    theirs = jax.jit(lambda p, x, y: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(plain)(p, x, y)))
    got = want = PARAMS
    for _ in range(5):
        got, want = step(got, X, Y), theirs(want, X, Y)
    near(got, want)


def test_value_and_grad_with_aux_and_checkpoint(stages: Any, add: Any) -> None:
    third = pw.jit(lambda x, w: (jnp.sin(x @ w).sum(), x.max()), devices=add(2), name="third")

    def loss(w: Any, x: Any) -> Any:
        return jax.checkpoint(third)(x, w)

    near(
        pw.program(jax.value_and_grad(loss, has_aux=True))(PARAMS["w1"], X),
        jax.value_and_grad(lambda w, x: (jnp.sin(x @ w).sum(), x.max()), has_aux=True)(PARAMS["w1"], X),
    )


def test_vmap_of_a_program_of_two_slices(add: Any) -> None:
    f, g = pw.jit(lambda x: x @ x, devices=add(2)), pw.jit(lambda x: jnp.linalg.norm(x), devices=add(1))
    batch = RNG.normal(size=(5, 4, 4)).astype(np.float32)
    near(pw.program(jax.vmap(lambda x: g(f(x))))(batch), jax.vmap(lambda x: jnp.linalg.norm(x @ x))(batch))
    per_example = jax.vmap(jax.grad(lambda x: jnp.linalg.norm(x @ x)))
    near(pw.program(jax.vmap(jax.grad(lambda x: g(f(x)))))(batch), per_example(batch), rtol=1e-4)


def test_custom_vjp_and_forward_mode(add: Any) -> None:
    @jax.custom_vjp
    def clip(x: Any) -> Any:
        return x * 2

    clip.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    f, g = pw.jit(lambda x: clip(x), devices=add(2)), pw.jit(lambda x: jnp.sin(x).sum(), devices=add(2))
    near(pw.program(jax.grad(lambda x: g(f(x))))(X), jax.grad(lambda x: jnp.sin(clip(x)).sum())(X))
    sine = pw.jit(jnp.sin, devices=f.slice)
    near(
        pw.program(lambda x: jax.jvp(lambda x: sine(sine(x)), (x,), (x,)))(X),
        jax.jvp(lambda x: jnp.sin(jnp.sin(x)), (X,), (X,)),
    )


def test_scan_while_and_cond_inside_a_computation(add: Any) -> None:
    def work(x: Any) -> Any:
        total, steps = jax.lax.scan(lambda c, row: (c + row, c.sum()), jnp.zeros(6), x)
        count = jax.lax.while_loop(lambda c: c < 100, lambda c: c * 2, jnp.int32(3))
        return jax.lax.cond(total.sum() > 0, lambda t: t, lambda t: -t, total), steps, count

    near(pw.jit(work, devices=add(2))(X), jax.jit(work)(X))
    f = pw.jit(lambda x: jax.lax.scan(lambda c, r: (c * r.sum(), None), 1.0, x)[0], devices=add(2))
    near(
        pw.program(jax.grad(lambda x: f(x)))(X),
        jax.grad(lambda x: jax.lax.scan(lambda c, r: (c * r.sum(), None), 1.0, x)[0])(X),
        rtol=1e-3,
    )


def test_random_numbers(add: Any) -> None:
    slice_ = add(4)
    normal = pw.jit(lambda key: jax.random.normal(key, (8, 4)), devices=slice_, out_shardings=P("x"))
    split = pw.jit(lambda key: jax.random.split(key), devices=add(1))

    @pw.program
    def draw(key: Any) -> Any:
        one, two = split(key)
        return one, normal(two), jax.random.fold_in(key, 3)

    key = jax.random.key(3)
    one, two = jax.random.split(key)
    got = draw(key)
    near(got[1], jax.random.normal(two, (8, 4)))
    for mine, theirs in ((got[0], one), (got[2], jax.random.fold_in(key, 3))):
        near(jax.random.key_data(mine), jax.random.key_data(theirs))
    near(draw(pw.device_put(key, slice_))[1], jax.random.normal(two, (8, 4)))
    again = draw(got[0])
    near(again[1], jax.random.normal(jax.random.split(one)[1], (8, 4)))


def test_linear_algebra(add: Any) -> None:
    a = X.T @ X + np.eye(6, dtype=np.float32)
    f = pw.jit(lambda a: (jnp.linalg.cholesky(a), jnp.linalg.solve(a, a[0])), devices=add(2))
    near(f(a), (jnp.linalg.cholesky(a), jnp.linalg.solve(a, a[0])), rtol=1e-3)


def test_complex_values_between_computations(add: Any) -> None:
    """They cross as real and imaginary parts; values and gradients are JAX's."""
    one, two = add(2), add(2)
    bodies = (lambda x: x * (1 + 2j) + jnp.roll(x, 1, 0), lambda x: jnp.abs(jnp.conj(x) @ jnp.exp(1j * jnp.arange(6))))

    def loss(parts: Any, w: Any, scale: Any) -> Any:
        first, second = parts
        return (second(first(w) * scale) ** 2).sum()

    placed = (
        pw.jit(bodies[0], devices=one, in_shardings=P("x"), out_shardings=P("x")),
        pw.jit(bodies[1], devices=two, in_shardings=P(None, "x")),
    )
    w = (np.arange(24).reshape(4, 6) * (0.1 - 0.3j) + 1).astype(np.complex64)
    scale = np.linspace(-1, 1, 6).astype(np.float32)
    want = jax.value_and_grad(lambda *args: loss(bodies, *args), (0, 1))(jnp.asarray(w), jnp.asarray(scale))
    got = pw.program(jax.value_and_grad(lambda *args: loss(placed, *args), (0, 1)))(w, scale)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=2e-5, atol=2e-5)


def test_a_gradient_of_integers_is_float0(add: Any) -> None:
    """As `jax.jit` gives it: an array of the dtype float0, of the argument's shape."""
    slice_ = add(2)
    loss = pw.jit(lambda x, n: (x * n).sum(), devices=slice_)
    x, n = np.ones(2, np.float32), np.array([3, 4], np.int32)
    grad = jax.grad(loss, argnums=(0, 1), allow_int=True)
    inside = jax.grad(lambda x, n: (x * n).sum(), argnums=(0, 1), allow_int=True)
    for fun in (pw.program(grad), pw.jit(inside, devices=slice_), grad):
        for given in ((x, n), (pw.device_put(x, slice_), pw.device_put(n, slice_))):
            for _ in range(2):
                of_x, of_n = fun(*given)
                np.testing.assert_array_equal(of_x, [3, 4])
                assert (of_n.dtype, of_n.shape) == (jax.dtypes.float0, (2,))
    alone = pw.program(jax.grad(loss, argnums=1, allow_int=True))(x, n)
    assert (alone.dtype, alone.shape) == (jax.dtypes.float0, (2,))
    # It has no bytes, so a put gives it back, alone or in a tree.
    put = pw.device_put({"of_n": alone, "x": np.ones(2, np.float32)}, slice_)
    there = jax.device_put(alone, slice_.sharding(P()))
    assert put["of_n"].dtype == there.dtype == jax.dtypes.float0 and put["x"].slice is slice_


def test_checkify_looks_into_placed_functions(add: Any) -> None:
    """Also when the function is given values, which is how checkify calls it, and has been called before."""
    slice_ = add(2)
    logs = pw.jit(jnp.log, devices=slice_, name="logs")

    def positive(x: Any) -> Any:
        checkify.check(jnp.all(x > 0), "not positive: {x}", x=x[0])
        return x * 2

    checked = pw.jit(positive, devices=slice_)
    program = pw.program(lambda x: logs(x) + 0)
    bad, good = np.array([-1.0, 2.0], np.float32), np.array([1.0, 2.0], np.float32)
    for put in (lambda x: x, lambda x: pw.device_put(x, slice_)):
        for _ in range(2):
            assert np.isnan(np.asarray(logs(put(bad)))).tolist() == [True, False]
            assert np.isnan(np.asarray(program(put(bad)))).tolist() == [True, False]
        for fun in (logs, program, lambda x: logs(x * 1) + 1, jax.vmap(logs), jax.grad(lambda x: logs(x).sum())):
            check = checkify.checkify(fun, errors=checkify.float_checks)
            for _ in range(2):
                error, value = check(put(good))
                assert error.get() is None
                np.testing.assert_allclose(np.asarray(value), np.asarray(fun(good)), rtol=1e-6)
        for fun in (logs, program, lambda x: logs(x * 1) + 1, jax.vmap(logs)):
            error, _ = checkify.checkify(fun, errors=checkify.float_checks)(put(bad))
            assert "nan generated by primitive: log" in error.get()
            with pytest.raises(checkify.JaxRuntimeError, match="nan generated"):
                error.throw()
        for fun in (checkify.checkify(checked), pw.program(checkify.checkify(checked))):
            assert "not positive: -1.0" in fun(put(bad))[0].get()
            error, value = fun(put(good))
            assert error.get() is None
            np.testing.assert_array_equal(np.asarray(value), good * 2)
    assert np.isnan(np.asarray(logs(pw.device_put(bad, slice_)))).tolist() == [True, False]


def test_eager_derivatives_of_what_is_used_twice(add: Any) -> None:
    """Cotangents are added outside of any trace; second derivatives, auxiliary results, recomputation, batches."""
    f = pw.jit(lambda a, b: jnp.sin(a) * b, devices=add(2))
    g = jax.jit(lambda a, b: jnp.sin(a) * b)
    x = np.arange(6, dtype=np.float32)
    cases = [
        lambda f: jax.grad(lambda q: jax.grad(lambda a: f(a, a))(q))(2.0),
        lambda f: jax.hessian(lambda a: f(a, a).sum())(x),
        lambda f: jax.value_and_grad(lambda a: (f(a, a).sum(), {"aux": f(a, 2.0)}), has_aux=True)(x),
        lambda f: jax.grad(lambda a: jax.checkpoint(lambda q: f(q, q))(a).sum())(x),
        lambda f: jax.vmap(jax.grad(lambda a: f(a, a)))(x),
        lambda f: jax.grad(lambda a: (f(a, a) * jax.lax.stop_gradient(f(a, 2.0))).sum())(x),
    ]
    for case in cases:
        jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), case(f), case(g))


#: What a placed function does with a value that another slice made: JAX gives such values the mesh of their slice.
MEETINGS: dict[str, Any] = {
    "number": lambda x: x + 1,
    "zeros": lambda x: jnp.zeros_like(x) + x,
    "update": lambda x: x.at[1:].set(2.0),
    "softmax": jax.nn.log_softmax,
    "scan": lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=3)[1],
    "branch": lambda x: jax.lax.cond(x.sum() > 0, lambda x: x + 1, lambda x: x, x),
    "recomputed": jax.checkpoint(lambda x: jnp.sin(x + 1)),
    "inverse": lambda x: jnp.linalg.inv(jnp.diag(x + 2)),
}
TRANSFORMATIONS: dict[str, Any] = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: jax.vmap(lambda s: f(s * x))(x),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1].sum()),
    "recomputed": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
}


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_slices_of_different_sizes(add: Any, meeting: str, transformation: str) -> None:
    source, fun, transform = jnp.sin, MEETINGS[meeting], TRANSFORMATIONS[transformation]
    x = np.array([0.1, 0.5, 0.3, 0.7], np.float32)
    want = jax.jit(transform(lambda x: fun(source(x))))(x)
    for one, other in ((2, 1), (1, 2)):
        make, use = pw.jit(source, devices=add(one)), pw.jit(fun, devices=add(other))
        near(pw.program(transform(lambda x, make=make, use=use: use(make(x))))(x), want)
