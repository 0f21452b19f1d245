"""NumPy functions on arrays: `np.sin(x)`, `np.mean(x)`, `a + x` with a NumPy array `a`.

Each runs as the function of the same name in `jax.numpy`, on the array's slice, with JAX's rules of promotion. What
JAX has not (or refuses), or what writes into a NumPy array, is done by NumPy on fetched values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways import errors
from pathways.api.arrays.array import Array

_SPACES = {"numpy": jnp, "numpy.linalg": jnp.linalg, "numpy.fft": jnp.fft}


def array_ufunc(self: Array, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """`__array_ufunc__`: the ufunc, or one of its methods, on operands of which one is a `pw.Array`."""
    ours = getattr(jnp, ufunc.__name__, None)
    where = kwargs.get("where")
    if ours is not None and kwargs.get("out") is None and (where is None or where is True):
        kwargs = {key: value for key, value in kwargs.items() if key not in ("out", "where")}
        if method != "__call__":
            ours = getattr(ours, method, None)
        if ours is not None and method != "at" and not kwargs.keys() - {"axis", "dtype", "keepdims"}:
            dtype = kwargs.pop("dtype", None) if method == "__call__" else None
            result = ours(*inputs, **kwargs)
            return result if dtype is None else result.astype(dtype)
    if any(type(out) is Array for out in kwargs.get("out") or ()):
        raise TypeError(f"np.{ufunc.__name__}(out=): a pw.Array cannot be written into; use the result instead")
    inputs, kwargs = _fetched((tuple(inputs), kwargs))
    return getattr(ufunc, method)(*inputs, **kwargs)


def array_function(
    self: Array, fun: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """`__array_function__`: any other function of NumPy's."""
    ours = getattr(_SPACES.get(fun.__module__), fun.__name__, None)
    if ours is not None and ours is not fun and kwargs.get("out") is None:
        try:
            return ours(*args, **kwargs)
        except (NotImplementedError, TypeError, ValueError) as error:
            # An argument or a type that JAX has not, or a result whose shape depends on values: NumPy knows.
            if isinstance(error, errors.PathwaysError) and not isinstance(error, TypeError):
                raise
    args, kwargs = _fetched((tuple(args), dict(kwargs)))
    return fun(*args, **kwargs)


def _fetched(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: np.asarray(leaf) if type(leaf) is Array else leaf, tree)
