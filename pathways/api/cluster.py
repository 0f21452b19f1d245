"""Clusters as a user sees them: connect to one, see what is there, leave it.

cluster = pw.connect()                                              # this process's own devices
cluster = pw.connect(pw.LocalCluster(islands=2, devices_per_host=4))  # host processes on this machine
cluster = pw.connect("unix:/run/user/1000/pathways-…/control.sock")   # a running one
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from pathways import _core, _jaxlib, errors
from pathways.api.slices import Device, Slice
from pathways.cluster.arena_trimming import ArenaTrimmer
from pathways.compiler.ir import ArrayType, MeshSpec
from pathways.plan.shard_packing import Packing
from pathways.plan.topology import SliceBinding
from pathways.protocol import payloads


@dataclasses.dataclass(frozen=True)
class LocalCluster:
    """Real host processes on this machine; a value, started by `connect`. Equal ones are one cluster.

    Args:
        islands: groups of hosts whose devices share a collective fabric.
        hosts_per_island: host processes in each.
        devices_per_host: devices that each host drives.
        platform: "cpu", "cuda", "rocm" or "tpu"; what JAX_PLATFORMS or the machine says when None.
        device_memory: budget of each device in bytes, by which runs are admitted; None: what the device says that it
            has, on CPU its share of the machine's memory.
        transfer_memory: budget in bytes of each host's shared memory, into which transfers land; None: 1 GiB.
        dispatch: "parallel", as it should be; or "sequential", node by node, which is there to be measured against.
        distance_us: microseconds that each message between the cluster's processes is on its way, as if they were far
            apart. For measurement; messages to and from clients, and the data itself, take no longer.
        machines: how many machines the hosts behave as if they were on, in their order and as many on each; the
            controller and the clients are on the first. Data between hosts of different ones goes over the network, and
            a host that is not on the first is lost when it does not answer for 5 s. For tests and measurement; messages
            of the control path, and what clients put and read, are in shared memory still.
    """

    islands: int = 1
    hosts_per_island: int = 1
    devices_per_host: int = 1
    platform: str | None = None
    device_memory: int | None = None
    transfer_memory: int | None = None
    dispatch: str = "parallel"
    distance_us: int = 0
    machines: int = 1

    def __post_init__(self) -> None:
        """Refuses a dispatch that there is not."""
        if self.dispatch not in ("parallel", "sequential"):
            raise ValueError(f'dispatch is "parallel" or "sequential", got {self.dispatch!r}')


#: Releases of buffers are held back, and sent together, up to so many bytes; less where devices have little memory.
RELEASE_BYTES = 1 << 20

_lock = threading.RLock()
_live: dict[Any, Cluster] = {}  # by target; guarded by _lock
_current: list[Cluster] = []  # the last one is current; guarded by _lock
_all: weakref.WeakSet[Cluster] = weakref.WeakSet()
_child_of: int | None = None  # the process that forked this one when JAX was up there


def connect(
    target: LocalCluster | str | None = None, *, progress: Any = None, max_in_flight: int | None = None
) -> Cluster:
    """A `Cluster`, which is also a context manager. Connecting again to an equal target gives the same one.

    Args:
        target: None for this process's own devices; a `LocalCluster` to start host processes here; or the address of a
            running cluster, "unix:/…".
        progress: see `pathways.cluster.launcher.start_local_cluster`.
        max_in_flight: how many runs this client may be ahead of the hosts: a call beyond it waits until an earlier run
            is over. Few, and what is not a run (a save, a read) finds little to wait for; 1,024 when not given. To a
            cluster that is connected already it applies from now on.

    Raises:
        OptionError: `max_in_flight` is no number from 1 on.
        ConnectError: nobody listens there, or a process did not start; with its log's last lines. Or this process was
            forked from one that uses JAX.
        UnsupportedVersionError: the cluster runs another jax or jaxlib.
    """
    if not (target is None or isinstance(target, LocalCluster | str)):
        raise errors.ConnectError(
            "connect expects None (this process's devices), a LocalCluster, or an address "
            f"like unix:/path, got {target!r} of type {type(target).__name__}"
        )
    if _child_of is not None or _jaxlib.is_forked():
        raise errors.ConnectError(
            f"process {os.getpid()} was forked from process {_child_of or os.getppid()}, where JAX was up: JAX's "
            f"threads are not in this one, and whoever waited for them would wait for ever. {_IN_CHILDREN}"
        )
    most = max_in_flight
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 1 <= most < 1 << 31):
        raise errors.OptionError(f"connect expects max_in_flight= a number of runs, 1 or more, got {most!r}")
    with _lock:
        known = _live.get(target)
        if known is not None and known.is_alive():
            _make_current(known)
            if most is not None:
                known.native.max_in_flight = most
            return known
        if target is None:
            from pathways.cluster.embedded import EmbeddedControl

            cluster = Cluster(EmbeddedControl(), target)
        elif isinstance(target, LocalCluster):
            from pathways.cluster.launcher import start_local_cluster

            handle = start_local_cluster(
                target.islands,
                target.hosts_per_island,
                target.devices_per_host,
                platform=target.platform,
                progress=progress,
                device_memory=target.device_memory,
                transfer_memory=target.transfer_memory,
                sequential=target.dispatch == "sequential",
                distance_us=target.distance_us,
                machines=target.machines,
            )
            try:
                cluster = Cluster(handle.control, target, handle)
            except BaseException:
                handle.close()
                raise
        else:
            from pathways.cluster.remote import connect_unix

            cluster = Cluster(connect_unix(target), target)
        if most is not None:
            cluster.native.max_in_flight = most
        _live[target] = cluster
        _make_current(cluster)
        return cluster


_IN_CHILDREN = (
    "Compute in the process that connected, and give forked workers NumPy arrays; workers that compute themselves are "
    "started by multiprocessing's 'spawn' or 'forkserver', or forked before JAX is used"
)


def _abandon_in_child() -> None:
    """After a fork, FORK-1: what the parent connected cannot be used here, and nothing here may end it."""
    global _lock, _child_of
    _lock = threading.RLock()  # perhaps a thread of the parent's held it
    parent = os.getppid()
    _jaxlib.keep_threads_of_parent()
    clusters = list(_all)
    if clusters or _jaxlib.initialized_backends():
        _child_of = parent
    for cluster in clusters:
        cluster.abandon(
            f"this array, program or cluster belongs to process {parent}, which forked this one ({os.getpid()}): its "
            f"cluster cannot be used here. {_IN_CHILDREN}"
        )
    _live.clear()
    _current.clear()


os.register_at_fork(after_in_child=_abandon_in_child)


def current() -> Cluster:
    """The cluster connected to last and not closed; the embedded one when there is none."""
    with _lock:
        while _current and not _current[-1].is_open:
            _current.pop()
        return _current[-1] if _current else connect()


def _make_current(cluster: Cluster) -> None:
    if cluster in _current:
        _current.remove(cluster)
    _current.append(cluster)


class Cluster:
    """A connection to a cluster. Made by `connect`; `close` it, or use it in a `with` statement."""

    def __init__(self, control: Any, target: Any, handle: Any = None) -> None:
        from pathways.api import checkpoint, jax_interop
        from pathways.api.array import Array
        from pathways.api.effects import Effects

        jax_interop.install()
        checkpoint.register_if_imported()
        self._control = control
        self._handle = handle
        self._target = target
        self._layouts: dict[Any, _core.Layout] = {}
        self._packings: dict[_core.Layout, Packing] = {}
        self._placements: dict[Any, tuple[int, SliceBinding]] = {}  # what hosts were told, and for which devices
        self._lock = threading.RLock()
        topology = control.topology
        each = topology.devices_per_host
        self.platform: str = topology.platform
        self.devices = tuple(
            Device(number, number // each, topology.island_of(number // each), topology.platform)
            for number in range(topology.devices)
        )
        self.lowering_platform = {"gpu": "cuda"}.get(topology.platform, topology.platform)
        self.is_embedded = target is None
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
        self.driver = None
        if self.is_embedded:
            self.driver = control.driver
            self.native.embed(control.controller, control.driver.core)
        self.copies: dict[_core.Layout, Any] = {}  # programs that copy an array, see `program.copy`
        self.slices: weakref.WeakSet[Slice] = weakref.WeakSet()
        self._home: Slice | None = None
        #: Programs that nobody here can call any more, (number, group): appended by finalizers, see `sweep`.
        self.forgotten: collections.deque[tuple[int, int]] = collections.deque()
        self.effects = Effects()
        self.compiled: weakref.WeakSet[Any] = weakref.WeakSet()  # guarded by `steady`
        self.steady = threading.RLock()  # bindings of slices change under it, and only in `moving.remap`
        self.operations: Any = None  # what ordinary use of arrays has compiled: see `operators`
        _all.add(self)

    # ---- what is there

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Host numbers, island by island."""
        return tuple(self._control.topology.islands)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Host numbers."""
        return tuple(range(self._control.topology.hosts))

    @property
    def address(self) -> str | None:
        """Where other clients reach it; None when embedded."""
        return getattr(self._control, "address", None)

    @property
    def is_open(self) -> bool:
        """False after `close`."""
        return not self.native.closed

    def is_alive(self) -> bool:
        """Whether it can be used: open, and none of its processes lost."""
        return self.is_open and bool(self._control.alive())

    def stats(self) -> dict[str, Any]:
        """Counters of this client and of the cluster.

        `dispatches`: runs this client submitted. `launches`: XLA launches, summed over hosts. `bytes_moved`: bytes that
        transfers brought from slice to slice. `compiles`: XLA compilations, by host. Hosts count from their last
        start; `restarts` under `hosts` says how many of those there were after losses. The rest under `controller`,
        `hosts`.
        """
        if self.native.orphaned is not None:
            self.native.check_alive()
        if self.is_open:
            self.sweep()
        stats = dict(self._control.cluster_stats())
        hosts = [host.get("driver", host) if isinstance(host, dict) else {} for host in stats.get("hosts", ())]
        return {
            "dispatches": self.native.dispatches,
            "in_flight": self.native.in_flight,
            "futures": self.native.futures_in_use,
            "launches": sum(int(host.get("launches", 0)) for host in hosts),
            "gangs": [int(host.get("gangs", 0)) for host in hosts],
            "bytes_moved": sum(int(host.get("bytes_moved", 0)) for host in hosts),
            "compiles": [int(host.get("compiles", 0)) for host in hosts],
            **stats,
        }

    # ---- moving

    @property
    def client_id(self) -> int:
        """This client's number in the cluster."""
        return int(self._control.client_id)

    def remap(self, slice: Slice, devices: Sequence[Device | int]) -> None:
        """Moves a slice, with every array on it, to other devices. Between runs: returns when everything is there.

        Arrays stay valid and keep their values bit by bit; they go from host to host, never through this process.
        Programs that use the slice are bound again at their next call: nothing is traced or partitioned, and a host
        compiles only what it has not compiled for those devices before. Calls of other threads wait meanwhile.

        Args:
            slice: of this cluster.
            devices: as many as the slice has, all of one island, in C order of its shape; `Device`s or their numbers.

        Raises:
            SliceError: other devices than such, or a slice of another cluster.
            ResourceExhaustedError, ComputationError: something found no room there; nothing has moved.
        """
        from pathways.api import moving

        moving.remap(self, slice, devices)

    def suspend(self, client: int | None = None, *, to: str = "memory") -> int:
        """Takes a client off the devices: its runs end, its buffers leave device memory, and its later work waits.

        The client notices nothing but that what it waits for comes after `resume`. When it dies meanwhile, all it owned
        is freed, as ever.

        Args:
            client: its number, see `stats()["clients"]`; this one when not given.
            to: "memory" of each host, or a file on its "disk", which is gone with the host or the client.

        Returns:
            The bytes that left the devices.

        Raises:
            ResourceExhaustedError: no room there; the client goes on and has lost nothing.
            ClusterClosedError: no such client.
        """
        if to not in ("memory", "disk"):
            raise errors.OptionError(f'suspend moves buffers to="memory" or to="disk", got {to!r}')
        number = self.client_id if client is None else client
        return int(self.control().suspend(number, to == "disk", self.native.pause))

    def resume(self, client: int | None = None) -> int:
        """Brings a suspended client's buffers back, then takes its work again. Of one that is not suspended: nothing.

        Returns:
            The bytes that came back to the devices.

        Raises:
            ComputationError, ResourceExhaustedError: no room on the devices; it stays suspended and has lost nothing.
        """
        number = self.client_id if client is None else client
        return int(self.control().resume(number, self.native.pause))

    # ---- for the rest of this room

    def control(self) -> Any:
        """The control plane of an open cluster; raises the failure reason of it otherwise."""
        self.native.check_alive()
        return self._control

    def home_mesh(self) -> MeshSpec:
        """Where a program runs that names no slice: one device, taken the first time it is needed."""
        from pathways.api.program import remember

        with self._lock:
            if self._home is None:
                self._home = Slice(self, self.control().allocate_slice((1,), ("x",), None))
                remember(self._home)
            return self._home.mesh_spec

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
        sizes = dict(slice.mesh_spec.axes)
        spec = tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in kind.spec)
        if spec != kind.spec:  # an axis of one device cuts nothing: one name for one thing
            kind = dataclasses.replace(kind, spec=spec)
        dtype = kind.dtype if dtype is None else dtype
        shape = kind.shape if shape is None else shape
        key = (shape, dtype, kind.shape, kind.dtype, kind.spec, slice.mesh_spec.name, weak_type)
        known = self._layouts.get(key)
        if known is None:
            with self._lock:  # a slice that moves does so under it
                binding = slice.binding
                known = _core.Layout(
                    shape,
                    dtype,
                    weak_type,
                    slice,
                    kind.spec,
                    binding.group,
                    binding.hosts,
                    kind.nbytes,
                    binding.space_set,
                    kind.nbytes // math.prod(slice.placed(kind).parts()),
                )
                known.cache = kind
                known = self._layouts.setdefault(key, known)
        return known

    def packing(self, layout: _core.Layout) -> Packing:
        """How bytes of a layout travel to its hosts."""
        known = self._packings.get(layout)
        if known is None:
            known = self._packings[layout] = layout.slice.placed(layout.cache).packing
        return known

    def move_layouts(self, slice: Slice, binding: SliceBinding) -> None:
        """From now on a slice lies elsewhere; `steady` is held, and nobody sends (`_core.Client.begin_move`)."""
        with self._lock:
            slice.binding = binding
            for layout in self._layouts.values():
                if layout.slice is slice:
                    layout.move(binding.group, binding.hosts, binding.space_set)

    def placement(self, layout: _core.Layout) -> int:
        """The number by which a layout's hosts know its placement; tells them the first time."""
        kind: ArrayType = layout.cache
        key = (kind.shape, kind.dtype, kind.spec, layout.slice.mesh_spec.name)
        known = self._placements.get(key)
        if known is None or known[1] is not layout.slice.binding:
            with self._lock:
                known = self._placements.get(key)
                if known is None or known[1] is not layout.slice.binding:
                    number = len(self._placements) + 1 if known is None else known[0]
                    payload = payloads.define(number, layout.slice.placed(kind))
                    self.native.command(payloads.BACKEND, layout.group, number, 0, payload)
                    known = self._placements[key] = number, layout.slice.binding
        return known[0]

    def sweep(self) -> None:
        """Tells the hosts, in the order, and the controller of programs that nobody here can call any more."""
        numbers = []
        while True:
            try:
                number, group = self.forgotten.popleft()
            except IndexError:
                break
            self.native.command(payloads.BACKEND, group, 0, number, payloads.forget(number))
            numbers.append(number)
        if numbers:
            self.control().forget_programs(numbers)

    # ---- the end

    def close(self) -> None:
        """Leaves the cluster: what this client owns there is freed. A LocalCluster started here ends. Idempotent."""
        with _lock:
            if self.native.closed:
                return
            try:
                if not self.is_embedded and self._control.alive():
                    self.native.flush()
            except errors.PathwaysError:
                pass
            self.native.close()
            if _live.get(self._target) is self:
                del _live[self._target]
            if self in _current:
                _current.remove(self)
        (self._handle or self._control).close()

    def __copy__(self) -> Cluster:
        return self

    def __deepcopy__(self, memo: Any) -> Cluster:
        return self

    def __reduce__(self) -> NoReturn:
        way = (
            "its devices are this process's own" if self.is_embedded else f"connect there: pw.connect({self.address!r})"
        )
        raise TypeError(f"{self!r} cannot be pickled: it is a connection of this process. In another process, {way}")

    def abandon(self, reason: str) -> None:
        """In a forked child: every use is refused with `reason`; nothing of it is ever closed or freed here."""
        self._lock = threading.RLock()  # perhaps threads of the parent's held them
        self.steady = threading.RLock()
        if not self.native.closed:
            self.native.abandon(reason, self)
            self._control.abandon(reason)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self.is_open else " (closed)"
        where = "embedded" if self.is_embedded else self.address
        return f"Cluster({where}, {self._control.topology.describe()}){state}"
