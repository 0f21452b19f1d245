"""Arrays as bytes: how a client sends and asks for them. The element after the next lies `strides` bytes further.

A client sends the least region of memory that has all elements. It sends no negative strides. An element of fewer than
8 bits has a byte. Strings are a message of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.dtypes import DType
from pathways.proxy.errors import Code, Refused

Bytes = bytes | bytearray | memoryview
Strings = tuple[bytes, ...]


def region_bytes(dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int] | None) -> int:
    """The bytes of the least region that has all elements. Raises `Refused` for what describes no array."""
    if any(size < 0 for size in shape):
        raise Refused(Code.INVALID_ARGUMENT, f"an array of shape {tuple(shape)}")
    if 0 in shape:
        return 0
    if strides is None or not shape:
        return math.prod(shape) * dtype.itemsize
    if len(strides) != len(shape):
        raise Refused(Code.INVALID_ARGUMENT, f"strides {tuple(strides)} for an array of shape {tuple(shape)}")
    if any(stride < 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
        raise Refused(Code.UNIMPLEMENTED, f"negative strides {tuple(strides)}")
    last = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True) if size > 1)
    return last + dtype.itemsize


def from_bytes(data: Bytes, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int] | None) -> Any:
    """The array that `data` is, without a copy. Raises `Refused` when `data` has another size."""
    expected = region_bytes(dtype, shape, strides)
    if len(data) != expected:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"an array {dtype}{list(shape)} with strides {None if strides is None else list(strides)} has {expected} "
            f"bytes, but {len(data)} came",
        )
    if strides is not None and expected and shape:
        # A dimension of one element may have any stride; NumPy would look whether it leads out of the buffer.
        whole = [stride if size > 1 else dtype.itemsize for stride, size in zip(strides, shape, strict=True)]
        return np.ndarray(tuple(shape), dtype, data, strides=whole)
    return np.frombuffer(data, dtype, count=math.prod(shape)).reshape(shape)


def to_bytes(values: np.ndarray[Any, Any], strides: Sequence[int] | None) -> Bytes:
    """The region of memory that a client asked for."""
    if strides is None or not values.shape or not values.size:
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    region = bytearray(region_bytes(values.dtype, values.shape, strides))
    from_bytes(region, values.dtype, values.shape, strides)[...] = values
    return region


def strings_from(data: Bytes, shape: Sequence[int]) -> Strings:
    """The strings in a client's bytes, rows first. Raises `Refused` when there are more or fewer than elements."""
    try:
        found = tuple(message("xla.ifrt.proto.StringArrayContents").FromString(bytes(data)).strings)
    except DecodeError:
        raise Refused(Code.INVALID_ARGUMENT, "what came is no array of strings") from None
    if any(size < 0 for size in shape) or len(found) != math.prod(shape):
        raise Refused(Code.INVALID_ARGUMENT, f"{len(found)} strings came for an array of shape {tuple(shape)}")
    return found


def strings_to(values: Strings) -> bytes:
    """The bytes that a client gets."""
    return message("xla.ifrt.proto.StringArrayContents")(strings=values).SerializeToString()


def shape_of(proto: Any) -> tuple[int, ...]:
    """The shape in a ShapeProto."""
    return tuple(proto.dims)


def strides_of(holder: Any) -> Sequence[int] | None:
    """The byte strides of a message that may have them."""
    return list(holder.byte_strides.strides) if holder.HasField("byte_strides") else None


def numpy_of(dtype: DType) -> np.dtype[Any]:
    """NumPy's type. Raises `Refused` for one without."""
    if dtype.numpy is None:
        raise Refused(Code.INVALID_ARGUMENT, f"an array of {dtype.name} has no values")
    return dtype.numpy
