"""Functions on arrays outside programs: jnp, lax, jax.nn, jax.random, NumPy and optax run on the array's slice; a
user's own `jax.jit` runs in this process, on the fetched value."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pathways as pw

# Some show what becomes of a `jax.jit` of the user's own, which takes arrays off their slice.
pytestmark = [pytest.mark.one_process, pytest.mark.filterwarnings("ignore::pathways.errors.FetchWarning")]

VALUE = np.arange(8, dtype=np.float32).reshape(4, 2) + 1


@pytest.fixture
def x(cluster: Any) -> pw.Array:
    """VALUE, cut over two devices."""
    return pw.device_put(VALUE, pw.make_virtual_device_set(cluster).add_slice(devices=2), P("x"))


def on_slice(got: Any, want: Any, x: pw.Array) -> None:
    """Every leaf is a `pw.Array` on x's slice, and what plain JAX gives."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert type(mine) is pw.Array and mine.slice is x.slice, mine
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-6)


FUNCTIONS = {
    "sin": jnp.sin,
    "where": lambda v: jnp.where(v > 3, v, 0),
    "concatenate": lambda v: jnp.concatenate([v, v]),
    "stack": lambda v: jnp.stack([v, VALUE]),
    "einsum": lambda v: jnp.einsum("ij,kj->ik", v, v),
    "linalg": lambda v: jnp.linalg.norm(v),
    "solve": lambda v: jnp.linalg.solve(v.T @ v, v.T),
    "sort": lambda v: jnp.sort(v, axis=0),
    "split": lambda v: jnp.split(v, 2),
    "array": lambda v: jnp.array(v),
    "list": lambda v: jnp.array([v[0, 0], v[0, 1]]),
    "nonzero": lambda v: jnp.where(v > 3),
    "var": jnp.var,
    "lax.add": lambda v: lax.add(v, v),
    "top_k": lambda v: lax.top_k(v, 1),
    "cumsum": jnp.cumsum,
    "scan": lambda v: lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(2), v),
    "cond": lambda v: lax.cond(v[0, 0] > 0, lambda a: a * 2, lambda a: -a, v),
    "while": lambda v: lax.while_loop(lambda a: a.sum() < 100, lambda a: a * 2, v),
    "fori": lambda v: lax.fori_loop(0, 3, lambda i, a: a + i, v),
    "softmax": jax.nn.softmax,
    "gelu": jax.nn.gelu,
    "one_hot": lambda v: jax.nn.one_hot(v[0].astype(int), 4),
    "logsumexp": jax.nn.logsumexp,
    "scipy": lambda v: jax.scipy.special.erf(v),
    "zeros_like": jnp.zeros_like,
    "full_like": lambda v: jnp.full_like(v, 2.5, dtype=jnp.bfloat16).astype(float),
    "vmap": jax.vmap(jnp.dot, in_axes=(0, None)),
    "checkpoint": jax.checkpoint(lambda v: jnp.sin(v) * 2),
}


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_jax_run_on_the_slice(x: pw.Array, name: str) -> None:
    fun = FUNCTIONS[name]
    extra = (np.ones(2, np.float32),) if name == "vmap" else ()
    on_slice(fun(x, *extra), fun(jnp.asarray(VALUE), *extra), x)


def test_functions_of_numpy_run_on_the_slice(x: pw.Array) -> None:
    theirs = jnp.asarray(VALUE)
    on_slice(
        [
            np.sin(x),
            np.mean(x),
            np.add(x, VALUE),
            np.maximum(2, x),
            np.concatenate([x, x]),
            np.sum(x, axis=0),
            np.add.reduce(x, axis=0),
            np.linalg.norm(x),
            np.transpose(x),
            VALUE * x,
            np.float32(2) - x,
            np.where(x > 2, x, 0),
            np.clip(x, 1, 2),
        ],
        [
            jnp.sin(theirs),
            jnp.mean(theirs),
            theirs + VALUE,
            jnp.maximum(2, theirs),
            jnp.concatenate([theirs, theirs]),
            theirs.sum(0),
            theirs.sum(0),
            jnp.linalg.norm(theirs),
            theirs.T,
            VALUE * theirs,
            np.float32(2) - theirs,
            jnp.where(theirs > 2, theirs, 0),
            jnp.clip(theirs, 1, 2),
        ],
        x,
    )
    assert np.shape(x) == (4, 2) and np.ndim(x) == 2 and np.array_equal(x, VALUE)


def test_numpy_does_itself_what_jax_has_not(x: pw.Array, tmp_path: Any) -> None:
    target = np.zeros((4, 2), np.float32)
    np.add(x, 1, out=target)
    np.testing.assert_array_equal(target, VALUE + 1)
    np.copyto(target, x)
    np.testing.assert_array_equal(target, VALUE)
    np.save(tmp_path / "x.npy", x)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), VALUE)
    assert np.array2string(x[0]) == "[1. 2.]"
    with pytest.raises(TypeError, match="cannot be written into"):
        np.add(VALUE, 1, out=x)


def test_a_users_jit_gets_the_fetched_value(x: pw.Array) -> None:
    for fun in (
        jax.jit(lambda v: jnp.sin(v) * 2),
        jax.jit(jax.grad(lambda v: jnp.sin(v).sum())),
        jax.jit(jax.vmap(lambda v: v @ v)),
    ):
        for _ in range(2):
            got = fun(x)
            assert not isinstance(got, pw.Array) and isinstance(got, jax.Array)
            np.testing.assert_allclose(np.asarray(got), np.asarray(fun(VALUE)), rtol=1e-6)
    got = jax.jit(lambda tree, n: tree["a"] * n)({"a": x}, 3)
    np.testing.assert_array_equal(got, VALUE * 3)
    np.testing.assert_array_equal(jax.jit(lambda v: v + x)(VALUE), VALUE * 2)  # closed over: a constant


def test_transformations_outside_of_jit(x: pw.Array) -> None:
    def loss(v: Any) -> Any:
        return (jnp.sin(v) ** 2).sum()

    for got in (jax.grad(loss)(x), jax.grad(jax.jit(loss))(x), jax.jacrev(loss)(x), jax.jit(jax.grad(loss))(x)):
        np.testing.assert_allclose(np.asarray(got), np.asarray(jax.grad(loss)(VALUE)), rtol=1e-5)
    value, gradient = jax.value_and_grad(loss)(x)
    assert type(gradient) is pw.Array and gradient.slice is x.slice
    np.testing.assert_allclose(float(value), float(loss(VALUE)), rtol=1e-6)
    _, tangent = jax.jvp(loss, (x,), (x,))
    np.testing.assert_allclose(float(tangent), float(jax.jvp(loss, (VALUE,), (VALUE,))[1]), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda v: x.sum() + v)(jnp.ones(3)), np.full(3, VALUE.sum() + 1))


def test_closed_over_by_a_program_and_a_placed_function(x: pw.Array) -> None:
    program = pw.program(lambda v: v * 2 + x)
    np.testing.assert_array_equal(np.asarray(program(x)), VALUE * 3)
    placed = pw.jit(lambda v: v * 2 + (x + 1), devices=x.slice)
    np.testing.assert_array_equal(np.asarray(placed(x)), VALUE * 3 + 1)


def test_abstract_evaluation_runs_nothing(x: pw.Array, cluster: Any) -> None:
    before = cluster.stats()["dispatches"]
    assert jax.eval_shape(lambda v: v @ v.T, x).shape == (4, 4)
    assert jax.make_jaxpr(lambda v: v + 1)(x).out_avals[0].shape == (4, 2)
    assert jax.typeof(x).shape == (4, 2) and jnp.result_type(x, 1.0) == jnp.float32
    assert cluster.stats()["dispatches"] == before


def test_random_keys(x: pw.Array) -> None:
    theirs = jax.random.key(3)
    key = pw.device_put(theirs, x.slice)
    assert key.dtype == theirs.dtype and key.shape == () and "key<fry>" in repr(key)
    on_slice(jax.random.key_data(key), jax.random.key_data(theirs), x)
    on_slice(jax.random.normal(key, (4,)), jax.random.normal(theirs, (4,)), x)
    on_slice(jax.random.key_data(jax.random.split(key, 3)), jax.random.key_data(jax.random.split(theirs, 3)), x)
    on_slice(jax.random.key_data(jax.random.fold_in(key, 7)), jax.random.key_data(jax.random.fold_in(theirs, 7)), x)
    on_slice(jax.random.key_data(jax.random.split(key)[1]), jax.random.key_data(jax.random.split(theirs)[1]), x)
    wrapped = jax.random.wrap_key_data(jax.random.key_data(key))
    on_slice(jax.random.uniform(wrapped), jax.random.uniform(theirs), x)
    step = pw.jit(lambda k: (jax.random.split(k)[0], jax.random.uniform(k)), devices=x.slice)
    new, drawn = step(key)
    assert new.dtype == key.dtype
    on_slice(drawn, jax.random.uniform(theirs), x)
    fetched = jax.device_get(new)
    assert jnp.issubdtype(fetched.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(jax.random.key_data(fetched), jax.random.key_data(jax.random.split(theirs)[0]))
    with pytest.raises(TypeError, match="extended dtype"):
        np.asarray(key)
    np.testing.assert_array_equal(jax.jit(lambda k: jax.random.bits(k, (2,)))(key), jax.random.bits(theirs, (2,)))


@pytest.mark.sampled(0.35)
@pytest.mark.parametrize("name", ["bool", "uint8", "int16", "bfloat16", "float16", "float8_e4m3fn"])
def test_narrow_types(x: pw.Array, name: str) -> None:
    value = np.array([0, 1, 1, 0]).astype(jnp.dtype(name))
    mine = pw.device_put(value, x.slice, P("x"))
    for fun in (
        lambda v: v[1:3],
        lambda v: v.astype(jnp.float32) + 1,
        lambda v: v == v,
        lambda v: jnp.stack([v, v]),
        lambda v: v.reshape(2, 2).T,
    ):
        got, want = fun(mine), fun(jnp.asarray(value))
        assert got.dtype == want.dtype and got.slice is x.slice
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_complex_results(x: pw.Array) -> None:
    got = jnp.fft.fft(x)
    assert type(got) is pw.Array and got.dtype == np.complex64
    np.testing.assert_allclose(np.asarray(got), np.fft.fft(np.asarray(x)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(got.conj() * 2j), np.fft.fft(np.asarray(x)).conj() * 2j, rtol=1e-6, atol=1e-6)


def test_callbacks(x: pw.Array, capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(v: Any) -> Any:
        jax.debug.print("saw {}", v)
        return v + 1

    noisy(x)  # no function on a slice: prints here
    jax.effects_barrier()
    assert "saw [[1. 2.]" in capfd.readouterr().out


def test_optax_outside_a_program(cluster: Any) -> None:
    add = pw.make_virtual_device_set(cluster).add_slice
    left, right = add(devices=2), add(devices=1)
    plain = {"w": VALUE, "b": np.ones(2, np.float32), "other": np.full((2, 2), 3, np.float32)}
    mine = {
        "w": pw.device_put(plain["w"], left, P("x")),
        "b": pw.device_put(plain["b"], left),
        "other": pw.device_put(plain["other"], right),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def train(params: Any) -> Any:
        state = optimizer.init(params)
        for _ in range(3):
            gradients = jax.tree.map(lambda p: p * 0.1 + 1, params)
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    got, state = train(mine)
    want, _ = train({name: jnp.asarray(value) for name, value in plain.items()})
    for name, value in got.items():
        assert type(value) is pw.Array and value.slice is mine[name].slice
        assert value.sharding == mine[name].sharding
        np.testing.assert_allclose(np.asarray(value), np.asarray(want[name]), rtol=1e-5)
    moments = state[1][0].mu
    assert all(moments[name].slice is mine[name].slice for name in mine)
    assert moments["w"].sharding == mine["w"].sharding
    compiled = len(cluster.operations.known)
    train(mine)
    assert len(cluster.operations.known) == compiled


@pytest.mark.slow
def test_a_client_seizes_no_accelerator() -> None:
    """Computing with arrays of a cluster initialises no backend of this process's own."""
    script = """
        import jax, jax.numpy as jnp, numpy as np, pathways as pw
        from pathways import _jaxlib
        if __name__ == "__main__":
            with pw.connect(pw.LocalCluster(devices_per_host=2), progress=False):
                x = pw.device_put(np.ones((4, 2), np.float32), pw.make_virtual_device_set().add_slice(devices=2))
                y = jnp.sin(x + 1).sum(axis=0) @ x.T + np.ones(4)
                z = y[1:3] * x[np.array([0, 1]), 0] + x[x > 3].sum() + np.mean(x) + jnp.zeros_like(y)[0]
                w = x.at[0].set(z[0])
                print(np.asarray(w), list(x)[0], jax.tree.map(lambda v: v + 1, [w]))
                assert _jaxlib.initialized_backends() == (), _jaxlib.initialized_backends()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=150)


def test_nothing_warns(x: pw.Array) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jnp.sin(x + 1).astype(jnp.float16).sum()
