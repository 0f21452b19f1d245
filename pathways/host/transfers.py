"""A host's part in the transfers of programs: within the host, to and from other hosts, and over the network.

The native executor decides what is transferred when, and its copier moves what goes through shared memory. The enqueue
thread calls all of this module; control threads call `open_streams` and `expect_peer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib
from pathways.host.devices import HostDevices
from pathways.host.network_transfer import Streams
from pathways.host.own_settings import own_settings
from pathways.host.programs import Program
from pathways.host.receive import ReceiveAllocation, allocate_receive


class Transfers:
    """The transfers of one host. A transfer's number in its host's plan is its `route`."""

    def __init__(self, core: Any, devices: HostDevices, programs: Mapping[int, Program], transfer_bytes: int) -> None:
        """`programs` are the host's, by number. `transfer_bytes`: memory of the host for receive buffers."""
        self._core = core
        self._devices = devices
        self._programs = programs
        self._transfer_bytes = transfer_bytes
        self._receives: dict[tuple[int, int, int], ReceiveAllocation] = {}  # by order, plan and reshard plan (`route`)
        self._streams: Streams | None = None  # to hosts on other machines
        self.local_bytes = 0  # moved by transfers within this host

    # ---- streams to other machines

    def open_streams(self, address: str, far: Mapping[int, str], credentials: str) -> None:
        """Opens the streams to the hosts `far` on other machines; see `Streams`. Call it before the loop begins."""
        self._streams = Streams(self._core, address, far, credentials)

    def expect_peer(self, host: int, epoch: int, stream: str) -> None:
        """A host will open that takes network transfers at `stream`; see `Streams.expect_peer`."""
        if self._streams is not None:
            self._streams.expect_peer(host, epoch, stream)

    def peer_opens(self, host: int, epoch: int) -> None:
        """What is sent to the host from now on is for the one of this epoch."""
        if self._streams is not None:
            self._streams.peer_opens(host, epoch)

    def stop(self) -> None:
        """Ends the streams."""
        if self._streams is not None:
            self._streams.stop()

    # ---- within this host

    @own_settings
    def transfer(self, plan: int, route: int, value: jax.Array) -> jax.Array:
        """Runs a transfer whose source and target are both on this host alone.

        If every shard fits as it is, the result shows the same shards, or copies of whole shards on other devices
        (MEM-4). Otherwise JAX reshards the value.
        """
        program = self._programs[plan]
        shards = self._source_shards(plan, route, value)
        if all(program.host_reshard_plans[route].direct):
            return self._show(plan, route, shards, [])
        if value.size == 0:  # JAX cannot reshard an array without elements onto other devices
            return program.target(route).zeros()
        self.local_bytes += value.nbytes
        return jax.device_put(value, program.target(route).sharding)

    # ---- to other hosts

    def transfer_number(self, plan: int, route: int) -> int:
        """The number by which all hosts know a transfer: its number in the program."""
        return self._programs[plan].plan.numbers[route]

    @own_settings
    def shards(self, plan: int, route: int, value: jax.Array) -> tuple[Any, list[int]]:
        """The source shards, already ready, that the transfer's copy plans read.

        Returns an object that keeps the shards alive, and their addresses.
        """
        program = self._programs[plan]
        reads = program.host_reshard_plans[route].reads
        shards = self._source_shards(plan, route, value)
        if program.reads_in_place[route]:
            return value, [_jaxlib.address_of(shards[at]) for at in reads]
        copies = [np.ascontiguousarray(shards[at]) for at in reads]
        return copies, [copy.__array_interface__["data"][0] for copy in copies]

    def send_remote(self, outgoing: Any) -> None:
        """Sends an outgoing transfer to a host on another machine; `core.remote_send_done` is called at its end."""
        assert self._streams is not None
        self._streams.send(outgoing)

    # ---- from other hosts

    def begin_receive(self, order: int, plan: int, route: int) -> tuple[tuple[int, ...], list[int]] | None:
        """Allocates a receive's blocks. Returns the sending hosts and the offsets of all blocks; None: no room now."""
        plan_here = self._programs[plan].host_reshard_plans[route]
        receive = allocate_receive(self._core, self._devices.host, plan_here, self._transfer_bytes)
        if receive is None:
            return None
        self._receives[order, plan, route] = receive
        self.expect(order, self.transfer_number(plan, route), plan_here.sources, receive.views)
        return plan_here.sources, receive.offsets

    def expect(self, order: int, number: int, sources: Sequence[int], views: list[Any]) -> None:
        """What node `number` of a program brings from other machines goes to these blocks; see `Streams.expect`."""
        if self._streams is not None:
            self._streams.expect(order, number, sources, views)

    def forget(self, order: int, number: int, sources: Sequence[int]) -> None:
        """Nothing more may come for the node; see `Streams.forget`."""
        if self._streams is not None:
            self._streams.forget(order, number, sources)

    def direct(self, order: int, plan: int, route: int, value: jax.Array) -> None:
        """Gives a receive the shards of this host's own value, which it shows as they are."""
        self._receives[order, plan, route].shards = self._source_shards(plan, route, value)

    @own_settings
    def finish_receive(self, order: int, plan: int, route: int) -> jax.Array:
        """Makes an array of a receive's blocks, which are all written; on CPU the array uses the blocks' memory."""
        receive = self._receives.pop((order, plan, route))
        return self._show(plan, route, receive.shards, receive.views)

    def place_early(self, order: int, plan: int, route: int, source: int, chunk: bytes) -> None:
        """Writes what a host on another machine has sent early into the receive's blocks.

        Raises:
            RuntimeError: it does not fit them.
        """
        assert self._streams is not None
        self._streams.place_early(order, self.transfer_number(plan, route), source, chunk)

    def abandon_receive(self, order: int, plan: int, route: int) -> None:
        """Returns the memory of a failed transfer's receive."""
        self._receives.pop((order, plan, route), None)
        sources = self._programs[plan].host_reshard_plans[route].sources
        self.forget(order, self.transfer_number(plan, route), sources)

    def _source_shards(self, plan: int, route: int, value: jax.Array) -> list[jax.Array]:
        """The value's shards on this host. They are what the program transfers: else the copier would read beyond them,
        or the result would take more memory than the ledger has booked (MEM-7).

        Raises:
            ValueError: the client's library gave the program an argument of another type.
        """
        expected = self._programs[plan].host_reshard_plans[route]
        shards = _jaxlib.shards_of(value)
        for shard in shards[:1]:  # all have one shape
            found = (len(shards), shard.shape, shard.dtype.itemsize)
            if found != (expected.sources_here, expected.source_shard, expected.itemsize):
                raise ValueError(
                    f"the program transfers an array of {expected.sources_here} shards of shape "
                    f"{expected.source_shard}, with {expected.itemsize} bytes per element, on this host; the run gave "
                    f"one of {found[0]} shards of shape {found[1]}, with {found[2]} bytes per element"
                )
        return shards

    def _show(
        self, plan: int, route: int, shards: Sequence[jax.Array], views: Sequence[np.ndarray | None]
    ) -> jax.Array:
        program = self._programs[plan]
        plan_here = program.host_reshard_plans[route]
        self.local_bytes += plan_here.copied
        parts = [views[at] if shard < 0 else shards[shard] for at, shard in plan_here.shows]
        return program.target(route).assemble(parts)
