"""Arrays of a session: views of buffers. What makes an array of the shards of others tells nobody.

    Held    a buffer, and which of its shards are gone because they were donated or deleted
    Array   dtype, shape, sharding, and a shard of a held buffer for each of its devices

Several arrays may view the same shard. When it is donated or deleted, it is gone for all of them, as in plain JAX. The
session's thread alone uses arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pathways.proxy.behind import AllShards, Buffer, Done, Shard
from pathways.proxy.contexts import Context
from pathways.proxy.dtypes import DType
from pathways.proxy.errors import Code, Refused
from pathways.proxy.host_arrays import Strings
from pathways.proxy.shardings import Sharding


class StringBuffer:
    """Arrays of strings, which the door itself holds: `values[i]` on `devices[i]`."""

    dtype = None

    def __init__(
        self, values: tuple[Strings, ...], shape: tuple[int, ...], devices: tuple[int, ...], memory_kind: str
    ) -> None:
        self.values, self.shape, self.devices, self.memory_kind = values, shape, devices, memory_kind

    def most_bytes(self, number: int) -> int:
        """The bytes of one shard's strings at most."""
        return sum(map(len, self.values[number]))

    def read(self, number: int, then: Callable[[Strings | BaseException], None]) -> None:
        """Tells `then` the strings of one shard, or why there are none; from any thread."""
        then(self.values[number])

    def when_ready(self, then: Done) -> None:
        """Strings are ready from the start."""
        then(None)

    def delete(self) -> None:
        """Frees the strings."""
        self.values = ()


@dataclasses.dataclass(eq=False, slots=True)
class Held:
    """A buffer of a session."""

    buffer: Buffer
    creator: str  # what made it: a function's name, or the kind of request
    context: Context | None
    gone: set[int] = dataclasses.field(default_factory=set)  # numbers of shards

    @property
    def shard_bytes(self) -> int:
        """The bytes of one shard; 0 for strings and tokens."""
        dtype = self.buffer.dtype
        return 0 if dtype is None else dtype.itemsize * math.prod(self.buffer.shape)


Part = tuple[Held, int]


@dataclasses.dataclass(eq=False, slots=True)
class Array:
    """An array that the client has a handle of."""

    dtype: DType
    shape: tuple[int, ...]
    sharding: Sharding
    context: Context | None  # of the request that made it
    whole: Held | None = None  # a buffer, if it is all of it and in order
    _parts: tuple[Part, ...] = ()  # those of a whole are made when somebody asks
    is_given: bool = False  # to another array, by a request that takes its input

    @property
    def parts(self) -> tuple[Part, ...]:
        """Per device: a buffer, and the number of its shard."""
        if self.whole is not None and not self._parts:
            self._parts = tuple((self.whole, number) for number in range(len(self.whole.buffer.devices)))
        return self._parts

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each part."""
        return self.sharding.devices

    @property
    def is_deleted(self) -> bool:
        """Whether it cannot be used any more."""
        if self.whole is not None:
            return bool(self.whole.gone)
        return self.is_given or any(held.gone and number in held.gone for held, number in self._parts)

    @property
    def held(self) -> tuple[Held, ...]:
        """The buffers that it views, each once."""
        if self.whole is not None:
            return (self.whole,)
        return tuple(dict.fromkeys(held for held, _ in self._parts))

    def shards(self) -> Sequence[Shard]:
        """Its shards. Raises `Refused` when it is deleted."""
        self.check_usable()
        if self.whole is not None:
            return AllShards(self.whole.buffer)
        return [Shard(held.buffer, number) for held, number in self._parts]

    def check_usable(self) -> None:
        """Raises `Refused` when it is deleted."""
        if self.is_deleted:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"Array has been deleted or donated: {self.dtype.name}{list(self.shape)}",
                (self.context,) if self.context else (),
            )

    def give(self) -> None:
        """Another array has its parts now."""
        self.is_given, self.whole, self._parts = True, None, ()

    def lose(self, is_donated: bool) -> None:
        """Its shards are gone, for all arrays that view them: a program has taken them, or they are to be freed."""
        for held in self.held:
            held.gone.update(number for one, number in self.parts if one is held)
            if not is_donated and len(held.gone) == len(held.buffer.devices):
                held.buffer.delete()
        self.give()


def of_buffer(
    buffer: Buffer, creator: str, dtype: DType, shape: tuple[int, ...], sharding: Sharding, context: Context | None
) -> Array:
    """The array whose parts are the shards of `buffer`, in order."""
    return Array(dtype, shape, sharding, context, Held(buffer, creator, context))


def of_parts(
    dtype: DType,
    shape: tuple[int, ...],
    sharding: Sharding,
    parts: Sequence[tuple[Held, int]],
    context: Context | None,
) -> Array:
    """The array with these parts. Raises `Refused` when they do not lie and are not as the sharding says."""
    if len(parts) != len(sharding.devices):
        raise Refused(Code.INVALID_ARGUMENT, f"{len(parts)} shards for {len(sharding.devices)} devices")
    for number, ((held, shard), device) in enumerate(zip(parts, sharding.devices, strict=True)):
        if held.buffer.devices[shard] != device:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"shard {number} lies on device {held.buffer.devices[shard]}, but its sharding says device {device}",
            )
        if held.buffer.dtype != dtype.numpy or isinstance(held.buffer, StringBuffer) != dtype.is_string:
            raise Refused(Code.INVALID_ARGUMENT, f"shard {number} is {held.buffer.dtype}, but the array {dtype.name}")
    return Array(dtype, shape, sharding, context, None, tuple(parts))
