"""The devices of a cluster, for one client of the door: a session of the cluster with its name, weight and limits."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib, errors
from pathways.api.arrays.host_values import put_physical
from pathways.api.connect import Cluster, connect_apart
from pathways.compiler.ir import Tiling, View
from pathways.process.client_terms import ClientTerms
from pathways.proxy.behind import DeviceInfo, Executable, Machine, Shard
from pathways.proxy.cluster_buffers import ArrayShard, ClusterBuffer, Form, form_of, pieces_of, whole
from pathways.proxy.cluster_executables import ClusterExecutable, Module
from pathways.proxy.cluster_kinds import DeviceList, Kind, Places, stacked, tiled
from pathways.proxy.service import Client
from pathways.proxy.shard_programs import Builder, KeptPrograms, ShardProgram
from pathways.proxy.waiter import Waiter

_TERMS = ("name", "weight", "priority", "memory", "runs", "at_limit")
#: Threads of a session that compile and read.
_THREADS = 8
#: Programs that move and show shards, kept.
_MOST_MOVES = 256


def open_session(address: str, client: Client) -> ClusterDevices:
    """The devices of the cluster at an address, for a caller of the door. It may say of itself, by
    `initialization_data`: its name, weight, priority, memory, runs and at_limit; see `pw.connect`.

    Raises:
        ConnectError: nobody listens at the address.
        OptionError: it asks for what makes no sense, or for more than the operator allows.
    """
    said = {what: client.initialization_data[what] for what in _TERMS if what in client.initialization_data}
    said.setdefault("name", f"JAX at {client.peer}")
    return ClusterDevices(connect_apart(address, ClientTerms.checked(**said)))


class ClusterDevices:
    """See `pathways.proxy.behind.Devices`."""

    def __init__(self, session: Cluster) -> None:
        self._session = session
        self._places = Places(session)
        self._waiter = Waiter(session)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "pathways-door")
        self._moves = KeptPrograms(_MOST_MOVES)

    def describe(self) -> Machine:
        """See `Devices`."""
        topology = self._session.control().topology
        devices = tuple(
            DeviceInfo(number, platform, island, host, ("device",))
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
        number: dict[int, int] = {}
        cells = [number.setdefault(id(shard), len(number)) for shard in shards]
        distinct = list({id(shard): shard for shard in shards}.values())
        kind = stacked(distinct[0].shape, distinct[0].dtype, devices, cells) if self._is_one_place(devices) else None
        if kind is not None:
            value = distinct[0] if len(distinct) == 1 else np.concatenate(distinct)
            return whole(self._put(kind, value), kind, self._waiter)
        pieces: list[ArrayShard] = []
        for device, shard in zip(devices, shards, strict=True):
            alone = tiled_alone(shard.shape, shard.dtype, device)
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
                value = np.asarray(array)
                array.cached = None  # the client keeps what it has read
            except BaseException as error:
                then(error)
            else:
                then(value)

        self._threads.submit(read)

    def _shown(self, piece: ArrayShard) -> Any:
        """A shard as an array of one device."""
        device = piece.kind.devices[piece.number]
        alone = tiled_alone(piece.kind.shard_shape, piece.kind.dtype, device)

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
        is_array = form.kinds[0].is_alike if form.is_whole else bool(shards[0].buffer.shape)
        if is_array and self._is_one_place(devices) and self._is_one_place(form.devices):
            if form.is_whole:
                old = form.kinds[0]
                kind = Kind(old.shape, old.dtype, devices, old.tiling)
            else:
                made = stacked(shards[0].buffer.shape, form.kinds[0].dtype, devices, range(len(devices)))
                assert made is not None
                kind = made
            return self._moved(form, arrays, kind)
        pieces: list[ArrayShard] = []
        for shard, device in zip(shards, devices, strict=True):
            one, parts = form_of([shard])
            kind = tiled_alone(shard.buffer.shape, one.kinds[0].dtype, device)
            pieces += self._moved(one, parts, kind).pieces
        return ClusterBuffer(tuple(pieces), self._waiter)

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
            return builder.build([builder.move(value, kind)], is_view=True)

        (made,) = self._moves.run(("move", form, kind, shown), build, arrays)
        return whole(made, kind, self._waiter)

    def bitcast(self, shards: Sequence[Shard], dtype: np.dtype[Any], shape: tuple[int, ...]) -> ClusterBuffer:
        """See `Devices`."""
        raise NotImplementedError("bitcast of arrays is not there yet")

    # ---- programs

    def compile(
        self, module: bytes, options: bytes, devices: DeviceList, then: Callable[[Executable | BaseException], None]
    ) -> None:
        """See `Devices`."""

        def work() -> None:
            try:
                name, parameters, results = _jaxlib.signature_of(module)
                described = Module(name, module, options, devices, parameters, results)
                made: Executable | BaseException = ClusterExecutable(self._places, self._waiter, described)
            except BaseException as error:
                made = error
            then(made)

        self._threads.submit(work)

    def default_layout(self, dtype: np.dtype[Any], shape: tuple[int, ...], device: int, memory_kind: str) -> str:
        """See `Devices`."""
        return "{" + ",".join(map(str, reversed(range(len(shape))))) + "}"

    def close(self) -> None:
        """See `Devices`."""
        self._waiter.close()
        self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_one_place(self, devices: DeviceList) -> bool:
        """Whether these devices are distinct ones of one island, so that one array may lie there."""
        topology = self._session.control().topology
        islands = {topology.island_of(device // topology.devices_per_host) for device in devices}
        return len(islands) == 1 and len(set(devices)) == len(devices)


def tiled_alone(shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Kind:
    """The kind of an array on one device."""
    kind = stacked(shape, dtype, (device,), (0,))
    assert kind is not None
    return kind
