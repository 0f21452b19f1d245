"""`pw.Array`: a sharded buffer that may still be being computed, with a handle and an owner.

It stands wherever a JAX array does: in pytrees, under NumPy functions, in arithmetic (which runs on its own slice, see
`operators`). Only what needs the value waits for it: `np.asarray`, `float`, `print`, a comparison used as a condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pathways import _core, _jaxlib, errors
from pathways.api.array import _unpickle_key
from pathways.api.arrays import transfer_guard
from pathways.api.arrays.host_transfer import INLINE_RESULT, InlineResult, ReadBack, value_of
from pathways.api.arrays.shards import shards_of
from pathways.compiler import specs

_READY, _FAILED = "ready", "failed"
#: Embedded, up to so many bytes are shown by `repr` before anybody read them.
_SHOWN_BYTES = 1 << 16


if TYPE_CHECKING:
    # What `jax_interop` adds is what JAX's own arrays have; to `isinstance` as well, see `__class__`.
    class _Face(_core.Buffer, jax.Array):
        pass
else:
    _Face = _core.Buffer


def _conversion(kind: type) -> Any:
    """The method of `Array` that makes a Python number of one element."""

    def convert(self: Array) -> Any:
        if self.layout.shape:
            raise TypeError(f"only scalar arrays can be converted to {kind.__name__}, got {self!r}")
        return kind(self.__array__())

    convert.__name__ = f"__{kind.__name__}__"
    convert.__qualname__ = f"Array.{convert.__name__}"
    convert.__annotations__ = {"return": kind.__name__}
    return convert


class Array(_Face):
    """A logical array on a slice. Made by programs and by `pw.device_put`; never directly."""

    __slots__ = ("__weakref__",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refused: there is no value without a slice."""
        raise TypeError("pw.Array is not made directly; pw.device_put(x, slice) puts a value on a slice")

    # ---- what it is; none of these waits. `_FACTS` has the rest: shape, dtype and so on

    @property
    def slice(self) -> Any:
        """The slice it lives on."""
        return self.layout.slice

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """Its sharding over the slice's abstract mesh; knows the slice."""
        spec = specs.to_partition_spec(self.layout.spec[: len(self.layout.shape)])
        return self.layout.slice.sharding(spec)

    def devices(self) -> set[Any]:
        """The devices of its slice."""
        return set(self.layout.slice.devices)

    @property
    def device(self) -> Any:
        """Its sharding, as of any sharded array of JAX's; also on a slice of one device, as slices may move."""
        return self.sharding

    @property
    def format(self) -> Any:
        """Its layout in memory, major to minor, with its sharding: a `jax.experimental.layout.Format`."""
        return _jaxlib.array_format(len(self.layout.shape), self.sharding)

    def on_device_size_in_bytes(self) -> int:
        """Bytes on all devices of its slice together, replicas counted."""
        return int(self.layout.space_bytes) * int(self.layout.slice.size)

    @property
    def addressable_shards(self) -> list[Any]:
        """Its parts, one per device of the slice; the client can read each."""
        if self.is_deleted():
            raise self._deleted_error("addressable_shards")
        return shards_of(self)

    @property
    def global_shards(self) -> list[Any]:
        """As `addressable_shards`."""
        return self.addressable_shards

    def addressable_data(self, index: int) -> Any:
        """The part on device `index` of the slice, as an array."""
        return self.addressable_shards[index].data

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`isinstance(x, jax.Array)` is true, as for every array that JAX computes with; `type(x)` is `pw.Array`."""
        return jax.Array

    def is_ready(self) -> bool:
        """Whether its value exists (or its computation failed); never blocks."""
        if self.is_deleted():
            raise self._deleted_error("is_ready()")
        self.client.pump()
        return bool(self.client.state(self) != "pending")

    # ---- waiting and reading

    def block_until_ready(self) -> Array:
        """Waits for the value and returns the array itself.

        Raises:
            ComputationError: what it depends on failed; names the computation, host and devices, with XLA's message.
            HostLostError, ControllerLostError, ClusterClosedError: the cluster is gone.
            DeletedArrayError: it was deleted or donated.
        """
        if self.is_deleted():
            raise self._deleted_error("block_until_ready()")
        if self.client.wait(self) == _FAILED:
            raise self._failure()
        return self

    def copy_to_host_async(self) -> None:
        """Starts reading the value back; a later `np.asarray` finds it here. Waits for nothing.

        From now on results of this call that are small come with their completion (READ-1), at no cost of their own.
        Embedded, there is nothing to start: the value is in this process (READ-2).
        """
        if self.is_deleted():
            raise self._deleted_error("copy_to_host_async()")
        if self.cached is None and not self.client.is_embedded:
            self._learn()
            self.cached = INLINE_RESULT if self.is_inline else self.ahead or self._read_back()
            self.ahead = None

    def delete(self) -> None:
        """Gives the buffer back now. Any later use is refused."""
        self._forget()

    #: Before NumPy's arrays, as JAX's are. `jax_interop` adds what NumPy asks for.
    __array_priority__ = 100

    def __dlpack__(self, **options: Any) -> Any:
        """The value, fetched, as memory of this process's CPU; see `numpy.ndarray.__dlpack__` for the options.

        It is read-only. Consumers that know nothing of that (DLPack before 1.0) get a copy.
        """
        value = np.asarray(self)
        if value.dtype.kind not in "biufc" or _jaxlib.is_sub_byte(value.dtype):
            return jax.device_put(value, jax.local_devices(backend="cpu")[0]).__dlpack__()
        if not value.flags.writeable and (options.get("max_version") or (0,))[0] < 1:
            value = value.copy()
        return value.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU, where a fetched value is."""
        return (1, 0)

    def __reduce__(self) -> Any:
        """A pickle holds the value, and gives a NumPy array (or a JAX key array): a cluster cannot be pickled."""
        value = self._value()
        if isinstance(value, np.ndarray):
            return value.__reduce__()
        return _unpickle_key, (np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value)))

    def _value(self) -> Any:
        """The whole logical array on this machine: read-only NumPy, or a JAX array for PRNG keys."""
        if self.is_deleted():
            raise self._deleted_error("reading it")
        if self.raw_handle == 0:
            raise errors.ProgramError(
                "a jax.jit inside a loop of a program reads a variable (pw.Variable): read it in the program's own "
                "body, and pass it on as an argument"
            )
        if self.cached is None:
            if not self.layout.slice.quirks.is_host_memory:
                transfer_guard.check("device-to-host", ReadName(self), self)
            value = self._in_process()
            if value is not None:
                self.cached = value = _jaxlib.from_physical(value, self.layout.dtype)
                return value
            if not self.is_inline and self.client.state(self) == _FAILED:
                raise self._failure()
            is_asked = self.is_inline or self.ahead is not None
            self.copy_to_host_async()
            self.cached = self.cached or self._read_back()
            if not is_asked:
                self._read_ahead()
        fetched = self.cached
        if isinstance(fetched, (ReadBack, InlineResult)):
            self.cached = fetched = fetched.result(self)
        return fetched

    def _read_back(self) -> ReadBack:
        self.client.enter()  # a slice that moves changes who answers
        try:
            read_back: ReadBack = self.layout.slice.cluster.transfer.read_back(self)
            return read_back
        finally:
            self.client.leave()

    def _read_ahead(self) -> None:
        """READ-3: this read must ask for its value, so it asks for those that will probably be read next, too."""
        cluster = self.layout.slice.cluster
        cluster.failures.watch()  # its thread drops what is not read
        self.client.enter()
        try:
            cluster.transfer.read_ahead(self)
        finally:
            self.client.leave()

    def _failure(self) -> errors.PathwaysError:
        return errors.from_text(self.client.error_text(self.raw_handle), errors.ComputationError)

    def _deleted_error(self, doing: str) -> errors.DeletedArrayError:
        return errors.DeletedArrayError(f"{doing}: the array {self!r} was deleted, or donated to a program")

    # ---- Python's own protocols; each of these waits

    __float__ = _conversion(float)
    __int__ = _conversion(int)
    __complex__ = _conversion(complex)

    def __bool__(self) -> bool:
        # ValueError, as NumPy's and JAX's arrays raise it: libraries that compare what they do not know catch it.
        if self.layout.shape and self.size != 1:
            many = "an empty array" if self.size == 0 else "an array with more than one element"
            raise ValueError(f"the truth value of {many} is ambiguous, got {self!r}; use .size, .any() or .all()")
        return bool(self.__array__())

    def __index__(self) -> int:
        if self.shape or not np.issubdtype(self.dtype, np.integer):
            raise TypeError(f"only integer scalars can be an index, got {self!r}")
        return int(self._value())

    def item(self, *args: int) -> Any:
        """The value as a Python number."""
        return np.asarray(self).item(*args)

    def tolist(self) -> Any:
        """The value as nested lists."""
        return np.asarray(self).tolist()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-dimensional array")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a 0-dimensional array")
        rows: jax.Array = self
        sharding = self.aval.sharding
        if any(sharding.spec.partitions[:1]):  # over explicit axes: nobody can say what type a row of it has
            rest = jax.sharding.PartitionSpec(None, *sharding.spec.partitions[1:])
            rows = jax.sharding.reshard(self, jax.sharding.NamedSharding(sharding.mesh, rest))
        # As JAX: a hundred rows per dispatch.
        return (row for first in range(0, self.shape[0], 100) for row in jax.numpy.unstack(rows[first : first + 100]))

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __format__(self, spec: str) -> str:
        if self.is_deleted() and not spec:
            return repr(self)
        value = self._value()
        return format(value if self.shape else value[()], spec)

    def __str__(self) -> str:
        if self.is_deleted():
            return repr(self)
        return str(self._value())

    def _here(self) -> Any:
        """The value, if it is in this process's memory already; None otherwise. Waits for nothing and sends nothing."""
        fetched = self.ahead if self.cached is None else self.cached
        if isinstance(fetched, ReadBack):
            return fetched.result(self) if fetched.is_here(self) else None
        if fetched is not None and not isinstance(fetched, InlineResult):
            return fetched
        client = self.client
        if client.closed or client.state(self) != _READY:
            return None
        if self.is_inline:
            data = self._read()
            return None if data is None else value_of(self.layout, data)
        if not self.layout.slice.quirks.is_host_memory or self.nbytes > _SHOWN_BYTES:
            return None
        value = self._in_process()
        return None if value is None else _jaxlib.from_physical(value, self.layout.dtype)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What a notebook shows: it would look for JAX's own ways to print a `jax.Array`."""
        return {"text/plain": repr(self)}

    def __repr__(self) -> str:
        """Never waits. With the value, if it is here already."""
        value = ""
        if self.is_deleted():
            state = ", deleted"
        else:
            state = "" if self.client.closed or self.client.state(self) == _READY else f", {self.client.state(self)}"
            if state == f", {_FAILED}":
                self.client.error_text(self.raw_handle)  # who sees it here has read of the failure
            here = self._here()
            if isinstance(here, np.ndarray):
                value = np.array2string(here, separator=", ", prefix="pw.Array(") + ", "
        dims = ",".join(map(str, self.shape))
        weak = ", weak_type" if self.weak_type else ""
        spec = tuple(self.layout.spec[: len(self.shape)])
        return f"pw.Array({value}{self.dtype}[{dims}]{weak} on {self.layout.slice.mesh_spec.name}, spec={spec}{state})"

    __hash__ = None  # type: ignore[assignment]


class ReadName:
    """The name of a read in messages: worked out when it is read."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __str__(self) -> str:
        return f"reading {self._array!r}"


def _aval(self: Array) -> Any:
    layout = self.layout
    sharding = specs.sharding_in_type(layout.slice.mesh_spec, layout.spec[: len(layout.shape)])
    return _jaxlib.shaped_array(layout.shape, layout.dtype, layout.weak_type, sharding)


#: Properties of `Array` that follow from its layout alone: name, type, description, value.
_FACTS: tuple[tuple[str, str, str, Callable[[Array], Any]], ...] = (
    ("shape", "tuple[int, ...]", "Extents.", lambda self: self.layout.shape),
    ("dtype", "Any", "Element type.", lambda self: self.layout.dtype),
    ("weak_type", "bool", "Whether JAX would promote it like a Python number.", lambda self: self.layout.weak_type),
    ("ndim", "int", "Number of dimensions.", lambda self: len(self.layout.shape)),
    ("size", "int", "Number of elements.", lambda self: math.prod(self.layout.shape)),
    ("nbytes", "int", "Bytes of the whole array, each element once.", lambda self: self.layout.nbytes),
    ("aval", "Any", "What JAX sees of it while it traces.", _aval),
    ("committed", "bool", "True: it stays on its slice, and operations with it run there.", lambda self: True),
    (
        "is_fully_replicated",
        "bool",
        "Whether every device of the slice holds all of it.",
        lambda self: not any(self.layout.spec),
    ),
    ("is_fully_addressable", "bool", "True: the client can read all of it.", lambda self: True),
)
for _name, _type, _description, _value in _FACTS:
    _value.__annotations__ = {"return": _type}
    setattr(Array, _name, property(_value, doc=_description))
