"""Strings in an array of bytes of a fixed length, as they come from a function on hosts: hosts know no strings.

Each string is its length, in 4 bytes, and its bytes in UTF-8; the first comes behind their number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from pathways.proxy.errors import Code, Refused
from pathways.proxy.host_arrays import Strings

#: The most bytes of the strings of one shard. The types of a thousand results take about 300,000.
MOST_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


def pack(strings: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of strings as `MOST_BYTES` bytes. Raises `ValueError` when they are longer."""
    found = [str(each).encode() for each in np.asarray(strings, object).flat]
    data = b"".join((_LENGTH.pack(len(found)), *(_LENGTH.pack(len(each)) + each for each in found)))
    if len(data) > MOST_BYTES:
        raise ValueError(f"strings of {len(data)} bytes on one device, expected at most {MOST_BYTES}")
    return np.frombuffer(data.ljust(MOST_BYTES, b"\0"), np.uint8)


def unpack(data: np.ndarray[Any, Any], count: int) -> Strings:
    """The strings in an array of bytes. Raises `Refused` when they are not so many (TRUST-1)."""
    raw = data.tobytes()

    def parts() -> Iterator[bytes]:
        at = _LENGTH.size
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(raw, at)
            at += _LENGTH.size + length
            if at > len(raw):
                raise ValueError
            yield raw[at - length : at]

    try:
        if _LENGTH.unpack_from(raw, 0)[0] == count:
            return tuple(parts())
    except (struct.error, ValueError):
        pass
    raise Refused(Code.INTERNAL, f"a function gave bytes that are not {count} strings")
