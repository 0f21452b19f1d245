"""Computes what is known of scalars when a program is traced: the counter of an unrolled loop, and what depends on it.

Only integers and truth values are computed, because there NumPy and XLA agree on every bit. So a branch on the number
of the iteration is taken when the program is flattened, and a loop's counter is never sent from slice to slice.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib

_RULES: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: cases[min(max(int(which[0]), 0), len(cases) - 1)],  # clamped, as XLA does
    "convert_element_type": lambda x: x,
}


def fold(eqn: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """The results of an equation as literals; None if they are not known or not computed here.

    `inputs` are what the equation reads: literals, or anything else for what is not known.
    """
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or not all(_is_whole(v.aval) for v in eqn.outvars):
        return None
    if not all(isinstance(v, _jaxlib.Literal) and _is_whole(v.aval) for v in inputs):
        return None
    (result,) = eqn.outvars
    # Of one element, not of none: then NumPy wraps around without a warning, as XLA does.
    value = rule(*(np.asarray(v.val, v.aval.dtype).reshape(1) for v in inputs))
    return [_jaxlib.new_literal(value.astype(result.aval.dtype)[0], result.aval)]


def _is_whole(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biu" and not aval.shape
