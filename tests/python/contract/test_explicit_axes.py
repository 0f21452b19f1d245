"""Slices with explicit axes (`add_slice(axis_types=AxisType.Explicit)`): how an axis cuts a value is part of its type.

The oracle is plain JAX on a mesh of four CPU devices: the same function has the same values, the same output shardings,
the same types and, where it fails, the same type of error. Each function runs placed, by `jax.jit` and operation by
operation under `jax.set_mesh(slice.mesh)`, and as a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

E, A = AxisType.Explicit, AxisType.Auto
X = np.arange(32, dtype=np.float32).reshape(8, 4) / 10
W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
#: NumPy's values of `tanh(x @ w)`, once and twice.
ONCE = np.tanh(X @ W)
TWICE = np.tanh(ONCE @ W)


@pytest.fixture
def explicit(cluster: Any) -> Callable[..., Any]:
    """`explicit(2, 2)` is a slice with explicit axes; `names` and `types` are others than x, y and all explicit."""

    def make(*shape: int, names: Any = None, types: Any = E) -> Any:
        device_set = pw.make_virtual_device_set()
        return device_set.add_slice(shape=shape, axis_names=names, axis_types=types, island=0)

    return make


@jax.custom_vjp
def _sine(x: Any) -> Any:
    return jnp.sin(x)


_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def _layer(x: Any, w: Any, out: P | None = None) -> Any:
    return jnp.tanh(jnp.einsum("bd,df->bf", x, w, out_sharding=out or P("x", "y")))


#: By name: a function of x and w, and how these are cut.
FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], P, P]] = {
    "elementwise": (lambda x, w: jnp.where(x > 1, jnp.sin(x) * 2.5, 0), P("x", "y"), P()),
    "broadcast": (lambda x, w: x + jnp.sum(x, axis=0), P("x", "y"), P()),
    "reductions": (lambda x, w: (x.sum(), x.mean(1), x.max((0, 1)), jax.nn.softmax(x)), P("x", "y"), P()),
    "matmul": (lambda x, w: x @ w, P("x"), P(None, "y")),
    "matmul, ambiguous": (lambda x, w: x @ w, P("x", "y"), P("y")),
    "dot": (lambda x, w: jnp.dot(x, w, out_sharding=P("x")), P("x", "y"), P("y")),
    "illegal sum": (lambda x, w: x[:4] + w, P(None, "y"), P("y")),
    "transpose": (lambda x, w: jnp.stack([x.T, x.T]), P("x", "y"), P()),
    "reshape": (lambda x, w: (x.reshape(2, 4, 4), x.reshape(32)), P("x"), P()),
    "reshape to": (lambda x, w: jax.lax.reshape(x, (4, 8), out_sharding=P("x")), P("x", "y"), P()),
    "reshard": (lambda x, w: jax.sharding.reshard(x, P("y", "x")), P("x", "y"), P()),
    "constraint": (lambda x, w: jax.lax.with_sharding_constraint(x, P("x", "y")), P("x", "y"), P()),
    "other constraint": (lambda x, w: jax.lax.with_sharding_constraint(x, P("y")), P("x", "y"), P()),
    "made": (lambda x, w: jnp.ones((8, 4), out_sharding=P("x")) * x + jnp.zeros_like(x) + jnp.arange(4), P("x"), P()),
    "gather": (lambda x, w: w.at[np.arange(4)].get(out_sharding=P("x")), P(), P()),
    "gather, ambiguous": (lambda x, w: w[jnp.arange(4)], P(), P("x")),
    "slice of a cut dimension": (lambda x, w: x[:3], P("x"), P()),
    "update": (lambda x, w: x.at[:, 0].set(0.0), P("x"), P()),
    "gradient": (jax.grad(lambda x, w: jnp.sum(_layer(x, w) ** 2), argnums=(0, 1)), P("x", "y"), P()),
    "gradient of a rule": (lambda x, w: jax.grad(lambda x: jnp.sum(_sine(x)))(x), P("x", "y"), P()),
    "remat": (jax.grad(lambda x, w: jnp.sum(jax.checkpoint(jnp.sin)(x) * x)), P("x", "y"), P()),
    "scan": (lambda x, w: jax.lax.scan(lambda c, _: (_layer(c, w), c.sum()), x, None, length=3), P("x", "y"), P()),
    "scan of another type": (
        lambda x, w: jax.lax.scan(lambda c, _: (jax.sharding.reshard(c, P("y")), None), x, None, length=2),
        P("x"),
        P(),
    ),
    "cond": (lambda x, w: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), P("x", "y"), P()),
    "while": (lambda x, w: jax.lax.while_loop(lambda a: a.sum() < 1e3, lambda a: a * 2, x), P("x", "y"), P()),
    "vmap": (lambda x, w: jax.vmap(lambda r: jnp.sin(r) * 2)(x), P("x", "y"), P()),
    "shard_map": (
        lambda x, w: jax.shard_map(lambda a: jax.lax.psum(a, "x"), in_specs=P("x"), out_specs=P())(x),
        P("x"),
        P(),
    ),
    "auto_axes": (
        lambda x, w: jax.sharding.auto_axes(lambda a, b: a @ b, out_sharding=P("x"))(x, w),
        P("x", "y"),
        P("y"),
    ),
    "random": (lambda x, w: jax.random.normal(jax.random.key(0), (8, 4), out_sharding=P("x", "y")), P(), P()),
    "keys": (lambda x, w: jax.random.split(jax.random.key(3), 8), P(), P()),
    "jit with a sharding": (lambda x, w: jax.jit(lambda a: a * 2, out_shardings=P("y"))(x), P("x"), P()),
    "partial sums": (
        lambda x, w: jax.sharding.reshard(jnp.einsum("bd,df->bf", x, w, out_sharding=P("x", unreduced={"y"})), P("x")),
        P("x", "y"),
        P("y"),
    ),
    "passed through": (lambda x, w: (x, w, x), P("x", "y"), P("y")),
    "two axes on one dimension": (lambda x, w: x * 2, P(("x", "y")), P()),
}
#: Operation by operation, this would have an array of partial sums.
NOT_EAGER = ("partial sums",)


def _outcome(function: Callable[[], Any]) -> Any:
    """What a function gives, as values, shardings and types; or the type of its error."""
    try:
        leaves = jax.tree.leaves(function())
    except Exception as error:
        return type(error).__name__
    return [_facts(leaf) for leaf in leaves]


def _facts(array: Any) -> Any:
    axes = [
        [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in (*spec, *(None,) * array.ndim)]
        for spec in (array.sharding.spec, jax.typeof(array).sharding.spec)
    ]
    value = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return np.asarray(value), array.dtype, [each[: array.ndim] for each in axes]


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    for (value, *kind), (wanted, *wanted_kind) in zip(found, expected, strict=True):
        assert kind == wanted_kind
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_plain_jax(explicit: Callable[..., Any], name: str) -> None:
    function, cut_x, cut_w = FUNCTIONS[name]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(E, E), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        args = [jax.device_put(v, NamedSharding(mesh, cut)) for v, cut in ((X, cut_x), (W, cut_w))]
        compiled, eager = _outcome(lambda: jax.jit(function)(*args)), _outcome(lambda: function(*args))
    slice_ = explicit(2, 2)
    there = [pw.device_put(v, slice_, cut) for v, cut in ((X, cut_x), (W, cut_w))]
    assert [jax.typeof(a).sharding.spec for a in there] == [jax.typeof(a).sharding.spec for a in args]
    placed = pw.jit(function, devices=slice_)
    _assert_same(_outcome(lambda: placed(*there)), compiled)
    _assert_same(_outcome(lambda: pw.program(lambda x, w: placed(x, w))(*there)), compiled)
    with jax.set_mesh(slice_.mesh):
        _assert_same(_outcome(lambda: jax.jit(function)(*there)), compiled)
        if name not in NOT_EAGER:
            _assert_same(_outcome(lambda: function(*there)), eager)


def _is_on(array: Any, slice_: Any, spec: P, value: Any) -> None:
    assert type(array) is pw.Array and array.slice is slice_
    assert array.sharding == slice_.sharding(spec)
    np.testing.assert_allclose(array, value, rtol=1e-4, atol=1e-5)


def test_what_crosses_slices_gets_the_type_of_where_it_is(explicit: Callable[..., Any], add: Any) -> None:
    one, like, other, auto = explicit(2, 2), explicit(2, 2), explicit(4, names=("z",)), add((2, 2))
    on_one, on_like = (pw.jit(_layer, devices=slice_) for slice_ in (one, like))
    on_other = pw.jit(lambda x, w: _layer(x, w, P("z")), devices=other)
    on_auto = pw.jit(lambda x, w: jnp.tanh(x @ w), devices=auto, out_shardings=P("x"))
    x, w = pw.device_put(X, one, P("x", "y")), {s: pw.device_put(W, s) for s in (one, like, other, auto)}
    for second, slice_, spec in ((on_like, like, P("x", "y")), (on_other, other, P("z")), (on_auto, auto, P("x"))):
        _is_on(second(x, w[one]), slice_, spec, ONCE)  # each argument comes from another slice
        chain = pw.program(lambda x, w, v, second=second: second(on_one(x, w), v))
        _is_on(chain(x, w[one], w[slice_]), slice_, spec, TWICE)
    _is_on(pw.program(lambda x, w, v: on_one(on_auto(x, w), v))(X, w[auto], w[one]), one, P("x", "y"), TWICE)
    for target, spec in ((other, P(None, "z")), (auto, P(None, "y"))):
        put = pw.program(lambda x, w, t=target, s=spec: pw.device_put(on_one(x, w), t, s) * 2)
        _is_on(put(x, w[one]), target, spec, 2 * ONCE)
        _is_on(jax.device_put(pw.device_put(x, target, spec), one.sharding(P("y"))), one, P("y"), X)
    for slice_ in (like, other):
        there = pw.device_put(X, slice_)
        for mixed in (lambda v: x + v, lambda _, s=slice_: pw.jit(lambda v: v + x, devices=s)(X)):
            with pytest.raises(ValueError, match=r"Mesh for all inputs should be equal.* of slice"):  # JAX's own words
                mixed(there)


def test_each_of_many_equal_slices_gets_what_runs_under_its_mesh(explicit: Callable[..., Any]) -> None:
    for one in [explicit(2) for _ in range(50)]:
        with jax.set_mesh(one.mesh):
            _is_on(jnp.sum(X), one, P(), X.sum())
            _is_on(jax.grad(lambda v: jnp.sum(v**2))(jax.device_put(X, P("x"))), one, P("x"), 2 * X)


def test_gradients_go_back_to_the_types_that_the_values_had(explicit: Callable[..., Any], add: Any) -> None:
    one, other, auto = explicit(2, 2), explicit(4, names=("z",)), add((2, 2))
    on_one = pw.jit(_layer, devices=one)
    on_other = pw.jit(lambda x, w: _layer(x, w, P("z")), devices=other)
    on_auto = pw.jit(lambda x, w: jnp.tanh(x @ w), devices=auto)

    def loss(weights: Any, x: Any) -> Any:
        for stage, w in zip((on_one, on_other, on_auto), weights, strict=True):
            x = stage(x, w)
        return jnp.sum(x**2)

    plain = jax.grad(lambda ws, x: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2]) ** 2))([W] * 3, X)
    weights = [pw.device_put(W, one, P("x", "y")), pw.device_put(W, other, P("z")), pw.device_put(W, auto)]
    x = pw.device_put(X, one, P("x"))
    for grads in (pw.program(jax.grad(loss))(weights, x), jax.grad(loss)(weights, x)):
        for grad, w, expected in zip(grads, weights, plain, strict=True):
            np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)
            assert grad.slice is w.slice
        assert [grad.sharding.spec for grad in grads[:2]] == [P("x", "y"), P("z")]


def test_loops_and_pipelines(explicit: Callable[..., Any]) -> None:
    one, other = explicit(2, 2), explicit(4, names=("z",))
    on_one = pw.jit(_layer, devices=one)
    on_other = pw.jit(lambda x, w: _layer(x, w, P("z")), devices=other)
    x, w, v = pw.device_put(X, one, P("x", "y")), pw.device_put(W, one), pw.device_put(W, other)

    def both(c: Any, w: Any, v: Any) -> Any:
        return on_one(on_other(c, v), w)

    expected = X
    for _ in range(60):
        expected = np.tanh(expected @ W)
    looped = pw.program(lambda x, w, v: jax.lax.scan(lambda c, _: (both(c, w, v), None), x, None, length=30)[0])
    _is_on(looped(x, w, v), one, P("x", "y"), expected)
    chosen = pw.program(lambda x, w, v: jax.lax.cond(x.sum() > 0, on_one, lambda c, w: both(c, w, v), x, w))
    _is_on(chosen(x, w, v), one, P("x", "y"), ONCE)
    rows = pw.device_put(np.stack([X, X]), one, P(None, "x"))
    _is_on(pw.program(jax.vmap(on_one, in_axes=(0, None)))(rows, w), one, P(None, "x", "y"), np.stack([ONCE, ONCE]))
    stages = [pw.jit(lambda w, x, o=o: _layer(x, w, o), devices=s) for s, o in ((one, P("x")), (other, P("z")))]
    model = pw.pipeline(stages, microbatches=2, schedule="1F1B", loss=lambda y, t: jnp.mean((y - t) ** 2))
    loss, _ = pw.program(jax.value_and_grad(model))([w, v], x, X)
    np.testing.assert_allclose(loss, np.mean((TWICE - X) ** 2), rtol=1e-4)


def test_axes_of_both_types_and_axes_of_one_device(explicit: Callable[..., Any]) -> None:
    mixed, single = explicit(2, 2, types=(E, A)), explicit(1, names=("x",))
    assert mixed.mesh.axis_types == (E, A)
    types = []

    def product(x: Any, w: Any) -> Any:
        types.append(jax.typeof(x).sharding.spec)
        return jnp.einsum("bd,df->bf", x, w, out_sharding=P("x"))

    cut = pw.jit(product, devices=mixed, in_shardings=P("x", "y"), out_shardings=P("x", "y"))
    _is_on(cut(X, W), mixed, P("x", "y"), X @ W)
    assert types == [P("x", None)]

    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jax.sharding.reshard(c * 2, P("x")), None), x, None, length=2)[0]

    result = pw.jit(looped, devices=single)(pw.device_put(X, single, P("x")))
    np.testing.assert_array_equal(result, 4 * X)
    assert jax.typeof(result).sharding.spec == P("x", None)


def test_state(explicit: Callable[..., Any]) -> None:
    slice_ = explicit(2, 2)
    layer, w = pw.jit(_layer, devices=slice_), pw.device_put(W, slice_)
    variable = pw.Variable(X, slice_, P("x", "y"))

    @pw.program
    def step(w: Any) -> None:
        variable.value = layer(variable.value, w)

    step(w)
    _is_on(variable.value, slice_, P("x", "y"), ONCE)
    reference = jax.new_ref(pw.device_put(X, slice_, P("x", "y")))
    types = []

    @pw.jit(devices=slice_)
    def double(reference: Any) -> None:
        types.append(jax.typeof(reference[...]).sharding.spec)
        reference[...] = reference[...] * 2

    double(reference)
    _is_on(reference[...], slice_, P("x", "y"), 2 * X)
    assert types[0] == P("x", "y")
    x = pw.device_put(X, slice_, P("x", "y"))
    np.testing.assert_array_equal(np.stack([*x]), X)
    slice_.resize((4, 1))
    assert slice_.mesh.axis_types == (E, E)
    _is_on(x * 2, slice_, P("x", "y"), 2 * X)


def test_what_is_known_before_a_run(explicit: Callable[..., Any]) -> None:
    slice_ = explicit(2, 2)
    assert slice_.mesh.axis_types == slice_.sharding(P()).mesh.axis_types == (E, E)
    x, w = pw.device_put(X, slice_, P("x", "y")), pw.device_put(W, slice_)
    layer = pw.jit(_layer, devices=slice_)
    for shape in (jax.eval_shape(layer, x, w), layer.lower(x, w).out_info, layer.eval_shape(x, w)):
        assert shape.sharding.spec == P("x", "y")
    assert jax.tree.leaves(layer.lower(x, w).in_avals)[0].sharding.spec == P("x", "y")
    for given, wanted in ((P("y"), P("y", None)), (None, P(None, None))):  # what a host value is
        types: list[Any] = []
        pw.jit(lambda v, t=types: t.append(jax.typeof(v).sharding.spec), devices=slice_, in_shardings=given)(X)
        assert types == [wanted]


def test_refused(explicit: Callable[..., Any], add: Any) -> None:
    slice_ = explicit(2, 2)
    for types in (AxisType.Manual, (E,), "explicit"):
        with pytest.raises(pw.errors.SliceError, match="axis_types expects"):
            explicit(2, 2, types=types)
    sums = pw.jit(lambda x, w: jnp.einsum("bd,df->bf", x, w, out_sharding=P("x", unreduced={"y"})), devices=slice_)
    with pytest.raises(pw.errors.ShardingError, match=r"unreduced over the axes \['y'\]"):
        sums(pw.device_put(X, slice_, P("x", "y")), pw.device_put(W, slice_, P("y")))
    with pytest.raises(pw.errors.ShardingError, match=r"\(Auto, Auto\)"):
        pw.device_put(X, add((2, 2)), NamedSharding(slice_.mesh.update(axis_types=(E, E)).abstract_mesh, P("x")))


class _Model(nnx.Module):
    """A model as code for explicit axes writes it: each product says how its result is cut."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Param(jax.random.normal(rngs(), (4, 8), out_sharding=P(None, "y")))
        self.down = nnx.Param(jax.random.normal(rngs(), (8, 4), out_sharding=P("y", None)))

    def __call__(self, x: Any) -> Any:
        hidden = jax.nn.gelu(jnp.einsum("bd,df->bf", x, self.up[...], out_sharding=P("x", "y")))
        return jnp.einsum("bf,fd->bd", hidden, self.down[...], out_sharding=P("x", None))


def _trained(mesh: Any) -> tuple[list[float], Any]:
    with jax.set_mesh(mesh):
        model = _Model(nnx.Rngs(0))
        x = jax.device_put(X, P("x", None))

        @nnx.jit
        def step(model: Any, x: Any) -> Any:
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model), grads))
            return loss

        losses = [float(step(model, x)) for _ in range(3)]
        return losses, model.up[...]


def test_flax_nnx(explicit: Callable[..., Any]) -> None:
    slice_ = explicit(2, 2)
    plain = jax.make_mesh((2, 2), ("x", "y"), axis_types=(E, E), devices=jax.devices()[:4])
    (expected, weights), (losses, there) = _trained(plain), _trained(slice_.mesh)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    _is_on(there, slice_, P(None, "y"), weights)
