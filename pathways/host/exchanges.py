"""A host's part in the exchanges of rows of programs: the memory of rows that come, and the arrays that are made of it.

The native executor decides which row goes where, and its copier writes the rows. The enqueue thread calls all of this
module. A node is known by its run's order, its plan, and its number among the plan's exchanges (`index`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib, errors
from pathways.host.devices import HostDevices
from pathways.host.host_buffers import LocalPlacement
from pathways.host.own_settings import own_settings
from pathways.host.programs import Program
from pathways.host.receive import allocate_block
from pathways.host.transfers import Transfers
from pathways.plan.exchange_shape import ExchangeShape
from pathways.plan.memory_profile import block_bytes

_INT32 = np.dtype(np.int32)

_Key = tuple[int, int, int]  # order, plan, index


class _Room:
    """The memory of one target shard: its rows, and the number of each row's source."""

    __slots__ = ("numbers", "rows")

    def __init__(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        self.rows = rows
        self.numbers = numbers

    def clear(self, empty: Any) -> None:
        """Clears the slots to which no row came: a slice or a mask."""
        self.rows[empty] = 0
        self.numbers[empty] = -1


class Exchanges:
    """The exchanges of one host."""

    def __init__(
        self,
        core: Any,
        devices: HostDevices,
        programs: Mapping[int, Program],
        transfer_bytes: int,
        transfers: Transfers,
    ) -> None:
        """`programs` are the host's, by number. `transfer_bytes`: memory of the host for what it receives. `transfers`:
        by which rows of other machines come.
        """
        self._transfers = transfers
        self._core = core
        self._devices = devices
        self._programs = programs
        self._transfer_bytes = transfer_bytes
        self._rooms: dict[_Key, list[_Room]] = {}
        self._origins: dict[_Key, list[np.ndarray]] = {}  # of known routes: the numbers that the slots expect

    @own_settings
    def read(self, order: int, plan: int, index: int, position: int, value: jax.Array) -> tuple[Any, list[Any]]:
        """The shards of input number `position`, which are ready.

        Returns what keeps them there, and for each its address and bytes.

        Raises:
            ValueError: the client's library gave the program an argument of another type.
        """
        program = self._programs[plan]
        node, shape = program.exchanges[index]
        kind = program.bound.program.values[shape.part(node, self._devices.host)[0][position]]
        shards = _jaxlib.shards_of(value)
        is_origins = not shape.has_source(self._devices.host) or position == 2
        ranges, count = (shape.targets, shape.target_shards) if is_origins else (shape.sources, shape.source_shards)
        expected = self._shards_here(ranges, count), kind.shape[0] // count, tuple(kind.shape[1:]), kind.dtype.itemsize
        for shard in shards[:1]:  # all have one shape
            found = (len(shards), shard.shape[0] if shard.ndim else -1, tuple(shard.shape[1:]), shard.dtype.itemsize)
            if found != expected:
                raise ValueError(
                    f"the program exchanges the rows of {expected[0]} shards of shape {expected[1:3]} on this host, "
                    f"with {expected[3]} bytes per element; the run gave {found[0]} of shape {found[1:3]}, with "
                    f"{found[3]} bytes per element"
                )
        if is_origins:
            self._origins[order, plan, index] = [np.array(shard) for shard in shards]
        if self._devices.quirks.is_host_memory and not _jaxlib.is_sub_byte(kind.dtype):
            return value, [(_jaxlib.address_of(shard) if shard.size else 0, shard.nbytes) for shard in shards]
        copies = [np.ascontiguousarray(shard) for shard in shards]
        return copies, [(copy.__array_interface__["data"][0], copy.nbytes) for copy in copies]

    def number(self, plan: int, index: int) -> int:
        """The number by which all hosts know an exchange: its number in the program."""
        return self._programs[plan].plan.exchange_numbers[index]

    def begin(self, order: int, plan: int, index: int) -> list[int] | None:
        """Allocates the memory of this host's target shards. Returns for each the offset of its rows and of their
        numbers; None: no room now.

        Raises:
            ResourceExhaustedError: the memory for transfers is too small for it.
        """
        program, here = self._programs[plan], self._devices.host
        node, shape = program.exchanges[index]
        kind = program.bound.program.values[node.outputs[0]]
        rows, dtype = (shape.capacity, *kind.shape[1:]), kind.dtype
        count = self._shards_here(shape.targets, shape.target_shards)
        nbytes = math.prod(rows) * dtype.itemsize
        needed = count * (block_bytes(nbytes) + block_bytes(shape.capacity * _INT32.itemsize))
        if self._core.arena_capacity() > 0 and needed > self._transfer_bytes:
            raise errors.ResourceExhaustedError(
                f"pw.exchange takes {needed} bytes on host {here}, for {count} shards of {shape.capacity} rows; its "
                f"memory for transfers has {self._transfer_bytes} bytes: give a smaller capacity"
            )
        rooms, offsets = [], []
        for _ in range(count):
            blocks = []
            for extent, kind_of in ((rows, dtype), ((shape.capacity,), _INT32)):
                block = allocate_block(self._core, extent, kind_of, self._transfer_bytes)
                if block is None:
                    return None
                blocks.append(block[0])
                offsets.append(block[1])
            rooms.append(_Room(*blocks))
        self._rooms[order, plan, index] = rooms
        if rooms:
            views = [view for room in rooms for view in (room.rows, room.numbers)]
            self._transfers.expect(order, self.number(plan, index), shape.source_hosts, views)
        return offsets

    @own_settings
    def finish(
        self,
        order: int,
        plan: int,
        index: int,
        kept: Sequence[int],
        offered: Sequence[int],
        slots: Sequence[Sequence[int]],
    ) -> list[jax.Array]:
        """Makes the outputs that this host has, when all rows have come.

        `kept` and `offered`: per target shard of the host, the rows that it has, and that were sent to it. `slots`: per
        source shard of the host, the slot of each row.
        """
        program = self._programs[plan]
        node, shape = program.exchanges[index]
        key = (order, plan, index)
        rooms, origins = self._take(key)
        parts: list[list[np.ndarray]] = []
        if shape.has_target(self._devices.host):
            for number, room in enumerate(rooms):
                room.clear(origins[number] < 0 if shape.how is None else slice(kept[number], None))
            parts.append([room.rows for room in rooms])
            if shape.how is not None:
                parts.append([room.numbers for room in rooms])
                parts += [[np.array([count], np.int32) for count in counts] for counts in (kept, offered)]
        if shape.how is not None and shape.has_source(self._devices.host):
            parts.append([np.array(each, np.int32) for each in slots])
        outputs = shape.part(node, self._devices.host)[1]
        return [self._target(program, value).assemble(each) for value, each in zip(outputs, parts, strict=True)]

    def _take(self, key: _Key) -> tuple[list[_Room], list[np.ndarray]]:
        """Rows come no more: the memory of the host's target shards, and the numbers that their slots expect."""
        order, plan, index = key
        rooms = self._rooms.pop(key, [])
        if rooms:
            self._transfers.forget(
                order, self.number(plan, index), self._programs[plan].exchanges[index][1].source_hosts
            )
        return rooms, self._origins.pop(key, [])

    def abandon(self, order: int, plan: int, index: int) -> None:
        """Returns the memory of a failed exchange."""
        self._take((order, plan, index))

    def _target(self, program: Program, value: int) -> LocalPlacement:
        if value not in program.placements:
            program.placements[value] = LocalPlacement(program.bound.placed(value), self._devices)
        return program.placements[value]

    def _shards_here(self, ranges: Any, shards: int) -> int:
        """How many of the shards are on this host."""
        return ExchangeShape.count_on(ranges, shards, self._devices.host)
