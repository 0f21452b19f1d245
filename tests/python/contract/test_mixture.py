"""`pw.nn.MixtureOfExperts`: values and gradients are those of a dense mixture in plain JAX, with both gates."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw

ROWS, WIDTH, EXPERTS = 24, 5, 8


def expert(params: Any, rows: Any) -> Any:
    return jnp.tanh(rows @ params["w"]) + params["b"]


def init_expert(key: jax.Array) -> Any:
    one, two = jax.random.split(key)
    return {"w": jax.random.normal(one, (WIDTH, WIDTH)), "b": jax.random.normal(two, (WIDTH,))}


def dense(mixture: Any, params: Any, x: Any) -> Any:
    """Every expert computes every row."""
    gating = mixture.gate(params["gate"], x)
    weights = jnp.broadcast_to(gating.weights, (len(x), mixture.gate.experts))
    if mixture.visits is not None:
        least = jax.lax.top_k(weights, mixture.visits)[0][:, -1:]
        weights = jnp.where(weights >= least, weights, 0)
    stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *params["experts"])
    results = jax.vmap(expert, in_axes=(0, None))(stacked, x)
    return jnp.einsum("ne,enf->nf", weights, results), gating.penalty


GATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "top 2": (pw.nn.TopKGate(EXPERTS, 2, WIDTH), {}),
    "top 1, small blocks": (pw.nn.TopKGate(EXPERTS, 1, WIDTH), {"block": 3}),
    "dselect per example": (pw.nn.DSelectKGate(EXPERTS, 2, WIDTH), {"visits": EXPERTS}),
    "dselect static": (pw.nn.DSelectKGate(EXPERTS, 2), {"visits": EXPERTS, "block": 5}),
}


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("name", GATES)
def test_values_and_gradients(add: Any, quiet: Any, name: str) -> None:
    gate, how = GATES[name]
    home, slices = add(2), [add(2), add(2)]
    mixture = pw.nn.MixtureOfExperts(expert, gate, home=home, slices=slices, capacity=ROWS * EXPERTS, **how)
    params = mixture.init(jax.random.key(1), init_expert)
    x = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
    error = pw.jit(lambda got, y, penalty: jnp.mean((got - y) ** 2) + penalty, devices=home)

    def loss(params: Any, x: Any, y: Any) -> Any:
        mixed = mixture(params, x)
        return error(mixed.results, y, mixed.penalty), mixed

    def plain(params: Any, x: Any, y: Any) -> Any:
        got, penalty = dense(mixture, params, x)
        return jnp.mean((got - y) ** 2) + penalty, got

    step = pw.program(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (got, mixed), gradients = step(params, x, y)
    (want, results), expected = jax.value_and_grad(plain, argnums=(0, 1), has_aux=True)(params, x, y)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(mixed.results), results, rtol=1e-4, atol=1e-5)
    assert int(np.asarray(mixed.dropped)) == 0
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-3, atol=1e-5, err_msg=str(path))


#: Derivatives of a function of one argument, in a direction: in forward mode, and twice in both orders.
DERIVATIVES: dict[str, Any] = {
    "forward": lambda f, v, u: jax.jvp(f, (v,), (u,)),
    "forward over reverse": lambda f, v, u: jax.jvp(jax.grad(f), (v,), (u,))[1],
    "reverse over forward": lambda f, v, u: jax.grad(lambda v: jax.jvp(f, (v,), (u,))[1])(v),
}


@pytest.mark.one_process
@pytest.mark.parametrize("name", DERIVATIVES)
def test_other_derivatives(add: Any, name: str) -> None:
    """Of a mixture whose experts also read a value of the program, which all of them share."""
    home, place = add(2), add(2)
    gate = pw.nn.TopKGate(EXPERTS, 2, WIDTH)

    def sharing(factor: Any, **how: Any) -> Any:
        return pw.nn.MixtureOfExperts(
            lambda params, rows: expert(params, rows * factor), gate, home=home, slices=place, capacity=2 * ROWS, **how
        )

    error = pw.jit(lambda y, penalty: jnp.mean(y**2) + penalty, devices=home)
    params = sharing(1).init(jax.random.key(1), init_expert)
    x = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype(np.float32)

    def loss(given: Any) -> Any:
        params, factor = given
        mixed = sharing(factor, block=4)(params, x)
        return error(mixed.results, mixed.penalty)

    def plain(given: Any) -> Any:
        params, factor = given
        (stacked,) = params["experts"]
        gating = gate(params["gate"], x)
        results = jax.vmap(expert, in_axes=(0, None))(stacked, x * factor)
        return jnp.mean(jnp.einsum("ne,enf->nf", gating.weights, results) ** 2) + gating.penalty

    given = params, np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
    direction = jax.tree.map(jnp.cos, given)
    got = pw.program(functools.partial(DERIVATIVES[name], loss))(given, direction)
    expected = DERIVATIVES[name](plain, given, direction)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-3, atol=1e-4)


def test_what_has_no_room_is_left_out(add: Any) -> None:
    home, slice_ = add(2), add(2)
    gate = pw.nn.TopKGate(2, 1, WIDTH)
    mixture = pw.nn.MixtureOfExperts(expert, gate, home=home, slices=[slice_], capacity=2)
    params = mixture.init(jax.random.key(1), init_expert)
    params["gate"]["kernel"] = params["gate"]["kernel"] * 0  # all rows to expert 0
    x = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype(np.float32)
    mixed = pw.program(mixture)(params, x)
    assert int(np.asarray(mixed.dropped)) == ROWS - 2
    results = np.asarray(mixed.results)
    want, _ = dense(mixture, params, x)
    np.testing.assert_allclose(results[:2], want[:2], rtol=1e-5, atol=1e-6)
    assert not results[2:].any()


def test_what_an_expert_closes_over_is_an_argument(add: Any) -> None:
    table = np.random.default_rng(4).normal(size=(1 << 14, WIDTH)).astype(np.float32)
    shift = jax.jit(lambda row: row + jnp.asarray(table).mean(0))
    home, slice_ = add(2), add(2)
    mixture = pw.nn.MixtureOfExperts(
        lambda params, rows: shift(expert(params, rows)),
        GATES["top 2"][0],
        home=home,
        slices=[slice_],
        capacity=2 * ROWS,
    )
    params = mixture.init(jax.random.key(1), init_expert)
    x = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype(np.float32)
    program = pw.program(mixture)
    assert sum(len(each.module) for each in program.lower(params, x).logical.computations) < table.nbytes
    want = dense(mixture, params, x)[0] + table.mean(0)  # the weights of two experts add up to 1
    np.testing.assert_allclose(np.asarray(program(params, x).results), want, rtol=1e-4, atol=1e-4)


def test_bad_arguments(add: Any) -> None:
    home = add(2)
    gate = pw.nn.TopKGate(3, 1, WIDTH)
    with pytest.raises(pw.errors.ProgramError, match="3 experts on 2 devices; expected a multiple of 2"):
        pw.nn.MixtureOfExperts(expert, gate, home=home, slices=[home], capacity=2)
    gate = pw.nn.TopKGate(4, 1, WIDTH)
    with pytest.raises(pw.errors.ProgramError, match="capacity of MixtureOfExperts is 0"):
        pw.nn.MixtureOfExperts(expert, gate, home=home, slices=[home], capacity=0)
    with pytest.raises(pw.errors.ProgramError, match="visits of MixtureOfExperts is 5; expected an int of 1 to 4"):
        pw.nn.MixtureOfExperts(expert, gate, home=home, slices=[home], capacity=1, visits=5)
    with pytest.raises(pw.errors.ProgramError, match="expected slices, one or more"):
        pw.nn.MixtureOfExperts(expert, gate, home=home, slices=[], capacity=1)
    with pytest.raises(pw.errors.ProgramError, match="overflow of MixtureOfExperts is 'wait'"):
        pw.nn.MixtureOfExperts(expert, gate, home=home, slices=home, capacity=1, overflow="wait")  # type: ignore[arg-type]
    with pytest.raises(pw.errors.ProgramError, match="expected slices, one or more"):
        pw.nn.MixtureOfExperts(expert, gate, home=home, slices=None, capacity=1)  # type: ignore[arg-type]
    with pytest.raises(pw.errors.ProgramError, match="expert of MixtureOfExperts is None; expected a function"):
        pw.nn.MixtureOfExperts(None, gate, home=home, slices=home, capacity=1)  # type: ignore[arg-type]
    mixture = pw.nn.MixtureOfExperts(expert, gate, home=home, slices=home, capacity=1)
    params = mixture.init(jax.random.key(0), init_expert)
    for shape in ((2, 4, WIDTH), (3, WIDTH), (4, WIDTH + 1)):
        with pytest.raises(pw.errors.ProgramError, match=r"x of MixtureOfExperts has shape .*; expected \[n, 5\]"):
            pw.program(mixture)(params, np.zeros(shape, np.float32))


@pytest.mark.one_process
def test_bad_parameters_and_experts(add: Any) -> None:
    home = add(2)
    gate = pw.nn.TopKGate(4, 1, WIDTH)
    x = np.ones((4, WIDTH), np.float32)

    def refused(text: str, params: Any = None, expert: Any = expert) -> None:
        mixture = pw.nn.MixtureOfExperts(expert, gate, home=home, slices=home, capacity=4)
        with pytest.raises(pw.errors.ProgramError, match=text):
            pw.program(mixture)(good if params is None else params, x)

    mixture = pw.nn.MixtureOfExperts(expert, gate, home=home, slices=home, capacity=4)
    good = mixture.init(jax.random.key(0), init_expert)
    (experts,) = good["experts"]
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), experts)
    refused(r'"experts"\]\[0\]\[\'b\'\] .* has shape \(8, 5\); expected \[4, ...\]', {**good, "experts": [twice]})
    refused("one pytree per slice: 1", {**good, "experts": [experts, experts]})
    refused("one pytree per slice: 1", {**good, "experts": experts})
    refused("one pytree per slice: 1", {"experts": [experts]})
    refused("has no array", {**good, "experts": [{}]})
    refused("expected one array .4, ....", expert=lambda params, rows: rows[:1])
    refused("expected one array .4, ....", expert=lambda params, rows: rows.sum())
    refused("expected one array .4, ....", expert=lambda params, rows: {"rows": rows})
