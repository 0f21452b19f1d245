"""TRUST-1: what a client says of its memory and of its modules is data. A put or fetch that names what the client has
not lent fails alone, by an error that says so; no host dies of it, and no other client's bytes come or go. A module is
what its bytes are, whatever its client says of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import pathways as pw
from pathways.api.arrays import host_transfer
from pathways.cluster import remote
from pathways.protocol import payloads, program_pb2
from pathways.protocol.serialization import dump_program

VALUE = np.arange(1 << 16, dtype=np.float32)  # too big to travel inline
OTHER = VALUE + 0.5


@pytest.fixture
def mine(cluster: Any, add: Any) -> Iterator[Any]:
    """An array of a client that does nothing wrong; it, and the hosts' processes, are the same afterwards."""
    pids = [host.get("pid") for host in cluster.stats()["hosts"]]
    array = pw.device_put(VALUE, add(2)).block_until_ready()
    yield array
    assert [host.get("pid") for host in cluster.stats()["hosts"]] == pids
    np.testing.assert_array_equal(np.asarray(pw.jit(lambda x: x + 1, devices=array.slice)(array)), VALUE + 1)


def refused(cluster: Any, raw: int) -> str:
    """Why a future failed."""
    assert cluster.native.wait_raw(raw, 60.0) == "failed"
    return str(cluster.native.error_text(raw))


def spans(block: Any, room: int) -> dict[str, tuple[int, int]]:
    """(offset, bytes) that are not `block` with its `room` bytes."""
    return {
        "the arena's header": (64, room),
        "nothing": (0, room),
        "inside a block": (block.offset + 64, 64),
        "unaligned": (block.offset + 8, 64),
        "behind the block": (block.offset, room + 65),
        "behind the segment": (1 << 40, 64),
        "around the address space": ((1 << 64) - 64, 128),
        "as long as the address space": (block.offset, (1 << 64) - 1),
        "before the arena": ((1 << 64) - 4096, 64),
    }


def test_puts_of_what_was_not_lent(cluster: Any, mine: Any) -> None:
    native, layout = cluster.native, mine.layout
    placement = cluster.placement(layout).number
    room = cluster.placement(layout).packing.nbytes
    block = host_transfer.allocate(native, room, "a test")
    np.frombuffer(block, np.uint8)[:] = 0
    never = host_transfer.allocate(native, room, "a test")
    cases = {**spans(block, room), "a block that was not lent": (never.offset, room)}
    payload = payloads.put_leased(placement)
    lease = block  # once in its life: from the first of these on it is lent
    for name, span in cases.items():
        array = native.new_array(layout)
        native.put(array, payload, lease, span)
        lease = None
        assert "was not lent" in refused(cluster, array.raw_handle), name
    array = native.new_array(layout)
    native.put(array, payload, None, (block.offset, room))  # the one that was
    np.testing.assert_array_equal(np.asarray(array), np.zeros_like(VALUE))
    del array, block, never
    np.testing.assert_array_equal(np.asarray(pw.device_put(OTHER, mine.slice)), OTHER)


def test_puts_that_make_no_sense(cluster: Any, mine: Any) -> None:
    native, layout = cluster.native, mine.layout
    placement = cluster.placement(layout).number
    block = host_transfer.allocate(native, 64, "a test")
    for name, payload in {
        "a short block": payloads.put_leased(placement),
        "few bytes": payloads.put_inline(placement, b"1234"),
        "uneven bytes": payloads.put_inline(placement, b"12345"),
        "no placement": payloads.put_inline(placement + 1000, VALUE.tobytes()),
        "no mode at all": payloads.put_leased(placement)[:-1],
        "no mode": payloads.put_inline(placement, b"")[:-1] + b"\xff",
        "no kind": b"",
        "no key": payloads.put_local(placement, 1 << 50),
    }.items():
        array = native.new_array(layout)
        native.put(array, payload, block if name == "a short block" else None)
        assert "put failed on host" in refused(cluster, array.raw_handle), name
        del array
    del block
    gc.collect()


def test_a_put_keeps_only_the_block_that_its_array_needs(cluster: Any, mine: Any, quiet: Any) -> None:
    """What else it leases comes back, whatever becomes of the put; over a link, the host's machine has it back."""
    native, layout = cluster.native, mine.layout
    placement = cluster.placement(layout).number
    before = quiet()
    for name, payload in {
        "ready": payloads.put_inline(placement, VALUE.tobytes()),
        "no placement": payloads.put_inline(placement + 1000, VALUE.tobytes()),
        "a long block": payloads.put_leased(placement),
        "no mode": payloads.put_leased(placement)[:-1],
        "no kind": b"",
    }.items():
        array = native.new_array(layout)
        native.put(array, payload, host_transfer.allocate(native, 1 << 20, "a test"))
        assert native.wait_raw(array.raw_handle, 60.0) == ("ready" if name == "ready" else "failed"), name
        now = quiet()
        assert now["arena"] < before["arena"] + (1 << 19), name
        for host, old in zip(now["hosts"], before["hosts"], strict=True):
            assert host["borrowed"] <= old["borrowed"], name
        del array
        gc.collect()
    quiet(back_to=before["kept"])


def test_placements_that_make_no_sense(cluster: Any, mine: Any) -> None:
    native, layout = cluster.native, mine.layout
    number = cluster.placement(layout).number + 1000  # none of the connection's own
    good = payloads.define(number, mine.slice.placed(layout.cache))
    fields = json.loads(good[1:])
    first = fields["devices"][0]
    broken = {"no JSON": good[:-3], "no fields": b"D[]", "nothing": b"D", "other fields": b'D{"id": %d}' % number}
    for name, change in {
        "devices that are not there": {"devices": [first, 1000]},
        "devices of the end": {"devices": [-1, -2]},
        "devices that are no numbers": {"devices": ["a", "b"]},
        "one device twice": {"devices": [first, first]},
        "too few devices": {"devices": [first]},
        "a negative size": {"shape": [-65536]},
        "a size that is none": {"shape": [1.5]},
        "a shape that is none": {"shape": 7},
        "a size that is not cut evenly": {"shape": [65537], "spec": [["x"]]},
        "an unknown axis": {"spec": [["z"]]},
        "an axis twice": {"shape": [4, 4], "spec": [["x"], ["x"]]},
        "more cuts than dimensions": {"spec": [[], []]},
        "no dtype": {"dtype": "dtype"},
        "a dtype of objects": {"dtype": "object"},
    }.items():
        broken[name] = b"D" + json.dumps({**fields, **change}).encode()
    for name, payload in broken.items():
        native.command(payloads.BACKEND, layout.group, 0, 0, payload)
        array = native.new_array(layout)
        native.put(array, payloads.put_inline(number, VALUE.tobytes()))
        assert "put failed on host" in refused(cluster, array.raw_handle), name
    native.command(payloads.BACKEND, layout.group, 0, 0, good)
    array = native.new_array(layout)
    native.put(array, payloads.put_inline(number, OTHER.tobytes()))
    np.testing.assert_array_equal(np.asarray(array), OTHER)


def test_fetches_to_what_was_not_lent(cluster: Any, mine: Any) -> None:
    native, room = cluster.native, VALUE.nbytes
    block = host_transfer.allocate(native, room, "a test")
    never = host_transfer.allocate(native, room, "a test")
    cases = {**spans(block, room), "a block that was not lent": (never.offset, room)}
    payload = payloads.fetch_leased()
    lease = block
    for name, span in cases.items():
        token = native.new_token(mine.layout.parts)
        native.fetch(mine, token, payload, lease, span)
        lease = None
        assert "was not lent" in refused(cluster, token), name
        native.forget_token(token)
    token = native.new_token(mine.layout.parts)
    native.fetch(mine, token, payload, None, (block.offset, room))  # the one that was
    assert native.wait_raw(token, 60.0) == "ready"
    native.forget_token(token)
    np.testing.assert_array_equal(np.frombuffer(block, np.float32), VALUE)
    del block, never
    small = host_transfer.allocate(native, 64, "a test")
    guard = host_transfer.allocate(native, 1 << 12, "a test")
    np.frombuffer(guard, np.uint8)[:] = 7
    for nbytes in (64, 4):
        token = native.new_token(mine.layout.parts)
        native.fetch(mine, token, payload, small, (small.offset, nbytes))
        assert "does not fit into" in refused(cluster, token)
        native.forget_token(token)
        small = host_transfer.allocate(native, 64, "a test")
    assert (np.frombuffer(guard, np.uint8) == 7).all()
    for payload in (b"", b"F", b"F\xff"):
        token = native.new_token(mine.layout.parts)
        native.fetch(mine, token, payload)
        assert "fetch failed on host" in refused(cluster, token), payload
        native.forget_token(token)


def test_a_fetch_of_what_is_gone_with_a_bad_span(cluster: Any, mine: Any) -> None:
    """Refusing it gives its block back; there is none."""
    native = cluster.native
    gone = pw.device_put(OTHER, mine.slice).block_until_ready()
    handle, layout = gone.raw_handle, gone.layout
    del gone
    gc.collect()
    native.flush()
    token = native.new_token(layout.parts)
    native.command(2, layout.group, handle, token, payloads.fetch_leased())
    assert "deleted" in refused(cluster, token)
    native.forget_token(token)
    assert isinstance(jax.device_get(mine), np.ndarray)


def test_a_module_that_pretends_to_be_another(cluster: Any, mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts compile equal modules once, for all clients: which are equal they find out themselves."""
    fingerprints: list[str] = []

    def told(program: Any, texts: bool = True) -> bytes:
        fingerprints.extend(computation.fingerprint for computation in program.computations)
        return dump_program(program, texts)

    def forged(program: Any, texts: bool = True) -> bytes:
        message = program_pb2.LogicalProgram.FromString(dump_program(program, texts))
        for computation, other in zip(message.computations, fingerprints, strict=True):
            computation.MergeFromString(b"\x1a" + bytes([len(other)]) + other.encode())  # field 3, as it once was
        return message.SerializeToString()

    if cluster.is_embedded:
        pytest.skip("no program crosses to another process")
    for dump, factor in ((told, 3), (forged, -7), (dump_program, 3)):
        monkeypatch.setattr(remote, "dump_program", dump)
        result = pw.jit(lambda x, factor=factor: x * factor, devices=mine.slice)(mine)
        np.testing.assert_array_equal(np.asarray(result), VALUE * factor)
    assert len(fingerprints) == 1
