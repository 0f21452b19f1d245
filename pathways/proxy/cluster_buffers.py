"""Buffers of the door on a cluster: which shards of which arrays they consist of.

What the client makes of shards without moving a byte is known here alone. A program that takes such a buffer shows the
shards as one array first (`Computation.views`); one that takes a whole array as it is shows nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pathways.compiler.ir import View
from pathways.proxy.behind import AllShards, Done, Shard
from pathways.proxy.cluster_kinds import DeviceList, Kind, apart
from pathways.proxy.shard_programs import Builder
from pathways.proxy.waiter import Waiter


class ArrayShard(NamedTuple):
    """One shard of an array of the cluster."""

    array: Any  # a `pw.Array`
    kind: Kind
    number: int


class ClusterBuffer:
    """See `pathways.proxy.behind.Buffer`."""

    memory_kind = "device"

    def __init__(self, pieces: Sequence[ArrayShard], waiter: Waiter, form: Form | None = None) -> None:
        """`pieces`: one per device, all of one shape and element type. `form`: they are a whole array of this form, and
        the first one is enough.
        """
        self._pieces, self.form = pieces, form
        self._waiter = waiter

    @property
    def pieces(self) -> Sequence[ArrayShard]:
        """Its shards, one per device."""
        if len(self._pieces) != len(self.devices):
            array, kind, _ = self._pieces[0]
            self._pieces = [ArrayShard(array, kind, number) for number in range(len(kind.devices))]
        return self._pieces

    @property
    def devices(self) -> DeviceList:
        """See `Buffer`."""
        if self.form is not None:
            return self.form.kinds[0].devices
        return tuple(piece.kind.devices[piece.number] for piece in self._pieces)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Buffer`."""
        return self._pieces[0].kind.shard_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `Buffer`."""
        return self._pieces[0].kind.dtype

    @property
    def first(self) -> Any:
        """The array of its first shard: of a whole one, its only one."""
        return self._pieces[0].array

    @property
    def arrays(self) -> list[Any]:
        """The arrays that it consists of, each once."""
        return list({id(piece.array): piece.array for piece in self._pieces}.values())

    def when_ready(self, then: Done) -> None:
        """See `Buffer`."""
        self._waiter.add(self.arrays, then)

    def delete(self) -> None:
        """See `Buffer`."""
        for array in self.arrays:
            array.delete()


def whole(array: Any, form: Form, waiter: Waiter) -> ClusterBuffer:
    """A buffer of all shards of an array; `form` is that of its kind."""
    return ClusterBuffer((ArrayShard(array, form.kinds[0], 0),), waiter, form)


def form_of_kind(kind: Kind) -> Form:
    """The form of a whole array."""
    count = len(kind.devices)
    return Form((kind,), (0,) * count, tuple(range(count)))


@dataclasses.dataclass(frozen=True)
class Form:
    """How an argument consists of shards of arrays: of which kinds these are, and per device the array and its shard.
    It is the same for arguments for which one program serves. `is_whole`: it is an array as it is.
    """

    kinds: tuple[Kind, ...]
    inputs: tuple[int, ...]
    shards: tuple[int, ...]

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether it is one array with all its shards, in their order."""
        return len(self.kinds) == 1 and self.shards == tuple(range(len(self.kinds[0].devices)))

    def takes_all(self) -> list[bool]:
        """Of each array, whether all of its shards are in this."""
        used = set(zip(self.inputs, self.shards, strict=True))
        return [all((at, n) in used for n in range(len(kind.devices))) for at, kind in enumerate(self.kinds)]

    @property
    def devices(self) -> DeviceList:
        """The device of each shard."""
        return tuple(self.kinds[at].devices[shard] for at, shard in zip(self.inputs, self.shards, strict=True))

    def add_to(self, builder: Builder, shown: Kind | None = None) -> int:
        """Makes it an argument, or several that are shown as one; returns the value. `shown`: its kind; any if None."""
        arguments = [builder.argument(kind) for kind in self.kinds]
        if self.is_whole and shown in (None, self.kinds[0]):
            return arguments[0]
        first, devices = self.kinds[0], self.devices
        shown = shown or apart(first.shard_shape, first.dtype, devices)
        (value,) = builder.call(devices, arguments, [shown], views=(View(self.inputs, self.shards),))
        return value


def form_of(shards: Sequence[Shard]) -> tuple[Form, list[Any]]:
    """The form of an argument, and the arrays that it consists of."""
    if isinstance(shards, AllShards) and (known := shards.buffer.form) is not None:  # type: ignore[attr-defined]
        return known, shards.buffer.arrays  # type: ignore[attr-defined]
    pieces = pieces_of(shards)
    number: dict[int, int] = {}
    arrays: list[Any] = []
    kinds: list[Kind] = []
    for piece in pieces:
        if id(piece.array) not in number:
            number[id(piece.array)] = len(arrays)
            arrays.append(piece.array)
            kinds.append(piece.kind)
    inputs = tuple(number[id(piece.array)] for piece in pieces)
    return Form(tuple(kinds), inputs, tuple(piece.number for piece in pieces)), arrays


def pieces_of(shards: Sequence[Shard]) -> list[ArrayShard]:
    """The shards as pieces of arrays."""
    return [shard.buffer.pieces[shard.number] for shard in shards]  # type: ignore[attr-defined]
