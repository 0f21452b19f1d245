"""A scan of few iterations as plain steps: the body once per iteration.

What a scan stacks stays a list of values, one per iteration (`Stacked`). The backward scan of a gradient reads the list
directly; whatever needs one array reads their concatenation.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pathways import _jaxlib, errors

#: How many copies of its body an unrolled scan may have, with the unrolled scans around it.
MOST_COPIES = 1 << 12


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """An array that a scan stacks, as its rows: variables or literals. `aval` is the array's."""

    rows: tuple[Any, ...]
    aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """An array that a scan stacks which is cut into several loops, as its pieces: variables. Number n begins with row
    `starts[n]`. `aval` is the array's.
    """

    pieces: tuple[Any, ...]
    starts: tuple[int, ...]
    aval: Any


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan equation, read. `consts`, `carry` and `xs` are counts of its inputs, in this order.

    `body` is its closed jaxpr: it takes the constants, the carry, and one row of each of `xs`. It gives the new carry
    and one row of each result that is stacked.
    """

    body: Any
    consts: int
    carry: int
    length: int
    reverse: bool

    @classmethod
    def of(cls, eqn: Any) -> Scan:
        """Reads an equation of the primitive `scan`."""
        consts, carry = _jaxlib.scan_counts(eqn)
        return cls(eqn.params["jaxpr"], consts, carry, eqn.params["length"], eqn.params["reverse"])

    @property
    def positions(self) -> range:
        """The rows in the order in which the iterations read and write them."""
        return range(self.length - 1, -1, -1) if self.reverse else range(self.length)


def check_copies(name: str, lengths: Sequence[int]) -> None:
    """Refuses unrolled scans, each inside the one before, that would make too many copies of the innermost body.

    `lengths` are their iterations.

    Raises:
        ProgramError: there would be more than `MOST_COPIES`.
    """
    if math.prod(lengths) > MOST_COPIES:
        shown = " x ".join(map(str, lengths))
        raise errors.ProgramError(
            f"program {name!r}: scans of {shown} iterations, one inside the other, have placed functions inside and "
            f"would be unrolled to {math.prod(lengths)} copies of the innermost body; expected at most {MOST_COPIES}. "
            f"Give pw.program(unroll=...) a number below {max(lengths)}, so that the longest stays a loop, or put an "
            "inner scan into one placed function"
        )


def row(aval: Any, position: int) -> Any:
    """A closed jaxpr from an array to its row `position`."""
    return operations(lambda x: jax.lax.squeeze(jax.lax.slice_in_dim(x, position, position + 1), (0,)), [aval])


def piece(aval: Any, start: int, length: int) -> Any:
    """A closed jaxpr from an array to its rows from `start` on."""
    return operations(lambda x: jax.lax.slice_in_dim(x, start, start + length), [aval])


def join(pieces: Sequence[Any]) -> Any:
    """A closed jaxpr from pieces of an array (their types are given) to the array."""
    return operations(lambda *xs: jax.lax.concatenate(xs, 0), pieces)


def stack(rows: Sequence[Any], aval: Any) -> Any:
    """A closed jaxpr from the rows (their types are given) to the array of type `aval`."""
    if not rows:
        return operations(functools.partial(empty, aval), [])
    return operations(lambda *xs: jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in xs], 0), rows)


def empty(aval: Any) -> Any:
    """Zeros of a type: a number's, or a key's."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        words, dtype = _jaxlib.physical(aval)
        return _jaxlib.from_physical(jax.lax.full(words, 0, dtype), aval.dtype)
    return jax.lax.full(aval.shape, 0, aval.dtype)


def operations(fun: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function of values of those types."""
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals
    ]
    # As in `trace`: jit is on and no mesh is set, because the mesh of this process is not that of a slice.
    with jax.disable_jit(False), _jaxlib.no_mesh():
        return jax.make_jaxpr(fun)(*structs)
