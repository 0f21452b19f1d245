"""What the proxy does on a cluster without a client's program: arrays move, and their bytes become other types."""

from __future__ import annotations

import gc
import queue
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jaxlib._jax as xla
import ml_dtypes
import numpy as np
import pytest

import pathways as pw
from pathways import _jaxlib, errors
from pathways.api.programs.registration import Registration
from pathways.compiler.ir import Tiling
from pathways.proxy.behind import Buffer, Executable, Module, Part, Shard
from pathways.proxy.cluster_devices import ClusterDevices, open_session
from pathways.proxy.cluster_executables import ClusterExecutable
from pathways.proxy.service import Client
from pathways.proxy.versions import Version

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def devices() -> Iterator[ClusterDevices]:
    """Four devices of one island and four of another, of two hosts each."""
    with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=2)) as cluster:
        made = open_session(cluster.address or "", Client("here", Version(25, 3), {}))
        yield made
        made.close()


def told(start: Callable[[Callable[[Any], None]], None]) -> Any:
    """What a callback is told."""
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    start(outcomes.put)
    outcome = outcomes.get(timeout=60)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def shards_of(buffer: Buffer) -> list[Shard]:
    return [Shard(buffer, number) for number in range(len(buffer.devices))]


def values_of(devices: ClusterDevices, buffer: Buffer) -> list[Array]:
    return [told(lambda then, shard=shard: devices.fetch(shard, then)) for shard in shards_of(buffer)]


def put(devices: ClusterDevices, where: Sequence[int], shards: Sequence[Array]) -> list[Shard]:
    return shards_of(devices.put(tuple(where), "device", shards))


def program_of(devices: ClusterDevices, function: Callable[[Any], Any], where: int, like: Array) -> Executable:
    """`function`, which takes over its argument, for one device."""
    lowered = jax.jit(function, donate_argnums=0).trace(like).lower(lowering_platforms=("cpu",))
    module = str(lowered.compiler_ir("stablehlo")).encode()
    made: Executable = told(lambda then: devices.compile(part(module, xla.CompileOptions(), where), then))
    return made


def part(module: bytes, options: Any, where: int) -> Part:
    name, parameters, results = _jaxlib.signature_of(module)
    return Part(Module(name, module, parameters, results), options.SerializeAsString(), (where,))


@pytest.mark.parametrize(("where", "is_taken"), [(1, True), (3, True), (5, True), (0, False)])
def test_a_copy_on_another_device_can_be_taken_over(
    devices: ClusterDevices, monkeypatch: pytest.MonkeyPatch, where: int, is_taken: bool
) -> None:
    """One on the same device may be the same memory, which is another array's, too: a program gets a copy of it."""
    kept = put(devices, (0,), [np.arange(5, dtype=np.float32)])
    program = program_of(devices, lambda v: v + 1, where, np.arange(5, dtype=np.float32))
    made = []
    build = ClusterExecutable._build
    monkeypatch.setattr(ClusterExecutable, "_build", lambda *them: made.append(them[-1]) or build(*them))
    moved = devices.copy(kept, (where,), "device")
    (result,) = program.execute([shards_of(moved)], ())
    assert values_of(devices, result)[0].tolist() == [1, 2, 3, 4, 5]
    assert made == [(0,)] if is_taken else made == [(0,), ()]
    assert values_of(devices, kept[0].buffer)[0].tolist() == [0, 1, 2, 3, 4]


def test_copies_across_islands_and_of_shards_that_are_no_array(devices: ClusterDevices) -> None:
    parts = [np.float32(number) * np.ones((), np.float32) for number in range(4)]
    scalars = put(devices, (0, 1, 4, 5), parts)
    for numbers, where in (((0, 1, 2, 3), (7, 6, 1, 0)), ((1, 0), (2, 3))):
        moved = devices.copy([scalars[number] for number in numbers], where, "device")
        assert moved.devices == where
        assert [float(value) for value in values_of(devices, moved)] == list(numbers)


CASTS: list[tuple[Any, tuple[int, ...], Any, tuple[int, ...]]] = [
    (np.float32, (3, 2), np.int32, (3, 2)),
    (np.float32, (3, 2), np.int16, (3, 4)),
    (np.float32, (3, 2), np.uint8, (3, 2, 4)),
    (np.uint8, (3, 8), np.float32, (6,)),
    (np.int16, (2,), np.float32, ()),
    (np.uint32, (4,), ml_dtypes.bfloat16, (8,)),
    (np.complex64, (4,), np.complex64, (2, 2)),
    (np.float32, (0, 3), np.int8, (0,)),
]


@pytest.mark.parametrize(("dtype", "shape", "made_dtype", "made_shape"), CASTS)
def test_bitcasts(devices: ClusterDevices, dtype: Any, shape: Any, made_dtype: Any, made_shape: Any) -> None:
    size = int(np.prod(shape))
    parts = [np.arange(first, first + size).astype(dtype).reshape(shape) for first in (1, 50, 100)]
    expected = [part.reshape(-1).view(made_dtype).reshape(made_shape).tolist() for part in parts]
    shards = put(devices, (1, 0, 2), parts)
    for chosen in ((0, 1, 2), (2, 0), (1,)):
        made = devices.bitcast([shards[number] for number in chosen], np.dtype(made_dtype), made_shape)
        assert made.devices == tuple((1, 0, 2)[number] for number in chosen)
        assert [value.tolist() for value in values_of(devices, made)] == [expected[number] for number in chosen]
    program = program_of(devices, lambda v: v, 0, np.zeros(made_shape, made_dtype))
    (same,) = program.execute([[shards_of(devices.bitcast(shards, np.dtype(made_dtype), made_shape))[1]]], ())
    assert values_of(devices, same)[0].tolist() == expected[1]


def test_a_bitcast_over_islands(devices: ClusterDevices) -> None:
    shards = put(devices, (3, 4), [np.float32([1, 2]), np.float32([3, 4])])
    made = devices.bitcast(shards, np.dtype(np.int32), (2,))
    assert np.stack(values_of(devices, made)).view(np.float32).tolist() == [[1, 2], [3, 4]]
    assert made.devices == (3, 4)


@pytest.mark.parametrize("dtype", [np.bool_, ml_dtypes.int4, np.complex64])
def test_a_bitcast_of_bytes_that_xla_does_not_say(devices: ClusterDevices, dtype: Any) -> None:
    shards = put(devices, (0,), [np.zeros(8, dtype)])
    with pytest.raises(NotImplementedError, match="the bytes of an array of"):
        devices.bitcast(shards, np.dtype(np.int8), (8 * np.dtype(dtype).itemsize,))


def test_reshards(devices: ClusterDevices) -> None:
    whole = np.arange(24.0).reshape(6, 4)
    rows = Tiling((2, 1), (0, 1))
    shards = put(devices, (0, 2), [whole[:3], whole[3:]])
    made = devices.reshard(shards, rows, (4, 5, 6, 7), Tiling((2, 2), (3, 1, 2, 0)), (6, 4), "device")
    quarters = [whole[at : at + 3, to : to + 2].tolist() for at in (0, 3) for to in (0, 2)]
    assert [value.tolist() for value in values_of(devices, made)] == [quarters[at] for at in (3, 1, 2, 0)]


def test_a_program_runs_on_one_island(devices: ClusterDevices) -> None:
    with pytest.raises(errors.SliceError, match=r"of the islands \[0, 1\]\. .*slice_index == 0"):
        told(lambda then: devices.compile(Part(Module("f", b"", (), ()), b"", (0, 4)), then))


def test_a_program_that_does_not_compile_is_forgotten(devices: ClusterDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: a host that is started anew compiles what is known, and may end by it again."""
    known: weakref.WeakSet[Registration] = weakref.WeakSet()

    class Watched(Registration):
        def __init__(self, *arguments: Any) -> None:
            known.add(self)
            super().__init__(*arguments)

    monkeypatch.setattr("pathways.proxy.shard_programs.Registration", Watched)
    module, options = b"module @m { func.func public @main() { return } }", xla.CompileOptions()
    options.env_option_overrides = [("xla_no_such_option", "1")]
    texts: queue.SimpleQueue[str] = queue.SimpleQueue()
    gc.disable()
    try:
        devices.compile(part(module, options, 0), lambda outcome: texts.put(str(outcome)))
        assert "could not compile" in texts.get(timeout=60)
        deadline = time.monotonic() + 10
        while known and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not known
    finally:
        gc.enable()
