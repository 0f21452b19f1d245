"""What the compiler gives to the runtime: a program on virtual slices, which names no physical device.

A `LogicalProgram` is the location-agnostic program of the design: flat, immutable, and independent of the devices that
its slices are bound to. `pathways.compiler.partition.lower` makes it from IFRT IR.
`pathways.plan.binding` binds it to physical devices and cuts it into one plan per host.

Conventions:
    * A *value* is one logical array; values are numbered 0..V-1 and each is written once (single assignment).
    * A *mesh* is one virtual slice: named axes over logical device numbers, row-major; number i of mesh m is the
      i-th device of the slice in C order of its shape.
    * A *spec* gives, per array dimension, the tuple of mesh axis names that cut it, major first; () means the
      dimension is not cut. It has exactly as many entries as the array has dimensions.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pathways.compiler.lengths import Lengths

Spec = tuple[tuple[str, ...], ...]

#: The most cases of one branch, so that a host's work for a program grows with the program's size only.
MOST_CASES = 256
#: So deep may branches be nested; `kMostNested` of csrc/plan/branches.h.
MOST_NESTED = 64


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """A virtual slice as the compiler sees it: a name, and named axes with sizes.

    `explicit` has the axes of type `jax.sharding.AxisType.Explicit`: how they cut a value is part of its type.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    explicit: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of logical devices."""
        return int(np.prod([size for _, size in self.axes], dtype=np.int64)) if self.axes else 1


class Memory(enum.Enum):
    """Where the shards of an array lie."""

    DEVICE = "device"  # in the memory of their devices
    HOST = "host"  # in the memory of their devices' hosts: offloaded


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How an array is cut where no spec can say it: into `grid` equal parts per dimension. Logical device i of the mesh
    holds the part `cells[i]`, counted in C order of the grid. It is what XLA's shardings of whole tiles say.
    """

    grid: tuple[int, ...]
    cells: tuple[int, ...]

    def check(self, shape: tuple[int, ...], devices: int) -> None:
        """Raises ValueError unless it cuts arrays of this shape, and gives each part to equally many of the devices."""
        count = math.prod(self.grid)
        if len(self.grid) != len(shape) or any(n < 1 or size % n for size, n in zip(shape, self.grid, strict=True)):
            raise ValueError(f"an array of shape {shape} cannot be cut into {self.grid} equal parts")
        held = collections.Counter(self.cells)
        is_known = len(held) == count and all(0 <= cell < count for cell in held)
        if len(self.cells) != devices or not is_known or len(set(held.values())) != 1:
            raise ValueError(f"{devices} devices do not hold each of {count} parts equally often: {self.cells}")


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape, dtype and placement of one logical array.

    `dtype` is the physical element type (of a PRNG key array, that of its uint32 words). `mesh` indexes
    `LogicalProgram.meshes`. Only a move makes an array in host memory, and only a move reads it. With a `tiling`, that
    says how the array is cut, and the spec cuts nothing.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    mesh: int
    spec: Spec
    memory: Memory = Memory.DEVICE
    tiling: Tiling | None = None

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole logical array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.dtype, self.mesh, self.spec, self.memory, self.tiling))

    def __hash__(self) -> int:
        return self._hash


@dataclasses.dataclass(frozen=True)
class View:
    """An array that shows shards of others: on logical device i, shard `shards[i]` of input `inputs[i]`, which lies on
    the same device.
    """

    inputs: tuple[int, ...]
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Computation:
    """One compiled function, SPMD over the devices of one mesh.

    `module` is StableHLO as portable bytecode; its function `main` takes and returns *logical* (global) shapes.
    Equal modules have equal bytes, so a host compiles each `fingerprint` once, for all clients. Each process computes
    it itself: a client that could say it could give its module to others (TRUST-1).
    `donated[i]` says that input i may be donated to the outputs; each node still decides (MEM-4).
    `callbacks` are the numbers of the client's functions that it calls, and of its host functions.

    A move has no module: it copies its one input from device memory to host memory, or back. `pathways.plan.offloads`
    makes moves.

    `options` are XLA's (a serialized `CompileOptionsProto`) of a module that was compiled for its devices elsewhere:
    hosts compile it as it is, with its own shardings and donations, and no axis names a device. `views` has an entry
    per output of a computation without a module that only shows shards of its inputs, and copies nothing.

    A computation with a callback and no module is a call of that host function: once per host, with the shards that
    its inputs have there.
    """

    name: str
    module: bytes
    mesh: int
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    donated: tuple[bool, ...]
    callbacks: tuple[int, ...] = ()
    options: bytes = b""
    views: tuple[View, ...] = ()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells its module, and its options, from all others."""
        found = hashlib.sha256(b"%d " % len(self.module))
        found.update(self.module)
        found.update(self.options)
        return found.hexdigest()[:32]

    @property
    def is_move(self) -> bool:
        """Whether it moves an array between device memory and host memory."""
        return any(type.memory is Memory.HOST for type in (*self.inputs, *self.outputs))

    @property
    def is_host_call(self) -> bool:
        """Whether it calls a host function, and computes nothing itself."""
        return bool(self.callbacks) and not self.module


@dataclasses.dataclass(frozen=True)
class HostFunction:
    """A function that computations call on hosts (`pw.host_callback`). `number` is in `Computation.callbacks`.

    `function` are the bytes of it that `pathways.process.host_functions` reads, and `path` the folders where the client
    finds modules. A call may take `deadline_s` seconds; 0: any time. `what` is its name, for errors.
    """

    number: int
    what: str
    function: bytes
    deadline_s: float
    path: tuple[str, ...]


class Phase(enum.Enum):
    """What a labelled step does for its microbatch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"  # makes gradients of weights, apart from the backward step that makes those of the input
    SUM = "sum"  # adds the microbatch's gradients to those of the microbatches before


@dataclasses.dataclass(frozen=True)
class Label:
    """The place of a step in a pipeline: its stage, its microbatch, what it does for it, and for which of the stage's
    chunks. Stages, microbatches and chunks count from 0. `pipeline` is the number of the pipeline in the program.
    """

    stage: int
    microbatch: int
    phase: Phase
    chunk: int = 0
    pipeline: int = 0

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        pipeline = f" of pipeline {self.pipeline}" if self.pipeline else ""
        return f"{self.phase.value}, microbatch {self.microbatch}{chunk}{pipeline}"


@dataclasses.dataclass(frozen=True)
class PipelineInfo:
    """What is known of a pipeline of a program; its number is its place in `LogicalProgram.pipelines`.

    `title` says whose it is, for errors. `schedule` is the name of the schedule that the order of its nodes follows,
    for "auto" with what was chosen; "none" if the order is the text's. `is_searched` is true for "auto". `lengths` are
    those that the user gives for it, one item per stage (chunk c of stage s has item c * depth + s); () if none. `key`
    is the name of its scopes; "" if it has none. The forward and the backward half of a pipeline have one key.
    """

    title: str
    schedule: str
    is_searched: bool = False
    lengths: tuple[Lengths, ...] = ()
    key: str = ""


class NodeKind(enum.Enum):
    """What a node of a logical program does."""

    CALL = "call"  # runs a computation on its mesh
    TRANSFER = "transfer"  # moves one value to another mesh, or to another sharding
    SELECT = "select"  # gives the result of the branch that was taken: of its inputs, the first is the branch's number
    LOOP = "loop"  # runs a body again and again
    EXCHANGE = "exchange"  # sends rows to shards chosen at run time; see `pathways.compiler.added_primitives.exchange`
    PERMUTE = "permute"  # sends rows along the routes of an exchange, or back


@dataclasses.dataclass(frozen=True)
class Node:
    """One step of a program. `computation` indexes `LogicalProgram.computations`, or `loops` for a loop, or `exchanges`
    for an exchange; else it is -1.

    `name` is the call site's own name, `origin` the placed function's name. `transposes` is 0 for a forward step and 1
    for a backward step. `donates[i]` refines the computation's donation for this call site: true only if input i has no
    later reader, is not an argument that the user keeps, and is not returned. `label` is set by a schedule. `predicate`
    indexes `LogicalProgram.predicates`: the node is run only if that holds; -1: always.
    """

    kind: NodeKind
    name: str
    computation: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    origin: str = ""
    transposes: int = 0
    donates: tuple[bool, ...] = ()
    label: Label | None = None
    predicate: int = -1


@dataclasses.dataclass(frozen=True)
class Predicate:
    """Holds if the scalar `value` is `case`, and the enclosing predicate `parent` holds (-1: there is none).

    `value` is not read if `parent` does not hold: perhaps it was never made.
    """

    value: int
    case: int
    parent: int = -1


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop. It runs its body `count` times, or while the body says so if `count` is None.

    The inputs of its node are, if `count` is None, whether to begin; then `constants` values, then the carry. The body
    takes the constants and the carry, and gives, if `count` is None, whether to go on; then the new carry. A carried
    value has one type from its start to its end. The results of the node are the last carry. The body may overwrite the
    carry where its `donated_arguments` say so. So whoever runs the loop copies the first carry if others read it.
    """

    body: LogicalProgram
    constants: int
    count: int | None = None


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How an exchange sends: a shard of the target has room for `capacity` rows; `drops`: more are left, else they fail
    the run; rows whose destination is `unsent` go nowhere.
    """

    capacity: int
    drops: bool
    unsent: int | None


@dataclasses.dataclass(frozen=True)
class Calls:
    """The results by which a client knows that its program's callbacks are over.

    After the user's results there are `count` more, one per computation with callbacks, which exists when that
    computation is over. The first `effects` of them are of computations whose callbacks have side effects. If callbacks
    are ordered, one more argument comes before the first ordered callback, and the result number `last` of these comes
    after the last one. Otherwise `last` is -1.
    """

    count: int = 0
    effects: int = 0
    last: int = -1


@dataclasses.dataclass(frozen=True)
class LogicalProgram:
    """A whole program: arguments in, nodes in order, results out.

    `arguments` and `results` are value numbers; a result may be an argument (it then bypasses XLA) or appear twice.
    `donated_arguments[i]` is the user's `donate_argnums`, per flattened argument.
    `nodes` are in a valid order: every input is an argument or the output of an earlier node.

    `predicates`, `loops` and `exchanges` are those of nodes. A host knows no loop: the controller orders the runs of
    its body. No loop or exchange has a predicate (`control`). `decides`: the boolean scalar that says whether a loop
    of which this is a part goes on behind it; -1: there is none. `host_functions`: those that its computations call.

    Only the client knows the rest. `calls`: because of callbacks there may be one more argument and more results than
    the user's. `callbacks`: the function (`_jaxlib.Callback`) of each callback number. `pipelines`: those that labels
    of nodes name. `parallel_iterations`: the option of that name, of a program with loops.
    """

    name: str
    meshes: tuple[MeshSpec, ...]
    values: tuple[ArrayType, ...]
    computations: tuple[Computation, ...]
    nodes: tuple[Node, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    donated_arguments: tuple[bool, ...]
    mpmd_text: str = ""
    ifrt_text: str = ""
    calls: Calls = Calls()
    callbacks: Mapping[int, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    pipelines: tuple[PipelineInfo, ...] = ()
    predicates: tuple[Predicate, ...] = ()
    loops: tuple[Loop, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    decides: int = -1
    host_functions: tuple[HostFunction, ...] = ()
    parallel_iterations: int = 1

    @property
    def schedule(self) -> str:
        """The names of the schedules that the order of the nodes follows; "none" if the order is the text's."""
        names = dict.fromkeys(each.schedule for each in self.pipelines if each.schedule != "none")
        return " and ".join(names) or "none"

    @property
    def has_choices(self) -> bool:
        """Whether hosts read scalars of it and decide by them."""
        return bool(self.predicates) or self.decides >= 0 or any(node.kind is NodeKind.SELECT for node in self.nodes)
