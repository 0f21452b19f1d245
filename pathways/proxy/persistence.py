"""Persistence requests of `pathwaysutils` and of orbax's handler for it: hosts write and read the shards they hold.

`plugin_programs.py` calls this. A request names arrays by folder and name, and says how each is cut over which devices;
a write says no element types, so these are those of the arrays that come.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from pathways.proxy import dtypes, shardings
from pathways.proxy.array_making import check_devices
from pathways.proxy.arrays import Array
from pathways.proxy.behind import Buffer, Cut, ExecutableMetadata, Parameter, Shard, Stored
from pathways.proxy.dtypes import DType
from pathways.proxy.errors import Code, Refused, not_implemented
from pathways.proxy.layouts import default_text
from pathways.proxy.loaded import Loaded, LoadedResult
from pathways.proxy.shardings import Sharding
from pathways.proxy.state import State

#: By a request's kind: where its body has the requests for single arrays; None: it is one.
WRITES = {"persistenceWriteRequest": None, "bulk_persistence_write_request": "write_requests"}
READS = {"persistenceReadRequest": None, "bulk_persistence_read_request": "read_requests"}
#: XLA's names of element types that are not spelled from NumPy's by `_dtype`.
_NAMES = {"PRED": "bool", "BF16": "bfloat16", "C64": "complex64", "C128": "complex128"}
_KINDS = {"S": "int", "U": "uint", "F": "float"}
_MOST_BYTES = 1 << 50  # more is nowhere


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for one array."""

    folder: str
    name: str
    shape: tuple[int, ...]
    dtype: DType | None  # None: it does not say
    sharding: Sharding
    timeout_s: float

    @property
    def what(self) -> str:
        """For errors."""
        return f"{self.name!r} in {self.folder}"

    def stored(self, dtype: DType) -> Stored:
        """The same of a known element type. Raises `Refused`: there are no such arrays in files."""
        if dtype.numpy is None or dtype.is_string:
            raise not_implemented(f"{self.what}: files have no elements of type {dtype.name}")
        if math.prod(self.shape) == 0:
            raise not_implemented(f"{self.what}: an array of shape {self.shape} without elements has no files")
        tiling = self.sharding.tiling(self.shape)
        try:
            tiling.check(self.shape, len(self.sharding.devices))
        except ValueError as error:
            raise not_implemented(f"{self.what}: {error}") from None
        return Stored(self.folder, self.name, Cut(self.shape, dtype.numpy, tiling), self.sharding.devices)


def parse(state: State, kind: str, body: Any, most: int) -> Loaded:
    """A request of one of the kinds above, as what can run.

    Raises:
        Refused: of `most` arrays more, of devices that are not there, or of arrays or places that cannot be.
        KeyError, TypeError, ValueError and the like: it is malformed.
    """
    each = (READS if kind in READS else WRITES)[kind]
    requests = [body] if each is None else body[each]
    if not isinstance(requests, list) or not 0 < len(requests) <= most:
        raise ValueError
    asked = [_asked(state, request) for request in requests]
    places = {(one.folder, one.name) for one in asked}
    if len(places) != len(asked) and kind in WRITES:
        raise Refused(Code.INVALID_ARGUMENT, "a persistence request that writes two arrays to one place")
    if kind in WRITES:
        return Write(state, asked).loaded()
    return Read(state, asked, [one.stored(_known(one)) for one in asked]).loaded()


def _asked(state: State, request: Any) -> Asked:
    shape, dtype = request["shape"], None
    if isinstance(shape, dict):
        shape, dtype = shape["dimensions"], _dtype(shape["xla_primitive_type_str"])
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError
    devices = tuple(request["devices"]["device_ids"])
    if not devices or not all(isinstance(one, int) for one in devices) or len(set(devices)) != len(devices):
        raise ValueError
    check_devices(state, devices)
    memory = next(device.memories[0] for device in state.machine.devices if device.id == devices[0])
    sharding = shardings.by_hlo(base64.b64decode(request["b64_hlo_sharding_string"], validate=True), devices, memory)
    timeout_s = float(request["timeout"]["seconds"]) + float(request["timeout"].get("nanos", 0)) / 1e9
    if math.prod(shape) > _MOST_BYTES or not 0 < timeout_s < math.inf:
        raise ValueError
    folder, name = _text(request["b64_location"]).rstrip("/"), _text(request["b64_name"])
    if not folder.startswith("/") or {".", ".."} & set(folder.split("/")):
        raise not_implemented(
            f"the folder {folder[:200]!r} of a persistence request; give the absolute path of a folder that the "
            "program and all hosts see"
        )
    if {"", ".", ".."} & set(name.split("/")):
        raise Refused(Code.INVALID_ARGUMENT, f"an array of the name {name[:200]!r}")
    return Asked(folder, name, tuple(shape), dtype, sharding, timeout_s)


def _text(data: str) -> str:
    text = base64.b64decode(data, validate=True).decode()
    if "\0" in text:
        raise ValueError
    return text


def _dtype(name: str) -> DType:
    known = _NAMES.get(name) or f"{_KINDS.get(name[:1], '')}{name[1:]}"
    if known not in dtypes.KINDS:
        raise not_implemented(f"arrays of the element type {name[:50]!r} in files")
    return dtypes.of_name(known)


def _known(one: Asked) -> DType:
    if one.dtype is None:
        raise ValueError
    return one.dtype


def _metadata(name: str, count: int) -> ExecutableMetadata:
    parameters = tuple(Parameter(None, "") for _ in range(count))
    return ExecutableMetadata(name, b"", parameters, (), (), {}, 0, {}, "a persistence request of pathwaysutils")


class Write:
    """A request that writes arrays, as an executable: see `pathways.proxy.behind.Executable`."""

    def __init__(self, state: State, asked: Sequence[Asked]) -> None:
        self._state, self._asked = state, asked
        self._stored: list[Stored] = []  # of the next run
        self.metadata = _metadata("write", len(asked))

    def loaded(self) -> Loaded:
        """What the session keeps of it."""
        takes = tuple((None, one.sharding.devices) for one in self._asked)
        # A client checks that its arguments have as many shards as these are.
        devices = self._asked[0].sharding.devices
        return Loaded(
            self, self.metadata.name, devices, (), frozenset(), ([], []), takes, results_of=self._check, tokens=1
        )

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> Sequence[Buffer]:
        """See `Executable`."""
        return [self._state.devices.save(self._stored, arguments, min(one.timeout_s for one in self._asked))]

    def run_again(self, arguments: Sequence[Buffer]) -> None:
        """See `Executable`. A write takes so long that nothing is saved."""

    def _check(self, arrays: Sequence[Array]) -> list[LoadedResult]:
        """What comes is what the request says; it has no results."""
        for array, one in zip(arrays, self._asked, strict=True):
            if array.shape != one.shape:
                raise Refused(
                    Code.INVALID_ARGUMENT, f"{one.what}: the request says shape {one.shape}, and {array.shape} came"
                )
            if array.sharding.tiling(array.shape) != one.sharding.tiling(one.shape):
                raise Refused(Code.INVALID_ARGUMENT, f"{one.what}: the array is not cut as the request says")
        self._stored = [one.stored(array.dtype) for array, one in zip(arrays, self._asked, strict=True)]
        return []


class Read:
    """A request that reads arrays, as an executable: see `pathways.proxy.behind.Executable`."""

    def __init__(self, state: State, asked: Sequence[Asked], stored: Sequence[Stored]) -> None:
        self._state, self._asked, self._stored = state, asked, stored
        self.metadata = _metadata("read", 0)

    def loaded(self) -> Loaded:
        """What the session keeps of it."""
        results = tuple(LoadedResult(_known(one), one.shape, one.sharding, one.sharding) for one in self._asked)
        layouts = [default_text(len(one.shape)) for one in self._asked]
        devices = self._asked[0].sharding.devices
        return Loaded(self, self.metadata.name, devices, results, frozenset(), ([], layouts), tokens=1)

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> Sequence[Buffer]:
        """See `Executable`."""
        buffers, token = self._state.devices.restore(self._stored, min(one.timeout_s for one in self._asked))
        return [*buffers, token]

    def run_again(self, arguments: Sequence[Buffer]) -> None:
        """See `Executable`."""
