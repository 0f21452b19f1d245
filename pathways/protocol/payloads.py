"""The payloads of commands from a client to the hosts. A client describes each placement once, then names it by number.

    define    "D" + JSON {"id", "shape", "dtype", "axes", "spec", "devices"}      (BACKEND, under the same number)
    rename    pairs of handles: the name, and the array that takes the name       (RENAME)
    offload   "S", request number, to disk?                                       (OFFLOAD or RESTORE)
    put       "P", placement id, mode, then: bytes inline | offset and length in the client's arena | a local key
    fetch     "F", mode, then: offset and length in the client's arena | a local key
    task      "T" + JSON, see below                                               (TASK)
    end       "E" + JSON {"job", "early"}: the client asks no more of a job       (BACKEND)

Tasks read and write checkpoints; `pathways.host.checkpoint_io` does them. Each contains the number of its job. The
tasks of a save:
    {"op": "stage", "number"}                           keeps the command's buffer under that number
    {"op": "write", "lead", "context", "atomic", "arrays": [[number, name, tensorstore spec], …]}
    {"op": "commit", "name"}
The task of a restore, whose command makes a buffer:
    {"op": "read", "name", "spec", "context", "placement", "dtype"}
The task of a save or restore that failed:
    {"op": "end"}                                       gives the job up; done when nothing of the job is under way

TRUST-1: a client wrote all of it. The `parse_` functions raise ValueError for a payload that no correct client writes.
Their caller checks the numbers against what exists.

Little-endian, fixed width. "Local" is embedded mode: client and host are one process and pass objects by reference.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pathways.compiler.ir import ArrayType, MeshSpec, Tiling
from pathways.plan.resharding import Placement

#: A placeholder in a spec: each host replaces it by its own number.
HOST = "HOSTNUMBER"

_PUT = struct.Struct("<cIB")
_FETCH = struct.Struct("<cB")
_KEY = struct.Struct("<Q")
_PAIR = struct.Struct("<QQ")
_OFFLOAD = struct.Struct("<cQ?")
_LEASED_PART = struct.Struct("<IIQQ")

#: See `leased_parts`. As in csrc/messages/leased_parts.h.
LEASED_PART_BYTES, MOST_LEASED_PARTS = _LEASED_PART.size, 1 << 16

#: Kinds of commands, as csrc/messages/records.h numbers them.
BACKEND, RENAME, OFFLOAD, RESTORE = 4, 6, 7, 8
#: The most pairs in one rename, because a command must fit the ring.
MOST_PAIRS = 1024


class Mode(enum.IntEnum):
    """Where the bytes of a put or fetch are: in the command, in memory it leases, or in an object of this process.

    LEASED: a put's bytes are packed (`pathways.plan.shard_packing`), a fetch's are the array in C order. PACKED: those
    of a fetch are packed, too, so that what hosts on different machines write lies apart.
    """

    INLINE = 0
    LEASED = 1
    LOCAL = 2
    PACKED = 3


def define(number: int, placed: Placement) -> bytes:
    """Describes a placement. Later commands name it by `number`."""
    tiling = placed.type.tiling
    return (
        b"D"
        + json.dumps(
            {
                "id": number,
                "shape": placed.type.shape,
                "dtype": placed.type.dtype.name,
                "axes": placed.mesh.axes,
                "spec": placed.type.spec,
                "tiling": None if tiling is None else [tiling.grid, tiling.cells],
                "devices": placed.devices,
            }
        ).encode()
    )


def parse_define(payload: bytes) -> tuple[int, Placement]:
    """What `define` wrote.

    Raises:
        ValueError: it describes no placement.
    """
    fields = json.loads(payload[1:])
    try:
        axes = tuple((str(name), _whole(size, 1)) for name, size in fields["axes"])
        spec = tuple(tuple(str(axis) for axis in cut) for cut in fields["spec"])
        shape = tuple(_whole(size) for size in fields["shape"])
        devices = tuple(_whole(device) for device in fields["devices"])
        number, dtype = _whole(fields["id"]), dtype_of(str(fields["dtype"]))
        tiling = fields["tiling"] and Tiling(*(tuple(map(_whole, numbers)) for numbers in fields["tiling"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a placement is not described as it should be: {error!r}") from error
    sizes = dict(axes)
    named = [axis for cut in spec for axis in cut]
    if len(sizes) != len(axes) or len(set(named)) != len(named) or not sizes.keys() >= set(named):
        raise ValueError(f"a placement cuts by the axes {named}, its mesh has {list(sizes)}")
    if math.prod(sizes.values()) != len(devices) or len(set(devices)) != len(devices):
        raise ValueError(f"a placement has {len(devices)} devices for a mesh of {list(sizes.values())}, or one twice")
    if tiling:
        tiling.check(shape, len(devices))
        if named:
            raise ValueError(f"a placement cuts by the axes {named}, and by a tiling")
    parts = [math.prod(sizes[axis] for axis in cut) for cut in spec]
    if len(spec) != len(shape) or any(size % part for size, part in zip(shape, parts, strict=True)):
        raise ValueError(f"a placement cuts {list(shape)} into {parts} parts")
    return number, Placement(ArrayType(shape, dtype, 0, spec, tiling=tiling), MeshSpec("put", axes), devices)


def _whole(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 48:
        raise ValueError(f"expected a whole number of at least {least}, got {value!r}")
    return value


def rename(pairs: Sequence[tuple[int, int]]) -> bytes:
    """In each pair, the buffer of the second handle takes the name of the first handle."""
    return b"".join(_PAIR.pack(name, fresh) for name, fresh in pairs)


def offload(request: int, to_disk: bool) -> bytes:
    """Moves a client's buffers off the devices, or back. The host's answer contains the number `request`."""
    return _OFFLOAD.pack(b"S", request, to_disk)


def parse_offload(payload: bytes) -> tuple[int, bool]:
    """What `offload` wrote: (request, to disk)."""
    _, request, to_disk = _OFFLOAD.unpack(payload)
    return request, to_disk


def dtype_of(name: str) -> np.dtype:
    """The dtype that NumPy or ml_dtypes gives this name.

    Raises:
        ValueError: no element type of arrays has this name.
    """
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise ValueError(f"no element type is called {name!r}") from error
    if dtype.hasobject or dtype.fields is not None or dtype.itemsize == 0:
        raise ValueError(f"no elements of an array are of type {dtype}")
    return dtype


def put_inline(placement: int, data: bytes) -> bytes:
    """A put whose bytes (C order) are in the command itself."""
    return _PUT.pack(b"P", placement, Mode.INLINE) + data


def put_leased(placement: int) -> bytes:
    """A put whose bytes lie in the block of memory that the command leases to each host."""
    return _PUT.pack(b"P", placement, Mode.LEASED)


def leased_parts(parts: Iterable[tuple[int, int, int]]) -> bytes:
    """What hosts need of a put's bytes: (host, first byte, bytes) of each piece. It lies behind these bytes."""
    return b"".join(_LEASED_PART.pack(host, 0, at, nbytes) for host, at, nbytes in parts)


def put_local(placement: int, key: int) -> bytes:
    """A put of an object that the driver finds under `key`."""
    return _PUT.pack(b"P", placement, Mode.LOCAL) + _KEY.pack(key)


def parse_put(payload: bytes) -> tuple[int, Mode, bytes | int]:
    """(placement, mode, what the mode needs)."""
    try:
        kind, placement, number = _PUT.unpack_from(payload)
        mode = Mode(number)
        rest = payload[_PUT.size :]
        if kind != b"P":
            raise ValueError(f"a put begins with {kind!r}")
        if mode is Mode.LOCAL:
            return placement, mode, _KEY.unpack(rest)[0]
    except struct.error as error:
        raise ValueError(f"a put of {len(payload)} bytes is cut short: {error}") from error
    return placement, mode, rest


def fetch_leased(is_packed: bool = False) -> bytes:
    """A fetch into the block of memory that the command leases to each host."""
    return _FETCH.pack(b"F", Mode.PACKED if is_packed else Mode.LEASED)


def fetch_local(key: int) -> bytes:
    """A fetch whose value the driver leaves under `key`."""
    return _FETCH.pack(b"F", Mode.LOCAL) + _KEY.pack(key)


def parse_fetch(payload: bytes) -> tuple[Mode, int]:
    """(mode, the key that mode LOCAL needs)."""
    try:
        kind, number = _FETCH.unpack_from(payload)
        mode, rest = Mode(number), payload[_FETCH.size :]
        if kind != b"F" or mode is Mode.INLINE:
            raise ValueError(f"a fetch begins with {kind!r} and goes by mode {mode!r}")
        return mode, _KEY.unpack(rest)[0] if mode is Mode.LOCAL else 0
    except struct.error as error:
        raise ValueError(f"a fetch of {len(payload)} bytes is cut short: {error}") from error


def task(op: str, job: int, **fields: Any) -> bytes:
    """Asks for a step of a save or restore."""
    return b"T" + json.dumps({"op": op, "job": job, **fields}).encode()


def parse_task(payload: bytes) -> dict[str, Any]:
    """What `task` wrote."""
    fields: dict[str, Any] = json.loads(payload[1:])
    return fields


def end(job: int, early: bool) -> bytes:
    """The client asks no more of a job. `early`: tasks asked for before may still wait for their buffers."""
    return b"E" + json.dumps({"job": job, "early": early}).encode()


def parse_end(payload: bytes) -> tuple[int, bool]:
    """What `end` wrote: (job, early)."""
    fields = json.loads(payload[1:])
    return fields["job"], fields["early"]
