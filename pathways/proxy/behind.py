"""What lies behind the door: devices, the buffers on them, and executables, as protocols.

`pathways/proxy` uses these and nothing else of what runs programs. A session calls them from its own thread. A method
that starts work returns at once; the work's end is told to a callback, once, from any thread. A callback does not
block, and calls nothing of a buffer or of devices.

A memory kind is one of `DeviceInfo.memories`; the empty one is the device's default.

Errors: a method raises, or tells its callback, any exception; `pathways/proxy/errors.py:refusal_of` gives it its code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pathways.compiler.ir import Tiling

Attribute = bool | int | float | str
#: Called once, from any thread: None, or why it failed.
Done = Callable[[BaseException | None], None]


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """One device as clients see it. Its number `id` is the same after a restart."""

    id: int
    kind: str  # such as "NVIDIA H200"
    slice_index: int  # the island
    host: int  # the host within the cluster
    memories: tuple[str, ...]  # memory kinds, the default one first
    attributes: Mapping[str, Attribute] = dataclasses.field(default_factory=dict)  # more, such as "coords_x"


@dataclasses.dataclass(frozen=True)
class Machine:
    """All devices that a client may ever use: lost or absent islands included, as a client learns of them once."""

    platform: str  # JAX's name: "cpu", "cuda", "tpu"
    platform_version: str
    devices: tuple[DeviceInfo, ...]


class Buffer(Protocol):
    """n arrays of one shape and dtype, one on each of `devices`. It is freed when nobody refers to it."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Device of each shard."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one shard."""

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """None: the buffer of a token."""

    @property
    def memory_kind(self) -> str:
        """Where it lies on the devices."""

    def when_ready(self, then: Done) -> None:
        """Calls `then` when all shards are computed."""

    def delete(self) -> None:
        """Frees the memory now. Nobody uses the buffer afterwards; it may be deleted twice."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One of a buffer's arrays."""

    buffer: Buffer
    number: int

    @property
    def device(self) -> int:
        """Where it lies."""
        return self.buffer.devices[self.number]


class AllShards(Sequence[Shard]):
    """All shards of a buffer, in order, made when somebody asks for one."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.buffer.devices)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [Shard(self.buffer, each) for each in range(len(self))[number]]
        return Shard(self.buffer, range(len(self))[number])


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of an executable."""

    sharding: bytes | None  # a serialized xla.OpSharding; None: the compiler does not say
    layout: str  # XLA's text, such as "{1,0:T(8,128)}"


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of an executable."""

    shape: tuple[int, ...]  # of the whole array
    dtype: str  # NumPy's or ml_dtypes' name, or "token"
    shard_shape: tuple[int, ...]
    sharding: bytes | None
    layout: str
    memory_kind: str


@dataclasses.dataclass(frozen=True)
class ExecutableMetadata:
    """What an executable's compiler knows of it: numbers, texts and bytes, so that it crosses between processes."""

    name: str
    fingerprint: bytes  # empty: none
    parameters: tuple[Parameter, ...]
    results: tuple[Result, ...]
    donated: tuple[int, ...]  # the parameters whose memory results take over
    memory: Mapping[str, int]  # fields of xla.CompiledMemoryStatsProto
    code_bytes: int
    cost: Mapping[str, Attribute]
    text: str  # the compiled HLO, for people


class Executable(Protocol):
    """A compiled and loaded program. It is freed when nobody refers to it and nothing of it runs."""

    @property
    def metadata(self) -> ExecutableMetadata:
        """What is known of it."""

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> Sequence[Buffer]:
        """Starts it. `arguments[i]` has parameter i's shard for each device, in the order of the devices it was
        compiled for. The shards of donated parameters are taken, unless their number is in `kept`. One buffer per
        result. Raises only what is wrong at once; what fails later fails the results.
        """

    def run_again(self, arguments: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Starts it as it was started before, with all shards of `arguments[i]`, of which it may take those of donated
        parameters. None, or an error: it does not start with these arguments, and nothing was done. Then `execute`
        starts it, or says what is wrong.
        """


class GraphExecutable(Executable, Protocol):
    """An executable of several programs."""

    @property
    def parts(self) -> tuple[ExecutableMetadata, ...]:
        """What is known of each part of the graph."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """An array as a function takes or makes it, and how it is cut over the function's devices, evenly."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    tiling: Tiling


@dataclasses.dataclass(frozen=True)
class Function:
    """A Python function of a client. Each host of `devices` calls it as `call(host, *arguments)`, in a process that it
    has for the client, where `call` comes by cloudpickle. An argument has the shards of a parameter that lie on the
    host's devices, in the order of `devices`, one behind the other along a first dimension. Of this form are the
    results, a list.
    """

    name: str
    call: Callable[..., list[np.ndarray[Any, Any]]]
    devices: tuple[int, ...]
    parameters: tuple[Cut, ...]
    results: tuple[Cut, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in files, `name` in `folder`, in the form that orbax and tensorstore read, and as which array it lies on
    `devices`.
    """

    folder: str
    name: str
    cut: Cut
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of StableHLO, portable bytecode or text, with shape and element type of each parameter and result."""

    name: str
    data: bytes
    parameters: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A program: a module that is compiled for `devices`, replica by replica, partitions in order. `options` is a
    serialized xla.CompileOptionsProto.
    """

    module: Module
    options: bytes
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a graph. It calls `parts[part]`, which may take over the inputs in the places `donated`; or it moves
    its only input, and `part` is -1. Inputs and outputs are numbers of values.
    """

    part: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Graph:
    """Several programs, and moves between their devices. Of the `values`, arrays on devices, the first `arguments` are
    given; those in `donated` are taken over. The steps are in an order in which they can run.
    """

    name: str
    values: tuple[tuple[Cut, tuple[int, ...]], ...]
    arguments: int
    parts: tuple[Part, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    donated: frozenset[int]


class Devices(Protocol):
    """The devices of one client."""

    def describe(self) -> Machine:
        """The devices. The same at every call."""

    def put(self, devices: tuple[int, ...], memory_kind: str, shards: Sequence[np.ndarray[Any, Any]]) -> Buffer:
        """Copies `shards[i]` onto `devices[i]`; replicas are one and the same object. The arrays do not change."""

    def fetch(self, shard: Shard, then: Callable[[np.ndarray[Any, Any] | BaseException], None]) -> None:
        """Tells `then` the shard's values, or why there are none."""

    def copy(self, shards: Sequence[Shard], devices: tuple[int, ...], memory_kind: str) -> Buffer:
        """A new buffer with a copy of `shards[i]` on `devices[i]`."""

    def reshard(
        self,
        shards: Sequence[Shard],
        source: Tiling,
        devices: tuple[int, ...],
        target: Tiling,
        shape: tuple[int, ...],
        memory_kind: str,
    ) -> Buffer:
        """The array of `shape` that `shards` are by `source`, cut by `target` over `devices`. Where a tiling does not
        divide a dimension, its parts there have ceil(size / parts), and the last ones are shorter.
        """

    def bitcast(self, shards: Sequence[Shard], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Buffer:
        """The same bytes as shards of another dtype and shape, on the same devices."""

    def compile(self, part: Part, then: Callable[[Executable | BaseException], None]) -> None:
        """Compiles a program."""

    def join(self, graph: Graph, then: Callable[[GraphExecutable | BaseException], None]) -> None:
        """Compiles all parts of a graph, and makes it one program. The devices of each part are of one island."""

    def load(self, function: Function, then: Callable[[Executable | BaseException], None]) -> None:
        """Makes a Python function one that can be run, like what is compiled. It donates nothing."""

    def save(self, arrays: Sequence[Stored], shards: Sequence[Sequence[Shard]], timeout_s: float) -> Buffer:
        """Has the hosts write arrays as they are now; `shards[i]` are those of `arrays[i]`. Returns a token. If it
        fails, an array is whole in its files or not there.
        """

    def restore(self, arrays: Sequence[Stored], timeout_s: float) -> tuple[Sequence[Buffer], Buffer]:
        """Has the hosts read arrays. Returns them, and a token."""

    def default_layout(self, dtype: np.dtype[Any], shape: tuple[int, ...], device: int, memory_kind: str) -> str:
        """How an array of this kind lies in memory when nobody says: XLA's text, such as "{1,0}"."""

    def tidy(self) -> None:
        """Executables were dropped: what others keep for them is to be freed soon."""

    def close(self) -> None:
        """The client is gone: everything of it is freed. Called once, last."""
