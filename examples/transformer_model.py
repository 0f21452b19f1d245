"""A small decoder-only transformer in four stages, whose first and last stage share the embedding; in plain JAX.

`transformer_pipeline.py` and `transformer_islands.py` put the stages on slices. The text to learn: each sequence counts
modulo `VOCABULARY` in steps of its own, so the next token follows from the two before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STAGES, VOCABULARY, LENGTH, WIDTH, HEADS = 4, 16, 12, 32, 2
LEARNING_RATE, MOMENTUM = 0.1, 0.9


def init_params(seed: int = 0) -> Any:
    """All parameters: the embedding [VOCABULARY, WIDTH], the positions [LENGTH, WIDTH], one block per stage."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    blocks = [
        {
            "qkv": normal(WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }
        for _ in range(STAGES)
    ]
    return {"embedding": normal(VOCABULARY, WIDTH), "positions": normal(LENGTH, WIDTH), "blocks": blocks}


def texts(rows: int, seed: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches without end: tokens [rows, LENGTH], and for each token the next one."""
    rng = np.random.default_rng(seed)
    while True:
        start, step = rng.integers(0, VOCABULARY, (rows, 1)), rng.integers(1, 5, (rows, 1))
        text = ((start + step * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
        yield text[:, :-1], text[:, 1:]


def normalized(x: Any) -> Any:
    """Each position's vector with mean square 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(p: Any, x: Any) -> Any:
    """Causal self-attention and a perceptron, each beside a skip connection; x[rows, LENGTH, WIDTH]."""
    q, k, v = jnp.einsum("btw,wchd->cbthd", normalized(x), p["qkv"])
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(WIDTH // HEADS)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normalized(x) @ p["up"]) @ p["down"]


def first(p: Any, tokens: Any) -> Any:
    """The first stage: tokens to vectors, and a block."""
    return block(p["block"], p["embedding"][tokens] + p["positions"])


def last(p: Any, x: Any) -> Any:
    """The last stage: a block, and logits by the same embedding."""
    return normalized(block(p["block"], x)) @ p["embedding"].T


FUNCTIONS: list[Callable[[Any, Any], Any]] = [first, block, block, last]


def per_stage(params: Any) -> list[Any]:
    """What each stage reads: the embedding is the first stage's and the last stage's."""
    at, (a, b, c, d) = params["embedding"], params["blocks"]
    return [{"embedding": at, "positions": params["positions"], "block": a}, b, c, {"embedding": at, "block": d}]


def loss_of(logits: Any, targets: Any) -> Any:
    """Mean cross entropy, in nats."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1))


def update(params: Any, moments: Any, grads: Any) -> tuple[Any, Any]:
    """Gradient descent with momentum."""
    moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - LEARNING_RATE * m, params, moments), moments


def train_in_plain_jax(rows: int, steps: int) -> list[float]:
    """The loss of each step, on one device and without stages."""

    def whole(params: Any, tokens: Any, targets: Any) -> Any:
        x = tokens
        for function, p in zip(FUNCTIONS, per_stage(params), strict=True):
            x = function(p, x)
        return loss_of(x, targets)

    @jax.jit
    def step(params: Any, moments: Any, tokens: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(whole)(params, tokens, targets)
        return *update(params, moments, grads), loss

    params = init_params()
    moments, losses = jax.tree.map(np.zeros_like, params), []
    for _, (tokens, targets) in zip(range(steps), texts(rows), strict=False):
        params, moments, loss = step(params, moments, tokens, targets)
        losses.append(float(loss))
    return losses
