"""Big arrays of this process that functions close over: arguments of their programs, sent to a slice once.

As in `jax.jit`, a run takes the value that an array had when the function was traced, also if the array has been
written or deleted since. So a `Snapshot` has memory of its own, unless nobody can write to that of the array. Functions
that close over equal arrays share the snapshot, and what was sent of it to a slice, as long as one of them is there.
On the slice it is an array like any other, so it counts there (MEM-1), and it moves with the slice. Small arrays are no
arguments: they are compiled in, so that XLA can compute with them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from pathways import _core, _jaxlib
from pathways.api.arrays.array import Array
from pathways.api.arrays.host_values import put_physical
from pathways.api.programs.constants import is_frozen
from pathways.compiler.closures import ClosedOver
from pathways.compiler.trace import Argument, as_argument

#: Arrays up to this size are compiled in.
SMALL_BYTES = 1 << 12
#: Of so many bytes is the key by which an equal snapshot is looked for.
_SAMPLES = 1 << 10

_lock = threading.Lock()
_known: weakref.WeakValueDictionary[Hashable, Snapshot] = weakref.WeakValueDictionary()  # guarded by _lock


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """A snapshot on a slice. `losses`: of hosts, when it was sent; after another one it may be gone (ERR-2)."""

    array: Array
    losses: int

    def is_there(self, layout: _core.Layout) -> bool:
        """Whether runs may take the array, as one of this layout. It polls for losses."""
        array = self.array
        if array.layout is not layout or array.is_deleted() or array.client.state(array) == "failed":
            return False
        return bool(array.client.losses == self.losses)


class Snapshot:
    """The value of an array of this process when a function that closes over it was traced. Immutable."""

    def __init__(self, argument: Argument, value: np.ndarray) -> None:
        """`argument`: with the logical shape and dtype. `value`: in the physical form; its memory stays as it is."""
        self.argument = argument
        self.value = value
        self._sent: weakref.WeakValueDictionary[_core.Layout, Sent] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        weakref.finalize(self, _freed, value.nbytes).atexit = False

    def on(self, layout: _core.Layout) -> Sent:
        """It as an array of this layout: sent, unless it is there."""
        with self._lock:
            sent = self._sent.get(layout)
            if sent is None or not sent.is_there(layout):
                losses = layout.slice.cluster.native.losses
                sent = Sent(put_physical(self.value, layout, "an array that the function closes over"), losses)
                self._sent[layout] = sent
            return sent


def stands_in(value: Any) -> ClosedOver | None:
    """What becomes an argument in place of a closed-over value of this process; None: it stays a constant."""
    is_key = isinstance(value, jax.Array) and not _jaxlib.is_tracer(value) and _jaxlib.is_key(value.dtype)
    if not (is_key or isinstance(value, np.ndarray) or (_jaxlib.is_concrete(value) and value.is_fully_addressable)):
        return None
    if not is_key and value.nbytes <= SMALL_BYTES:
        return None
    argument = as_argument(value, "a closed-over array")
    physical = np.asarray(_jaxlib.to_physical(value, argument.dtype))
    if physical.nbytes <= SMALL_BYTES:
        return None
    return ClosedOver(
        _of(argument, physical, is_frozen=not isinstance(value, np.ndarray) or is_frozen(value)), is_free=True
    )


def _of(argument: Argument, value: np.ndarray, is_frozen: bool) -> Snapshot:
    """The snapshot of a value. JAX often copies an array when it traces, so equal arrays are told by their bytes."""
    if not value.flags.c_contiguous:
        value, is_frozen = np.ascontiguousarray(value), True
    flat = value.reshape(-1).view(np.uint8)
    key = argument, flat[:: -(-flat.size // _SAMPLES)].tobytes()
    with _lock:
        known = _known.get(key)
        if known is not None and np.array_equal(known.value.reshape(-1).view(np.uint8), flat):
            return known
        if not is_frozen:
            value = value.copy()
        made = _known[key] = Snapshot(argument, value)
        return made


class _Allocator:
    """Gives freed memory back. glibc keeps it when an array that lives on lies behind it in memory."""

    #: After so many freed bytes.
    EVERY = 32 << 20
    freed = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def _freed(nbytes: int) -> None:
    _Allocator.freed += nbytes
    if _Allocator.freed >= _Allocator.EVERY and _Allocator.trim is not None:
        _Allocator.freed = 0
        _Allocator.trim(0)


class SentSnapshots:
    """The snapshots that a compiled program takes as arguments: sent again when hosts were lost (ERR-2)."""

    def __init__(self, call: _core.Call, sent: Mapping[int, tuple[Snapshot, Sent]]) -> None:
        """`sent`: by position in `call.closed_over`, which has these arrays."""
        self._call, self._sent = call, dict(sent)
        self._losses = min((each.losses for _, each in sent.values()), default=0)
        self._settled = False  # whether all of them had arrived, at the last look
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sent)

    def look(self) -> None:
        """Before a run: the call has arrays that are there."""
        if self._settled and self._losses == self._call.client.losses:
            return
        with self._lock:
            first = len(self._call.inputs)
            losses = self._call.client.losses
            for at, (snapshot, before) in list(self._sent.items()):
                layout = self._call.layouts[first + at]
                sent = before if before.is_there(layout) else snapshot.on(layout)
                self._sent[at] = snapshot, sent
                self._call.closed_over[at] = sent.array
            client = self._call.client
            self._settled = all(client.state(sent.array) == "ready" for _, sent in self._sent.values())
            self._losses = losses
