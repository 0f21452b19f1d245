"""What a session keeps of an executable."""

from __future__ import annotations

import dataclasses

from pathways.proxy import dtypes, shardings
from pathways.proxy.behind import Executable, ExecutableMetadata
from pathways.proxy.dtypes import DType
from pathways.proxy.shardings import Sharding


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedResult:
    """A result of an executable. `sharding` says how the array is cut, `told` is what the client gets of it."""

    dtype: DType
    shape: tuple[int, ...]
    sharding: Sharding
    told: Sharding


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """An executable that the client has a handle of."""

    executable: Executable
    name: str
    devices: tuple[int, ...]
    results: tuple[LoadedResult, ...]
    donated: frozenset[int]

    @property
    def metadata(self) -> ExecutableMetadata:
        """What its compiler knows of it."""
        return self.executable.metadata


def loaded(executable: Executable, devices: tuple[int, ...]) -> Loaded:
    """What there is to keep of a new executable for `devices`."""
    results = []
    for result in executable.metadata.results:
        told = shardings.even(devices, result.memory_kind, result.shape, result.shard_shape)
        own = told if result.sharding is None else shardings.by_hlo(result.sharding, devices, result.memory_kind)
        results.append(LoadedResult(dtypes.of_name(result.dtype), result.shape, own, told))
    return Loaded(executable, executable.metadata.name, devices, tuple(results), frozenset(executable.metadata.donated))
