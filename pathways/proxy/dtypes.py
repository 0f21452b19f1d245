"""Element types: the protocol's number of each kind, its name, and what it is in NumPy.

A kind without a NumPy type is held by the door itself (strings) or has no values (tokens).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from pathways.proxy.errors import Code, Refused

#: DTypeProto.Kind of each name. Names that are not NumPy's are ml_dtypes'.
KINDS = {
    "bool": 1,
    "int1": 32,
    "int2": 26,
    "int4": 21,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint1": 33,
    "uint2": 27,
    "uint4": 22,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
    "complex64": 15,
    "complex128": 18,
    "float8_e3m4": 29,
    "float8_e4m3": 28,
    "float8_e4m3fn": 20,
    "float8_e4m3b11fnuz": 23,
    "float8_e4m3fnuz": 25,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 24,
    "float8_e8m0fnu": 31,
    "float4_e2m1fn": 30,
    "float6_e2m3fn": 34,
    "float6_e3m2fn": 35,
    "token": 17,
    "string": 99,
}


@dataclasses.dataclass(frozen=True)
class DType:
    """One element type."""

    name: str
    kind: int
    numpy: np.dtype[Any] | None

    @property
    def is_string(self) -> bool:
        """Whether its arrays are held by the door."""
        return self.name == "string"


def _numpy(name: str) -> np.dtype[Any] | None:
    found = getattr(ml_dtypes, name, None)
    if found is None and name not in ("token", "string"):
        return np.dtype(name) if name in np.sctypeDict else None  # an older ml_dtypes lacks the newest types
    return np.dtype(found) if found is not None else None


@functools.cache
def _by_kind() -> Mapping[int, DType]:
    return {kind: DType(name, kind, _numpy(name)) for name, kind in KINDS.items()}


def of_kind(kind: int) -> DType:
    """The type that a message names. Raises `Refused` for a number that nobody knows."""
    found = _by_kind().get(kind)
    if found is None:
        raise Refused(Code.INVALID_ARGUMENT, f"element type {kind} is unknown here")
    if found.numpy is None and found.name not in ("token", "string"):
        raise Refused(
            Code.UNIMPLEMENTED, f"the installed ml_dtypes has no {found.name}; install a newer one beside the proxy"
        )
    return found


def of_name(name: str) -> DType:
    """The type with NumPy's, ml_dtypes' or the protocol's name."""
    return of_kind(KINDS[name])
