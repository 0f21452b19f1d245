"""A call of a client's function, or the answer to it, as bytes: arrays with their shapes, cut into chunks.

A host sends the call (`pathways.host.callbacks`). The client's process sends the answer (`pathways.cluster.callbacks`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from pathways.protocol import payloads

#: The most bytes of a call or an answer in one message, so that no other message waits long behind it.
CHUNK_BYTES = 1 << 20
#: The most characters of an error text.
MAX_ERROR_CHARS = 1 << 14

_HEADER = struct.Struct("<QQ")  # the callback's number, bytes of JSON


def readable(text: str) -> str:
    """A text that can be sent, and given to XLA, which ends the process at a text that is not UTF-8. What a file's name
    may have, a surrogate, is written as `\\udcff`. No longer than `MAX_ERROR_CHARS`."""
    return text[:MAX_ERROR_CHARS].encode(errors="backslashreplace").decode()


Kind = tuple[tuple[int, ...], np.dtype]


def pack(number: int, arrays: Sequence[np.ndarray]) -> bytes:
    """A callback's number and its arrays as bytes."""
    kinds = json.dumps([[array.shape, array.dtype.name] for array in arrays]).encode()
    return b"".join(
        (_HEADER.pack(number, len(kinds)), kinds, *(np.ascontiguousarray(each).tobytes() for each in arrays))
    )


def unpack(data: bytes) -> tuple[int, list[np.ndarray]]:
    """What `pack` was given.

    Raises:
        ValueError: `pack` did not write these bytes.
    """
    try:
        number, length = _HEADER.unpack_from(data)
        at = _HEADER.size + length
        arrays = []
        for shape, name in json.loads(data[_HEADER.size : at]):
            dtype = payloads.dtype_of(name)
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(data, dtype, count, at).reshape(shape) if count else np.empty(shape, dtype)
            arrays.append(array)
            at += array.nbytes
    except (struct.error, TypeError, KeyError) as error:
        raise ValueError(f"{len(data)} bytes that should be a call or its answer: {error}") from error
    if at != len(data):
        raise ValueError(f"{len(data)} bytes where a call or its answer takes {at}")
    return number, arrays


def chunks(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Parts of `CHUNK_BYTES`, at least one, and whether it is the last."""
    for at in range(0, max(1, len(data)), CHUNK_BYTES):
        yield data[at : at + CHUNK_BYTES], at + CHUNK_BYTES >= len(data)
