"""The cache key of a call: calls with equal signatures run the same compiled program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from pathways.compiler.trace import Argument


def signature(in_tree: Any, arguments: Sequence[Argument], static: Sequence[Hashable] = ()) -> Hashable:
    """The pytree structure, shapes, dtypes, weak types and placements of the arguments, the static values, the x64 mode
    and the other JAX modes that change the result of a trace.

    A number, which JAX calls weakly typed, has another signature than an array of the same dtype.
    """
    return (in_tree, tuple(arguments), tuple(static), *modes())


def modes() -> tuple[Any, ...]:
    """The global JAX settings that a trace depends on."""
    config = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
        config.jax_default_prng_impl,
        config.jax_threefry_partitionable,
    )
