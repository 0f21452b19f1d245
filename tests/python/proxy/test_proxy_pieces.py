"""Parts of the door by themselves: messages, tilings, layouts, host buffers, handles, the shared directory, waits.

PROXY-4 (bounds): test_room_is_kept
"""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways import errors
from pathways._jaxlib import proxy_messages
from pathways._jaxlib.proxy_messages import message
from pathways.compiler.ir import Tiling
from pathways.proxy import dtypes, host_arrays, layouts, shardings
from pathways.proxy.arrays import Held
from pathways.proxy.errors import Code, Refused, refusal_of
from pathways.proxy.futures import when_all_ready
from pathways.proxy.handles import OWN, HandleTable, own_handles
from pathways.proxy.host_buffers import HostBuffers
from pathways.proxy.shared_directory import SharedDirectory


def test_messages_come_without_jax() -> None:
    program = (
        "import sys; from pathways._jaxlib.proxy_messages import message; message('xla.ifrt.proxy.IfrtRequest')();"
        "import pathways.proxy.server; print(sorted({'jax', 'jaxlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"[]\n"


def test_a_jaxlib_without_descriptors_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UnsupportedVersionError, match=r"no message xla\.Nothing,.*pip install 'jaxlib"):
        message("xla.Nothing")
    with pytest.raises(errors.UnsupportedVersionError, match=r"no descriptor of xla/absent\.proto"):
        proxy_messages.descriptor_in(b"\n\x10xla/absent.proto, which is only named", "xla/absent.proto")
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").touch()
    program = "from pathways._jaxlib.proxy_messages import message; message('xla.ifrt.proxy.IfrtRequest')"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert "UnsupportedVersionError: the installed jaxlib has no libjax_common.so" in ended.stderr


def test_element_types_are_those_of_the_protocol() -> None:
    kinds = message("xla.ifrt.DTypeProto").DESCRIPTOR.enum_types_by_name["Kind"].values_by_name
    names = {"KIND_PRED": "bool", "KIND_BF16": "bfloat16", "KIND_S4": "int4", "KIND_C64": "complex64"}
    known = set(dtypes.KINDS.values())
    for name, value in kinds.items():
        if name not in ("KIND_UNSPECIFIED", "KIND_OPAQUE"):
            assert value.number in known, name
        if name in names:
            assert dtypes.of_kind(value.number).name == names[name]
    assert len(known) == len(dtypes.KINDS)


def op_sharding(sharding: Any, rank: int) -> Any:
    return message("xla.OpSharding").FromString(sharding._to_xla_hlo_sharding(rank).to_proto().SerializeToString())


MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
AXES = [None, "a", "b", "c", ("a", "b"), ("b", "a"), ("c", "a"), ("a", "b", "c")]
SPECS = [
    (first, second)
    for first, second in itertools.product(AXES, AXES)
    if not {*np.atleast_1d(first or ())} & {*np.atleast_1d(second or ())}
]


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_tilings_are_those_of_jax(spec: tuple[Any, Any], is_turned: bool) -> None:
    """The parts that JAX gives each device, also for a mesh in another order and sizes that do not divide."""
    devices = MESH.devices.transpose(2, 0, 1) if is_turned else MESH.devices
    mesh = Mesh(devices, MESH.axis_names)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    order = [device.id for device in devices.flat]
    made = message("xla.ifrt.HloShardingProto")(xla_op_sharding=op_sharding(sharding, 2))
    made.devices.device_ids.extend(order)
    proto = message("xla.ifrt.ShardingProto")()
    proto.serialized_sharding.type_name, proto.serialized_sharding.data = shardings.HLO, made.SerializeToString()
    parsed = shardings.parse(proto)
    shape = (16, 8)
    tiling = parsed.tiling(shape)
    indices = {device.id: index for device, index in sharding.devices_indices_map(shape).items()}
    whole = np.arange(128).reshape(shape)
    from pathways.proxy.array_making import part_of

    for number, device in enumerate(order):
        expected = whole[indices[device]]
        assert np.array_equal(part_of(whole, tiling, number), expected)
        assert parsed.shard_shape(shape, number) == expected.shape


def test_a_named_sharding_is_the_same_tiling() -> None:
    """Newer ones name axes of a mesh, and parts of axes."""
    named = message("xla.OpSharding")(type=3)
    for name, size in (("a", 2), ("b", 4)):
        named.named_sharding.mesh.axes.add(name=name, size=size)
    rows, columns = named.named_sharding.dim_shardings.add(), named.named_sharding.dim_shardings.add()
    rows.axes.add(mesh_axis_index=0)
    columns.axes.add(mesh_axis_index=1).sub_axis_info.pre_size = 1
    columns.axes[0].sub_axis_info.size = 2  # the major digit of b; the minor one holds replicas
    assert shardings.hlo_tiling(named, 8, 2) == Tiling((2, 2), (0, 0, 1, 1, 2, 2, 3, 3))
    columns.axes[0].sub_axis_info.pre_size = 2
    assert shardings.hlo_tiling(named, 8, 2) == Tiling((2, 2), (0, 1, 0, 1, 2, 3, 2, 3))
    named.named_sharding.mesh.device_ids.extend([7, 6, 5, 4, 3, 2, 1, 0])
    assert shardings.hlo_tiling(named, 8, 2) == Tiling((2, 2), (3, 2, 3, 2, 1, 0, 1, 0))
    columns.axes[0].sub_axis_info.size = 3
    with pytest.raises(Refused):
        shardings.hlo_tiling(named, 8, 2)


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({"tile_assignment_dimensions": [2, 2], "tile_assignment_devices": [0, 1, 2, 2]}, 4),
        ({"tile_assignment_dimensions": [2, 2], "tile_assignment_devices": [0, 1, 2, 9]}, 4),
        ({"tile_assignment_dimensions": [2, 2]}, 8),
        ({"tile_assignment_dimensions": [4]}, 4),
        ({"tile_assignment_dimensions": [1 << 40, 1 << 40]}, 4),
        ({"tile_assignment_dimensions": [2, 2], "iota_reshape_dims": [4], "iota_transpose_perm": [5]}, 4),
        ({"tile_assignment_dimensions": [2, 2], "iota_reshape_dims": [-4], "iota_transpose_perm": [0]}, 4),
    ],
)
def test_malformed_tilings_are_refused(fields: dict[str, Any], devices: int) -> None:
    with pytest.raises(Refused):
        shardings.hlo_tiling(message("xla.OpSharding")(type=3, **fields), devices, 2)


def test_layouts() -> None:
    made = message("xla.LayoutProto")()
    layouts.fill("{1,0:T(8,128)(2,1)E(4)S(5)}", made)
    assert list(made.minor_to_major) == [1, 0]
    assert [list(tile.dimensions) for tile in made.tiles] == [[8, 128], [2, 1]]
    assert (made.element_size_in_bits, made.memory_space) == (4, 5)


@given(st.lists(st.integers(0, 4), max_size=4), st.permutations(range(4)), st.sampled_from(["float32", "int4", "bool"]))
def test_bytes_and_arrays(shape: list[int], order: list[int], name: str) -> None:
    """Whatever the order of dimensions in memory, what is sent is what comes."""
    dtype = host_arrays.numpy_of(dtypes.of_name(name))
    own = [axis for axis in order if axis < len(shape)]
    strides = [0] * len(shape)
    step = dtype.itemsize
    for axis in own:
        strides[axis] = step
        step *= max(1, shape[axis])
    values = (np.arange(int(np.prod(shape))) % 2).astype(dtype).reshape(shape)
    data = bytes(host_arrays.to_bytes(values, strides))
    assert len(data) == host_arrays.region_bytes(dtype, shape, strides) == values.size * dtype.itemsize
    assert np.array_equal(host_arrays.from_bytes(data, dtype, shape, strides), values)
    assert np.array_equal(host_arrays.from_bytes(bytes(host_arrays.to_bytes(values, None)), dtype, shape, None), values)


def test_room_is_kept() -> None:
    buffers, told = HostBuffers(100), []

    def reserve(handle: int, size: int, is_read: bool = False) -> None:
        buffers.reserve(handle, size, lambda wrong: told.append((handle, wrong.code if wrong else None)), is_read)

    reserve(1, 60)
    reserve(2, 60)  # waits
    reserve(3, 10)  # waits behind it, although there is room
    reserve(1, 10)
    reserve(4, 101)  # more than there ever is
    reserve(5, -1)
    assert told == [
        (1, None),
        (1, Code.ALREADY_EXISTS),
        (4, Code.RESOURCE_EXHAUSTED),
        (5, Code.RESOURCE_EXHAUSTED),
    ]
    told.clear()
    woken = []
    assert not buffers.all_here([3, 1], lambda: woken.append(True))
    assert told == [(3, None)]  # what the next request needs goes first
    buffers.put(3, b"x" * 10)
    assert woken == []
    buffers.put(1, b"x" * 60)
    assert woken == [True] and buffers.all_here([1, 3], lambda: None)
    assert buffers.take(1) == b"x" * 60
    assert told == [(3, None), (2, None)] and buffers.used_bytes == 70
    buffers.release(2)
    buffers.release(2)
    buffers.release(3)
    reserve(6, 60)
    reserve(9, 60, is_read=True)  # what is read has room of its own
    reserve(10, 500, is_read=True)
    assert told[2:] == [(6, None), (9, None)]  # the third waits until it is alone
    buffers.release(9)
    assert told[4:] == [(10, None)] and buffers.used_bytes == 560
    del told[2:5]
    reserve(7, 60)
    buffers.close()
    reserve(8, 1)
    assert told[2:] == [(7, Code.CANCELLED), (8, Code.CANCELLED)]
    buffers.put(10, b"late")
    with pytest.raises(Refused):
        buffers.look_up(10)


def test_room_under_random_use() -> None:
    """However buffers come and go, the room is what they have, and each is told once."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    buffers, told = HostBuffers(1000), {}
    sizes: dict[int, int] = {}
    for handle in range(2000):
        size = sizes[handle] = draw.randrange(400)
        told[handle] = 0
        buffers.reserve(handle, size, lambda wrong, h=handle: told.__setitem__(h, told[h] + 1))
        if draw.random() < 0.3:
            buffers.all_here([draw.randrange(handle + 1)], lambda: None)
        live = list(buffers._coming.reserved)
        assert buffers.used_bytes == sum(sizes[h] for h in live) <= 2000
        for gone in draw.sample(live, draw.randrange(len(live) + 1)):
            buffers.release(gone)
    buffers.close()
    assert set(told.values()) <= {0, 1} and sum(told.values()) > 1000


def test_handles() -> None:
    table: HandleTable[str] = HandleTable("thing", 4, own_handles())
    assert table.add([5], ["five"]) == [5]
    (own,) = table.add([], ["own"])
    assert own > OWN
    refused = Refused(Code.ABORTED, "it failed")
    table.fail([6, 5, OWN + 7, 0], refused)  # what exists stays; what no client may give is left out
    assert (table.find(5), len(table)) == ("five", 3)
    for _ in range(3):
        with pytest.raises(Refused, match="it failed") as caught:
            table.find(6)
        assert len(caught.traceback) == 2  # it keeps no frames of earlier uses
    with pytest.raises(Refused, match="1 handles for 2 things"):
        table.add([7], ["a", "b"])
    with pytest.raises(Refused, match="at most 4 things"):
        table.add([7, 8], ["a", "b"])
    with pytest.raises(Refused, match="unknown thing handles: 99"):
        table.drop([6, 99])
    with pytest.raises(Refused, match="unknown thing handle: 6"):
        table.find(6)


def test_waits_for_several_buffers() -> None:
    class Fake:
        devices, shape, dtype, memory_kind = (0,), (), None, ""

        def when_ready(self, then: Any) -> None:
            self.then = then

        def delete(self) -> None:
            pass

    def waited(*outcomes: Exception | None) -> list[Any]:
        buffers, told = [Fake() for _ in outcomes], []
        when_all_ready([Held(buffer, "", None) for buffer in buffers], told.append)
        for buffer, outcome in zip(buffers, outcomes, strict=True):
            buffer.then(outcome)
        return [error and (error.code, error.text) for error in told]

    assert waited() == [None]
    assert waited(None, None) == [None]
    bad, worse = ValueError("bad"), errors.HostLostError("host 1")
    assert waited(None, bad, worse) == [(Code.INVALID_ARGUMENT, "bad")]
    assert waited(worse, None, bad) == [(Code.DATA_LOSS, "host 1")]


def test_codes_of_errors() -> None:
    for error, code, text in (
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), Code.RESOURCE_EXHAUSTED, "out of memory"),
        (RuntimeError("NONSENSE: x"), Code.INTERNAL, "NONSENSE: x"),
        (errors.ComputationError("x"), Code.INTERNAL, "x"),
        (errors.CancelledError("x"), Code.CANCELLED, "x"),
        (errors.ControllerLostError("x"), Code.UNAVAILABLE, "x"),
        (MemoryError(), Code.RESOURCE_EXHAUSTED, "MemoryError"),
        (KeyboardInterrupt(), Code.UNKNOWN, "KeyboardInterrupt"),
    ):
        found = refusal_of(error)
        assert (found.code, found.text) == (code, text)


def test_the_shared_directory(tmp_path: pathlib.Path) -> None:
    """Only plain files within it, by the client's own name of a handle, and of one client at a time."""
    inside, outside = tmp_path / "shared", tmp_path / "secret"
    inside.mkdir()
    outside.write_bytes(b"secret")
    shared = SharedDirectory(str(inside))
    (inside / "lt_5").write_bytes(b"abcdef")
    with pytest.raises(Refused, match="no plain file of 7 bytes"):
        shared.take(1, 5, 7)
    with pytest.raises(Refused, match="another client uses"):
        shared.take(2, 5, 6)
    assert bytes(shared.take(1, 5, 6)) == b"abcdef"
    assert list(inside.iterdir()) == []
    shared.ended(2)
    shared.ended(1)
    (inside / "lt_6").symlink_to(outside)
    with pytest.raises(Refused, match="host buffer 6"):
        shared.take(2, 6, 6)
    (inside / "lt_7").mkdir()
    with pytest.raises(Refused):
        shared.take(2, 7, 4096)
    os.mkfifo(inside / "lt_8")
    with pytest.raises(Refused):  # and it does not wait for a writer
        shared.take(2, 8, 0)
    with pytest.raises(Refused, match="no file of host buffer 9"):
        shared.take(2, 9, 1)
    assert outside.read_bytes() == b"secret"
    shared.close()
