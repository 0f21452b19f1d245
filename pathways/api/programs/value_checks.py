"""`jax.debug_nans` and `jax.debug_infs`: a call whose results have such a value raises `FloatingPointError`.

As in JAX a call then waits for its results, and donates nothing. The values are looked at where they are; a boolean
comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

_TESTS = {"nan": jnp.isnan, "inf": jnp.isinf}


def check(kinds: Sequence[str], name: str, results: Sequence[Any], result_names: Sequence[str]) -> None:
    """Raises `FloatingPointError`, which names the computation or program and its result, for a value not allowed:
    "nan", "inf"."""
    for kind in kinds:
        for result, result_name in zip(results, result_names, strict=False):
            if jnp.issubdtype(result.dtype, jnp.inexact) and bool(_TESTS[kind](result).any()):
                raise FloatingPointError(f"invalid value ({kind}) encountered in {name!r}: {result_name}")
