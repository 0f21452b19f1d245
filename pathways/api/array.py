"""What the pickle of a key array names. It stays in this place, or pickles that users have saved cannot be read."""

from __future__ import annotations

import jax
import numpy as np


def _unpickle_key(words: np.ndarray, implementation: str) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=implementation)
