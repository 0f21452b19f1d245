"""The model of the digits demo, in plain JAX: what both sides of the comparison train.

A four-layer perceptron on scikit-learn's handwritten digits (1,797 real 8 x 8 images), cut into two stages. Each
stage is a pair of layers, the first cut by columns and the second by rows over the axis "model" (Megatron's layout,
arXiv 1909.08053), with the batch cut over the axis "data"; so each stage needs one all-reduce over "model" going
forward and its gradients one all-reduce over "data" going back.

Nothing here knows about Pathways. `digits_pipeline.py` trains it on two islands, `digits_plain.py` on two meshes of
one process, and the parameters must agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

Params = dict[str, jax.Array]
Specs = dict[str, P]

MESH_SHAPE = (2, 2)
MESH_AXES = ("data", "model")

# How each stage's arrays lie on its mesh. Both sides use these very specs.
STAGE_SPECS: Specs = {"w_in": P(None, "model"), "b_in": P("model"), "w_out": P("model", None), "b_out": P()}
BATCH_SPEC = P("data")
SCALAR_SPEC = P()


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides the result of a training."""

    steps: int = 500
    batch: int = 256
    hidden: int = 128
    learning_rate: float = 0.3
    momentum: float = 0.9
    seed: int = 0

    def optimizer(self) -> optax.GradientTransformation:
        """Momentum SGD whose rate falls along a cosine to zero at the last step."""
        schedule = optax.cosine_decay_schedule(self.learning_rate, self.steps)
        return optax.sgd(schedule, momentum=self.momentum)


@dataclasses.dataclass(frozen=True)
class Digits:
    """The data set, scaled to [0, 1]: images are float32[n, 64], labels int32[n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def batches(self, config: Config) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """`config.steps` shuffled batches of `config.batch`, the same for the same seed."""
        rng = np.random.default_rng(config.seed)
        order = np.empty(0, np.int64)
        for _ in range(config.steps):
            if len(order) < config.batch:
                order = rng.permutation(len(self.train_labels))
            chosen, order = order[: config.batch], order[config.batch :]
            yield self.train_images[chosen], self.train_labels[chosen]


def load_digits() -> Digits:
    """Read the data out of scikit-learn's wheel; one image in five, drawn per class, is kept for the test."""
    from sklearn import datasets, model_selection

    bunch = datasets.load_digits()
    images = (bunch.data / 16.0).astype(np.float32)
    labels = bunch.target.astype(np.int32)
    split = model_selection.train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = split
    return Digits(train_images, train_labels, test_images, test_labels)


def init_params(config: Config) -> tuple[Params, Params]:
    """Parameters of both stages, as NumPy arrays: 64 -> hidden -> hidden, and hidden -> hidden -> 10."""
    rng = np.random.default_rng(config.seed)

    def stage(size_in: int, size_out: int) -> Any:
        def dense(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) * np.sqrt(1.0 / rows)).astype(np.float32)

        return {
            "w_in": dense(size_in, config.hidden),
            "b_in": np.zeros(config.hidden, np.float32),
            "w_out": dense(config.hidden, size_out),
            "b_out": np.zeros(size_out, np.float32),
        }

    return stage(64, config.hidden), stage(config.hidden, 10)


def _two_layers(params: Params, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w_in"] + params["b_in"])
    return hidden @ params["w_out"] + params["b_out"]


def encode(params: Params, images: jax.Array) -> jax.Array:
    """Stage 1: images[batch, 64] -> features[batch, hidden]."""
    return jnp.tanh(_two_layers(params, images))


def classify(params: Params, features: jax.Array) -> jax.Array:
    """Stage 2: features[batch, hidden] -> logits[batch, 10]."""
    return _two_layers(params, features)


def classify_loss(params: Params, features: jax.Array, labels: jax.Array) -> jax.Array:
    """Stage 2 while training: the mean cross-entropy of the batch, a scalar."""
    logits = classify(params, features)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of the rows whose largest logit is the label's."""
    return float((np.asarray(logits).argmax(axis=-1) == labels).mean())


def opt_state_specs(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """Where the optimizer's state lies: like the parameter it belongs to, and whole everywhere if it has none."""
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_map_params(
        optimizer, lambda _, spec: spec, state, STAGE_SPECS, transform_non_params=lambda _: P()
    )
