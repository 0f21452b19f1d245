"""Virtual devices: a client asks for a mesh of them, computes on it, and never learns which physical ones they are."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pathways import _core, _jaxlib, errors
from pathways.api.programs.tracing import find_named, remember
from pathways.compiler import specs
from pathways.compiler.ir import ArrayType, MeshSpec
from pathways.plan.resharding import Placement
from pathways.plan.topology import SliceBinding
from pathways.quirks import Quirks, quirks_of

_numbers = itertools.count()
#: Which part of an array: one range per dimension.
Index: TypeAlias = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Device:
    """One device of a cluster: a global number, and the host and island it belongs to."""

    id: int
    host: int
    island: int
    platform: str

    def __repr__(self) -> str:
        return f"Device({self.platform}:{self.id}, host {self.host}, island {self.island})"


class SliceSharding(NamedSharding):
    """A `jax.sharding.NamedSharding` over a slice's mesh that knows its slice; equal to the plain one.

    Those of two slices are not equal. Shardings that cut alike are equal, however their specs are written: `P()` and
    `P(None)`, `P("x")` and `P(("x",), None)`.
    """

    slice: Slice

    @property
    def device_set(self) -> set[Any]:
        """The devices of the slice now."""
        return set(self.slice.devices)

    @property
    def addressable_devices(self) -> set[Any]:
        """All of them: the client reads and writes every shard."""
        return self.device_set

    @property
    def is_fully_addressable(self) -> bool:
        """True, see `addressable_devices`."""
        return True

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Any, Index]:
        """By device of the slice, in C order of its shape: which part of an array it holds."""
        return dict(zip(self.slice.devices, self.slice.indices(self.spec, global_shape), strict=True))

    def addressable_devices_indices_map(self, global_shape: Sequence[int]) -> dict[Any, Index]:
        """As `devices_indices_map`."""
        return self.devices_indices_map(global_shape)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SliceSharding) and other.slice is not self.slice:
            return False
        if isinstance(other, NamedSharding) and _jaxlib.slice_name(other.mesh) not in (None, self.mesh.slice_name):
            return False
        return isinstance(other, NamedSharding) and bool(NamedSharding.__eq__(_plain(self), _plain(other)))

    def __hash__(self) -> int:
        return hash(_plain(self))

    def __deepcopy__(self, memo: Any) -> SliceSharding:
        return self

    def __copy__(self) -> SliceSharding:
        return self

    def __reduce__(self) -> Any:
        """A pickle holds the mesh and the spec, and gives a plain sharding: a slice belongs to its process."""
        return NamedSharding, (self.mesh, self.spec)


def slice_sharding(sharding: Any) -> SliceSharding | None:
    """A sharding over a slice's mesh (`NamedSharding(slice.mesh, spec)`) as one that knows its slice; else None.

    Raises:
        SliceError: the slice is no more, or has another shape now.
    """
    if isinstance(sharding, SliceSharding):
        return sharding
    name = _jaxlib.slice_name(sharding.mesh) if isinstance(sharding, NamedSharding) else None
    return None if name is None else slice_of_mesh(name).sharding(sharding.spec)


def slice_of_mesh(name: str) -> Slice:
    """The slice whose mesh has that name.

    Raises:
        SliceError: the slice is no more, or has another shape now.
    """
    slice_: Slice | None = find_named(name)
    if slice_ is None:
        raise errors.SliceError(f"the mesh is that of slice {name!r}, which is no more. Keep the slice")
    if slice_.mesh_spec.name != name:
        raise errors.SliceError(f"the mesh is that of {slice_!r} before it got another shape; take slice.mesh again")
    return slice_


def _plain(sharding: NamedSharding) -> NamedSharding:
    """The sharding as JAX has it, with its spec in its shortest form; an axis of one device cuts nothing."""
    sizes = sharding.mesh.shape
    entries: list[Any] = []
    for entry in sharding.spec:
        if isinstance(entry, str | tuple):
            axes = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry) if sizes[axis] > 1)
            entry = axes[0] if len(axes) == 1 else axes or None
        entries.append(entry)
    while entries and entries[-1] is None:
        entries.pop()
    spec = sharding.spec.update(partitions=tuple(entries))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


class Slice:
    """A named mesh of virtual devices. Made by `VirtualDeviceSet.add_slice`; compared by identity."""

    binding: SliceBinding
    mesh_spec: MeshSpec
    mesh: AbstractMesh

    def __init__(self, cluster: Any, binding: SliceBinding, explicit: tuple[str, ...] = ()) -> None:
        self.cluster = cluster  # a `Cluster`
        self._name = f"s{next(_numbers)}"
        self._shapes = 0  # that it has been given after its first one
        axes = tuple(zip(binding.axis_names, binding.shape, strict=True))
        self.lie(binding, MeshSpec(self._name, axes, explicit))
        #: What is made anew when the slice gets another shape; guarded by `Session.steady`.
        self.functions: weakref.WeakSet[Any] = weakref.WeakSet()
        cluster.slices.add(self)

    def lie(self, binding: SliceBinding, mesh: MeshSpec) -> None:
        """Where it lies from now on, and over which mesh. For `pathways.api.slices.reshape`."""
        self.binding = binding
        self.mesh_spec = mesh
        self.mesh = specs.abstract_mesh(mesh)
        #: What `device_put` has found out about NumPy arrays, by their shape and type and the x64 mode.
        self.put_layouts: dict[Hashable, _core.Layout] = {}
        remember(self)

    def next_mesh(self, shape: Sequence[int]) -> MeshSpec:
        """The mesh of another shape: a new name, because a name stands for one shape."""
        self._shapes += 1
        axes = tuple(zip(self.axis_names, shape, strict=True))
        return MeshSpec(f"{self._name}_{self._shapes}", axes, self.mesh_spec.explicit)

    def resize(self, shape: Sequence[int]) -> None:
        """Grows or shrinks the slice, with every array on it. Between runs: returns when everything is there.

        Arrays stay valid, and keep their values bit by bit and their `PartitionSpec`s. They go from host to host, never
        through this process, and lie twice on the devices meanwhile. An axis of one device cuts nothing: what is
        resized to it is replicated, also after the next `resize`, until a program or a put cuts it again. Functions and
        programs placed here are compiled again at their next call. What was taken from the slice before (`mesh`,
        `Lowered` and `Compiled` programs) is for the old shape. Calls of other threads wait meanwhile. After an error
        the slice and its arrays are as before.

        Args:
            shape: one size for each axis. The slice stays on its island, if that has so many devices.

        Raises:
            SliceError: another number of axes, or no island has so many devices.
            ShardingError: an array on the slice cannot be cut so; names it and the dimension.
            ResourceExhaustedError, ComputationError: something found no room there.
        """
        self.cluster.resize(self, shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis; `mesh.shape` has them by name."""
        return self.binding.shape

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, major first."""
        return self.binding.axis_names

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.mesh_spec.size

    @property
    def island(self) -> int:
        """The number of the island that it lies on now. What goes from an island to another passes host memory."""
        return self.binding.island

    @functools.cached_property
    def platform(self) -> str:
        """What its devices are. It never changes, because a slice moves to devices of its own kind only."""
        return str(self.cluster.platform_of(self.binding.island))

    @functools.cached_property
    def quirks(self) -> Quirks:
        """What its devices do differently."""
        return quirks_of(self.platform)

    @property
    def lowering_platform(self) -> str:
        """The platform for which its programs are lowered."""
        return self.quirks.lowered_as or self.platform

    @property
    def devices(self) -> tuple[Device, ...]:
        """The physical devices behind it now, in C order of its shape."""
        by_number = self.cluster.devices_by_number()
        return tuple(by_number[number] for number in self.binding.devices)

    def sharding(self, spec: PartitionSpec | None = None) -> SliceSharding:
        """A sharding over this slice, for `jax.ShapeDtypeStruct` and whoever else asks for one; None: replicated."""
        sharding = SliceSharding(self.mesh, PartitionSpec() if spec is None else spec)
        sharding.slice = self
        remember(self)
        return sharding

    def placed(self, kind: ArrayType) -> Placement:
        """An array type of this slice on its physical devices."""
        return Placement(kind, self.mesh_spec, self.binding.devices)

    def spec(self, spec: PartitionSpec | None, shape: Sequence[int], what: object) -> tuple[tuple[str, ...], ...]:
        """A PartitionSpec normalized for an array of `shape` on this slice; raises `ShardingError`."""
        return specs.normalize(spec, shape, self.mesh_spec, what)

    def indices(self, spec: PartitionSpec, shape: Sequence[int]) -> list[Index]:
        """Which part of an array of `shape` each device holds, in C order of the slice's shape."""
        dims = self.spec(spec, shape, "sharding")
        sizes = dict(self.mesh_spec.axes)
        parts = []
        for place in np.ndindex(*sizes.values()):
            at = dict(zip(sizes, place, strict=True))
            index = []
            for extent, axes in zip(shape, dims, strict=True):
                number = 0
                for axis in axes:
                    number = number * sizes[axis] + at[axis]
                each = extent // math.prod(sizes[axis] for axis in axes)
                index.append(slice(None) if each == extent else slice(number * each, (number + 1) * each))
            parts.append(tuple(index))
        return parts

    def __copy__(self) -> Slice:
        return self

    def __deepcopy__(self, memo: Any) -> Slice:
        """A slice is what its devices are known by: there is no second one of it."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: it belongs to this process's connection. Connect in the other process "
            "(pw.connect(cluster.address)) and ask for a slice there"
        )

    def __repr__(self) -> str:
        shape = " x ".join(f"{name}={size}" for name, size in self.mesh_spec.axes)
        return f"Slice({self.mesh_spec.name}: {shape} on {self.platform} devices of island {self.binding.island})"


class VirtualDeviceSet:
    """Where slices come from. Made by `make_virtual_device_set`."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def add_slice(
        self,
        devices: int | None = None,
        *,
        shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        axis_types: AxisType | Sequence[AxisType] | None = None,
        island: int | None = None,
        kind: str | None = None,
    ) -> Slice:
        """A new slice of `devices` devices, or of a mesh of `shape` with named axes; contiguous in one island.

        Args:
            devices: how many, as a mesh of one axis.
            shape: one to three sizes, instead of `devices`.
            axis_names: one name per axis; "x", "y", "z" when not given.
            axis_types: `jax.sharding.AxisType.Auto` or `Explicit`, one for all axes or one per axis; `Auto` when not
                given.
            island: on which island; the least loaded one when not given.
            kind: what the devices are: a platform such as "cpu" or "cuda", or "gpu"; any when not given.

        Raises:
            SliceError: there are not so many devices in one island, or none of that kind; says what there is.
        """
        if (devices is None) == (shape is None):
            raise errors.SliceError(
                f"add_slice expects either devices=n or shape=(…), got devices={devices!r} and shape={shape!r}"
            )
        if shape is None:
            if isinstance(devices, bool) or not isinstance(devices, int):
                raise errors.SliceError(f"devices must be a positive int, got {devices!r}")
            shape = (devices,)
        sizes = tuple(shape)
        if axis_names is None and len(sizes) > 3:
            raise errors.SliceError(f"a slice has one to three axes, got shape {sizes}")
        names = ("x", "y", "z")[: len(sizes)] if axis_names is None else tuple(axis_names)
        explicit = _explicit(names, axis_types)
        control = self.cluster.control()
        return Slice(self.cluster, control.allocate_slice(sizes, names, island, kind), explicit)


def _explicit(names: tuple[str, ...], types: AxisType | Sequence[AxisType] | None) -> tuple[str, ...]:
    """The axes that are explicit."""
    each = (types,) * len(names) if isinstance(types, AxisType | None) else tuple(types)
    if len(each) != len(names) or not all(kind in (None, AxisType.Auto, AxisType.Explicit) for kind in each):
        raise errors.SliceError(
            "axis_types expects jax.sharding.AxisType.Auto or AxisType.Explicit, one for all axes or one for each of "
            f"{names}, got {types!r}. An axis is manual inside of jax.shard_map only"
        )
    return tuple(name for name, kind in zip(names, each, strict=True) if kind is AxisType.Explicit)
