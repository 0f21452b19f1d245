"""Computes what is known when a program is traced: the counter of an unrolled loop, rows of `jnp.arange`, and what
depends on them.

Only integers and truth values are computed, because there NumPy and XLA agree on every bit. What XLA leaves open
(division by zero, a shift by too many bits) is not computed. So a branch on the number of the iteration is taken when
the program is flattened, and a loop's counter is never sent from slice to slice.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib

#: The most elements of an array that is computed here.
MOST_ELEMENTS = 1 << 12


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The quotient, rounded to zero."""
    remainder = _remainder(x, y)
    return None if remainder is None else np.floor_divide(x - remainder, y)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The remainder, which has the sign of `x`."""
    least = np.iinfo(x.dtype).min if x.dtype.kind == "i" else None
    if np.any(y == 0) or (least is not None and np.any((x == least) & (y == -1))):
        return None
    return np.fmod(x, y)


def _shifted(kind: str, shift: Callable[..., Any]) -> Callable[..., Any]:
    """A shift of numbers of a kind: signed "i", unsigned "u"."""

    def rule(x: np.ndarray, by: np.ndarray) -> np.ndarray | None:
        if x.dtype.kind not in kind or np.any((by < 0) | (by >= 8 * x.dtype.itemsize)):
            return None
        return np.asarray(shift(x, by))

    return rule


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    number = np.minimum(np.maximum(which.astype(np.int64), 0), len(cases) - 1)  # clamped, as XLA does
    return (
        np.choose(number, cases) if number.shape and len(cases) < 32 else None if number.shape else cases[int(number)]
    )


def _whole_power(x: np.ndarray, *, y: int) -> np.ndarray | None:
    return np.power(x, y, dtype=x.dtype) if y >= 0 else None


def _iota(*, dtype: Any, shape: Sequence[int], dimension: int, **_: Any) -> np.ndarray | None:
    if math.prod(shape) > MOST_ELEMENTS:
        return None
    column = [-1 if n == dimension else 1 for n in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(column), shape)


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: Sequence[int], **_: Any) -> np.ndarray:
    begin = [
        min(max(int(start), 0), whole - size) for start, whole, size in zip(starts, x.shape, slice_sizes, strict=True)
    ]
    return x[tuple(slice(at, at + size) for at, size in zip(begin, slice_sizes, strict=True))]


def _broadcast(x: np.ndarray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> Any:
    if math.prod(shape) > MOST_ELEMENTS:
        return None
    there = [1] * len(shape)
    for dimension, size in zip(broadcast_dimensions, x.shape, strict=True):
        there[dimension] = size
    return np.broadcast_to(x.reshape(there), shape)


#: Rules of what works element by element; a number goes with an array.
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divided,
    "rem": _remainder,
    "sign": np.sign,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": _shifted("iu", np.left_shift),
    "shift_right_arithmetic": _shifted("i", np.right_shift),
    "shift_right_logical": _shifted("u", np.right_shift),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": _select,
    "convert_element_type": lambda x: x,
}

#: Rules that need the parameters of their equation.
_WITH_PARAMETERS: dict[str, Callable[..., Any]] = {
    "integer_pow": _whole_power,
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "broadcast_in_dim": _broadcast,
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "reshape": lambda x, *, new_sizes, dimensions, **_: x.reshape(new_sizes) if dimensions is None else None,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
}


class Folder:
    """Knows the integers and truth values of a program, as far as they do not depend on its arguments."""

    def __init__(self) -> None:
        self._arrays: dict[Any, np.ndarray] = {}  # by variable; a known number is a literal instead

    def know(self, v: Any, value: Any) -> None:
        """The variable `v` has this value, if it is an array that is computed with."""
        if isinstance(value, np.ndarray) and _is_small(value) and not isinstance(v, _jaxlib.Literal):
            self._arrays[v] = value.view(np.ndarray)

    def known(self, v: Any) -> np.ndarray | None:
        """What is known of a literal or variable."""
        if isinstance(v, _jaxlib.Literal):
            return np.asarray(v.val, v.aval.dtype) if _is_whole(v.aval) else None
        return self._arrays.get(v)

    def fold(self, eqn: Any, inputs: Sequence[Any]) -> list[np.ndarray] | None:
        """The results of an equation; None if they are not known or not computed here.

        `inputs` are what the equation reads: literals, or anything else.
        """
        if eqn.primitive.name not in _KNOWN or not all(_is_whole(v.aval) for v in eqn.outvars):
            return None
        values = [self.known(v) for v in inputs]
        if any(value is None for value in values):
            return None
        with np.errstate(all="ignore"):  # a number wraps around, as in XLA
            return _results(eqn, values)


_KNOWN = {*_ELEMENTWISE, *_WITH_PARAMETERS, "jit", "pjit"}


def literals(eqn: Any, values: Sequence[np.ndarray]) -> list[Any] | None:
    """The results of an equation as literals, if they are numbers."""
    if any(value.shape for value in values):
        return None
    return [_jaxlib.new_literal(value[()], v.aval) for value, v in zip(values, eqn.outvars, strict=True)]


def _results(eqn: Any, values: Sequence[Any]) -> list[np.ndarray] | None:
    if eqn.primitive is _jaxlib.jit_p:
        return _results_of(*_jaxlib.opened(eqn.params["jaxpr"]), values)
    elementwise = _ELEMENTWISE.get(eqn.primitive.name)
    if elementwise is not None:
        value = elementwise(*values)
    else:
        value = _WITH_PARAMETERS[eqn.primitive.name](*values, **eqn.params)
    (result,) = eqn.outvars
    if value is None or np.shape(value) != result.aval.shape or np.size(value) > MOST_ELEMENTS:
        return None
    return [np.asarray(value, result.aval.dtype)]


def _results_of(jaxpr: Any, constants: Sequence[Any], values: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """The results of a jaxpr that a `jax.jit` calls."""
    if not all(isinstance(value, np.ndarray) and _is_small(value) for value in constants):
        return None
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _KNOWN or not all(_is_whole(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return None
        results = _results(eqn, [_read(env, v) for v in eqn.invars])
        if results is None:
            return None
        env.update(zip(eqn.outvars, results, strict=True))
    return [_read(env, v) for v in jaxpr.outvars]


def _read(env: dict[Any, np.ndarray], v: Any) -> np.ndarray:
    return np.asarray(v.val, v.aval.dtype) if isinstance(v, _jaxlib.Literal) else env[v]


def _is_small(value: np.ndarray) -> bool:
    return value.dtype.kind in "biu" and value.size <= MOST_ELEMENTS


def _is_whole(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biu"
