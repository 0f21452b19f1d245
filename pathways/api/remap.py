"""Moving a slice to other devices: its arrays go from host to host and keep their names (MOVE-1).

    the gate is closed     no other thread of this client sends anything, and what is released waits
    one move               a program of transfers alone: the live arrays in, fresh ones out, where the slice shall lie
    one rename             once all of them are there: on the hosts the fresh buffers take the old ones' names
    the map changes        layouts, the slice's binding; programs that use it are to be bound again
    the gate opens

Until the rename nothing has changed, so a move that fails only lets go of what it made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pathways import _core, errors
from pathways.api.array import Array
from pathways.api.compiled import Registration
from pathways.api.session import Session
from pathways.api.slices import Device, Slice
from pathways.api.tracing import is_tracing
from pathways.compiler.ir import ArrayType, LogicalProgram, MeshSpec, Node, NodeKind
from pathways.plan.binding import BoundProgram
from pathways.plan.topology import SliceBinding
from pathways.protocol import payloads

#: Arrays that one run moves: a record must fit the rings.
MOST_AT_ONCE = 256

_one_at_a_time = threading.RLock()


def remap(cluster: Session, slice_: Slice, devices: Sequence[Device | int]) -> None:
    """See `Cluster.remap`."""
    if is_tracing():
        raise errors.TraceError("a slice cannot move inside the trace of a program: call remap outside")
    if not isinstance(slice_, Slice) or slice_.cluster is not cluster:
        raise errors.SliceError(f"remap expects a slice of {cluster!r}, got {slice_!r}")
    numbers = _numbers(cluster, devices)
    control = cluster.control()
    with _one_at_a_time:
        old = slice_.binding
        new = control.remap_slice(old.slice_id, numbers)
        if new.devices == old.devices:
            return
        native = cluster.native
        try:
            native.begin_move()
            _unbroken(functools.partial(_rename, cluster, slice_, old, new, _move(cluster, slice_, old, new)))
        except BaseException:
            if slice_.binding is old:
                control.remap_slice(old.slice_id, old.devices)
            raise
        finally:
            native.end_move()
        native.flush()
        cluster.sweep()


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


def _move(cluster: Session, slice_: Slice, old: SliceBinding, new: SliceBinding) -> list[tuple[Array, Any]]:
    """Fresh arrays on the new devices, there or failed as the ones on the old devices are."""
    native, control = cluster.native, cluster.control()
    arrays: list[Array] = native.arrays_on(slice_)
    there: dict[int, _core.Layout] = {}  # by id of a layout: the same where the slice shall lie

    def moved_layout(layout: _core.Layout) -> _core.Layout:
        known = there.get(id(layout))
        if known is None:
            known = there[id(layout)] = _core.Layout(
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
        return known

    pairs: list[tuple[Array, Any]] = []
    for first in range(0, len(arrays), MOST_AT_ONCE):
        piece = arrays[first : first + MOST_AT_ONCE]
        program = _transfers(slice_, [array.layout.cache for array in piece])
        bound = BoundProgram(program, (old.devices, new.devices), control.topology.devices_per_host)
        registration = Registration(cluster, program, bound)
        control.wait_compiled(registration.number)
        inputs = tuple(array.layout for array in piece)
        call = _core.Call(
            native, registration.number, registration.group, inputs, tuple(moved_layout(layout) for layout in inputs)
        )
        fresh = call(list(piece))
        assert isinstance(fresh, list), fresh
        pairs.extend(zip(piece, fresh, strict=True))
    failed = False
    for array, fresh in pairs:
        if native.wait(fresh) == "failed":
            failed = True
            if native.wait(array) != "failed":
                text = native.error_text(fresh.raw_handle)
                raise errors.from_text(text, errors.ComputationError)
    while failed and native.in_flight:  # other hosts may still speak of what failed on one
        native.pause(0.001)
        native.check_alive()
    return pairs


def _rename(
    cluster: Session, slice_: Slice, old: SliceBinding, new: SliceBinding, pairs: list[tuple[Array, Any]]
) -> None:
    """From here on the names mean the fresh buffers."""
    native = cluster.native
    group = cluster.control().group(tuple({*old.hosts, *new.hosts}))
    for first in range(0, len(pairs), payloads.MOST_PAIRS):
        names = [(array.raw_handle, fresh.raw_handle) for array, fresh in pairs[first : first + payloads.MOST_PAIRS]]
        native.command(payloads.RENAME, group, 0, 0, payloads.rename(names))
    with cluster.steady:
        cluster.move_layouts(slice_, new)
        for compiled in list(cluster.compiled):
            if compiled.uses(slice_):
                compiled.unbind()


def _transfers(slice_: Slice, kinds: Sequence[ArrayType]) -> LogicalProgram:
    """Each argument on the first mesh to a result of its own on the second."""
    name, axes = slice_.mesh_spec.name, slice_.mesh_spec.axes
    count = len(kinds)
    values = tuple(ArrayType(kind.shape, kind.dtype, mesh, kind.spec) for mesh in (0, 1) for kind in kinds)
    return LogicalProgram(
        name=f"remap of {name}",
        meshes=(MeshSpec(name, axes), MeshSpec(f"{name}'", axes)),
        values=values,
        computations=(),
        nodes=tuple(
            Node(NodeKind.TRANSFER, f"move.{number}", -1, (number,), (count + number,)) for number in range(count)
        ),
        arguments=tuple(range(count)),
        results=tuple(range(count, 2 * count)),
        donated_arguments=(False,) * count,
    )
