"""MEM-6: a host makes no buffer that takes more memory than its client has booked in the order. The buffer fails alone,
by an error that says so; nothing is on the devices that the ledger does not count, and no other client is disturbed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pathways as pw
from pathways import _core
from pathways.api.arrays import host_transfer
from pathways.api.programs.registration import Registration
from pathways.api.slices import remap
from pathways.plan.binding import BoundProgram
from pathways.protocol import payloads

VALUE = np.arange(1 << 16, dtype=np.float32)  # too big to travel inline
NO_SPACE_SET = (1 << 32) - 1
TASK = 5


@pytest.fixture
def here(cluster: Any, add: Any) -> Any:
    """An array on one device, of a client that does nothing wrong; it is right afterwards."""
    array = pw.device_put(VALUE, add(1)).block_until_ready()
    yield array
    np.testing.assert_array_equal(np.asarray(pw.jit(lambda x: x + 1, devices=array.slice)(array)), VALUE + 1)


def booked(layout: Any, space_set: int, nbytes: int) -> Any:
    """A layout like `layout`, whose arrays are booked otherwise than they are."""
    made = _core.Layout(
        layout.shape,
        layout.dtype,
        layout.weak_type,
        layout.slice,
        layout.spec,
        layout.group,
        layout.hosts,
        layout.nbytes,
        space_set,
        nbytes,
    )
    made.cache = layout.cache
    return made


def bookings(add: Any, layout: Any) -> dict[str, tuple[int, int]]:
    """(space set, bytes) that do not cover an array of `layout`, which lies on one device."""
    other = next(other for other in (add(1) for _ in range(8)) if other.binding.devices != layout.slice.binding.devices)
    return {
        "a byte too few": (layout.space_set, layout.space_bytes - 1),
        "nothing": (layout.space_set, 0),
        "another device": (other.binding.space_set, layout.space_bytes),
        "no device": (NO_SPACE_SET, layout.space_bytes),
    }


def held_by_hosts(cluster: Any) -> int:
    return sum(device["bytes"] for host in cluster.stats()["hosts"] for device in host["memory"]["devices"])


def refused(cluster: Any, raw: int) -> str:
    """Why a future failed."""
    assert cluster.native.wait_raw(raw, 60.0) == "failed"
    return str(cluster.native.error_text(raw))


def test_puts_are_no_bigger_than_booked(cluster: Any, here: Any, add: Any, quiet: Any) -> None:
    native, layout = cluster.native, here.layout
    placement = cluster.placement(layout).number
    room = cluster.placement(layout).packing.nbytes
    quiet()
    before = held_by_hosts(cluster)
    arena = native.arena_stats()[0]
    for name, (space_set, nbytes) in bookings(add, layout).items():
        for is_inline in (True, False):
            array = native.new_array(booked(layout, space_set, nbytes))
            if is_inline:
                native.put(array, payloads.put_inline(placement, bytes(VALUE.nbytes)))
            else:
                block = host_transfer.allocate(native, room, "a test")
                native.put(array, payloads.put_leased(placement), block)
                del block
            text = refused(cluster, array.raw_handle)
            assert "put failed on host" in text, name
            assert f"takes {VALUE.nbytes} bytes on each of the local devices" in text, name
            assert held_by_hosts(cluster) == before, name
            with pytest.raises(pw.errors.ComputationError, match="has booked"):  # what depends on it fails with it
                array.block_until_ready()
            del array
    quiet()
    assert native.arena_stats()[0] == arena  # a refused put gives the client's memory back
    more = native.new_array(booked(layout, layout.space_set, layout.space_bytes + 1))
    native.put(more, payloads.put_inline(placement, (VALUE + 2).tobytes()))
    np.testing.assert_array_equal(np.asarray(more), VALUE + 2)


def test_a_put_on_more_devices_than_booked(cluster: Any, here: Any, add: Any) -> None:
    """The placement has two devices, and the client books one of them."""
    both = pw.device_put(VALUE, add(2)).block_until_ready()
    layout, native = both.layout, cluster.native
    array = native.new_array(booked(layout, here.layout.space_set, layout.space_bytes))
    native.put(array, payloads.put_inline(cluster.placement(layout).number, VALUE.tobytes()))
    assert "has booked" in refused(cluster, array.raw_handle)


def test_restores_are_no_bigger_than_booked(cluster: Any, here: Any, add: Any, quiet: Any, tmp_path: Any) -> None:
    native, layout = cluster.native, here.layout
    fields = {
        "name": "x",
        "spec": {"driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path)}},
        "context": {},
        "placement": cluster.placement(layout).number,
        "dtype": "float32",
    }
    quiet()
    before = held_by_hosts(cluster)
    for name, (space_set, nbytes) in bookings(add, layout).items():
        array = native.new_array(booked(layout, space_set, nbytes))
        native.make(array, payloads.task("read", 1, **fields))
        assert "has booked" in refused(cluster, array.raw_handle), name
        assert held_by_hosts(cluster) == before, name
    array = native.new_array(layout)  # booked as it should be, it comes as far as the file that is not there
    native.make(array, payloads.task("read", 1, **fields))
    assert "opening 'x'" in refused(cluster, array.raw_handle)
    # A task that says that it makes no array, and would make one.
    token = native.new_token(layout.parts)
    native.command(TASK, layout.group, 0, token, payloads.task("read", 1, **fields))
    assert "has booked" in refused(cluster, token)
    native.forget_token(token)


@pytest.mark.parametrize(
    "other", [VALUE[:16], np.concatenate([VALUE, VALUE]), VALUE.astype(np.int8)], ids=["short", "long", "narrow"]
)
def test_a_transfer_of_an_array_of_another_type(cluster: Any, here: Any, add: Any, other: np.ndarray) -> None:
    """MEM-7: its result would take more than is booked, or the copy would read beyond the array."""
    control, native, slice_ = cluster.control(), cluster.native, here.slice
    wrong = pw.device_put(other, slice_).block_until_ready()
    for _ in range(8):
        there = add(1)
        if there.binding.devices == slice_.binding.devices:
            continue
        mesh, kind = slice_.mesh_spec, here.layout.cache
        program = remap._transfers(mesh, mesh, [kind], [kind])
        bound = BoundProgram(
            program, (slice_.binding.devices, there.binding.devices), control.topology.devices_per_host
        )
        registration = Registration(cluster, program, bound)
        control.wait_compiled(registration.number)
        moved = pw.device_put(VALUE, there).layout
        call = _core.Call(native, registration.number, registration.group, (wrong.layout,), (moved,))
        (result,) = call([wrong])
        assert "the program transfers an array of 1 shards of shape (65536,)" in refused(cluster, result.raw_handle)
    np.testing.assert_array_equal(np.asarray(wrong), other)
