"""Plugin programs of `pathwaysutils`: requests in JSON that a client compiles and runs like programs.

Persistence requests write arrays to files and read them: `persistence.py`. A reshard request cuts arrays anew, over
other devices. It does not say their shapes, so what its results are is known from the arrays that come
(`Loaded.results_of`).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from pathways.proxy import persistence, shardings
from pathways.proxy.array_making import check_devices
from pathways.proxy.arrays import Array
from pathways.proxy.behind import AllShards, Buffer, ExecutableMetadata, Parameter, Shard
from pathways.proxy.errors import Code, Refused, not_implemented
from pathways.proxy.loaded import Loaded, LoadedResult
from pathways.proxy.shardings import Sharding
from pathways.proxy.state import State

_PREFIX = "__serialized_plugin_program "
_MOST_ARRAYS = 1 << 16


def parse(state: State, data: bytes) -> Loaded:
    """A plugin program, which can run at once.

    Raises:
        Refused: it is malformed, names devices that are not there, or asks for what this proxy does not do.
    """
    try:
        (kind, body), *rest = json.loads(data.decode().removeprefix(_PREFIX)).items()
    except (ValueError, AttributeError, RecursionError):
        raise Refused(Code.INVALID_ARGUMENT, "a plugin program that is not one request in JSON") from None
    parser = PARSERS.get(kind)
    if parser is None or rest:
        raise not_implemented(f"the plugin program {kind[:200]!r}; this proxy runs {', '.join(PARSERS)}")
    try:
        return parser(state, kind, body)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError, DecodeError, binascii.Error):
        raise Refused(Code.INVALID_ARGUMENT, f"a {kind} that is malformed") from None


def _reshard(state: State, kind: str, body: Any) -> Loaded:
    sources, targets = ([_sharding(state, each) for each in body[name]] for name in ("inSharding", "outSharding"))
    is_given = body.get("donateInput", False) is True
    if not len(sources) == len(targets) <= _MOST_ARRAYS:
        raise Refused(Code.INVALID_ARGUMENT, f"{len(sources)} arrays to cut anew into {len(targets)}")
    return Reshard(state, sources, targets, is_given).loaded()


def _sharding(state: State, request: Any) -> Sharding:
    devices = tuple(request["devices"]["device_ids"])
    if not devices or not all(isinstance(each, int) for each in devices) or len(set(devices)) != len(devices):
        raise ValueError
    check_devices(state, devices)
    op_sharding = base64.b64decode(request["xla_hlo_sharding"], validate=True)
    return shardings.by_hlo(op_sharding, devices, str(request.get("memory_kind", "")))


def _persistence(state: State, kind: str, body: Any) -> Loaded:
    return persistence.parse(state, kind, body, _MOST_ARRAYS)


PARSERS: dict[str, Callable[[State, str, Any], Loaded]] = {
    "reshardRequest": _reshard,
    **dict.fromkeys((*persistence.WRITES, *persistence.READS), _persistence),
}


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A reshard request, as an executable: see `pathways.proxy.behind.Executable`."""

    state: State
    sources: list[Sharding]
    targets: list[Sharding]
    is_given: bool

    def loaded(self) -> Loaded:
        """What the session keeps of it."""
        donated = frozenset(range(len(self.sources))) if self.is_given else frozenset[int]()
        takes = tuple((None, source.devices) for source in self.sources)
        # A client checks that its arguments have as many shards as these are.
        devices = self.sources[0].devices if self.sources else ()
        return Loaded(self, self.metadata.name, devices, (), donated, ([], []), takes, results_of=self._results)

    @property
    def metadata(self) -> ExecutableMetadata:
        """See `Executable`."""
        parameters = tuple(Parameter(None, "") for _ in self.sources)
        return ExecutableMetadata("reshard", b"", parameters, (), (), {}, 0, {}, "a reshard request of pathwaysutils")

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> Sequence[Buffer]:
        """See `Executable`."""
        made = [self._cut(number, shards) for number, shards in enumerate(arguments)]
        for number, shards in enumerate(arguments):
            if self.is_given and number not in kept and isinstance(shards, AllShards):
                shards.buffer.delete()  # its moves have begun
        return made

    def _cut(self, number: int, shards: Sequence[Shard]) -> Buffer:
        source, target, shape = self.sources[number], self.targets[number], shards[0].buffer.shape
        cut, wanted = source.tiling(shape), target.tiling(shape)
        whole = tuple(size * parts for size, parts in zip(shape, cut.grid, strict=True))
        devices = self.state.devices
        if cut == wanted:
            return devices.copy(shards, target.devices, target.memory_kind)
        return devices.reshard(shards, cut, target.devices, wanted, whole, target.memory_kind)

    def run_again(self, arguments: Sequence[Buffer]) -> None:
        """See `Executable`. A move takes so long that nothing is saved."""

    def _results(self, arrays: Sequence[Array]) -> list[LoadedResult]:
        for number, (array, source) in enumerate(zip(arrays, self.sources, strict=True)):
            tiling = source.tiling(array.shape)
            if array.sharding.tiling(array.shape) != tiling:
                raise Refused(Code.INVALID_ARGUMENT, f"array {number} is not cut as the reshardRequest says")
            if any(size % parts for size, parts in zip(array.shape, tiling.grid, strict=True)):
                raise not_implemented(f"array {number} of a reshardRequest, {list(array.shape)}, in unequal parts")
        return [
            LoadedResult(array.dtype, array.shape, target, target)
            for array, target in zip(arrays, self.targets, strict=True)
        ]
