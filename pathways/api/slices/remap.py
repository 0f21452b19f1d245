"""Moving a slice to other devices, or giving it another shape: its arrays go from host to host and keep their names
(MOVE-1).

    the map changes        at the controller alone, which tells the devices
    the gate is closed     no other thread of this client sends anything, and what is released waits
    one move               a program of transfers alone: the live arrays in, fresh ones out, where the slice shall lie
    one rename             once all of them are there: on the hosts the fresh buffers take the old ones' names
    the slice changes      its binding and its mesh; layouts; programs that use it are to be bound or compiled again
    the gate opens

Until the rename nothing has changed here, so a move that fails lets go of what it made, and the controller takes the
change of the map back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pathways import _core, errors
from pathways.api.arrays.array import Array
from pathways.api.programs.registration import Registration
from pathways.api.programs.tracing import is_tracing
from pathways.api.session import Session
from pathways.api.slices.reshape import NewShape
from pathways.api.slices.virtual_devices import Device, Slice
from pathways.compiler.ir import ArrayType, LogicalProgram, MeshSpec, Node, NodeKind
from pathways.plan.binding import BoundProgram
from pathways.plan.topology import SliceBinding
from pathways.process.children import Deadline
from pathways.protocol import payloads

#: Arrays that one run moves: a record must fit the rings.
MOST_AT_ONCE = 256

_one_at_a_time = threading.RLock()


def remap(cluster: Session, slice_: Slice, devices: Sequence[Device | int], deadline: Deadline | None = None) -> None:
    """See `Cluster.remap`. With a deadline, a move that is not over then is given up.

    Raises:
        TimeoutError: the deadline has passed; nothing has moved.
    """
    _check(cluster, slice_, "remap")
    numbers = _numbers(cluster, devices)
    with _one_at_a_time:
        _Move(cluster, slice_, deadline or Deadline(None)).run(numbers, ())


def resize(cluster: Session, slice_: Slice, shape: Sequence[int]) -> None:
    """See `Slice.resize`."""
    _check(cluster, slice_, "resize")
    sizes = _sizes(slice_, shape)
    with _one_at_a_time:
        if sizes != slice_.shape:
            _Move(cluster, slice_, Deadline(None)).run((), sizes)


def move_as_asked(cluster: Session, slice_id: int, devices: Sequence[int], timeout_s: float) -> None:
    """Moves a slice because the controller asks for it: somebody drains hosts (`pathways drain`)."""
    slice_ = next((each for each in list(cluster.slices) if each.binding.slice_id == slice_id), None)
    if slice_ is not None:
        remap(cluster, slice_, devices, Deadline(timeout_s))
        return
    control = cluster.control()  # Python has forgotten the slice, so no array lies on it
    control.remap_slice(slice_id, tuple(devices))
    control.end_remap(slice_id, undone=False)


def _check(cluster: Session, slice_: Any, doing: str) -> None:
    if is_tracing():
        raise errors.TraceError(f"a slice cannot move inside the trace of a program: call {doing} outside")
    if not isinstance(slice_, Slice) or slice_.cluster is not cluster:
        raise errors.SliceError(f"{doing} expects a slice of {cluster!r}, got {slice_!r}")


def _sizes(slice_: Slice, shape: Any) -> tuple[int, ...]:
    given = shape if isinstance(shape, Sequence) else (shape,)
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in given)
    if not whole or len(given) != len(slice_.shape):
        raise errors.SliceError(
            f"resize expects {len(slice_.shape)} positive ints, one for each axis of {slice_!r}, got {shape!r}"
        )
    return tuple(given)


def _numbers(cluster: Session, devices: Sequence[Device | int]) -> tuple[int, ...]:
    known = {device: device.id for device in cluster.devices}
    out = []
    try:
        for device in devices:
            if isinstance(device, Device):
                out.append(known[device])
            elif isinstance(device, int) and not isinstance(device, bool):
                out.append(device)
            else:
                raise TypeError
    except (TypeError, KeyError):
        raise errors.SliceError(
            f"remap expects devices of {cluster!r} or their numbers, got {devices!r}; see cluster.devices"
        ) from None
    return tuple(out)


def _unbroken(work: Callable[[], None]) -> None:
    """Runs `work` to its end whatever the user presses: signals reach the main thread only."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="pw-remap")
    thread.start()
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as interrupt:
            raised.append(interrupt)
    if raised:
        raise raised[0]


class _Move:
    """One slice on its way to other devices, or to another shape, with all its arrays."""

    def __init__(self, cluster: Session, slice_: Slice, deadline: Deadline) -> None:
        self._cluster = cluster
        self._slice = slice_
        self._deadline = deadline
        self._old: SliceBinding = slice_.binding
        self._new: SliceBinding = slice_.binding
        self._shape: NewShape | None = None  # None: the shape stays
        self._there: dict[int, _core.Layout] = {}  # by id of a layout: the same where the slice shall lie

    def run(self, devices: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Moves it. `devices`: none if the controller is to choose. `shape`: empty if it stays."""
        cluster, control, native = self._cluster, self._cluster.control(), self._cluster.native
        slice_id = self._old.slice_id
        self._new = control.remap_slice(slice_id, devices, shape)
        try:
            if self._new.devices == self._old.devices and not shape:
                self._slice.binding = self._new
                return
            native.begin_move()
            if shape:
                self._shape = NewShape(cluster, self._slice, self._new)
                self._shape.check()
            _unbroken(functools.partial(self._rename, self._moved()))
        finally:
            if native.moving:
                native.end_move()
            _unbroken(self._end)
        if shape:
            cluster.forget_outdated()
        cluster.sweep()

    def _end(self) -> None:
        """Tells the controller where the arrays are, behind the last record of the move."""
        with contextlib.suppress(errors.PathwaysError):  # the cluster is gone: whoever uses it next is told
            self._cluster.native.flush()
            self._cluster.control().end_remap(self._old.slice_id, self._slice.binding is not self._new)

    def _moved(self) -> list[tuple[Array, Array]]:
        """The live arrays, each with a fresh one on the new devices, there or failed as the old one is."""
        arrays: list[Array] = self._cluster.native.arrays_on(self._slice)
        pairs: list[tuple[Array, Array]] = []
        for first in range(0, len(arrays), MOST_AT_ONCE):
            piece = arrays[first : first + MOST_AT_ONCE]
            pairs.extend(zip(piece, self._sent(piece), strict=True))
        self._wait(pairs)
        return pairs

    def _sent(self, arrays: list[Array]) -> list[Array]:
        """Fresh arrays on the new devices, still to come."""
        cluster, control = self._cluster, self._cluster.control()
        inputs = tuple(array.layout for array in arrays)
        outputs = tuple(self._layout_there(layout) for layout in inputs)
        program = _transfers(
            self._slice.mesh_spec, self._mesh, [layout.cache for layout in inputs], [out.cache for out in outputs]
        )
        bound = BoundProgram(program, (self._old.devices, self._new.devices), control.topology.devices_per_host)
        registration = Registration(cluster, program, bound)
        registration.settle()
        call = _core.Call(cluster.native, registration.number, registration.group, inputs, outputs)
        fresh = call(list(arrays))
        assert isinstance(fresh, list), fresh
        return fresh

    @property
    def _mesh(self) -> MeshSpec:
        """The slice's mesh after the move."""
        return self._slice.mesh_spec if self._shape is None else self._shape.mesh

    def _layout_there(self, layout: _core.Layout) -> _core.Layout:
        known = self._there.get(id(layout))
        if known is None:
            new = self._new
            if self._shape is not None:
                known = self._shape.layout(layout)
            else:
                known = _core.Layout(
                    layout.shape,
                    layout.dtype,
                    layout.weak_type,
                    layout.slice,
                    layout.spec,
                    new.group,
                    new.hosts,
                    layout.nbytes,
                    new.space_set,
                    layout.space_bytes,
                )
                known.cache, known.plain = layout.cache, layout.plain
            self._there[id(layout)] = known
        return known

    def _wait(self, pairs: list[tuple[Array, Array]]) -> None:
        """Until each fresh array is there, or has failed as the old one did."""
        native = self._cluster.native
        failed = False
        for array, fresh in pairs:
            state = native.wait(fresh, self._deadline.left(1e9))
            if state == "pending":
                raise TimeoutError(
                    f"the arrays of {self._slice!r} were not there in time: this client is suspended, its runs take "
                    "long, or a callback of a run waits for the slice"
                )
            if state == "failed":
                failed = True
                if native.wait(array) != "failed":
                    raise self._unmoved(array, native.error_text(fresh.raw_handle))
        while failed and native.in_flight:  # other hosts may still speak of what failed on one
            native.pause(0.001)
            native.check_alive()

    def _unmoved(self, array: Array, text: str) -> errors.PathwaysError:
        """Why an array that was there has not come to its new place."""
        error = errors.from_text(text, errors.ComputationError)
        if not isinstance(error, errors.HostLostError):
            return error
        what = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        return errors.HostLostError(
            f"an array {what} on {self._slice!r} cannot move: {error} If it is the array that was lost with that host, "
            "delete it (array.delete()), and move the slice again"
        )

    def _rename(self, pairs: list[tuple[Array, Array]]) -> None:
        """From here on the names mean the fresh buffers."""
        cluster, native = self._cluster, self._cluster.native
        group = cluster.control().group(tuple({*self._old.hosts, *self._new.hosts}))
        for first in range(0, len(pairs), payloads.MOST_PAIRS):
            piece = pairs[first : first + payloads.MOST_PAIRS]
            names = [(array.raw_handle, fresh.raw_handle) for array, fresh in piece]
            native.command(payloads.RENAME, group, 0, 0, payloads.rename(names))
        with cluster.steady:
            if self._shape is not None:
                self._shape.take(pairs)
                return
            cluster.move_layouts(self._slice, self._new)
            for compiled in list(cluster.compiled):
                if compiled.uses(self._slice):
                    compiled.unbind()


def _transfers(old: MeshSpec, new: MeshSpec, kinds: Sequence[ArrayType], fresh: Sequence[ArrayType]) -> LogicalProgram:
    """Each argument on the first mesh to a result of its own on the second. Shapes and types are the same there."""
    count = len(kinds)
    values = tuple(
        ArrayType(kind.shape, kind.dtype, mesh, kind.spec) for mesh, some in enumerate((kinds, fresh)) for kind in some
    )
    return LogicalProgram(
        name=f"remap of {old.name}",
        meshes=(old, MeshSpec(f"{old.name}'", new.axes)),
        values=values,
        computations=(),
        nodes=tuple(
            Node(NodeKind.TRANSFER, f"move.{number}", -1, (number,), (count + number,)) for number in range(count)
        ),
        arguments=tuple(range(count)),
        results=tuple(range(count, 2 * count)),
        donated_arguments=(False,) * count,
    )
