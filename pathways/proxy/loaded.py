"""What a session keeps of an executable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pathways.proxy import dtypes, shardings
from pathways.proxy.arrays import Array
from pathways.proxy.behind import Cut, Executable, ExecutableMetadata, Parameter, Result
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
class MpmdParts:
    """Of an executable of several programs: the devices of each mesh, and what is known of each program."""

    meshes: Mapping[str, tuple[int, ...]]
    programs: Mapping[str, ExecutableMetadata]


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """An executable that the client has a handle of. `layouts`: of its parameters and of its results, as the client
    knows them. `takes`: what each argument is, if that is known, and its devices, if these are not those of the
    executable. `results_of`: what the results are, if that depends on the arguments. `tokens`: so many of its buffers,
    the last ones, are no results, but a run is over when they are ready.
    """

    executable: Executable
    name: str
    devices: tuple[int, ...]
    results: tuple[LoadedResult, ...]
    donated: frozenset[int]
    layouts: tuple[list[str], list[str]]
    takes: Sequence[tuple[Cut | None, tuple[int, ...]]] | None = None
    mpmd: MpmdParts | None = None
    results_of: Callable[[Sequence[Array]], Sequence[LoadedResult]] | None = None
    tokens: int = 0

    @property
    def metadata(self) -> ExecutableMetadata:
        """What its compiler knows of it."""
        return self.executable.metadata


def loaded(
    executable: Executable,
    devices: tuple[int, ...],
    parameter_layouts: Sequence[str] = (),
    result_layouts: Sequence[str] = (),
) -> Loaded:
    """What there is to keep of a new executable for `devices`. The layouts are those that the client asked for; each
    may be empty.
    """
    metadata, results = executable.metadata, []
    for result in metadata.results:
        told = shardings.even(devices, result.memory_kind, result.shape, result.shard_shape)
        own = told if result.sharding is None else shardings.by_hlo(result.sharding, devices, result.memory_kind)
        results.append(LoadedResult(dtypes.of_name(result.dtype), result.shape, own, told))
    layouts = _layouts(metadata.parameters, parameter_layouts), _layouts(metadata.results, result_layouts)
    return Loaded(executable, metadata.name, devices, tuple(results), frozenset(metadata.donated), layouts)


def _layouts(made: Sequence[Parameter | Result], asked: Sequence[str]) -> list[str]:
    return [layout or each.layout for each, layout in zip(made, asked or [""] * len(made), strict=True)]
