"""The devices of a cluster, for one client of the door: a session of the cluster with its name, weight and limits."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib, errors
from pathways.api.arrays.host_values import put_physical
from pathways.api.connect import Cluster, connect_apart
from pathways.compiler.ir import Tiling, View
from pathways.proxy import layouts
from pathways.proxy.behind import (
    Buffer,
    DeviceInfo,
    Executable,
    Function,
    Graph,
    GraphExecutable,
    Machine,
    Part,
    Shard,
    Stored,
)
from pathways.proxy.cluster_buffers import ArrayShard, ClusterBuffer, Form, form_of, form_of_kind, pieces_of, whole
from pathways.proxy.cluster_executables import ClusterExecutable
from pathways.proxy.cluster_files import Files
from pathways.proxy.cluster_functions import ClusterFunction
from pathways.proxy.cluster_graphs import ClusterGraph
from pathways.proxy.cluster_kinds import DeviceList, Kind, Places, apart, stacked, tiled
from pathways.proxy.service import Client
from pathways.proxy.shard_programs import Builder, KeptPrograms, ShardProgram
from pathways.proxy.terms import Allowed, terms_of
from pathways.proxy.waiter import Waiter

#: By platform: the memories that clients may name. On a CPU they are the same, and no byte moves from one to another.
_MEMORIES = {"cpu": ("device", "pinned_host", "unpinned_host")}
#: Threads of a session that compile and read.
_THREADS = 8
#: Programs that move and show shards, kept.
_MOST_MOVES = 256


def open_session(
    address: str, client: Client, offered: Mapping[str, Any] | None = None, allowed: Allowed | None = None
) -> ClusterDevices:
    """The devices of the cluster at an address, for a caller of the door; on which terms says `terms_of`, and
    what it may do `allowed`.

    A slice of the door shows shards of another one, so each must lie where the client's numbers say.

    Raises:
        ConnectError: nobody listens at the address.
        OptionError: it asks for what makes no sense, or for more than the proxy's or the cluster's operator allows.
    """
    return ClusterDevices(connect_apart(address, terms_of(client, offered or {})), allowed)


class ClusterDevices:
    """See `pathways.proxy.behind.Devices`."""

    def __init__(self, session: Cluster, allowed: Allowed | None = None) -> None:
        self._session, self._allowed = session, allowed or Allowed()
        self._places = Places(session)
        self._waiter = Waiter(session, self._places.islands)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "pathways-door")
        self._moves = KeptPrograms(_MOST_MOVES)
        self._files = Files(self._places, self._waiter, self._shown_as, self._allowed.checkpoint_root)

    def describe(self) -> Machine:
        """See `Devices`."""
        topology = self._session.control().topology
        devices = tuple(
            DeviceInfo(number, platform, island, host, _MEMORIES.get(platform, ("device",)))
            for island, hosts in enumerate(topology.islands)
            for platform in [topology.platform_of(island)]
            for host in hosts
            for number in topology.devices_of(host)
        )
        if not devices:
            raise errors.ConnectError("the cluster has no devices as yet: start the program when an agent has joined")
        return Machine(devices[0].kind, "pathways", devices)

    # ---- bytes in and out

    def put(self, devices: DeviceList, memory_kind: str, shards: Sequence[np.ndarray[Any, Any]]) -> ClusterBuffer:
        """See `Devices`."""
        self._places.check(devices)
        number: dict[int, int] = {}
        cells = [number.setdefault(id(shard), len(number)) for shard in shards]
        distinct = list({id(shard): shard for shard in shards}.values())
        kind = stacked(distinct[0].shape, distinct[0].dtype, devices, cells) if self._is_one_place(devices) else None
        if kind is not None:
            value = distinct[0] if len(distinct) == 1 else np.concatenate(distinct)
            return whole(self._put(kind, value), form_of_kind(kind), self._waiter)
        pieces: list[ArrayShard] = []
        for device, shard in zip(devices, shards, strict=True):
            alone = apart(shard.shape, shard.dtype, (device,))
            pieces.append(ArrayShard(self._put(alone, shard), alone, 0))
        return ClusterBuffer(tuple(pieces), self._waiter)

    def _put(self, kind: Kind, value: np.ndarray[Any, Any]) -> Any:
        return put_physical(value, self._places.layout(kind), "an array")

    def fetch(self, shard: Shard, then: Callable[[np.ndarray[Any, Any] | BaseException], None]) -> None:
        """See `Devices`."""
        (piece,) = pieces_of([shard])
        # A read of a whole array takes each part from the first device that holds it.
        is_first = piece.number == 0 and piece.kind.shard_shape == piece.kind.shape
        array = piece.array if is_first else self._shown(piece)

        def read() -> None:
            try:
                self._places.islands.check(array.slice.binding.devices)
                value = np.asarray(array)
                array.cached = None  # the client keeps what it has read
            except BaseException as error:
                then(error)
            else:
                then(value)

        if array.is_inline:  # its value comes with its completion
            self._waiter.add([array], lambda error: read() if error is None else then(error))
        else:
            self._threads.submit(read)

    def _shown(self, piece: ArrayShard) -> Any:
        """A shard as an array of one device."""
        device = piece.kind.devices[piece.number]
        alone = apart(piece.kind.shard_shape, piece.kind.dtype, (device,))

        def build() -> ShardProgram:
            builder = Builder(self._places, "shard")
            shown = builder.call(
                (device,), [builder.argument(piece.kind)], [alone], views=(View((0,), (piece.number,)),)
            )
            return builder.build(shown, is_view=True)

        (made,) = self._moves.run(("shard", piece.kind, piece.number), build, [piece.array])
        return made

    # ---- from devices to devices

    def copy(self, shards: Sequence[Shard], devices: DeviceList, memory_kind: str) -> ClusterBuffer:
        """See `Devices`."""
        form, arrays = form_of(shards)
        kind = self._kind_of_copy(form, devices)
        if kind is None:
            each = [self.copy([shard], (device,), memory_kind) for shard, device in zip(shards, devices, strict=True)]
            return self._joined(each)
        return self._moved(form, arrays, kind)

    def _kind_of_copy(self, form: Form, devices: DeviceList) -> Kind | None:
        """As what one array a form lies on other devices; None: shard by shard."""
        first = form.kinds[0]
        if not (self._is_one_place(devices) and self._is_one_place(form.devices)):
            return None
        if not form.is_whole:
            return stacked(first.shard_shape, first.dtype, devices, range(len(devices)))
        return Kind(first.shape, first.dtype, devices, first.tiling) if first.is_alike else None

    def _joined(self, buffers: Sequence[ClusterBuffer]) -> ClusterBuffer:
        return ClusterBuffer(tuple(piece for buffer in buffers for piece in buffer.pieces), self._waiter)

    def reshard(
        self,
        shards: Sequence[Shard],
        source: Tiling,
        devices: DeviceList,
        target: Tiling,
        shape: tuple[int, ...],
        memory_kind: str,
    ) -> ClusterBuffer:
        """See `Devices`."""
        form, arrays = form_of(shards)
        kind = tiled(shape, form.kinds[0].dtype, devices, target)
        return self._moved(form, arrays, kind, tiled(shape, form.kinds[0].dtype, form.devices, source))

    def _moved(self, form: Form, arrays: list[Any], kind: Kind, shown: Kind | None = None) -> ClusterBuffer:
        """A buffer of a kind, with the values of another one. `shown`: as what kind that is moved."""

        def build() -> ShardProgram:
            builder = Builder(self._places, "move")
            value = form.add_to(builder, shown)
            # On a device that both are on, the shard may be the same memory. Elsewhere it is its own, so it can be
            # donated.
            is_view = not set(form.devices).isdisjoint(kind.devices)
            return builder.build([builder.move(value, kind)], is_view=is_view)

        (made,) = self._moves.run(("move", form, kind, shown), build, arrays)
        return whole(made, form_of_kind(kind), self._waiter)

    def _shown_as(self, shards: Sequence[Shard], kind: Kind) -> Any:
        """Shards as an array of a kind, without a copy."""
        form, arrays = form_of(shards)
        if form.is_whole and form.kinds[0] == kind:
            return arrays[0]

        def build() -> ShardProgram:
            builder = Builder(self._places, "shown")
            return builder.build([form.add_to(builder, kind)], is_view=True)

        (made,) = self._moves.run(("shown", form, kind), build, arrays)
        return made

    # ---- files

    def save(self, arrays: Sequence[Stored], shards: Sequence[Sequence[Shard]], timeout_s: float) -> Buffer:
        """See `Devices`."""
        return self._files_for(arrays).save(arrays, shards, timeout_s)

    def restore(self, arrays: Sequence[Stored], timeout_s: float) -> tuple[Sequence[Buffer], Buffer]:
        """See `Devices`."""
        return self._files_for(arrays).restore(arrays, timeout_s)

    def _files_for(self, arrays: Sequence[Stored]) -> Files:
        if not self._allowed.files:
            raise errors.PermissionDeniedError(
                "programs of this proxy, which others than its user can reach, write and read no files. Its operator "
                "may name a folder for them: `pathways proxy --checkpoint-root FOLDER`"
            )
        for stored in arrays:
            if len(islands := self._islands_of(stored.devices)) > 1:
                raise errors.SliceError(
                    f"{stored.name!r} lies on the islands {sorted(islands)}; hosts of one island write or read an "
                    "array. Move it to devices of one island"
                )
        return self._files

    def bitcast(self, shards: Sequence[Shard], dtype: np.dtype[Any], shape: tuple[int, ...]) -> ClusterBuffer:
        """See `Devices`."""
        form, arrays = form_of(shards)
        devices, first = form.devices, form.kinds[0]
        if not self._is_one_place(devices):
            return self._joined([self.bitcast([shard], dtype, shape) for shard in shards])
        kind = apart(shape, dtype, devices)

        def build() -> ShardProgram:
            module, options = _jaxlib.bitcast_module(first.shard_shape, first.dtype, shape, dtype, len(devices))
            builder = Builder(self._places, "bitcast")
            made = builder.call(devices, [form.add_to(builder)], [kind], module=module, options=options)
            return builder.build(made)

        (made,) = self._moves.run(("bitcast", form, kind), build, arrays)
        return whole(made, form_of_kind(kind), self._waiter)

    # ---- programs

    def compile(self, part: Part, then: Callable[[Executable | BaseException], None]) -> None:
        """See `Devices`."""
        self._make(
            [(part.module.name, part.devices)], lambda: ClusterExecutable(self._places, self._waiter, part), then
        )

    def load(self, function: Function, then: Callable[[Executable | BaseException], None]) -> None:
        """See `Devices`."""

        def make() -> Executable:
            if self._allowed.function_s is None:
                raise errors.PermissionDeniedError(
                    f"{function.name}: programs run no Python on the hosts of this proxy, which others than its user "
                    "can reach. Its operator may let them: `pathways proxy --functions`"
                )
            return ClusterFunction(self._places, self._waiter, function, self._allowed.function_s)

        self._make([(function.name, function.devices)], make, then)

    def join(self, graph: Graph, then: Callable[[GraphExecutable | BaseException], None]) -> None:
        """See `Devices`."""
        places = [(part.module.name, part.devices) for part in graph.parts]
        self._make(places, lambda: ClusterGraph(self._places, self._waiter, graph), then)

    def _make(
        self, places: Sequence[tuple[str, DeviceList]], make: Callable[[], Executable], then: Callable[[Any], None]
    ) -> None:
        """Makes an executable, by a thread, if the devices of each of its programs are those of one island."""

        def work() -> None:
            try:
                for name, devices in places:
                    self._check_island(name, devices)
                made = make()
            except BaseException as error:
                # Not by a name that stays: this frame and its error would be a circle, and keep the program.
                then(error)
            else:
                then(made)

        self._threads.submit(work)

    def _check_island(self, name: str, devices: DeviceList) -> None:
        if len(islands := self._islands_of(devices)) > 1:
            raise errors.SliceError(
                f"a program runs on the devices of one island, and those of {name} are of the islands "
                f"{sorted(islands)}. Take those of one, as [d for d in jax.devices() if d.slice_index == 0]"
            )

    def default_layout(self, dtype: np.dtype[Any], shape: tuple[int, ...], device: int, memory_kind: str) -> str:
        """See `Devices`."""
        return layouts.default_text(len(shape))

    def tidy(self) -> None:
        """See `Devices`."""
        self._threads.submit(self._session.sweep_if_open)

    def close(self) -> None:
        """See `Devices`."""
        self._waiter.close()
        self._files.close()
        self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_one_place(self, devices: DeviceList) -> bool:
        """Whether these devices are distinct ones of one island, so that one array may lie there."""
        return len(self._islands_of(devices)) == 1 and len(set(devices)) == len(devices)

    def _islands_of(self, devices: DeviceList) -> set[int]:
        topology = self._session.control().topology
        return {topology.island_of(device // topology.devices_per_host) for device in devices}
