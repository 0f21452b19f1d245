"""How the bytes of an array go from the client to the hosts, and come back.

A cluster has one `HostTransfer`, chosen when it is connected:

    SharedMemory    to other processes: few bytes inside the command, more in a block of the client's arena
    InProcess       embedded: client and host are one process, and hand the values themselves over

A small result that the client reads anyway comes with its completion, without a read-back of its own: `InlineResult`.

READ-3: a read that must ask for its value, and wait, asks for the small values that are probably read next, too: the
other results of its run, and the same result of other runs. If the client's last read asked as well, and no run came
between, it asks for all that are ready. So whoever reads a tree, leaf by leaf, waits for one round trip. Nobody waits
for such a value before it is read, and it changes nothing: its array may fail, be donated or be freed, as if nobody had
asked. A value that has come and is not read soon is dropped, so an array that lives on keeps nothing more than before;
but not while values of ready arrays are on their way: on a slow line, the last may come long after the first.
To find such values, a read looks at all arrays of the client. When there are many, and the last look found nothing,
only the second read in a row looks: a loop that reads one value after each run pays for no looks.
"""

from __future__ import annotations

import abc
import gc
import itertools
import threading
import time
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np

from pathways import _core, _jaxlib, errors
from pathways.cluster.arena_trimming import ArenaTrimmer
from pathways.compiler.ir import ArrayType
from pathways.plan.shard_packing import Packing, aligned
from pathways.plan.topology import SliceBinding
from pathways.protocol import payloads

#: Up to here bytes travel inside the command; above, through shared memory.
INLINE_BYTES = 1024
#: How long a value waits for room in shared memory before nothing seems to give any back.
_PATIENCE_S = 30.0
#: Most values that a read asks for ahead. A host takes no more than 4,096 commands of a client (messages/credits.h).
MOST_AHEAD = 1024
#: With more arrays than this, a look for what to ask ahead counts as long.
MANY = 1024
#: From here on the trimmer looks at how much of the arena is in use.
BIG_BYTES = 1 << 20
_READY, _FAILED, _PENDING = "ready", "failed", "pending"
_keys = itertools.count(1)


class KnownPlacement(NamedTuple):
    """Where the arrays of one layout are, as its hosts were told: under which number, and for which devices."""

    number: int
    binding: SliceBinding
    packing: Packing
    #: What each host needs of the packed form (`payloads.leased_parts`), if they are on several machines.
    parts: bytes = b""


class HostTransfer(abc.ABC):
    """Puts and read-backs of one cluster. The caller is inside `_core.Client.enter`, so no slice moves meanwhile."""

    @abc.abstractmethod
    def put(self, array: Any, leaf: Any, placement: KnownPlacement, what: object) -> None:
        """Sends the value of a new array. The bytes are copied, once, before this returns.

        Args:
            array: the new `pw.Array`, of the layout that the value has.
            leaf: a NumPy array, or a `jax.Array` of this process.
            placement: that of the layout.
            what: the value's name in messages.
        """

    @abc.abstractmethod
    def read_back(self, array: Any) -> ReadBack:
        """Begins to bring the value of an array to this process."""

    @abc.abstractmethod
    def read_ahead(self, array: Any) -> None:
        """Begins the same for what is probably read next (READ-3). Waits for nothing. `array`: whose read-back has just
        begun, because it is read now."""

    @abc.abstractmethod
    def drop_unread(self) -> None:
        """Drops what was read ahead, had come at the last call of this, and is not read yet (READ-3). Any thread."""


class SharedMemory(HostTransfer):
    """To host processes of this machine."""

    def __init__(self, client: _core.Client, arena_trimmer: ArenaTrimmer, has_machines: bool) -> None:
        """`has_machines`: hosts may be on several machines, and each writes into memory of its own machine first."""
        self._client = client
        self._has_machines = has_machines
        self._arena_trimmer = arena_trimmer
        self._asked_at = -1  # how many runs there had been at the last read that had to ask
        self._was_in_vain = False  # the last look at many arrays
        self._ahead: list[weakref.ref[Any]] = []  # arrays that were read ahead

    def put(self, array: Any, leaf: Any, placement: KnownPlacement, what: object) -> None:  # noqa: D102
        kind: ArrayType = array.layout.cache
        if array.layout.nbytes <= INLINE_BYTES:
            data = np.asarray(leaf, dtype=kind.dtype).tobytes()
            self._client.put(array, payloads.put_inline(placement.number, data))
            return
        nbytes, parts = placement.packing.nbytes, placement.parts
        block = self.allocate(nbytes + len(parts), what)
        placement.packing.pack(leaf, memoryview(block))
        memoryview(block)[nbytes:] = parts
        count = len(parts) // payloads.LEASED_PART_BYTES
        self._client.put(array, payloads.put_leased(placement.number), block, parts=count)

    def read_back(self, array: Any) -> ReadBack:  # noqa: D102
        packing, nbytes = self._form(array)
        block = self.allocate(nbytes, f"reading {array!r}", array)
        read_back = _SharedMemoryReadBack(self._client, block, packing)
        self._client.own_token(read_back, array.layout.parts)
        self._client.fetch(array, read_back.token, payloads.fetch_leased(packing is not None), block)
        return read_back

    def _form(self, array: Any) -> tuple[Packing | None, int]:
        """How an array comes, None: in C order; and how many bytes it then takes."""
        layout = array.layout
        if not self._has_machines or layout.parts == 1:
            return None, max(layout.nbytes, 1)
        packing = layout.slice.placed(layout.cache).packing
        return packing, max(packing.nbytes, 1)

    def read_ahead(self, array: Any) -> None:  # noqa: D102
        in_a_row = self._asked_at == self._client.dispatches
        self._asked_at = self._client.dispatches
        if self._was_in_vain and not in_a_row:
            return
        others = array._beside(in_a_row, MOST_AHEAD)
        self._was_in_vain = not others and self._client.top > MANY
        for other in others:
            packing, nbytes = self._form(other)
            block = self._client.allocate(nbytes)
            if block is None:
                break
            read_back = _SharedMemoryReadBack(self._client, block, packing)
            if not other._ask_ahead(read_back, payloads.fetch_leased(packing is not None), block):
                break
            other.ahead = read_back
            self._ahead.append(weakref.ref(other))

    def drop_unread(self) -> None:  # noqa: D102
        asked, self._ahead = self._ahead, []
        left, are_coming = [], False
        for each in asked:
            array = each()
            read_back = None if array is None else array.ahead
            if array is None or read_back is None:
                continue
            self._ahead.append(each)
            if read_back.is_left():
                left.append(array)
            elif not read_back.has_come:
                are_coming = are_coming or self._client.state(array) == _READY
        if not are_coming or len(left) > MOST_AHEAD:
            for array in left:
                array.ahead = None

    def allocate(self, nbytes: int, what: object, array: Any = None) -> _core.BlockView:
        """A block of the client's shared memory; waits while others are released, and refuses what can never fit. The
        wait ends with `array`, if that fails (END-1).
        """
        block = allocate(self._client, nbytes, what, array)
        if nbytes >= BIG_BYTES:
            self._arena_trimmer.block_taken()
        return block


class InProcess(HostTransfer):
    """To this process itself. A value is handed over as it is, but never memory that the caller can change."""

    def __init__(self, client: _core.Client, handed_over: dict[int, Any]) -> None:
        """`handed_over`: of the host, by key or token; the client and the host put values there for each other."""
        self._client = client
        self._handed_over = handed_over

    def put(self, array: Any, leaf: Any, placement: KnownPlacement, what: object) -> None:  # noqa: D102
        key = next(_keys)
        if isinstance(leaf, jax.Array):
            self._handed_over[key] = leaf
        else:
            self._handed_over[key] = memory = aligned(placement.packing.nbytes)
            placement.packing.pack(leaf, memory)
        self._client.put(array, payloads.put_local(placement.number, key))

    def read_back(self, array: Any) -> ReadBack:  # noqa: D102
        read_back = _InProcessReadBack(self._client, self._handed_over)
        self._client.own_token(read_back, array.layout.parts)
        self._handed_over[read_back.token] = None  # the host fills it in only where it is asked for
        self._client.fetch(array, read_back.token, payloads.fetch_local(read_back.token))
        return read_back

    def read_ahead(self, array: Any) -> None:
        """There is nobody to ask."""

    def drop_unread(self) -> None:
        """There is nothing."""


class InlineResult:
    """A value that comes with its completion (READ-1). While it stands in `Array.cached`, the array is not donated."""

    def result(self, array: Any) -> Any:
        """Waits and returns the value; raises what the array failed with."""
        data = array._read()
        if data is None:
            array.cached = None
            raise array._deleted_error("reading it") if array.is_deleted() else array._failure()
        return value_of(array.layout, data)


INLINE_RESULT = InlineResult()


class ReadBack(abc.ABC):
    """A read-back under way: a token to wait for, and where the bytes come. It owns the token, which is made for it."""

    token = 0

    def __init__(self, client: _core.Client) -> None:
        self._client = client
        self._lock = threading.Lock()  # two threads may read one array
        self._value: Any = None

    @abc.abstractmethod
    def _take(self, layout: _core.Layout) -> Any:
        """The value, which is there."""

    def is_here(self, array: Any) -> bool:
        """Whether the value has come; never waits."""
        return self._value is not None or (
            not self._client.closed and self._client.wait_raw(self.token, 0.0, array.raw_handle) == _READY
        )

    def result(self, array: Any) -> Any:
        """Waits and returns the value; raises what the array failed with."""
        with self._lock:
            if self._value is None:
                self._value = self._wait(array)
            return self._value

    def _wait(self, array: Any) -> Any:
        if self._client.wait_raw(self.token, source=array.raw_handle) != _FAILED:  # END-1
            return self._take(array.layout)
        text = self._client.error_text(self.token)
        array.cached = None
        if not array.is_deleted() and self._client.state(array) == _FAILED:  # says more than that it is not there
            raise array._failure()
        raise errors.from_text(text, errors.ComputationError)

    def __del__(self) -> None:
        if self.token != 0 and not self._client.closed:
            self._client.forget_token(self.token)


class _SharedMemoryReadBack(ReadBack):
    def __init__(self, client: _core.Client, block: _core.BlockView, packing: Packing | None) -> None:
        super().__init__(client)
        self._block = block
        self._packing = packing  # None: the array is in C order
        self.has_come = False  # or will not; at the last look

    def is_left(self) -> bool:
        """Looks whether the value has come, or will not. Returns whether that was so at the last look already."""
        had_come, self.has_come = self.has_come, self._client.wait_raw(self.token, 0.0) != _PENDING
        return had_come

    def _take(self, layout: _core.Layout) -> Any:
        memory = memoryview(self._block)
        return value_of(layout, memory if self._packing is None else self._packing.unpack(memory))


class _InProcessReadBack(ReadBack):
    def __init__(self, client: _core.Client, handed_over: dict[int, Any]) -> None:
        super().__init__(client)
        self._handed_over = handed_over

    def _take(self, layout: _core.Layout) -> Any:
        return _jaxlib.from_physical(self._handed_over.pop(self.token), layout.dtype)

    def __del__(self) -> None:
        super().__del__()
        if not self._client.closed:
            self._handed_over.pop(self.token, None)


def value_of(layout: _core.Layout, data: Any) -> Any:
    """A fetched value, of read-only memory."""
    kind: ArrayType = layout.cache
    value: Any = np.ndarray(kind.shape, kind.dtype, data if layout.nbytes else b"")
    if value.flags.writeable:
        value.flags.writeable = False
    return value if layout.plain is not None else _jaxlib.from_physical(value, layout.dtype)


def allocate(client: _core.Client, nbytes: int, what: object, array: Any = None) -> _core.BlockView:
    """A block of the client's shared memory; waits while others give theirs back, and refuses what can never fit. The
    wait ends with `array`, if that fails (END-1).
    """
    capacity = client.arena_stats()[2]
    if nbytes > capacity:
        raise errors.ResourceExhaustedError(
            f"{what} has {nbytes} bytes, but this client's shared memory only {capacity}; connect with more"
        )
    deadline = 0.0
    while (block := client.allocate(nbytes)) is None:
        if deadline == 0:
            gc.collect()  # arrays in cycles
            deadline = time.monotonic() + _PATIENCE_S
        client.flush()
        client.check_alive()
        _core.check_deadline("waiting for room in this client's shared memory")
        if array is not None and not array.is_deleted() and client.state(array) == _FAILED:
            raise array._failure()
        client.pause(0.001)
        if time.monotonic() > deadline:
            raise errors.ResourceExhaustedError(
                f"{what} needs {nbytes} bytes of this client's shared memory, and none of its {capacity} bytes became "
                f"free for {_PATIENCE_S:g} s: {client.arena_stats()[0]} are in use by arrays that are still alive"
            )
    return block
