"""Gates of mixtures of experts: which experts an example goes to, and with what weights.

A gate is a description without parameters. `gate.init(key)` makes the parameters, and `gate(params, x)` is a pure
function, for `jax.grad`, `jax.jit`, `pw.jit` and programs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: Parameters of a gate: arrays by name.
Params = dict[str, jax.Array]

# The penalty for codes without an expert is the inverse of a probability. It is bounded by this one's inverse.
_LEAST_PROBABILITY = 1e-6


class Gating(NamedTuple):
    """What a gate says of a batch of examples."""

    #: `[..., experts]`, at least 0: the weight of each expert's result. Weight 0: the example need not go there.
    weights: jax.Array
    #: A scalar to add to the loss, as the gate describes it.
    penalty: jax.Array


@dataclasses.dataclass(frozen=True)
class TopKGate:
    """The k experts with the largest scores, weighted by the softmax of these k scores.

    The scores are `x @ params["kernel"]`. Exactly k experts have a weight, and the weights of an example add up to 1.
    If scores are equal, the gate takes the expert with the lower number. The gradient goes through the weights, not
    through the choice.

    The penalty is `balance * experts * sum(share * probability)`: `share` of an expert are the choices that fall on
    it, as a part of all choices; `probability` is the mean of the softmax of all scores. It is `balance` when all
    experts are used alike, and at most `balance * experts`.

    Source: Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017 (weights, without noise); Fedus et al.,
    "Switch Transformers", JMLR 2022, section 2.2 (penalty; there for k = 1).

    Args:
        experts: how many, at least 1.
        k: how many an example goes to, 1 to `experts`.
        features: size of the last dimension of x.
        balance: factor of the penalty, at least 0.

    Raises:
        ValueError, TypeError: an argument is none of these; a call's `x` has another last dimension.
    """

    experts: int
    k: int
    features: int
    balance: float = 0.01

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_count("features", self.features)
        _check_number("balance", self.balance, least=0)

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        """`{"kernel": [features, experts]}`, normal with variance 1 / features."""
        kernel = jax.random.normal(key, (self.features, self.experts), dtype) / np.sqrt(self.features)
        return {"kernel": kernel.astype(dtype)}

    def __call__(self, params: Params, x: Any) -> Gating:
        """`x`: `[..., features]`."""
        scores = _inputs(x, self.features) @ params["kernel"]
        largest, chosen = jax.lax.top_k(scores, self.k)
        is_chosen = jax.nn.one_hot(chosen, self.experts, dtype=scores.dtype)  # [..., k, experts]
        weights = jnp.einsum("...k,...ke->...e", jax.nn.softmax(largest), is_chosen)
        examples = tuple(range(scores.ndim - 1))
        share = jnp.mean(jnp.sum(is_chosen, -2), examples) / self.k
        probability = jnp.mean(jax.nn.softmax(scores), examples)
        return Gating(weights, self.balance * self.experts * jnp.sum(share * probability))


@dataclasses.dataclass(frozen=True)
class DSelectKGate:
    """DSelect-k: a gate that is continuously differentiable, and that chooses at most k experts once it has converged.

    The weights are a sum of k *selectors*, each times its part of a softmax. A selector has a logit per bit of an
    expert's number, the most significant bit first. The smooth step makes a probability of each logit. It is exactly 0
    below `-gamma / 2`, exactly 1 above `gamma / 2`, and a cubic between them. An expert's probability is the product
    over the bits of its number. So a selector whose bits are all 0 or 1 chooses one expert. Until then more than k
    experts can have a weight. The gradient is that of the weights at any time, because nothing is rounded or sorted.

    The penalty has two terms. Both are means over the examples and sums over the selectors:
    `entropy` times the entropy of a selector's probabilities, which makes it choose; and, if `experts` is no power of
    two, `reach` divided by the probability of all experts together, because some numbers then have no expert. The
    weights of an example add up to 1 if `experts` is a power of two. Otherwise they add up to less, as far as selectors
    choose a number without an expert.

    With `features`, the gate is per example: the logits are linear in x, plus a bias. Without it, the gate is static:
    the logits are parameters, and all examples have the same weights.

    Parameters of the authors' code (`z_logits`, `w_logits`) give the same weights here when they are reshaped to the
    shapes that `init` states. What differs is the penalty, so the factors are not comparable. In their code both terms
    are sums over the examples, the logarithm is of the probability plus 1e-6, the factor of the entropy is a function
    of the training step (off if none is given), and the second term has no factor and no bound.

    Source: Hazimeh et al., "DSelect-k: Differentiable Selection in the Mixture of Experts with Applications to
    Multi-Task Learning", NeurIPS 2021; and its authors' code, google-research/dselect_k_moe.

    Args:
        experts: how many, at least 1.
        k: selectors, 1 to `experts`.
        features: size of the last dimension of x; None: a static gate.
        gamma: width of the smooth step, above 0.
        entropy: factor of the entropy, at least 0.
        reach: factor of the term for numbers without an expert, at least 0.

    Raises:
        ValueError, TypeError: an argument is none of these; a call's `x` has another last dimension.
    """

    experts: int
    k: int
    features: int | None = None
    gamma: float = 1.0
    entropy: float = 0.01
    reach: float = 1.0

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.features is not None:
            _check_count("features", self.features)
        _check_number("gamma", self.gamma, above=0)
        _check_number("entropy", self.entropy, least=0)
        _check_number("reach", self.reach, least=0)

    @property
    def bits(self) -> int:
        """Bits of the largest number of an expert."""
        return (self.experts - 1).bit_length()

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        """Logits: `{"selectors": [k, bits], "parts": [k]}`.

        Per example, these two have one more dimension in front, `features`, and there are
        `{"selectors_bias": [k, bits], "parts_bias": [k]}` beside them.

        Uniform, and so small that each selector begins between its experts: a logit of a static gate is within
        `gamma / 100` of 0.
        """
        selectors, parts, selectors_bias, parts_bias = jax.random.split(key, 4)
        front = () if self.features is None else (self.features,)
        bound = self.gamma / 100
        params = {
            "selectors": jax.random.uniform(selectors, (*front, self.k, self.bits), dtype, -bound, bound),
            "parts": jax.random.uniform(parts, (*front, self.k), dtype, -0.05, 0.05),
        }
        if self.features is not None:
            params["selectors_bias"] = jax.random.uniform(selectors_bias, (self.k, self.bits), dtype, -bound, bound)
            params["parts_bias"] = jax.random.uniform(parts_bias, (self.k,), dtype, -0.05, 0.05)
        return params

    def __call__(self, params: Params, x: Any = None) -> Gating:
        """`x`: `[..., features]`. A static gate takes any `[..., n]` and repeats its weights for each example; without
        x its weights are `[experts]`. A bias that `params` does not have is 0.
        """
        logits, parts = params["selectors"], params["parts"]
        if self.features is not None:
            if x is None:
                raise TypeError("a DSelectKGate with features expects x; a static gate, features=None, needs none")
            x = _inputs(x, self.features)
            logits = jnp.einsum("...f,fkb->...kb", x, logits) + params.get("selectors_bias", 0)
            parts = x @ parts + params.get("parts_bias", 0)
        probabilities = self._probabilities(logits)  # [..., k, experts]
        weights = jnp.einsum("...k,...ke->...e", jax.nn.softmax(parts), probabilities)
        penalty = self.entropy * jnp.mean(jnp.sum(_entropy(probabilities), -1))
        if self.experts & (self.experts - 1):
            reached = jnp.maximum(jnp.sum(probabilities, -1), _LEAST_PROBABILITY)
            penalty += self.reach * jnp.mean(jnp.sum(1 / reached, -1))
        if self.features is None and x is not None:
            weights = jnp.broadcast_to(weights, (*jnp.shape(x)[:-1], self.experts))
        return Gating(weights, penalty)

    def _probabilities(self, logits: jax.Array) -> jax.Array:
        """Of each selector and expert: `[..., k, bits]` to `[..., k, experts]`."""
        ones = smooth_step(logits, self.gamma)[..., None, :]
        places = np.arange(self.bits)[::-1]  # the most significant bit first
        has_one = (np.arange(self.experts)[:, None] >> places) & 1 == 1  # [experts, bits]
        return jnp.prod(jnp.where(has_one, ones, 1 - ones), -1)


def smooth_step(t: jax.Array, gamma: float) -> jax.Array:
    """0 up to `-gamma / 2`, 1 from `gamma / 2`, a cubic between them; its first derivative is continuous."""
    t = jnp.clip(t / gamma, -0.5, 0.5)
    return -2 * t**3 + 1.5 * t + 0.5


def _entropy(probabilities: jax.Array) -> jax.Array:
    """Sum over the last dimension of -p log p, which is 0 at p = 0, as is the gradient there."""
    is_there = probabilities > 0
    p = jnp.where(is_there, probabilities, 1)
    return -jnp.sum(jnp.where(is_there, p * jnp.log(p), 0), -1)


def _inputs(x: Any, features: int) -> jax.Array:
    shape = jnp.shape(x)
    if not shape or shape[-1] != features:
        raise ValueError(f"x has shape {shape}; expected [..., {features}], the gate's features last")
    return jnp.asarray(x)


def _check_counts(gate: TopKGate | DSelectKGate) -> None:
    _check_count("experts", gate.experts)
    _check_count("k", gate.k)
    if gate.k > gate.experts:
        raise ValueError(f"k must be 1 to experts ({gate.experts}), got {gate.k}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_number(name: str, value: Any, *, least: float | None = None, above: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if least is not None and not (np.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be finite and at least {least}, got {value}")
    if above is not None and not (np.isfinite(value) and value > above):
        raise ValueError(f"{name} must be finite and above {above}, got {value}")
