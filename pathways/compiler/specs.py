"""Shardings as users write them, turned into `ir.Spec` and checked before any compiler sees them.

Pure functions. Every error names the argument, the dimension, its size and the axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pathways import _jaxlib, errors
from pathways.compiler.ir import ArrayType, MeshSpec, Spec


def axes_of(mesh: MeshSpec) -> tuple[tuple[str, int], ...]:
    """The mesh's axes. For a slice without axes: one axis of size 1, because a mesh has at least one axis."""
    return mesh.axes or (("_one", 1),)


def abstract_mesh(mesh: MeshSpec) -> AbstractMesh:
    """The `jax.sharding.AbstractMesh` of a slice: what a placed function's body sees."""
    axes = axes_of(mesh)
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    types = [AxisType.Explicit if name in mesh.explicit else AxisType.Auto for name in names]
    mesh_: AbstractMesh = _jaxlib.slice_mesh(mesh.name, names, sizes, types, mesh.explicit)
    return mesh_


def sharding_in_type(mesh: MeshSpec | None, spec: Spec | None) -> NamedSharding | None:
    """The sharding that is part of the type of an array on a slice; None: the slice has no explicit axes."""
    if mesh is None or not mesh.explicit or spec is None:
        return None
    return NamedSharding(abstract_mesh(mesh), to_partition_spec(chosen(spec, mesh.explicit)))


def chosen(spec: Spec, axes: Collection[str]) -> Spec:
    """The spec with these axes alone."""
    return tuple(tuple(axis for axis in entry if axis in axes) for entry in spec)


def spec_of_type(aval: Any) -> tuple[MeshSpec, Spec] | None:
    """The slice with explicit axes on which a value of that type is, and how they cut it; None: the type does not say.

    Raises:
        ShardingError: it is cut into partial sums, which no array of a slice can be.
    """
    sharding = getattr(aval, "sharding", None)
    mesh = slice_mesh(sharding)
    if sharding is None or mesh is None or not mesh.explicit or sharding.mesh is not abstract_mesh(mesh):
        return None
    spec = sharding.spec
    if spec.unreduced or spec.reduced:
        kind, axes = ("unreduced", spec.unreduced) if spec.unreduced else ("reduced", spec.reduced)
        raise errors.ShardingError(
            f"a value of type {aval.str_short()} leaves a computation on slice {mesh.name!r} {kind} over the axes "
            f"{sorted(axes)}, which is not supported; inside the function that makes it, reduce it "
            "(jax.sharding.reshard to a PartitionSpec without them)"
        )
    return mesh, entries_of(spec, len(aval.shape))


def as_typed(kind: ArrayType, mesh: MeshSpec, what: Any) -> ArrayType:
    """The physical type of an array on `mesh` with its explicit axes of one device, of which the partitioner knows
    nothing. `what`: its `trace.Argument` or, with a type, its `jax.ShapeDtypeStruct`."""
    small = [name for name, size in mesh.axes if size == 1 and name in mesh.explicit]
    if not small:
        return kind
    sharding = what.aval().sharding if hasattr(what, "aval") else what.sharding
    if sharding is None or slice_mesh(sharding) != mesh:
        return kind
    spec = [*kind.spec]
    for n, axes in enumerate(entries_of(sharding.spec, len(what.shape))):
        spec[n] = axes if set(axes) - {*spec[n]} else spec[n]
    return dataclasses.replace(kind, spec=tuple(spec))


def entries_of(spec: PartitionSpec, rank: int) -> Spec:
    """A `PartitionSpec` of axis names alone, as one tuple of them per dimension."""
    entries = (*spec.partitions, *(None,) * rank)[:rank]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def normalize(spec: PartitionSpec | NamedSharding | None, shape: Sequence[int], mesh: MeshSpec, what: object) -> Spec:
    """`spec` as one tuple of axis names per dimension of `shape`, checked against `mesh`; None means replicated.

    Raises:
        ShardingError: an unknown or repeated axis, more entries than dimensions, or a dimension that does not divide.
    """
    if spec is None:
        spec = PartitionSpec()
    if isinstance(spec, NamedSharding):
        types = abstract_mesh(mesh).axis_types
        if spec.mesh.axis_types != types and any(kind is not AxisType.Auto for kind in spec.mesh.axis_types):
            raise errors.ShardingError(
                f"{what}: the sharding is over a mesh with axes of types {spec.mesh.axis_types}, but those of slice "
                f"{mesh.name!r} are {types}. Give the PartitionSpec alone, or slice.sharding(spec). For a slice with "
                "explicit axes, give add_slice axis_types=; for such axes inside of a placed function only, put "
                "jax.sharding.explicit_axes around it"
            )
        is_own = slice_mesh(spec) == mesh  # perhaps taken from the slice when it had another shape
        if not is_own and dict(spec.mesh.shape) != dict(mesh.axes):
            raise errors.ShardingError(
                f"{what}: the sharding is over a mesh of axes {dict(spec.mesh.shape)}, but the "
                f"slice {mesh.name!r} has {dict(mesh.axes)}"
            )
        spec = spec.spec
    if not isinstance(spec, PartitionSpec):
        raise errors.ShardingError(f"{what}: expected a PartitionSpec, got {spec!r} of type {type(spec).__name__}")
    entries = tuple(spec)
    if len(entries) > len(shape):
        raise errors.ShardingError(
            f"{what}: {spec} has {len(entries)} entries, but the array has only {len(shape)} "
            f"dimensions (shape {tuple(shape)})"
        )
    sizes = dict(mesh.axes)
    seen: set[str] = set()
    dims: list[tuple[str, ...]] = []
    for number, entry in enumerate(entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            entry = ()
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in sizes:
                raise errors.ShardingError(
                    f"{what}: {spec} names the axis {axis!r}, but the slice {mesh.name!r} has "
                    f"only the axes {list(sizes)}"
                )
            if axis in seen:
                raise errors.ShardingError(f"{what}: {spec} names the axis {axis!r} twice")
            seen.add(axis)
        parts = math.prod(sizes[axis] for axis in axes)
        if shape[number] % parts:
            raise errors.ShardingError(
                f"{what}: dimension {number} of size {shape[number]} (shape {tuple(shape)}) does not divide into "
                f"{parts} parts over the axes {list(axes)} of slice {mesh.name!r}; pad it or choose another sharding"
            )
        dims.append(axes)
    return (*dims, *((),) * (len(shape) - len(dims)))


def slice_mesh(sharding: Any) -> MeshSpec | None:
    """The mesh of the slice of a sharding, or of an array's format; None if it has no slice."""
    sharding = getattr(sharding, "sharding", sharding)
    mesh = getattr(getattr(sharding, "slice", None), "mesh_spec", None)
    if isinstance(mesh, MeshSpec):
        return mesh
    mesh = getattr(sharding, "mesh", None)
    name = _jaxlib.slice_name(mesh)
    if name is None or mesh is None:
        return None
    return MeshSpec(name, tuple(mesh.shape_tuple), _jaxlib.slice_explicit(mesh))


def to_partition_spec(spec: Spec) -> PartitionSpec:
    """The `PartitionSpec` of a normalized spec, in its shortest form, as JAX's own results have it."""
    length = max((n + 1 for n, axes in enumerate(spec) if axes), default=0)
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec[:length]))


def broadcast(prefix: Any, tree: Any, what: str) -> list[Any]:
    """One entry of the pytree prefix `prefix` per leaf of `tree`. None and shardings are leaves of a prefix."""
    flat: list[Any] = []

    def leaf(x: Any) -> bool:
        return x is None or isinstance(x, (PartitionSpec, NamedSharding))

    def extend(spec: Any, subtree: Any) -> None:
        flat.extend([spec] * len(jax.tree_util.tree_leaves(subtree)))

    if isinstance(prefix, list) and isinstance(tree, tuple):
        prefix = tuple(prefix)
    try:
        jax.tree_util.tree_map(extend, prefix, tree, is_leaf=leaf)
    except (ValueError, TypeError) as error:
        raise errors.ShardingError(
            f"{what}: the pytree of shardings is no prefix of the pytree it is for "
            f"({jax.tree_util.tree_structure(tree)}): {error}"
        ) from None
    return flat
