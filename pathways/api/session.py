"""What a connection keeps for programs and arrays: layouts, placements, caches; and which connection is current."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from pathways import _core, _jaxlib, errors
from pathways.api.arrays.array import Array
from pathways.api.arrays.host_transfer import HostTransfer, InProcess, KnownPlacement, SharedMemory
from pathways.api.arrays.variable_list import VariableList
from pathways.api.failures import UnreadFailures
from pathways.api.programs.effects import Effects
from pathways.api.programs.first_calls import FirstCalls
from pathways.api.programs.tracing import remember
from pathways.api.slices.virtual_devices import Device, Slice, VirtualDeviceSet
from pathways.cluster.arena_trimming import ArenaTrimmer
from pathways.compiler.ir import ArrayType, MeshSpec
from pathways.plan.resharding import Placement
from pathways.plan.topology import SliceBinding, Topology
from pathways.protocol import payloads

#: Releases of buffers are held back, and sent together, up to so many bytes; less where devices have little memory.
RELEASE_BYTES = 1 << 20

registry = threading.RLock()  # of `_current`, and of what `connect` knows
_current: list[Session] = []  # the last one is current; guarded by registry


class Default:
    """How `current` connects when nothing is connected. `pathways.api.connect` sets `connect`."""

    connect: Callable[[], Session]


class Session:
    """One client's connection, as arrays and programs use it. Users have a `Cluster`, which is one."""

    def __init__(self, control: Any, is_embedded: bool) -> None:
        self._control = control
        self._layouts: dict[Any, _core.Layout] = {}
        self._placements: dict[_core.Layout, KnownPlacement] = {}
        self._placement_numbers = itertools.count(1)
        self._lock = threading.RLock()
        topology = control.topology
        self._devices: tuple[Any, dict[int, Device]] = (None, {})  # a topology, and its devices by number
        self.platform: str = topology.platform
        self.is_embedded = is_embedded
        liveness = None if self.is_embedded else control.check
        self.native = _core.Client(
            control.client_id,
            control.client_segment,
            control.status_segment,
            control.bell_segment,
            Array,
            liveness,
            release_bytes=max(1, min(RELEASE_BYTES, topology.device_bytes // 64))
            if topology.device_bytes
            else RELEASE_BYTES,
        )
        self.arena_trimmer = ArenaTrimmer(self.native)
        self.effects = Effects()
        self.failures = UnreadFailures(self.native, self._let_go)
        self.first_calls = FirstCalls(control.compiling)
        self.driver = None
        self.transfer: HostTransfer
        if self.is_embedded:
            self.driver = control.driver
            self.native.embed(control.controller, control.driver.core, _jaxlib.ARRAY_TYPE)
            self.transfer = InProcess(self.native, control.driver.local)
        else:
            self.transfer = SharedMemory(self.native, self.arena_trimmer, topology.is_spread)
        self.moves: dict[Hashable, Any] = {}  # programs of one array, see `compiled.move`
        self.slices: weakref.WeakSet[Slice] = weakref.WeakSet()
        self._home: Slice | None = None
        #: Programs that nobody here can call any more, (number, group): appended by finalizers, see `sweep`.
        self.forgotten: collections.deque[tuple[int, int]] = collections.deque()
        self.compiled: weakref.WeakSet[Any] = weakref.WeakSet()  # guarded by `steady`
        self.state_lock = (
            threading.RLock()
        )  # held while a run that uses variables is submitted: see `pathways.api.programs.state`
        self.variables = VariableList(control.name_variables)
        self.steady = threading.RLock()  # bindings of slices change under it, and only in `remap.remap`
        self.operations: Any = None  # what ordinary use of arrays has compiled: see `operators`

    @property
    def devices(self) -> tuple[Device, ...]:
        """The physical devices of the cluster as it is now."""
        return tuple(self.devices_by_number(self._control.present_topology()).values())

    def devices_by_number(self, topology: Topology | None = None) -> dict[int, Device]:
        """The physical devices; None: of the cluster as it was last heard of."""
        topology = self._control.topology if topology is None else topology
        known = self._devices
        if known[0] is not topology:
            found = {
                number: Device(number, host, island, topology.platform_of(island))
                for island, hosts in enumerate(topology.islands)
                for host in hosts
                for number in topology.devices_of(host)
            }
            known = self._devices = topology, found
        return known[1]

    def platform_of(self, island: int) -> str:
        """What the devices of an island are."""
        topology: Topology = self._control.topology
        return topology.platform_of(island)

    @property
    def client_id(self) -> int:
        """This client's number in the cluster."""
        return int(self._control.client_id)

    @property
    def is_open(self) -> bool:
        """False after `close`."""
        return not self.native.closed

    def is_alive(self) -> bool:
        """Whether it can be used: open, and none of its processes lost."""
        return self.is_open and bool(self._control.alive())

    def control(self) -> Any:
        """The control plane. Raises the error that ended the cluster, if it has ended."""
        self.native.check_alive()
        return self._control

    def home_mesh(self) -> MeshSpec:
        """See `home_slice`."""
        return self.home_slice().mesh_spec

    def home_slice(self) -> Slice:
        """Where a program runs that names no slice: one device, taken the first time it is needed."""
        with self._lock:
            if self._home is None:
                self._home = Slice(self, self.control().allocate_slice((1,), ("x",), None))
                remember(self._home)
            return self._home

    def layout(
        self,
        kind: ArrayType,
        slice: Slice,
        *,
        dtype: Any = None,
        shape: tuple[int, ...] | None = None,
        weak_type: bool = False,
    ) -> _core.Layout:
        """The interned layout of arrays of physical type `kind` on `slice`.

        `dtype` and `shape` are the logical ones where they differ (PRNG keys).
        """
        dtype = kind.dtype if dtype is None else dtype
        shape = kind.shape if shape is None else shape
        known = self._layouts.get(layout_key(kind, slice.mesh_spec, dtype, shape, weak_type)[0])
        if known is None:
            with self._lock:  # a slice that moves, or gets another shape, does so under it
                key, kind = layout_key(kind, slice.mesh_spec, dtype, shape, weak_type)
                known = self._layouts.get(key)
                if known is None:
                    known = make_layout(key, kind, slice, slice.mesh_spec, slice.binding)
                    self._layouts[key] = known
        return known

    def move_layouts(self, slice: Slice, binding: SliceBinding) -> None:
        """From now on a slice lies elsewhere; `steady` is held, and nobody sends (`_core.Client.begin_move`)."""
        with self._lock:
            slice.binding = binding
            for layout in self._layouts.values():
                if layout.slice is slice:
                    layout.move(binding.group, binding.hosts, binding.space_set)

    def reshape_layouts(
        self, slice: Slice, binding: SliceBinding, mesh: MeshSpec, layouts: Mapping[Hashable, _core.Layout]
    ) -> None:
        """From now on a slice has another mesh, and its arrays have `layouts`; as `move_layouts`."""
        with self._lock:
            slice.lie(binding, mesh)
            for key, layout in list(self._layouts.items()):
                if layout.slice is slice:
                    layout.move(binding.group, binding.hosts, binding.space_set)  # where what was released lies now
                    layout.retire()
                    del self._layouts[key]
                    self._placements.pop(layout, None)
            self._layouts.update(layouts)

    def forget_outdated(self) -> None:
        """Drops what was compiled for a slice that has another shape now."""
        self.moves = {key: known for key, known in self.moves.items() if not known.is_outdated}
        if self.operations is not None:
            self.operations.forget_outdated()

    def placement(self, layout: _core.Layout) -> KnownPlacement:
        """The placement of a layout, which its hosts know by number. The first call sends them the placement."""
        known = self._placements.get(layout)
        if known is None or known.binding is not layout.slice.binding:
            with self._lock:
                known = self._placements.get(layout)
                if known is None or known.binding is not layout.slice.binding:
                    number = next(self._placement_numbers) if known is None else known.number
                    placed = layout.slice.placed(layout.cache)
                    self.native.command(payloads.BACKEND, layout.group, number, 0, payloads.define(number, placed))
                    parts = self._parts(placed, layout.hosts)
                    known = KnownPlacement(number, layout.slice.binding, placed.packing, parts)
                    self._placements[layout] = known
        return known

    def _parts(self, placed: Placement, hosts: Sequence[int]) -> bytes:
        """What each of `hosts` needs of an array's bytes, if they may be on several machines, and not all need all."""
        topology = self._control.topology
        if len(hosts) == 1 or len(placed.replicas) == 1 or not topology.is_spread:
            return b""
        pieces = placed.pieces(topology.devices_per_host)
        return payloads.leased_parts(pieces) if len(pieces) <= payloads.MOST_LEASED_PARTS else b""

    def sweep(self) -> None:
        """Tells the hosts, in the order, and the controller of programs that nobody here can call any more."""
        numbers = []
        while True:
            try:
                number, group = self.forgotten.popleft()
            except IndexError:
                break
            self.native.command(payloads.BACKEND, group, 0, number, b"")
            numbers.append(number)
        if numbers:
            self.control().forget_programs(numbers)

    def _let_go(self) -> None:
        """Lets go of what this library itself holds and needs no more. A thread calls it again and again."""
        self.effects.settle()
        self.transfer.drop_unread()

    def sweep_if_open(self) -> None:
        """`sweep`, of a thread that nobody waits for. If the cluster has ended, nothing is left to be forgotten."""
        with contextlib.suppress(errors.PathwaysError):
            self.sweep()


def layout_key(
    kind: ArrayType, mesh: MeshSpec, dtype: Any, shape: tuple[int, ...], weak_type: bool
) -> tuple[Hashable, ArrayType]:
    """What tells a layout from all others, and its physical type: an automatic axis of one device cuts nothing."""
    sizes = dict(mesh.axes)
    spec = tuple(tuple(axis for axis in axes if sizes[axis] > 1 or axis in mesh.explicit) for axes in kind.spec)
    if spec != kind.spec:  # one name for one thing
        kind = dataclasses.replace(kind, spec=spec)
    return (shape, dtype, kind.shape, kind.dtype, kind.spec, kind.tiling, mesh.name, weak_type), kind


def make_layout(key: Any, kind: ArrayType, slice: Slice, mesh: MeshSpec, binding: SliceBinding) -> _core.Layout:
    """The layout of this key, with its slice bound so.

    Raises:
        SliceResizedError: the slice has got another shape since `kind` was made for it, and that cannot be cut so.
    """
    shape, dtype, *_, weak_type = key
    parts = Placement(kind, mesh, binding.devices).parts()
    if any(extent % count for extent, count in zip(kind.shape, parts, strict=True)):
        raise errors.SliceResizedError(f"{slice!r} has got its shape meanwhile; try again")
    layout = _core.Layout(
        shape,
        dtype,
        weak_type,
        slice,
        kind.spec,
        binding.group,
        binding.hosts,
        kind.nbytes,
        binding.space_set,
        kind.nbytes // math.prod(parts),
    )
    layout.cache = kind
    # The short way of a read asks no transfer guard: there is none for memory of this process's own kind.
    layout.plain = kind.dtype if dtype is kind.dtype and slice.quirks.is_host_memory else None
    return layout


def current() -> Session:
    """The cluster connected to last and not closed; the embedded one when there is none."""
    with registry:
        while _current and not _current[-1].is_open:
            _current.pop()
        return _current[-1] if _current else Default.connect()


def make_current(session: Session | None) -> None:
    """`session` is what `current` gives from now on; None: nothing is connected here."""
    with registry:
        if session is None:
            _current.clear()
            return
        forget_current(session)
        _current.append(session)


def forget_current(session: Session) -> None:
    """`session` is not current any more."""
    with registry:
        if session in _current:
            _current.remove(session)


def make_virtual_device_set(cluster: Session | None = None) -> VirtualDeviceSet:
    """Where slices of a cluster come from: `pw.make_virtual_device_set().add_slice(devices=4)`.

    Args:
        cluster: a `Cluster`. None: the one that this process connected to last; if there is none, this process's own
            devices are connected.

    Returns:
        A `VirtualDeviceSet`.

    Raises:
        ConnectError: nothing is connected, and this process's devices cannot be.
    """
    return VirtualDeviceSet(cluster or current())
