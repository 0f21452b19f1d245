"""What notes carry between a client and the hosts: descriptions of placements once, then puts and fetches by number.

    define    "D" + JSON {"id", "shape", "dtype", "axes", "spec", "devices"}      (a backend note under the same number)
    forget    "U" + program number: no run that comes after names it              (a backend note)
    rename    pairs of handles, name and newcomer                                 (a note of its own kind)
    park      "S", request number, to disk?                                       (a note of its own kind)
    put       "P", placement id, mode, then: bytes inline | offset and length in the client's arena | a local key
    fetch     "F", mode, then: offset and length in the client's arena | a local key
    task      "T" + JSON, see below                                                (a task note)
    end       "E" + JSON {"job", "early"}: nothing more is asked of a job           (a backend note)

Tasks read and write checkpoints; `pathways.runtime.tasks` does them. Of a save, each with its job's number:
    {"op": "stage", "number"}                           keeps the note's buffer under that number
    {"op": "write", "lead", "context", "atomic", "arrays": [[number, name, tensorstore spec], …]}
    {"op": "commit", "name"}
and of a restore, whose note makes a buffer:
    {"op": "read", "name", "spec", "context", "placement", "dtype"}
Of either, when it failed:
    {"op": "end"}                                       gives the job up; done when nothing of it is under way

Little-endian, fixed width. "Local" is embedded mode: client and host are one process and hand objects over as they are.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pathways.compiler.ir import ArrayType, MeshSpec
from pathways.runtime.routes import Placed

#: Stands in a spec for the number of the host that it comes to.
HOST = "HOSTNUMBER"

_PUT = struct.Struct("<cIB")
_FETCH = struct.Struct("<cB")
_SPAN = struct.Struct("<QQ")
_KEY = struct.Struct("<Q")
_FORGET = struct.Struct("<cI")
_PAIR = struct.Struct("<QQ")
_PARK = struct.Struct("<cQ?")

#: Kinds of notes, as csrc/channel/records.h numbers them.
BACKEND, RENAME, PARK, UNPARK = 4, 6, 7, 8
#: Of the pairs in one rename: a note must fit the ring.
MOST_PAIRS = 1024


class Mode(enum.IntEnum):
    """How the bytes travel."""

    INLINE = 0
    ARENA = 1
    LOCAL = 2


def define(number: int, placed: Placed) -> bytes:
    """Describes a placement, to be meant by `number` from then on."""
    return (
        b"D"
        + json.dumps(
            {
                "id": number,
                "shape": placed.type.shape,
                "dtype": placed.type.dtype.name,
                "axes": placed.mesh.axes,
                "spec": placed.type.spec,
                "devices": placed.devices,
            }
        ).encode()
    )


def parse_define(payload: bytes) -> tuple[int, Placed]:
    """What `define` wrote."""
    fields = json.loads(payload[1:])
    mesh = MeshSpec("put", tuple((name, size) for name, size in fields["axes"]))
    spec = tuple(tuple(axes) for axes in fields["spec"])
    kind = ArrayType(tuple(fields["shape"]), dtype_of(fields["dtype"]), 0, spec)
    return fields["id"], Placed(kind, mesh, tuple(fields["devices"]))


def forget(program: int) -> bytes:
    """No run that comes after this note names the program."""
    return _FORGET.pack(b"U", program)


def parse_forget(payload: bytes) -> int:
    """What `forget` wrote."""
    return int(_FORGET.unpack(payload)[1])


def rename(pairs: Sequence[tuple[int, int]]) -> bytes:
    """Of each pair, the buffer of the second handle takes the name of the first."""
    return b"".join(_PAIR.pack(name, fresh) for name, fresh in pairs)


def park(request: int, to_disk: bool) -> bytes:
    """Moves a client's buffers off the devices, or back; the answer goes to `request`."""
    return _PARK.pack(b"S", request, to_disk)


def parse_park(payload: bytes) -> tuple[int, bool]:
    """What `park` wrote: (request, to disk)."""
    _, request, to_disk = _PARK.unpack(payload)
    return request, to_disk


def dtype_of(name: str) -> np.dtype:
    """A dtype by the name NumPy or ml_dtypes gives it."""
    return np.dtype(getattr(ml_dtypes, name, name))


def put_inline(placement: int, data: bytes) -> bytes:
    """A put whose bytes (C order) travel with the note."""
    return _PUT.pack(b"P", placement, Mode.INLINE) + data


def put_arena(placement: int, offset: int, nbytes: int) -> bytes:
    """A put whose bytes lie in the client's arena, in a block lent to each host."""
    return _PUT.pack(b"P", placement, Mode.ARENA) + _SPAN.pack(offset, nbytes)


def put_local(placement: int, key: int) -> bytes:
    """A put of an object that the driver finds under `key`."""
    return _PUT.pack(b"P", placement, Mode.LOCAL) + _KEY.pack(key)


def parse_put(payload: bytes) -> tuple[int, Mode, bytes | tuple[int, int] | int]:
    """(placement, mode, what the mode needs)."""
    _, placement, mode = _PUT.unpack_from(payload)
    rest = payload[_PUT.size :]
    if mode == Mode.ARENA:
        return placement, Mode.ARENA, _SPAN.unpack(rest)
    if mode == Mode.LOCAL:
        return placement, Mode.LOCAL, _KEY.unpack(rest)[0]
    return placement, Mode.INLINE, rest


def fetch_arena(offset: int, nbytes: int) -> bytes:
    """A fetch into the client's arena, into a block lent to each host."""
    return _FETCH.pack(b"F", Mode.ARENA) + _SPAN.pack(offset, nbytes)


def fetch_local(key: int) -> bytes:
    """A fetch whose value the driver leaves under `key`."""
    return _FETCH.pack(b"F", Mode.LOCAL) + _KEY.pack(key)


def parse_fetch(payload: bytes) -> tuple[Mode, Sequence[int]]:
    """(mode, what it needs)."""
    mode = _FETCH.unpack_from(payload)[1]
    return (
        (Mode.ARENA, _SPAN.unpack(payload[_FETCH.size :]))
        if mode == Mode.ARENA
        else (Mode.LOCAL, _KEY.unpack(payload[_FETCH.size :]))
    )


def task(op: str, job: int, **fields: Any) -> bytes:
    """Asks for a step of a save or restore."""
    return b"T" + json.dumps({"op": op, "job": job, **fields}).encode()


def parse_task(payload: bytes) -> dict[str, Any]:
    """What `task` wrote."""
    fields: dict[str, Any] = json.loads(payload[1:])
    return fields


def end(job: int, early: bool) -> bytes:
    """Nothing more is asked of a job. `early`: what was asked before may still wait for its buffer."""
    return b"E" + json.dumps({"job": job, "early": early}).encode()


def parse_end(payload: bytes) -> tuple[int, bool]:
    """What `end` wrote: (job, early)."""
    fields = json.loads(payload[1:])
    return fields["job"], fields["early"]
