"""Trees that are placed by rules, or as their parameters lie: values and shardings are those of plain JAX. So are the
losses of a pipeline that is placed by its stages, and its random keys, whatever the schedule and the slices."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors

RULES = [("kernel$", P(None, "x")), ("bias|scale", P()), ("count", P())]
NAMES = ["kernel", "bias", "w", "out"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


@dataclasses.dataclass
class Unknown:
    kernel: Any


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """As equinox's modules: attributes are children, and a function may be among them."""

    def __init__(self, kernel: Any, act: Any) -> None:
        self.kernel, self.act = kernel, act

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return ((key("kernel"), self.kernel), (key("act"), self.act)), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Module:
        return cls(*children)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def filled(shapes: Any) -> Any:
    """A tree of NumPy arrays of these shapes; nothing is compiled for it."""
    return jax.tree.map(lambda leaf: draw(*leaf.shape).astype(leaf.dtype), shapes)


def same(placed: Any, tree: Any) -> None:
    """Bit-equal leaves of one structure."""
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(tree), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def specs(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


@pytest.mark.one_process
def test_trees_of_flax_and_others_are_placed_by_rules(add: Any) -> None:
    here = add(2)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "x"))
            return nn.Dense(2)(nn.LayerNorm()(nn.Dense(8, kernel_init=boxed)(x)))

    class Other(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.one = nnx.Linear(4, 8, rngs=rngs)
            self.more = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    linen = filled(jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 4))))
    state = filled(nnx.split(nnx.eval_shape(lambda: Other(nnx.Rngs(0))))[1])
    for tree in (
        linen,
        state,
        nnx.to_pure_dict(state),
        [Layer(draw(4, 8), draw(8)), {"kernel": draw(2, 2)}],
        Module(draw(4, 8), jnp.tanh),
        filled(jax.eval_shape(optax.adam(1e-3).init, linen["params"])),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not all rules are for all of the trees
            placed = pw.place(tree, here, RULES)
        if isinstance(tree, Module):
            assert placed.act is jnp.tanh
            placed, tree = placed.kernel, tree.kernel
        same(placed, tree)
        for path, spec in specs(placed).items():
            assert spec == (P(None, "x") if "kernel" in path or not path else P()), path
        assert all(leaf.slice is here for leaf in jax.tree.leaves(placed))
    # The specs that flax has itself are a prefix.
    same(pw.place(linen, here, nn.get_partition_spec(linen)), linen)
    x = draw(3, 4)
    net = pw.jit(Net().apply, devices=here)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = net(pw.place(linen, here, RULES), x)
    np.testing.assert_allclose(np.asarray(got), jax.jit(Net().apply)(linen, x), rtol=1e-5, atol=1e-6)


@st.composite
def trees(draw_: Any) -> Any:
    """A tree of dicts and lists, whose leaves divide by 2 and 4."""
    leaf = st.tuples(st.sampled_from([(), (4,), (8, 4), (4, 2, 8)]), st.sampled_from([np.float32, np.int32, np.bool_]))
    shape = draw_(
        st.recursive(
            leaf,
            lambda inner: st.one_of(
                st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3),
                st.lists(st.sampled_from(NAMES), min_size=1, max_size=2).flatmap(
                    lambda names: st.tuples(*[inner] * len(names)).map(list)
                ),
            ),
            max_leaves=6,
        )
    )

    def is_leaf(x: Any) -> bool:
        return isinstance(x, tuple)

    return jax.tree.map(
        lambda x: (np.arange(np.prod(x[0], dtype=int)).reshape(x[0]) % 7).astype(x[1]), shape, is_leaf=is_leaf
    )


def by_the_book(rules: Any, path: str, shape: tuple[int, ...]) -> P | None:
    """What t5x and its kin do: the first expression that is found; scalars are whole."""
    found = next((spec for pattern, spec in rules if re.search(pattern, path)), None)
    return found if found is not None else P() if np.prod(shape, dtype=int) == 1 else None


@pytest.mark.one_process
def test_rules_place_any_tree_as_plain_jax_places_it(add: Any) -> None:
    here = add((2, 2))
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    one = st.tuples(
        st.sampled_from([*NAMES, "^0", "/1", "kernel|w$", ".*"]),
        st.sampled_from([P(), P("x"), P("y"), P(("x", "y")), P(None, "x")]),
    )

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(trees(), st.lists(one, max_size=4))
    def check(tree: Any, rules: Any) -> None:
        rules = [*rules, (".", P())]  # a leaf at the root has the path ""
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        wanted = []
        for path, leaf in leaves:
            text = jax.tree_util.keystr(path, simple=True, separator="/")
            wanted.append(by_the_book(rules, text, leaf.shape))
        fits = [
            spec is not None
            and len(spec) <= leaf.ndim
            and all(
                n % (1 if axes is None else 2 if isinstance(axes, str) else 4) == 0
                for n, axes in zip(leaf.shape, tuple(spec), strict=False)
            )
            for (_, leaf), spec in zip(leaves, wanted, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not all(fits):
                with pytest.raises(errors.ShardingError):
                    pw.place(tree, here, rules)
                return
            placed = pw.place(tree, here, rules)
        same(placed, tree)
        for array, (_, leaf), spec in zip(jax.tree.leaves(placed), leaves, wanted, strict=True):
            plain = jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))
            assert array.dtype == plain.dtype
            assert array.sharding.shard_shape(array.shape) == plain.sharding.shard_shape(plain.shape)
            for mine, theirs in zip(array.addressable_shards, plain.addressable_shards, strict=True):
                assert np.asarray(mine.data).tobytes() == np.asarray(theirs.data).tobytes()

    check()


def test_state_lies_as_its_parameters(add: Any) -> None:
    one, two = add(2), add(2)
    params = [{"w": draw(4, 8), "b": draw(8)}, {"w": draw(8, 4)}]
    placed = [
        pw.place(params[0], one, [("w$", P("x")), ("b$", P())]),
        pw.place(params[1], two, [("w$", P(None, "x"))]),
    ]
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-2))
    for made, lies in (
        (optimizer.init(params), pw.place(optimizer.init(params), like=placed)),
        ([optimizer.init(p) for p in params], pw.place([optimizer.init(p) for p in params], like=placed)),
    ):
        same(lies, made)
        homes = {path: leaf.slice for path, leaf in zip(specs(lies), jax.tree.leaves(lies), strict=True)}
        for path, spec in specs(lies).items():
            if path.endswith("count"):
                assert spec == P()
                continue
            is_first = homes[path] is one
            assert spec == (P() if path.endswith("b") else P("x") if is_first else P(None, "x")), path
        assert sum(home is two for home in homes.values()) >= 2
        assert sum(home is one for home in homes.values()) >= 4
    # A factored state is like no parameter by shape; it stays on the slice of its parameter, by rules of its own.
    factored = optax.adafactor(1e-3, min_dim_size_to_factor=2).init(params)
    with pytest.raises(errors.ShardingError, match=r"v_row/0/w' of pw.place, of shape \(4,\), is like no parameter"):
        pw.place(factored, like=placed)
    lies = pw.place(factored, specs=P(), like=placed)
    same(lies, factored)
    assert lies[0].v_row[1]["w"].slice is two
    assert lies[0].v_row[0]["w"].slice is one
    with pytest.raises(errors.SliceError, match="no leaf is"):
        pw.place(factored, like=params)


def test_shapes_are_given_shardings(add: Any) -> None:
    here = add(2)

    def init(key: Any) -> Any:
        return {"w": jax.random.normal(key, (4, 8)), "b": jnp.zeros(8)}

    shapes = pw.place(jax.eval_shape(init, jax.random.key(0)), here, [("w", P("x")), ("b", None)])
    assert {name: (leaf.shape, leaf.sharding.spec) for name, leaf in shapes.items()} == {
        "w": ((4, 8), P("x")),
        "b": ((8,), P()),
    }
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    made = pw.jit(init, devices=here, out_shardings=shardings)(jax.random.key(0))
    assert specs(made) == {"b": P(), "w": P("x")}
    same(made, jax.jit(init)(jax.random.key(0)))


def test_in_a_program_what_is_placed_is_sent(add: Any) -> None:
    one, two = add(2), add(2)

    @pw.program
    def send(x: Any) -> Any:
        return pw.place({"w": x * 2, "b": 1.0}, two, [("w", P("x"))])

    got = send(pw.device_put(draw(4), one))
    assert got["w"].slice is two
    assert got["w"].sharding.spec == P("x")
    same(got["w"], draw(4) * 2)


@pytest.mark.one_process
def test_what_rules_do_not_cover_is_told(add: Any) -> None:
    here = add((2, 2))
    tree = {"layer": {"kernel": draw(4, 6), "bias": draw(6)}, "head": draw(6, 3)}
    with pytest.raises(errors.ShardingError) as found:
        pw.place(tree, here, [("kernl", P("x")), ("bias", P())])
    for word in ("'head'", "(6, 3)", "kernl -> ", "bias -> ", "'layer/kernel'", "Add a rule"):
        assert word in str(found.value), word
    rest = (".*", P())
    for rules, said in (
        ([("head", P(None, "x")), rest], r"'head' of pw.place \(rule 'head'\).*size 3 .*does not divide into 2 parts"),
        ([("head", P("z")), rest], r"'head' .*names the axis 'z', .*only the axes \['x', 'y'\]"),
        ([("bias", P(None, "x")), rest], r"'layer/bias' .*has 2 entries, but the array has only 1"),
        ([("head", "x"), rest], r"rule 0 of pw.place: expected a pair .* got \('head', 'x'\)"),
        ([rest, ("head",)], r"rule 1 of pw.place: expected a pair"),
        ([("he(ad", P())], r"'he\(ad' is no regular expression"),
    ):
        with pytest.raises(errors.ShardingError, match=said):
            pw.place(tree, here, rules)
    with pytest.warns(
        UserWarning, match=r"rule 'kernl\$' of pw.place matches no leaf; paths are such as 'layer/kernel'"
    ):
        pw.place(tree, here, [("kernl$", P("x")), rest])
    with pytest.warns(UserWarning, match="rule 'bias' of pw.place matches only leaves that rules before it decide"):
        pw.place(tree, here, [rest, ("bias", P())])
    with pytest.raises(errors.ProgramError, match=r"leaf 'a' of pw.place: .*type Unknown.*register_dataclass"):
        pw.place({"a": Unknown(1)}, here, [rest])
    with pytest.raises(errors.SliceError, match=r"expects a slice .* got an object of type list"):
        pw.place(tree, [rest])
    with pytest.raises(errors.SliceError, match="got neither"):
        pw.place(tree)
    before = here.cluster.stats()["bytes_moved"]
    with pytest.raises(errors.ShardingError, match="'b'"):
        pw.place({"a": draw(4), "b": draw(3)}, here, P("x"))
    assert here.cluster.stats()["bytes_moved"] == before


# Pipelines


def first(p: Any, x: Any, key: Any = None) -> Any:
    x = jnp.tanh(x @ p["w"] + p["b"])
    return x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape)


def middle(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"])


def last(p: Any, x: Any, *, key: Any) -> Any:
    return x @ p["w"] + 0.1 * jax.random.normal(key, (x.shape[0], p["w"].shape[1]))


def loss_of(x: Any, y: Any) -> Any:
    return jnp.mean((x - y) ** 2)


PARAMS = [{"w": draw(4, 8), "b": draw(8)}, {"w": draw(8, 8)}, {"w": draw(8, 8, seed=1)}, {"w": draw(8, 2)}]
STAGES = [first, middle, middle, last]
BATCH, TARGETS, COUNT = draw(8, 4), draw(8, 2), 4


def plain(params: Any, batch: Any, targets: Any, key: Any) -> Any:
    """The reference that the docstring of `Pipeline` prints."""
    losses = []
    for m, (x, t) in enumerate(zip(jnp.split(batch, COUNT), jnp.split(targets, COUNT), strict=True)):
        of_microbatch = jax.random.fold_in(key, m)
        for s, stage in enumerate(STAGES):
            own = jax.random.fold_in(of_microbatch, s)
            x = stage(params[s], x) if stage is middle else stage(params[s], x, key=own)
        losses.append(loss_of(x, t))
    return sum(losses) / COUNT


plain = jax.jit(plain)
OPTIMIZER = optax.adam(1e-2)
STATE = jax.jit(OPTIMIZER.init)(PARAMS)


def training(model: Any) -> Any:
    """A step that trains a model."""

    def step(params: Any, state: Any, batch: Any, targets: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(model)(params, batch, targets, key=key)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def losses_of(step: Any, params: Any, state: Any, batch: Any, targets: Any) -> list[float]:
    """Of three steps with a key each."""
    losses = []
    for number in range(3):
        params, state, loss = step(params, state, batch, targets, KEYS[number])
        losses.append(float(loss))
    return losses


KEYS = [jax.random.key(n) for n in range(3)]


@functools.cache
def plain_losses() -> list[float]:
    return losses_of(jax.jit(training(plain)), PARAMS, STATE, BATCH, TARGETS)


@pytest.mark.parametrize("schedule, slices", [("1F1B", 4), ("GPipe", 2), ("none", 1), ("Interleaved1F1B", -2)])
def test_a_placed_pipeline_trains_as_plain_jax(add: Any, schedule: str, slices: int) -> None:
    there = [add(2) for _ in range(abs(slices))]
    homes = [there[n % 2 if slices < 0 else n * slices // 4] for n in range(4)]
    stages = [
        pw.jit(f, devices=home, in_shardings=({"w": P(None, "x"), "b": P("x")} if f is first else P(), P("x")))
        for f, home in zip(STAGES, homes, strict=True)
    ]
    model = pw.pipeline(stages, microbatches=COUNT, schedule=schedule, loss=loss_of)
    params = model.place(PARAMS)
    same(params, PARAMS)
    assert [leaf.slice for leaf in jax.tree.leaves(params)] == [homes[n] for n in (0, 0, 1, 2, 3)]
    assert [*specs(params).values()] == [P("x"), P(None, "x"), P(), P(), P()]
    state = pw.place(STATE, like=params)
    assert specs(state)["0/mu/0/w"] == P(None, "x")
    assert state[0].nu[3]["w"].slice is homes[3]
    batch, targets = model.place_batch(BATCH, TARGETS)
    assert batch.slice is homes[0]
    assert targets.slice is homes[3]

    step = pw.program(training(model), donate_argnums=(0, 1))
    np.testing.assert_allclose(losses_of(step, params, state, batch, targets), plain_losses(), rtol=2e-5)


@pytest.mark.one_process
def test_a_tree_that_is_not_by_stages_is_placed_by_who_reads_it(add: Any) -> None:
    one, two = add(2), add(2)

    def per_stage(params: Any) -> Any:
        return [{"w": params["table"], "b": params["rest"][0]}, {"w": params["rest"][1], "table": params["table"]}]

    tree = {"table": draw(4, 8), "rest": [draw(8), draw(8, 8)]}
    model = pw.pipeline(
        [pw.jit(first, devices=one, in_shardings=(P(), P())), pw.jit(middle, devices=two)], microbatches=2, loss=jnp.sum
    )
    placed = model.place(tree, [("table", P("x")), ("rest", P())], per_stage=per_stage)
    same(placed, tree)
    assert [leaf.slice for leaf in jax.tree.leaves(placed)] == [one, two, one]
    assert specs(placed) == {"rest/0": P(), "rest/1": P(), "table": P("x")}
    x = draw(4, 4)
    got = pw.program(lambda p, x: model(per_stage(p), x))(placed, x)
    want = jnp.mean(
        jnp.stack([jnp.sum(middle(*[per_stage(tree)[1], first(per_stage(tree)[0], h)])) for h in (x[:2], x[2:])])
    )
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    with pytest.raises(errors.ProgramError, match=r"leaf 'rest/1' .*\(8, 8\).*hands it to no stage as it is"):
        model.place(tree, per_stage=lambda p: [{"w": p["table"], "b": p["rest"][0]}, {"w": p["rest"][1] * 2}])
    with pytest.raises(errors.ProgramError, match="one pytree per stage, 2 in all, got 1"):
        model.place(tree, per_stage=lambda p: [p])
    with pytest.raises(errors.ProgramError, match=r"2 in all, got an object of type dict. .*per_stage"):
        model.place(tree)
    with pytest.raises(errors.ShardingError, match=r"leaf 'table' of params of pipeline .*matches none of its rules"):
        model.place(tree, [("rest", P())], per_stage=per_stage)
    with pytest.raises(errors.ProgramError, match="no loss"):
        pw.pipeline([pw.jit(middle, devices=one)], microbatches=2).place_batch(x, x)


@pytest.mark.one_process
def test_a_stage_of_several_slices_wants_its_parameters_placed(add: Any) -> None:
    one, two = add(1), add(1)
    inner = [pw.jit(middle, devices=each) for each in (one, two)]

    def both(p: Any, x: Any) -> Any:
        return inner[1](p[1], inner[0](p[0], x))

    model = pw.pipeline([both, pw.jit(middle, devices=add(1))], microbatches=2)
    params = [[{"w": draw(8, 8)}, {"w": draw(8, 8)}], {"w": draw(8, 8)}]
    with pytest.raises(errors.ProgramError, match=r"leaf '0/0/w' .*stages\[0\] is a function.*pw.place"):
        model.place(params)
    placed = model.place([[pw.place(p, s) for p, s in zip(params[0], (one, two), strict=True)], params[1]])
    assert [leaf.slice for leaf in jax.tree.leaves(placed)][:2] == [one, two]
    x = draw(4, 8)
    want = middle(params[1], middle(params[0][1], middle(params[0][0], x)))
    np.testing.assert_allclose(np.asarray(model(placed, x)), want, rtol=1e-5)


@pytest.mark.one_process
def test_keys_go_to_those_who_take_them(add: Any) -> None:
    one, two = add(2), add(1)
    model = pw.pipeline(
        [
            pw.jit(first, devices=one),
            pw.jit(middle, devices=one),
            pw.jit(middle, devices=two),
            pw.jit(last, devices=two),
        ],
        microbatches=COUNT,
        loss=loss_of,
    )
    params = model.place(PARAMS)
    for key in (jax.random.PRNGKey(7), jax.random.key(7, impl="unsafe_rbg")):
        got = model(params, BATCH, TARGETS, key=key)
        np.testing.assert_allclose(np.asarray(got), plain(PARAMS, BATCH, TARGETS, key), rtol=1e-5)
    with pytest.raises(errors.ProgramError, match=r"stages\[3\] of pipeline .* call the model with key="):
        model(params, BATCH, TARGETS)
    with pytest.raises(errors.ProgramError, match=r"expected one key, such as jax.random.key\(0\), got"):
        model(params, BATCH, TARGETS, key=7)
    deaf = pw.pipeline([pw.jit(middle, devices=one)], microbatches=2)
    with pytest.raises(errors.ProgramError, match="neither a stage nor the loss has a parameter `key`"):
        deaf([{"w": draw(4, 4)}], BATCH, key=jax.random.key(0))
    drawn = pw.pipeline(
        [pw.jit(middle, devices=one)], microbatches=2, loss=lambda x, key: jnp.sum(x * jax.random.normal(key, x.shape))
    )
    want = [
        jnp.sum(
            middle({"w": draw(4, 4)}, x)
            * jax.random.normal(jax.random.fold_in(jax.random.fold_in(jax.random.key(1), m), 1), (4, 4))
        )
        for m, x in enumerate((BATCH[:4], BATCH[4:]))
    ]
    got = drawn([{"w": draw(4, 4)}], BATCH, key=jax.random.key(1))
    np.testing.assert_allclose(np.asarray(got), sum(want) / 2, rtol=1e-5)
