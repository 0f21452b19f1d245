"""What people do with `jax.jit`'s functions, done with placed functions and programs: methods, decorators, stages."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

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
    compiled = (jax.jit(f), jax.jit(f).lower, jax.jit(jax.grad(lambda x: f(x).sum())))
    loops = (
        lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
        lambda x: jax.lax.cond(True, f, lambda y: y, x),
    )
    for here in (*compiled, *(loops if make == "program" else ())):
        with pytest.raises(pw.errors.TraceError, match=words):
            here(X)
    for here in loops if make == "jit" else ():  # they run on the slice
        np.testing.assert_array_equal(here(X), X + 1)
    np.testing.assert_array_equal(f(X), X + 1)


def test_without_jit_the_users_python_runs_on_values(add: Callable[..., Any]) -> None:
    slice_ = add(2)
    seen = []

    def body(x: Any, n: int, *, shift: Any = 1.0) -> Any:
        seen.append(type(x) is pw.Array)
        if n > 1:
            x = jax.lax.scan(lambda c, _: (c * 2, None), x, length=n)[0]
        return {"r": jax.nn.relu(x) + shift}

    f = pw.jit(body, devices=slice_, static_argnums=1, in_shardings=P("x"), out_shardings=P("x"))
    whole = pw.program(lambda x: jnp.sum(f(x, 2)["r"]) + 1)
    compiled = f(X, 1)["r"]
    assert seen == [False]
    with jax.disable_jit():
        result = f(X, 2, shift=3.0)["r"]
        assert seen == [False, True]
        assert result.slice is slice_
        assert result.sharding.spec == P("x")
        np.testing.assert_array_equal(result, X * 4 + 3)
        np.testing.assert_array_equal(compiled + 1, X + 2)
        assert float(whole(X)) == (X * 4 + 1).sum() + 1
        np.testing.assert_array_equal(jax.grad(whole)(X), [0] + [4] * 7)
        np.testing.assert_array_equal(jax.vmap(lambda x: f(x, 1)["r"])(np.ones((3, 8), np.float32)), np.full((3, 8), 2))
        np.testing.assert_array_equal(pw.device_put(compiled, add(2)), X + 1)
        assert f.lower(X, 1).as_text("program").count("call") == 1
    np.testing.assert_array_equal(f(X, 1)["r"], X + 1)


def test_what_was_submitted_before_runs_under_disable_jit(add: Any) -> None:
    """Embedded, the thread that reads is the host's as well: what it launches there was asked for before."""
    one, two = add(2), add(2)
    there = pw.jit(lambda x: x @ x / 512, devices=two, in_shardings=P(None, "x"), out_shardings=P("x"))
    back = pw.jit(lambda x: x @ x / 512, devices=one, in_shardings=P("x"), out_shardings=P("x"))
    steps = pw.program(lambda x: back(there(back(x))))
    x = pw.device_put(np.ones((512, 512), np.float32), one, P("x"))
    compiled = back.lower(x).compile()
    steps(x).block_until_ready()
    waiting = [steps(x) for _ in range(20)]
    with jax.disable_jit():
        for each in waiting:
            np.testing.assert_array_equal(each, np.ones((512, 512)))
        np.testing.assert_array_equal(compiled(x), np.ones((512, 512)))


@pytest.mark.parametrize("what", ["function", "program", "timed", "lowered", "slice", "cluster"])
def test_copies_are_the_thing_itself_and_pickles_are_refused(add: Callable[..., Any], cluster: Any, what: str) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(2))
    program = pw.program(lambda x: f(x))
    thing: Any = {
        "function": f,
        "program": program,
        "timed": program.with_timeout(60),
        "lowered": f.lower(X),
        "slice": f.slice,
        "cluster": cluster,
    }[what]
    assert copy.copy(thing) is thing
    assert copy.deepcopy({"model": [thing]})["model"][0] is thing
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps({"model": thing})


def test_a_sharding_is_pickled_without_its_slice(add: Callable[..., Any]) -> None:
    sharding = add(2).sharding(P("x"))
    assert copy.deepcopy(sharding).slice is sharding.slice
    there = pickle.loads(pickle.dumps(sharding))
    assert there == sharding
    assert type(there) is NamedSharding


BIG = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)


def test_an_array_that_a_function_closes_over_is_an_argument(add: Callable[..., Any], quiet: Any) -> None:
    slice_ = add(2)
    state = pw.device_put(BIG, slice_, P("x"))
    f = pw.jit(lambda x: state * x + jnp.cos(state[0, 0]), devices=slice_, name="f")
    g = pw.jit(lambda x: (state * x).sum(), devices=slice_)
    for _ in range(3):
        np.testing.assert_allclose(f(2.0), BIG * 2 + 1)
        np.testing.assert_allclose(f(3.0), BIG * 3 + 1)
    lowered = f.lower(2.0)
    assert sum(len(c.module) for c in lowered.logical.computations) < BIG.nbytes // 16  # it is no constant in there
    assert lowered.in_tree == jax.tree.structure(((0,), {}))
    np.testing.assert_allclose(lowered.compile()(4.0), BIG * 4 + 1)
    total = BIG.sum(dtype=np.float64)
    for gradient in (jax.grad(g), pw.program(jax.grad(g)), pw.program(jax.grad(lambda x: g(x)))):
        np.testing.assert_allclose(gradient(1.0), total, rtol=1e-5)
    looped = pw.program(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + state[0, 1], x) + jnp.where(x > 0, g(x), state.min())
    )
    np.testing.assert_allclose(looped(1.0), total + 4, rtol=1e-5)
    np.testing.assert_allclose(f.with_timeout(60)(1.0), BIG + 1)
    del lowered, looped
    f.clear_cache()
    np.testing.assert_allclose(f(2.0), BIG * 2 + 1)


def test_equal_functions_that_close_over_different_arrays(add: Callable[..., Any]) -> None:
    slice_ = add(2)
    states = [pw.device_put(X + n, slice_) for n in range(3)]
    fs = [pw.jit(lambda x, state=state: x * state, devices=slice_) for state in states]
    gs = [functools.partial(pw.jit, devices=slice_)(functools.partial(lambda s, x: x - s, state)) for state in states]
    for _ in range(2):
        for n, (f, g) in enumerate(zip(fs, gs, strict=True)):
            np.testing.assert_array_equal(f(X), X * (X + n))
            np.testing.assert_array_equal(g(X), X - (X + n))


def test_what_is_closed_over_lies_on_another_slice(add: Callable[..., Any]) -> None:
    state = pw.device_put(BIG, add(2), P("x"))
    f = pw.jit(lambda x: state * x, devices=add(2), out_shardings=P("x"))
    np.testing.assert_array_equal(f(2.0), BIG * 2)
    np.testing.assert_array_equal(pw.program(lambda x: f(x) + state)(2.0), BIG * 3)


def test_closing_over_an_array_that_is_gone(add: Callable[..., Any]) -> None:
    slice_ = add(2)
    state = pw.device_put(X, slice_)
    f = pw.jit(lambda x: x + state, devices=slice_, name="closing")
    take = pw.jit(lambda s: s + 1, devices=slice_, donate_argnums=0)
    both = pw.jit(lambda s: s + state, devices=slice_, donate_argnums=0)
    np.testing.assert_array_equal(f(X), 2 * X)
    np.testing.assert_array_equal(both(state), 2 * X)  # given away and read: as a copy
    assert state.is_deleted()
    state = pw.device_put(X, slice_)
    np.testing.assert_array_equal(pw.jit(lambda x: x + state, devices=slice_)(X), 2 * X)
    other = pw.jit(lambda x: x * state, devices=slice_, name="other")
    np.testing.assert_array_equal(other(X), X * X)
    np.testing.assert_array_equal(take(state), X + 1)
    for call in (f, f.with_timeout(60), other):
        with pytest.raises(pw.errors.DeletedArrayError, match=r"closes over .*deleted, or donated"):
            call(X)


def test_errors_of_a_trace_name_the_placed_function(add: Callable[..., Any]) -> None:
    matmul = pw.jit(lambda a, b, *, c: a @ b["w"] + c, devices=add(2), name="matmul")
    whole = pw.program(lambda a, b: matmul(a, b, c=1.0))
    a, b = np.ones((2, 3), np.float32), {"w": np.ones((2, 3), np.float32)}
    for call in (whole, lambda a, b: matmul(a, b, c=1.0), lambda a, b: jax.grad(lambda a: whole(a, b).sum())(a)):
        with pytest.raises(TypeError, match="contracting dimensions") as caught:
            call(a, b)
        notes = [note for note in caught.value.__notes__ if "placed function" in note]
        assert len(notes) == 1
        for words in ("'matmul'", "test_habits.py:", repr(matmul.slice.mesh_spec.name), "float32[2,3]", "['w']"):
            assert words in notes[0]


def explicit(*sizes: int) -> Any:
    return jax.sharding.AbstractMesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Explicit,) * len(sizes))


def test_shardings_over_explicit_axes_are_refused(add: Callable[..., Any]) -> None:
    slice_ = add(2)
    sharding = NamedSharding(explicit(2), P("x"))
    for call in (
        pw.jit(lambda x: x, devices=slice_, in_shardings=sharding),
        pw.jit(lambda x: x, devices=slice_, out_shardings=sharding),
        lambda x: pw.device_put(x, slice_, sharding),
        pw.program(lambda x: pw.device_put(x, slice_, sharding)),
    ):
        with pytest.raises(pw.errors.ShardingError, match=r"\(Auto,\).*slice\.sharding"):
            call(X)
    with pytest.raises(ValueError, match="Auto axes"):  # JAX's own word for it
        pw.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding), devices=slice_)(X)


def test_a_mesh_that_is_set_for_this_process_is_none_of_a_slice(add: Callable[..., Any]) -> None:
    slice_ = add((2, 2))
    f = pw.jit(lambda x: x * 2, devices=slice_, out_shardings=P("x"))
    program = pw.program(lambda x: f(x).sum() + 1)
    array = pw.device_put(X, slice_)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    local = jax.device_put(X, NamedSharding(mesh, P("y")))
    for value in (X, local):
        np.testing.assert_array_equal(f(value), 2 * X)
    with jax.set_mesh(mesh):
        for value in (X, local, array):
            result = f(value)
            np.testing.assert_array_equal(result, 2 * X)
            assert result.sharding.spec == P("x")
            assert float(program(value)) == 2 * X.sum() + 1
        np.testing.assert_array_equal(array + 1, X + 1)
        np.testing.assert_array_equal(array[2:4], X[2:4])
        np.testing.assert_array_equal(pw.device_put(array, slice_, P("y")), X)
        np.testing.assert_array_equal(jnp.zeros(8, device=slice_.sharding(P("x"))), np.zeros(8))
        np.testing.assert_array_equal(pw.program(jax.grad(program))(X), np.full(8, 2))


def test_a_jit_of_this_process_says_that_it_pulls_arrays_off_their_slice(
    add: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathways.api.arrays.jax_interop._warned", set())  # this test runs for several clusters
    slice_ = add(2)
    fresh = functools.partial(pw.device_put, X, slice_)

    def step(a: Any, b: Any) -> Any:
        return a + b

    here = jax.jit(step)
    with pytest.warns(
        pw.errors.FetchWarning, match=r"step at .*test_habits.py:\d+.* 64 bytes of 2 .*pw\.jit\(step"
    ) as got:
        np.testing.assert_array_equal(here(fresh(), fresh()), 2 * X)
    assert got[0].filename == __file__
    np.testing.assert_array_equal(here(fresh(), 1), X + 1)  # said once (a warning is an error in these tests)
    state = fresh()
    with pytest.warns(pw.errors.FetchWarning, match="32 bytes of 1"):
        np.testing.assert_array_equal(jax.jit(lambda a: a + state)(1), X + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.errors.FetchWarning)
        np.testing.assert_array_equal(jax.jit(lambda a: a * 3)(fresh()), X * 3)
    read = fresh()
    np.asarray(read)
    np.testing.assert_array_equal(jax.jit(lambda a: a * 4)(read), X * 4)  # it was here already
    np.testing.assert_array_equal(jnp.sin(fresh()) + jnp.where(fresh() > 0, 1, 0), np.sin(X) + (X > 0))  # runs there


def test_what_xla_says_of_a_compiled_program(add: Callable[..., Any]) -> None:
    f = pw.jit(lambda x: x @ x, devices=add(2), out_shardings=P("x"), name="square")
    g = pw.jit(lambda x: x @ x + 1, devices=add(2), name="more")
    x = np.ones((64, 64), np.float32)
    half = 64 * 64 * 64  # multiply-adds of one device of two
    alone = f.lower(x).compile()
    cost, memory = alone.cost_analysis(), alone.memory_analysis()
    assert half <= cost["flops"] <= 3 * half
    assert cost["bytes accessed"] > 0
    assert cost == f.lower(x).cost_analysis()
    assert memory.output_size_in_bytes == x.nbytes // 2
    assert set(memory.by_computation) == {"square.0"}
    whole = pw.program(lambda x: g(f(f(x)))).lower(x).compile()
    assert whole.cost_analysis()["flops"] >= 3 * half
    sizes = whole.memory_analysis()
    assert len(sizes.by_computation) == 3
    for name in ("argument", "output", "temp", "alias"):
        field = f"{name}_size_in_bytes"
        assert getattr(sizes, field) == max(getattr(each, field) for each in sizes.by_computation.values())
    np.testing.assert_array_equal(whole(x), (x @ x @ x @ x) @ (x @ x @ x @ x) + 1)


def test_a_placed_function_is_exported(add: Callable[..., Any]) -> None:
    slice_ = add(2)
    plain = pw.jit(lambda x: {"r": jnp.sin(x) * 2}, devices=slice_, name="plain")
    cut = pw.jit(lambda x: {"r": jnp.sin(x) * 2}, devices=slice_, in_shardings=P("x"), out_shardings=P("x"))
    want = np.sin(X) * 2
    for f in (plain, cut):
        for argument in (jax.ShapeDtypeStruct((8,), np.float32), X, pw.device_put(X, slice_)):
            exported = jax.export.export(f, platforms=["cpu"])(argument)
            assert exported.in_avals[0].shape == (8,)
        there = jax.export.deserialize(exported.serialize())
        np.testing.assert_allclose(there.call(X)["r"], want, rtol=1e-6)  # plain JAX, in this process
        np.testing.assert_allclose(pw.jit(there.call, devices=add(2))(X)["r"], want, rtol=1e-6)
    (rows,) = jax.export.symbolic_shape("rows")
    flexible = jax.export.export(plain, platforms=["cpu"])(jax.ShapeDtypeStruct((rows,), np.float32))
    np.testing.assert_allclose(flexible.call(X[:3])["r"], want[:3], rtol=1e-6)
    with pytest.raises(pw.errors.ProgramError, match="placed functions"):
        jax.export.export(pw.program(lambda x: plain(x)), platforms=["cpu"])(X)
