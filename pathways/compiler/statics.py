"""Keys of static arguments: two arguments have the same key only if a trace cannot tell them apart.

`2`, `2.0` and `np.float32(2)` are equal for Python but different for a trace; so are `1` and `True`, and `0.0` and
`-0.0`. `jax.jit` compares only the type of the argument itself. Here the types inside tuples, frozensets and
dataclasses are compared too.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Hashable
from typing import Any

import numpy as np


def key_of(value: Any) -> Hashable:
    """A key that two values share only if they are the same to a trace. Hashable if the value is."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, tuple):
        return kind, tuple(key_of(item) for item in value)
    if kind is frozenset:
        return kind, frozenset(key_of(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value) if field.compare]
        return (
            kind,
            value,
            tuple(key_of(item) for item in fields if not isinstance(item, (list, dict, set, np.ndarray))),
        )
    return kind, value


class Static:
    """A static argument inside a `jax.jit` call: two are equal if their keys are."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = key_of(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and self.key == other.key

    def __repr__(self) -> str:
        return repr(self.value)
