"""The mesh axes that operations name themselves, and whether a slice has these axes.

A sharding constraint, a `jax.jit` with shardings or a `shard_map` names axes of a mesh. The compiler knows only the
axes of the slice that the operation runs on, and any other axis kills it. So the axes are compared here, before the
compiler sees them. A sharding made by `Slice.sharding` has its slice; an operation with such a sharding, outside of
placed functions, can run on that slice.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from pathways import _jaxlib, errors
from pathways.compiler import specs
from pathways.compiler.added_primitives.transfers import transfer_p
from pathways.compiler.ir import MeshSpec
from pathways.compiler.specs import slice_mesh

_CALLED = {"sharding_constraint": "jax.lax.with_sharding_constraint", "shard_map": "jax.shard_map", "jit": "jax.jit"}


@dataclasses.dataclass(frozen=True)
class Demand:
    """The axes, with sizes, that an operation needs on its slice. `device`: a sharding over this process's devices.

    `is_typed`: the type of its result says that it is on `home`, a slice with explicit axes.
    """

    called: str
    axes: tuple[tuple[str, int], ...]
    home: MeshSpec | None = None
    device: str = ""
    is_typed: bool = False

    def fits(self, mesh: MeshSpec) -> bool:
        """Whether a slice has these axes."""
        if self.is_typed:
            return mesh == self.home
        sizes = dict(mesh.axes)
        return not self.device and all(sizes.get(name) == size for name, size in self.axes)


def demands_of(eqn: Any, memo: dict[int, tuple[Demand, ...]]) -> tuple[Demand, ...]:
    """The demands of an equation and of everything inside it. `memo` is by id() of jaxprs, so these must stay alive."""
    found = list(_own(eqn))
    for sub in _jaxlib.sub_jaxprs(eqn.params):
        known = memo.get(id(sub))
        if known is None:
            known = memo[id(sub)] = tuple(
                dict.fromkeys(demand for inner in sub.eqns for demand in demands_of(inner, memo))
            )
        found.extend(known)
    return tuple(dict.fromkeys(found))


def demands_of_types(eqn: Any) -> tuple[Demand, ...]:
    """What the types of the results of an equation outside of placed functions say of its slice.

    Raises:
        ShardingError: a result is a partial sum over an axis.
    """
    found = [specs.spec_of_type(v.aval) for v in eqn.outvars]
    homes = dict.fromkeys(typed[0] for typed in found if typed is not None)
    return tuple(Demand(eqn.primitive.name, home.axes, home, is_typed=True) for home in homes)


def check(demands: tuple[Demand, ...], mesh: MeshSpec, where: str) -> None:
    """Raises `ShardingError` if the slice does not meet a demand."""
    for demand in demands:
        if demand.device:
            raise errors.ShardingError(
                f"{where} calls {demand.called} with {demand.device}, which names devices of this process, but runs "
                f"on slice {mesh.name!r}; use a PartitionSpec over the slice's axes {list(dict(mesh.axes))}, or "
                "pw.device_put to another slice, from the program"
            )
        if not demand.fits(mesh):
            raise errors.ShardingError(
                f"{where} calls {demand.called} over the axes {dict(demand.axes)}, but runs on slice {mesh.name!r}, "
                f"which has {dict(mesh.axes)}. Name axes of that slice, or call it in a function that is placed on a "
                "slice which has them (pw.jit(..., devices=slice))"
            )


def _own(eqn: Any) -> Iterator[Demand]:
    if eqn.primitive is transfer_p:  # its slice is known; the type of its result may be that of another one
        return
    called = _CALLED.get(eqn.primitive.name, eqn.primitive.name)
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, NamedSharding):
                sizes = dict(item.mesh.shape)
                names = {
                    axis
                    for entry in item.spec.partitions
                    if isinstance(entry, (str, tuple))
                    for axis in ((entry,) if isinstance(entry, str) else entry)
                }
                if names:
                    axes = tuple((name, size) for name, size in sizes.items() if name in names)
                    yield Demand(called, axes, slice_mesh(item))
            elif isinstance(item, Mesh | AbstractMesh):
                if not item.empty:
                    yield Demand(called, tuple(item.shape.items()))
            elif isinstance(item, Sharding) and not item.is_fully_replicated:
                yield Demand(called, (), device=repr(item))
