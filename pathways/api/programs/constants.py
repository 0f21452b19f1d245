"""Host values as arguments of one signature: what is known of their kinds, and those that need not be sent again.

A value that cannot change, given again at the same position, is the array that the hosts have already: Python and NumPy
scalars by their type and bits; `jax.Array`s, and NumPy arrays whose memory is such an array's or `bytes`, by identity
and for as long as they live. When hosts are lost, all are sent again (ERR-2). A NumPy array of its own memory is sent
each time, also a read-only one: who may set that flag may clear it. Bounded per position. Never for positions that are
donated.
"""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pathways import _core, _jaxlib
from pathways.api.arrays.array import Array
from pathways.api.arrays.host_values import put_leaf

#: Values kept per position; of big ones only the last.
KEPT = 16
BIG_BYTES = 1 << 16
#: Kinds of values known per position.
KINDS = 64

_NUMBERS = (int, float, bool, complex)
_INT32 = range(-(1 << 31), 1 << 31)


def kind_of(leaf: Any) -> Any:
    """A name for all host values that JAX abstracts alike, under one setting of its modes; None: cannot be told."""
    kind = type(leaf)
    if kind is np.ndarray:
        return leaf.dtype, leaf.shape
    if kind in _NUMBERS:
        return None if kind is int and leaf not in _INT32 else kind
    if isinstance(leaf, np.generic):
        return kind
    if _jaxlib.is_concrete(leaf):
        return kind, leaf.dtype, leaf.shape, leaf.weak_type
    return None


def name_of(leaf: Any) -> tuple[Hashable, bool]:
    """(a name of a value that cannot change, whether it is its identity); (None, False) for one that can."""
    kind = type(leaf)
    if kind is np.ndarray:
        return (id(leaf), True) if is_frozen(leaf) else (None, False)
    if kind is float:
        return (kind, struct.pack("d", leaf)), False  # 0.0 is not -0.0, and a NaN is itself
    if kind is complex:
        return (kind, struct.pack("dd", leaf.real, leaf.imag)), False
    if kind is int or kind is bool:
        return (kind, leaf), False
    if isinstance(leaf, np.generic):
        return (kind, leaf.tobytes()), False
    if _jaxlib.is_concrete(leaf) and not leaf.is_deleted():
        return id(leaf), True
    return None, False


def is_frozen(value: Any) -> bool:
    """Whether nobody can write a NumPy array's memory: it is that of an object that cannot change."""
    while isinstance(value, np.ndarray | memoryview):
        value = value.base if isinstance(value, np.ndarray) else value.obj
    return type(value) is bytes or _jaxlib.is_concrete(value)


class Constants:
    """The host values of one signature of a program."""

    def __init__(self, call: _core.Call | Any, names: Sequence[str]) -> None:
        self._layouts = call.inputs
        self._names = names
        self.kinds: list[set[Hashable]] = [set() for _ in call.inputs]
        #: By position and name: the array, and for a name that is an identity a reference to whom it names.
        self._kept: list[dict[Hashable, tuple[Array, weakref.ref[Any] | None]] | None] = [
            None if position in call.donated else {} for position in range(len(call.inputs))
        ]
        self._losses = 0  # of hosts, when the values in `_kept` were all alive

    def learn(self, leaves: Sequence[Any]) -> None:
        """Host values of these kinds have this signature."""
        for leaf, kinds in zip(leaves, self.kinds, strict=True):
            if type(leaf) is not Array and len(kinds) < KINDS and (kind := kind_of(leaf)) is not None:
                kinds.add(kind)

    def put(self, position: int, leaf: Any) -> Array:
        """A host value as the array that the position wants; sent unless the hosts have it."""
        layout, kept = self._layouts[position], self._kept[position]
        name, is_identity = (None, False) if kept is None else name_of(leaf)
        if kept is None or name is None:
            return put_leaf(leaf, layout, f"argument {self._names[position]}")
        known = kept.get(name)
        if known is not None:
            array, whose = known
            is_there = not array.is_deleted() and array.client.state(array) != "failed"  # this polls for losses
            if array.client.losses != self._losses:
                self._forget_lost(array.client.losses)
            elif is_there and (whose is None or whose() is leaf):
                return array
        array = put_leaf(leaf, layout, f"argument {self._names[position]}")
        kept.pop(name, None)
        most = 1 if layout.nbytes > BIG_BYTES else KEPT
        while len(kept) >= most:
            kept.pop(next(iter(kept)), None)
        kept[name] = array, weakref.ref(leaf, functools.partial(_forget, kept, name)) if is_identity else None
        return array

    def forget(self) -> None:
        """The next calls send all values again."""
        for kept in self._kept:
            if kept is not None:
                kept.clear()

    def _forget_lost(self, losses: int) -> None:
        """Hosts were lost: values that were there may be lost, though their arrays were ready."""
        self._losses = losses
        self.forget()


def _forget(
    kept: dict[Hashable, tuple[Array, weakref.ref[Any] | None]], name: Hashable, whose: weakref.ref[Any]
) -> None:
    """Forgets a value by its identity when it is gone: another may soon have the same."""
    known = kept.get(name)
    if known is not None and known[1] is whose:
        kept.pop(name, None)
