"""`x[1]`, `x[8:16]`, `x[rows]`, `x.at[1].set(0)`: each one program, in which positions are arguments.

JAX does an index in several steps, and compiles the positions of a slice in, which would mean a program per row or per
batch of a loop. What is not understood here (masks that do not fit, strings) is JAX's own affair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib
from pathways.api.arrays.array import Array
from pathways.api.arrays.operators import run


@dataclasses.dataclass(frozen=True)
class Shape:
    """A basic index without its positions.

    `sizes` is how much is taken of each dimension, or None if the whole is; `rest` is applied to what was taken.
    """

    sizes: tuple[int | None, ...]
    rest: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Positions:
    """An index by arrays: `entries` are its parts; a number means that array of positions, which is an argument."""

    entries: tuple[Any, ...]


def getitem(array: Array, index: Any, otherwise: Callable[[Array, Any], Any]) -> Any:
    """`array[index]`; `otherwise` is JAX's way to do it."""
    found = _understand(array, index)
    if found is None:
        return otherwise(array, index)
    what, arguments = found
    if isinstance(what, Shape) and not arguments and all(entry == _ALL for entry in what.rest):
        return array
    closed = _indexing(array.aval, what, _avals(arguments), None, (), _jaxlib.trace_modes())
    if isinstance(what, Shape):
        with _jaxlib.unguarded():  # the numbers of an index are no array of the user's
            return run(closed, "getitem", [array, *arguments])[0]
    return run(closed, "getitem", [array, *arguments])[0]


class At:
    """`x.at`, as JAX's."""

    def __init__(self, array: Array, otherwise: Callable[[Array], Any]) -> None:
        self._array = array
        self._otherwise = otherwise

    def __getitem__(self, index: Any) -> Any:
        theirs = self._otherwise(self._array)[index]
        return _Updates(self._array, index, theirs)


class _Updates:
    """`x.at[index]`. What is not one of `_UPDATES`, JAX does."""

    def __init__(self, array: Array, index: Any, theirs: Any) -> None:
        self._array = array
        self._index = index
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(self._theirs, name)
        return functools.partial(self._update, name, theirs) if name in _UPDATES else theirs

    @_jaxlib.outside_meshes
    def _update(self, name: str, theirs: Callable[..., Any], values: Any, **options: Any) -> Any:
        found = _understand(self._array, self._index, is_update=True)
        if found is None or not _is_array(values) or not all(isinstance(o, (bool, str)) for o in options.values()):
            return theirs(values, **options)
        what, arguments = found
        closed = _indexing(
            self._array.aval,
            what,
            _avals([values, *arguments]),
            name,
            tuple(sorted(options.items())),
            _jaxlib.trace_modes(),
        )
        return run(closed, f"at_{name}", [self._array, values, *arguments])[0]


_UPDATES = frozenset(("set", "add", "subtract", "multiply", "mul", "divide", "power", "min", "max"))
_ALL = ("slice", None, None, None)


def _understand(array: Array, index: Any, is_update: bool = False) -> tuple[Shape | Positions, list[Any]] | None:
    if not _jaxlib.is_top_level():
        return None
    basic = split(array.shape, index, is_update)
    if basic is None:
        return positions(array.shape, index)
    shape, starts = basic
    return shape, [np.asarray(starts, np.int32)] if starts else []


def _avals(values: list[Any]) -> tuple[Any, ...]:
    return tuple(map(_jaxlib.abstract_value, values))


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, bool, complex))


def split(extents: tuple[int, ...], index: Any, is_update: bool = False) -> tuple[Shape, list[int]] | None:
    """A basic index as its shape and its positions, in bounds; None for any other index.

    Out of bounds means the edge where values are read, as in JAX; nothing where they are updated: then None as well.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if not (
            entry is None
            or entry is Ellipsis
            or _is_integer(entry)
            or (
                isinstance(entry, slice)
                and all(part is None or _is_integer(part) for part in (entry.start, entry.stop, entry.step))
            )
        ):
            return None
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if used > len(extents) or sum(entry is Ellipsis for entry in entries) > 1 or max(extents, default=0) >= 2**31:
        return None  # JAX has the words for it
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    sizes: list[int | None] = []
    rest: list[Any] = []
    starts: list[int] = []
    for entry in entries:
        if entry is None:
            rest.append(None)
        elif entry is Ellipsis:
            whole = len(extents) - used
            sizes += [None] * whole
            rest += [_ALL] * whole
        elif isinstance(entry, slice):
            extent = extents[len(sizes)]
            start, stop, step = entry.indices(extent)
            taken = len(range(start, stop, step))
            if step == 1 and 0 < taken < extent:
                sizes.append(taken)
                starts.append(start)
                rest.append(_ALL)
            else:
                sizes.append(None)
                rest.append(_ALL if taken == extent and step == 1 else _frozen(entry))
        else:
            extent = extents[len(sizes)]
            if extent == 0:
                return None
            at = int(entry) + (extent if entry < 0 else 0)
            if is_update and not 0 <= at < extent:
                return None
            sizes.append(1)
            starts.append(min(max(at, 0), extent - 1))
            rest.append(0)
    return Shape(tuple(sizes), tuple(rest)), starts


def positions(extents: tuple[int, ...], index: Any) -> tuple[Positions, list[Any]] | None:
    """An index with arrays of whole numbers, or masks, among its parts; None for any other."""
    if isinstance(index, list):
        return None
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [np.asarray(part) if isinstance(part, list) else part for part in parts]
    entries: list[Any] = []
    arrays: list[Any] = []
    used = 0
    for number, part in enumerate(parts):
        if part is None:
            entries.append(None)
        elif part is Ellipsis:
            rest = sum(getattr(p, "ndim", 1) if _kind(p) == "b" else p is not None for p in parts[number + 1 :])
            used = len(extents) - rest
            entries.append(Ellipsis)
        elif isinstance(part, slice):
            if not all(at is None or _is_integer(at) for at in (part.start, part.stop, part.step)):
                return None
            entries.append(_frozen(part))
            used += 1
        elif _is_integer(part) or _kind(part) in "iu":
            entries.append(len(arrays))
            arrays.append(np.int32(part) if _is_integer(part) else part)
            used += 1
        elif _kind(part) == "b" and part.ndim and tuple(part.shape) == extents[used : used + part.ndim]:
            # How many it takes is a matter of its value.
            where = np.nonzero(np.asarray(part))
            entries += range(len(arrays), len(arrays) + len(where))
            arrays += [at.astype(np.int32) for at in where]
            used += part.ndim
        else:
            return None
    return (Positions(tuple(entries)), arrays) if arrays else None


def _kind(part: Any) -> str:
    """ "i", "u", "b" for an array of that kind; else "?"."""
    return (
        np.dtype(part.dtype).kind
        if isinstance(part, (jax.Array, np.ndarray)) and not _jaxlib.is_key(part.dtype)
        else "?"
    )


def _is_integer(entry: Any) -> bool:
    return isinstance(entry, (int, np.integer)) and not isinstance(entry, bool)


def _frozen(entry: slice) -> Any:
    """Slices are not hashable before Python 3.12."""
    return "slice", *(None if at is None else int(at) for at in (entry.start, entry.stop, entry.step))


def thawed(entry: Any) -> Any:
    """A part of `Shape.rest` or `Positions.entries` as it is written between brackets."""
    return slice(*entry[1:]) if isinstance(entry, tuple) else entry


@functools.lru_cache(maxsize=1024)
def _indexing(
    array: Any,
    what: Shape | Positions,
    arguments: tuple[Any, ...],
    update: str | None,
    options: tuple[tuple[str, Any], ...],
    settings: Any,
) -> Any:
    """The jaxpr of reading at an index, or of one update there; of the array, the update's value, and positions."""

    def at(x: Any, index: Any, values: Any) -> Any:
        return x[index] if update is None else getattr(x.at[index], update)(values, **dict(options))

    def by_positions(x: Any, *args: Any) -> Any:
        arrays = args if update is None else args[1:]
        assert isinstance(what, Positions)
        return at(x, tuple(arrays[e] if isinstance(e, int) else thawed(e) for e in what.entries), args[0])

    def by_shape(x: Any, *args: Any) -> Any:
        assert isinstance(what, Shape)
        index = tuple(map(thawed, what.rest))
        values = None if update is None else args[0]
        if all(size is None for size in what.sizes):
            return at(x, index, values)
        known = iter(range(x.ndim))
        starts = [0 if size is None else args[-1][next(known)] for size in what.sizes]
        sizes = [x.shape[n] if size is None else size for n, size in enumerate(what.sizes)]
        window = at(jax.lax.dynamic_slice(x, starts, sizes), index, values)
        return window if update is None else jax.lax.dynamic_update_slice(x, window, starts)

    body = by_shape if isinstance(what, Shape) else by_positions
    with jax.sharding.use_abstract_mesh(array.sharding.mesh):  # an empty one, unless the slice has explicit axes
        return jax.make_jaxpr(body)(*map(_jaxlib.struct, (array, *arguments)))
