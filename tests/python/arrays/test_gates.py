"""`pw.nn`: the gates of mixtures of experts against a plain NumPy reading of the papers.

Map: weights and penalties; gradients; what a trained gate chooses; a gate on a slice; bad arguments.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import pathways as pw
from pathways.api.nn.gates import smooth_step

KEY = jax.random.key(7)


def step_by_the_paper(t: float, gamma: float) -> float:
    if t <= -gamma / 2:
        return 0.0
    if t >= gamma / 2:
        return 1.0
    return -2 / gamma**3 * t**3 + 3 / (2 * gamma) * t + 1 / 2


def dselect_by_the_paper(logits: Any, parts: Any, experts: int, gamma: float) -> tuple[Any, float, float]:
    """The weights of one example, the entropies of its selectors, and the inverse of what reaches an expert."""
    softmax = np.exp(parts - np.max(parts))
    softmax /= softmax.sum()
    weights, entropy, inverse = np.zeros(experts), 0.0, 0.0
    for part, row in zip(softmax, logits, strict=True):
        chances = []
        for expert in range(experts):
            chance = 1.0
            for bit, t in enumerate(row):
                one = step_by_the_paper(t, gamma)
                chance *= one if expert & (1 << (len(row) - 1 - bit)) else 1 - one
            chances.append(chance)
        weights += part * np.array(chances)
        entropy -= sum(c * math.log(c) for c in chances if c > 0)
        inverse += 1 / max(sum(chances), 1e-6)
    return weights, entropy, inverse


def drawn(shape: tuple[int, ...], scale: float, seed: int) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 3.0])
def test_the_smooth_step_is_the_paper_s(gamma: float) -> None:
    at = np.linspace(-gamma, gamma, 41, dtype=np.float32)
    found = smooth_step(jnp.asarray(at), gamma)
    np.testing.assert_allclose(found, [step_by_the_paper(float(t), gamma) for t in at], atol=1e-6)
    slope = jax.vmap(jax.grad(lambda t: smooth_step(t, gamma)))(jnp.asarray([-gamma, -gamma / 2, gamma / 2, gamma]))
    np.testing.assert_allclose(slope, 0, atol=1e-6)


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 2), (8, 3), (12, 2), (16, 2), (17, 5)])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_dselect_k_is_the_paper_s(experts: int, k: int, scale: float) -> None:
    gate = pw.nn.DSelectKGate(experts, k, entropy=0.3, reach=0.7, gamma=1.5)
    assert gate.bits == math.ceil(math.log2(experts))
    params = {"selectors": drawn((k, gate.bits), scale, 1), "parts": drawn((k,), 1, 2)}
    weights, entropy, inverse = dselect_by_the_paper(params["selectors"], params["parts"], experts, 1.5)
    found = gate(params)
    np.testing.assert_allclose(found.weights, weights, atol=1e-6)
    is_power = experts in (1, 2, 4, 8, 16)
    assert float(found.penalty) == pytest.approx(0.3 * entropy + (0 if is_power else 0.7 * inverse), rel=1e-5, abs=1e-6)
    if is_power:
        assert float(found.weights.sum()) == pytest.approx(1, abs=1e-6)
    repeated = gate(params, np.zeros((2, 3, 9))).weights
    assert repeated.shape == (2, 3, experts)
    np.testing.assert_array_equal(repeated, np.broadcast_to(found.weights, repeated.shape))


@pytest.mark.parametrize("biased", [False, True])
def test_dselect_k_per_example_is_the_paper_s(biased: bool) -> None:
    gate = pw.nn.DSelectKGate(6, 2, features=4, entropy=0.3, reach=0.7)
    params = {"selectors": drawn((4, 2, 3), 0.5, 1), "parts": drawn((4, 2), 1, 2)}
    biases = {"selectors_bias": drawn((2, 3), 0.3, 4), "parts_bias": drawn((2,), 1, 5)} if biased else {}
    x = drawn((5, 7, 4), 1, 3)
    found = gate(params | biases, x)
    rows = x.reshape(-1, 4)
    z, w = biases.get("selectors_bias", 0), biases.get("parts_bias", 0)
    each = [
        dselect_by_the_paper(np.tensordot(r, params["selectors"], 1) + z, r @ params["parts"] + w, 6, 1.0) for r in rows
    ]
    np.testing.assert_allclose(found.weights.reshape(-1, 6), [weights for weights, _, _ in each], atol=1e-5)
    penalty = np.mean([0.3 * entropy + 0.7 * inverse for _, entropy, inverse in each])
    assert float(found.penalty) == pytest.approx(penalty, rel=1e-4)


# By hand from the paper's formulas (smooth step, product over the bits, softmax of the parts), with the authors' order
# of bits, the most significant first. Expert 6 of 8 is 110.
AUTHORS = [
    ((4, 1), [[9, -9]], [0], [0, 0, 1, 0]),
    ((8, 1), [[9, 9, -9]], [0], [0, 0, 0, 0, 0, 0, 1, 0]),
    ((5, 1), [[9, -9, -9]], [0], [0, 0, 0, 0, 1]),
    ((4, 2), [[1, -1], [-1, 1]], [math.log(3), 0], [0, 0.25, 0.75, 0]),
    ((4, 1), [[0.25, -0.25]], [0], [0.131836, 0.024414, 0.711914, 0.131836]),
    (
        (8, 2),
        [[0.25, 0, -0.5], [0.5, 0.1, -0.25]],
        [math.log(2), 0],
        [0.052083, 0, 0.052083, 0, 0.38025, 0.018333, 0.4635, 0.03375],
    ),
]


@pytest.mark.parametrize(("sizes", "z", "w", "weights"), AUTHORS)
def test_dselect_k_numbers_experts_as_its_authors_do(sizes: Any, z: Any, w: Any, weights: Any) -> None:
    """Static, and per example: by a kernel on a constant feature, and by the biases alone."""
    z, w = np.float32(z), np.float32(w)
    np.testing.assert_allclose(pw.nn.DSelectKGate(*sizes)({"selectors": z, "parts": w}).weights, weights, atol=1e-5)
    gate, one = pw.nn.DSelectKGate(*sizes, features=1), np.ones((1, 1), np.float32)
    by_kernel = gate({"selectors": z[None], "parts": w[None]}, one)
    by_bias = gate({"selectors": 0 * z[None], "parts": 0 * w[None], "selectors_bias": z, "parts_bias": w}, one)
    np.testing.assert_allclose(by_kernel.weights, [weights], atol=1e-5)
    np.testing.assert_allclose(by_bias.weights, [weights], atol=1e-5)


@pytest.mark.parametrize("experts", [4, 5])
@pytest.mark.parametrize("features", [None, 3])
def test_gradients_of_dselect_k(experts: int, features: int | None) -> None:
    gate = pw.nn.DSelectKGate(experts, 2, features)
    params = jax.tree.map(lambda p: p * 20, gate.init(KEY))  # between the ends of the step
    x = None if features is None else drawn((6, features), 0.5, 3)
    value = drawn((experts,), 1, 4)

    def loss(params: Any) -> Any:
        weights, penalty = gate(params, x)
        return jnp.sum((weights @ value) ** 2) + penalty

    check_grads(loss, (params,), order=1, modes=("fwd", "rev"), atol=1e-2, rtol=1e-2)


def test_a_selector_that_has_chosen_has_finite_gradients() -> None:
    """Probabilities of exactly 0 and 1, numbers without an expert included."""
    gate = pw.nn.DSelectKGate(5, 3)
    logits = jnp.asarray([[9.0, -9.0, 9.0], [-9.0, -9.0, 9.0], [9.0, 9.0, 9.0]])  # 5 (none), 1, 7 (none)
    params = {"selectors": logits, "parts": jnp.zeros(3)}
    np.testing.assert_allclose(gate(params).weights, [0, 1 / 3, 0, 0, 0], atol=1e-6)
    value, grad = jax.value_and_grad(lambda p: gate(p).penalty + gate(p).weights[1])(params)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grad))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_is_the_papers(k: int) -> None:
    gate = pw.nn.TopKGate(5, k, features=3, balance=0.5)
    params, x = gate.init(KEY), drawn((4, 6, 3), 1, 1)
    found = gate(params, x)
    scores = x.reshape(-1, 3) @ np.asarray(params["kernel"])
    weights = np.zeros_like(scores)
    for row, out in zip(scores, weights, strict=True):
        chosen = np.argsort(-row, kind="stable")[:k]
        out[chosen] = np.exp(row[chosen]) / np.exp(row[chosen]).sum()
    np.testing.assert_allclose(found.weights.reshape(-1, 5), weights, atol=1e-6)
    assert (np.count_nonzero(found.weights, axis=-1) == k).all()
    share = np.count_nonzero(weights, axis=0) / (k * len(scores))
    probability = (np.exp(scores) / np.exp(scores).sum(1, keepdims=True)).mean(0)
    assert float(found.penalty) == pytest.approx(0.5 * 5 * (share * probability).sum(), rel=1e-5)
    check_grads(
        lambda p: jnp.sum(gate(p, x).weights ** 2) + gate(p, x).penalty, (params,), order=1, atol=1e-2, rtol=1e-2
    )


def test_equal_scores_of_top_k_give_the_lower_numbers() -> None:
    gate = pw.nn.TopKGate(4, 2, features=3, balance=1.0)
    found = gate({"kernel": jnp.zeros((3, 4))}, np.ones((2, 3), np.float32))
    np.testing.assert_allclose(found.weights, [[0.5, 0.5, 0, 0]] * 2)
    assert float(found.penalty) == pytest.approx(1.0)


@pytest.mark.parametrize("experts", [8, 11])
def test_a_trained_dselect_k_has_chosen_at_most_k(experts: int) -> None:
    """The target is the mean of two experts' values. The gate ends with at most k experts, near the target."""
    gate = pw.nn.DSelectKGate(experts, 2, entropy=0.05)
    values = jnp.linspace(-1, 1, experts)
    target = 0.5 * (values[experts - 1] + values[experts - 2])
    params = gate.init(KEY)
    adam = optax.adam(0.02)

    def loss(params: Any) -> Any:
        weights, penalty = gate(params)
        return (weights @ values - target) ** 2 + penalty

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = adam.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = adam.init(params)
    for _ in range(1500):
        params, state = step(params, state)
    weights = np.asarray(gate(params).weights)
    assert 1 <= np.count_nonzero(weights) <= 2
    assert weights.sum() == pytest.approx(1, abs=1e-5)
    assert abs(float(weights @ values - target)) < 0.2


@pytest.mark.parametrize("make", [lambda: pw.nn.TopKGate(4, 2, 3), lambda: pw.nn.DSelectKGate(6, 2, 3)])
def test_a_gate_on_a_slice(embedded_cluster: Any, make: Any) -> None:
    gate = make()
    slice_ = pw.make_virtual_device_set(embedded_cluster).add_slice(devices=1)
    params, x = gate.init(KEY), drawn((8, 3), 1, 1)
    loss = lambda p, x: jnp.sum(gate(p, x).weights ** 2) + gate(p, x).penalty
    found = pw.jit(jax.value_and_grad(loss), devices=slice_)(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, jax.value_and_grad(loss)(params, x)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_parameters_and_weights_have_the_type_that_was_asked_for(dtype: Any) -> None:
    for gate in (pw.nn.TopKGate(4, 2, 3), pw.nn.DSelectKGate(5, 2, 3)):
        params = gate.init(KEY, dtype)
        assert {leaf.dtype for leaf in params.values()} == {jnp.dtype(dtype)}
        assert gate(params, jnp.ones((2, 3), dtype)).weights.dtype == dtype


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pw.nn.TopKGate(0, 1, 3), "experts must be at least 1, got 0"),
        (lambda: pw.nn.TopKGate(4, 5, 3), r"k must be 1 to experts \(4\), got 5"),
        (lambda: pw.nn.TopKGate(4, True, 3), "k must be an int, got True"),
        (lambda: pw.nn.TopKGate(4, 2, 3, balance=-1), "balance must be finite and at least 0, got -1"),
        (lambda: pw.nn.DSelectKGate(4, 2.0), "k must be an int, got 2.0"),
        (lambda: pw.nn.DSelectKGate(4, 2, 0), "features must be at least 1, got 0"),
        (lambda: pw.nn.DSelectKGate(4, 2, gamma=0), "gamma must be finite and above 0, got 0"),
        (lambda: pw.nn.DSelectKGate(4, 2, entropy=math.nan), "entropy must be finite"),
        (lambda: pw.nn.DSelectKGate(4, 2, reach="1"), "reach must be a number, got '1'"),
        (lambda: pw.nn.TopKGate(4, 2, 3)({"kernel": jnp.zeros((3, 4))}, np.ones((5, 4))), r"x has shape \(5, 4\)"),
        (lambda: pw.nn.DSelectKGate(4, 2, 3)(pw.nn.DSelectKGate(4, 2, 3).init(KEY)), "expects x"),
    ],
)
def test_bad_arguments(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()
