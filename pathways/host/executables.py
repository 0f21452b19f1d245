"""The host's side of a computation: compiled ahead by `jax.jit`, then called without it.

`load` inlines the computation's StableHLO into one `jax.jit` over the slice's mesh. So one call is one XLA launch, JAX
itself handles donation and multi-process meshes, and JAX's persistent compilation cache works. A call goes straight to
XLA's executable (`_jaxlib.direct_call`), because the arrays are of the types for which it was compiled.
A host's enqueue thread calls an executable; any thread may load one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pathways import _jaxlib, errors
from pathways.compiler import specs
from pathways.compiler.ir import ArrayType, Computation
from pathways.host.callbacks import Asker
from pathways.host.devices import device_mesh
from pathways.quirks import quirks_of

Axes = tuple[tuple[str, int], ...]  # names and sizes

#: What a cache keeps of executables that no program uses.
KEPT_BYTES = 32 << 20
#: What a small executable takes beside its module and its code. Measured: about 200 KiB.
_EXECUTABLE_BYTES = 200 << 10

#: While one device of several calls the client back, the others wait for it. XLA must not take that for a deadlock.
_PATIENCE = dict.fromkeys(
    (
        "xla_cpu_collective_timeout_seconds",
        "xla_cpu_collective_call_warn_stuck_seconds",
        "xla_cpu_collective_call_terminate_timeout_seconds",
    ),
    1 << 30,
)


@dataclasses.dataclass(frozen=True)
class _Module:
    """A computation's module as a parameter of the primitive; compared by its fingerprint."""

    fingerprint: str
    module: bytes = dataclasses.field(compare=False, repr=False)
    ask: Asker | None = None


def _load_module(key: _Module) -> Any:
    module = _jaxlib.parse_portable(key.module)
    _jaxlib.drop_main_attributes(module)
    return module


_computation_p = _jaxlib.module_primitive("pathways_computation", _load_module)


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """Bytes per device that an executable needs; aliased (donated) bytes are counted in arguments and outputs."""

    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    alias_bytes: int = 0
    code_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Executable:
    """A loaded computation. `call(*arrays)` takes global `jax.Array`s and returns a list or tuple of them.

    `in_shardings` and `out_shardings` are those of the arrays. Immutable; callable from any thread.
    """

    call: Callable[..., Sequence[jax.Array]]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    memory: MemoryStats
    cost: Callable[[], dict[str, float]]  # XLA's estimates: "flops", "bytes accessed", ...; of one device
    kept_bytes: int = 0  # about what it takes in this process
    form: _jaxlib.Form | None = None  # of a raw module
    raw: Any = None  # XLA's executable of a raw module, from which this is made; keeps it in the cache


def _mesh(computation: Computation, devices: Sequence[jax.Device], axes: Axes) -> Mesh:
    axes = mesh_axes(computation) or axes
    count = int(np.prod([size for _, size in axes], dtype=np.int64))
    if axes and count != len(devices):
        raise errors.PlanError(
            f"computation {computation.name!r} is for a mesh {dict(axes)} of {count} devices, but "
            f"{len(devices)} devices were given"
        )
    return device_mesh(axes, devices)


def mesh_axes(computation: Computation) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the mesh axes that the computation's module names; () if everything is replicated."""
    with _jaxlib.mlir_context():
        return _jaxlib.mesh_axes(_jaxlib.parse_portable(computation.module))


def _needed_axes(computation: Computation, axes: Axes) -> Axes:
    """The axes of the computation's slice, if its types name some; else ()."""
    types = (*computation.inputs, *computation.outputs)
    return axes if any(names for type in types for names in type.spec) else ()


def sharding(type: ArrayType, mesh: Mesh) -> NamedSharding:
    """The `NamedSharding` of a logical array's type on a physical mesh."""
    return NamedSharding(mesh, specs.to_partition_spec(type.spec))


def launch_with_jit(function: Callable[..., Any], inputs: Sequence[jax.Array]) -> Any:
    """A launch that was refused because `jax.disable_jit` is on for this thread, which is the embedded user's."""
    with jax.disable_jit(False):
        return function(*inputs)


@dataclasses.dataclass(frozen=True)
class Attended:
    """A launch to be made by a thread beside the enqueue thread, which calls `run` and waits for the end."""

    call: Callable[..., tuple[jax.Array, ...]]
    asker: Asker
    arrays: tuple[jax.Array, ...]
    #: This host's devices, if the computation runs on several hosts; else none.
    gang_devices: tuple[jax.Device, ...] = ()

    def run(self, has_stand_ins: bool = False) -> tuple[jax.Array, ...]:
        """Launches, waits, and returns the results, which are ready. `has_stand_ins`: see `Attendants`.

        Raises:
            CallbackFailedError: a call to the client failed.
            Whatever XLA raises.
        """
        self.asker.begin("an argument of the computation has failed" if has_stand_ins else None)
        try:
            made = jax.block_until_ready(self.call(*self.arrays))
        except Exception:
            if self.asker.failure is None:
                raise
        if self.asker.failure is not None:
            raise errors.CallbackFailedError(self.asker.failure)
        return tuple(made)


def load(
    computation: Computation,
    devices: Sequence[jax.Device],
    donate: Sequence[bool] = (),
    ask: Asker | None = None,
    axes: Axes = (),
) -> Executable:
    """Compiles `computation` for `devices` (C order of the slice's shape) without executing anything.

    `axes` are those of the mesh, for a module that names none while the types do; else the module's are taken.
    `donate[i]` gives input i's buffer to the outputs; () donates none. On a mesh of several processes, every process
    calls this with the same arguments. A computation with callbacks makes its calls by `ask`, and its `call` returns an
    `Attended` instead of results.

    Raises:
        ComputationError: XLA refused the module; the error has XLA's message.
    """
    if computation.callbacks and ask is None:
        raise errors.PlanError(f"computation {computation.name!r} calls its client back, and nobody carries that")
    _jaxlib.initialize_lapack()
    try:
        mesh = _mesh(computation, devices, axes)
        jitted, in_shardings, out_shardings = _jit(computation, mesh, donate, ask if computation.callbacks else None)
        structs = [
            jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=s)
            for type, s in zip(computation.inputs, in_shardings, strict=True)
        ]
        # The module of a computation with callbacks has pointers of this process.
        anew = _jaxlib.compile_anew() if computation.callbacks else contextlib.nullcontext()
        with _jaxlib.ignore_unused_donations(), anew:
            gives_up = len(devices) > 1 and quirks_of(devices[0].platform).collects_on_threads
            compiled = jitted.lower(*structs).compile(_PATIENCE if computation.callbacks and gives_up else None)
    except errors.PathwaysError:
        raise
    except (RuntimeError, ValueError) as error:
        raise errors.ComputationError(
            f"XLA could not compile computation {computation.name!r} for {len(devices)} devices: {error}"
        ) from error
    if computation.callbacks:
        local = tuple(device for device in devices if device.process_index == jax.process_index())
        gang_devices = local if len(local) < len(devices) else ()
        call: Any = lambda *arrays: Attended(compiled, ask, arrays, gang_devices)  # type: ignore[arg-type]
    elif any(_jaxlib.is_sub_byte(type.dtype) for type in computation.inputs):
        # Arrays of less than a byte per element have layouts that an ahead-of-time call refuses. For them call the jit:
        # its own cache already holds what was just compiled.
        call = jitted
    else:
        call = _jaxlib.direct_call(compiled)
    memory = memory_of(compiled.memory_analysis())
    kept = kept_bytes(computation, memory)
    return Executable(call, in_shardings, out_shardings, memory, functools.partial(cost_of, compiled), kept)


def kept_bytes(computation: Computation, memory: MemoryStats) -> int:
    """About what an executable takes in this process."""
    return _EXECUTABLE_BYTES + len(computation.module) + memory.code_bytes


def _jit(
    computation: Computation,
    mesh: Mesh,
    donate: Sequence[bool],
    ask: Asker | None,
) -> tuple[Any, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
    """A `jax.jit` that inlines the computation's module, and the shardings of its arguments and results."""
    in_shardings = tuple(sharding(type, mesh) for type in computation.inputs)
    out_shardings = tuple(sharding(type, mesh) for type in computation.outputs)
    out_avals = tuple(jax.core.ShapedArray(type.shape, type.dtype) for type in computation.outputs)
    key = _Module(computation.fingerprint, computation.module, ask)

    def call(*arrays: Any) -> tuple[Any, ...]:
        return tuple(_computation_p.bind(*arrays, key=key, out_avals=out_avals))

    call.__name__ = call.__qualname__ = computation.name or "computation"
    donated = tuple(number for number, given in enumerate(donate) if given)
    jitted = jax.jit(
        call, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donated, keep_unused=True
    )
    return jitted, in_shardings, out_shardings


def cost_of(compiled: Any) -> dict[str, float]:
    """XLA's estimates for an executable."""
    return {str(name): float(value) for name, value in (compiled.cost_analysis() or {}).items()}


def memory_of(stats: Any) -> MemoryStats:
    """What XLA says of an executable's memory, if it says something."""
    if stats is None:
        return MemoryStats()
    return MemoryStats(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )


class ExecutableCache:
    """One executable per (fingerprint, devices, donation). Thread-safe: of several threads that ask, one compiles.

    Who uses an executable keeps it. The cache itself keeps those that were used last, up to `KEPT_BYTES` of them: a
    function that is made and dropped again and again is compiled once, and what nobody calls any more goes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading: dict[Hashable, Future[Executable]] = {}  # guarded by _lock, like all below
        self._used: weakref.WeakValueDictionary[Hashable, Executable] = weakref.WeakValueDictionary()
        self._recent: collections.OrderedDict[Hashable, Executable] = collections.OrderedDict()
        self._bytes = 0  # of those in `_recent`

    def load(
        self,
        computation: Computation,
        devices: Sequence[jax.Device],
        donate: Sequence[bool] = (),
        client: int = 0,
        asker: Callable[[int], Asker] | None = None,
        axes: Axes = (),
    ) -> Executable:
        """As the function `load`, but equal modules compile once; those with callbacks, once per client.

        `axes`: of the computation's slice.

        `asker(devices)` makes the `Asker` by which they call their client.
        """
        donate = tuple(donate) if any(donate) else ()
        whose = client if computation.callbacks else None
        where = tuple(d.id for d in devices)
        axes = _needed_axes(computation, axes)

        def make() -> Executable:
            ask = asker(len(devices)) if computation.callbacks and asker is not None else None
            return load(computation, devices, donate, ask, axes)

        key = (whose, computation.fingerprint, computation.inputs, computation.outputs, where, donate, axes)
        return self.once(key, make)

    def once(self, key: Hashable, make: Callable[[], Executable]) -> Executable:
        """The executable of this key; the first thread that asks for it makes it."""
        with self._lock:
            there = self._used.get(key)
            if there is not None:
                self._keep(key, there)
                return there
            loading = self._loading.get(key)
            mine = loading is None
            if loading is None:
                loading = self._loading[key] = Future()
        if mine:
            try:
                made = make()
            except BaseException as error:
                with self._lock:
                    del self._loading[key]
                loading.set_exception(error)
                raise
            with self._lock:
                self._used[key] = made
                self._keep(key, made)
                del self._loading[key]
            loading.set_result(made)
        return loading.result()

    def _keep(self, key: Hashable, used: Executable) -> None:
        """Keeps an executable as the one used last. `_lock` is held."""
        if key not in self._recent:
            self._bytes += used.kept_bytes
        self._recent[key] = used
        self._recent.move_to_end(key)
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._recent.popitem(last=False)[1].kept_bytes

    def __len__(self) -> int:
        return len(self._used)

    def forget(self, client: int) -> None:
        """Forgets the executables that call a client, because the client is gone."""
        with self._lock:
            for key in [key for key in self._recent if isinstance(key, tuple) and key[0] == client]:
                self._bytes -= self._recent.pop(key).kept_bytes
            for key in [key for key in self._used if isinstance(key, tuple) and key[0] == client]:
                self._used.pop(key, None)
