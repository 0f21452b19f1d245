"""The programs of one host: stored by control threads, compiled by a thread of their own, dropped in the order.

Clients take turns at the compiler: each other client that registers many programs delays a client by one compilation.

A compiled program's callables are given to `_core.Host`, which launches them without this module.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pathways import _jaxlib, _native
from pathways.compiler.ir import LogicalProgram
from pathways.host import executables, host_calls, memory_moves, raw_computations
from pathways.host.callbacks import Asker
from pathways.host.devices import HostDevices
from pathways.host.host_buffers import LocalPlacement
from pathways.host.own_settings import own_settings
from pathways.host.sidecars import Sidecars
from pathways.plan.binding import Bindings, BoundProgram, exchange_shape, host_plan
from pathways.plan.host_resharding import host_reshard_plan
from pathways.plan.memory_profile import Profile, ProgramMemory, sizes_of
from pathways.process.collection import collection_is_rare
from pathways.process.worker_threads import WorkerThreads
from pathways.protocol import control_pb2 as pb

#: So many removals of a client wait for programs that are not stored yet; of more, the oldest are dropped.
MOST_EARLY = 1024
#: Called with a program's number, and with the error or the memory.
OnCompiled = Callable[[int, str | None, ProgramMemory | None], None]


class Program:
    """A registered program on one host. Immutable, but for the cache of its targets."""

    def __init__(self, client: int, bound: BoundProgram, devices: HostDevices, asker: Callable[[int], Asker]) -> None:
        """`asker(devices)` makes the `Asker` by which a computation on so many devices calls the client."""
        plan = host_plan(bound, devices.host, devices.quirks.is_host_memory, len(devices.local))
        self.client = client
        self.bound = bound
        self.plan = plan
        self.asker = asker
        self.host_reshard_plans = [
            host_reshard_plan(
                resharding,
                bound.placed(node.inputs[0]),
                bound.placed(node.outputs[0]),
                devices.host,
                bound.devices_per_host,
            )
            for resharding, node in zip(plan.routes, plan.transfers, strict=True)
        ]
        #: By transfer: whether the copier reads the shards where they are. Types of less than a byte are unpacked.
        self.reads_in_place = [
            devices.quirks.is_host_memory and not _jaxlib.is_sub_byte(each.target.type.dtype)
            for each in self.host_reshard_plans
        ]
        self._devices = devices
        self._targets: dict[int, LocalPlacement] = {}  # by transfer, of those that this host receives
        #: The exchanges of rows of this host's plan, in its order: each node and its shape.
        self.exchanges = [(node, exchange_shape(bound, node)) for node in plan.exchanges]
        self.placements: dict[int, LocalPlacement] = {}  # of what exchanges make, by value. Enqueue thread only.
        self.executables: tuple[executables.Executable, ...] = ()  # kept in the cache as long as this is here

    def target(self, route: int) -> LocalPlacement:
        """Where a transfer that this host receives puts its value. Enqueue thread only."""
        if route not in self._targets:
            self._targets[route] = LocalPlacement(self.host_reshard_plans[route].target, self._devices)
        return self._targets[route]

    def node_name(self, node: int) -> str:
        """The name of a node of this host's plan; "" when it has none."""
        nodes = _native.describe_plan(self.plan.block)
        return self.bound.program.nodes[nodes[node]["node"]].name if node < len(nodes) - 1 else ""


class Programs:
    """Stores, compiles and drops a host's programs."""

    def __init__(self, core: Any, devices: HostDevices, sidecars: Sidecars) -> None:
        self._core = core
        self._devices = devices
        self._sidecars = sidecars
        self.by_number: dict[int, Program] = {}
        #: By client, removals that came before their programs: clients' commands take another way than what stores.
        self._early: dict[int, collections.deque[int]] = {}
        self._lock = threading.Lock()  # a program is stored whole, or not yet, when its removal comes
        self._on_stand_ins: tuple[int, int] | None = None  # the node of the last placeholder; for the enqueue thread
        self._executables = executables.ExecutableCache()
        self._compiler = WorkerThreads("pw-compile", most=1, is_foreign=True)
        self._compiles = CompileCounter()
        #: Of the program that is compiled now: how many of how many computations are compiled; (0, 0): of none.
        self.progress = (0, 0)

    # ---- from any thread

    def register(
        self,
        client: int,
        program_id: int,
        program: LogicalProgram,
        bindings: Bindings,
        asker: Callable[[int], Asker],
        on_compiled: OnCompiled,
        islands: Mapping[int, int],
    ) -> None:
        """Stores a program and compiles it in the background; then calls `on_compiled(program_id, error, memory)`.
        `islands`: see `BoundProgram`.
        """
        devices = self._devices
        bound = BoundProgram(program, tuple(map(tuple, bindings)), devices.per_host, islands)
        with collection_is_rare():
            registered = Program(client, bound, devices, asker)
        with self._lock:
            self.by_number[program_id] = registered
            self._sidecars.add(client, program.host_functions)
            try:
                for route, plan_here in enumerate(registered.host_reshard_plans):
                    for destination, words in plan_here.copy_plans.items():
                        self._core.add_copy_plan(program_id, route, destination, words)
                self._core.add_plan(program_id, registered.plan.block, client)
            except BaseException:
                self.drop(program_id)
                raise
            if program_id in self._early.get(client, ()):
                self._core.remove_plan(program_id)
        self._compiler.do(lambda: self._compile(program_id, registered, on_compiled), client)

    def analyze(self, program_id: int) -> dict[int, pb.ComputationAnalysis]:
        """Memory and cost of a compiled program's computations on one device, from XLA; by computation number."""
        registered = self.by_number.get(program_id)
        if registered is None:
            return {}
        return {
            launch.computation: pb.ComputationAnalysis(
                memory=dataclasses.asdict(loaded.memory),
                cost=loaded.cost(),
                form=None if loaded.form is None else dataclasses.asdict(loaded.form),
            )
            for launch, loaded in zip(registered.plan.launches, self._load(registered), strict=True)
        }

    def stats(self) -> dict[str, Any]:
        """Statistics, for people to read."""
        return {
            "compiles": self._compiles.count,
            "compile_seconds": round(self._compiles.seconds, 3),
            "compile_cache_hits": self._compiles.hits,
            "compiling": self.progress,
            "executables": len(self._executables),
            "programs": len(self.by_number),
        }

    def name_of(self, plan: int | None) -> str | None:
        """The name of a program, if it is here."""
        known = self.by_number.get(plan) if plan is not None else None
        return known.bound.program.name if known is not None else None

    # ---- from the compiler's thread

    def _compile(self, program_id: int, registered: Program, on_compiled: OnCompiled) -> None:
        error = memory = None
        if program_id not in self.by_number:
            on_compiled(program_id, "the program was forgotten before it was compiled", None)
            return
        try:
            loaded = self._load(registered, tell=True)
            registered.executables = loaded
            temporaries = [each.memory.temporary_bytes for each in loaded]
            with collection_is_rare():
                profile = Profile(registered.bound, self._devices.host, self._devices.quirks.is_host_memory)
                memory = profile.memory(registered.plan, temporaries)
                sizes = sizes_of(registered.plan, profile, temporaries)
            self._core.set_launchables(program_id, tuple(each.call for each in loaded), *sizes)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem} (on host {self._devices.host})"
            self._core.set_failed(program_id, error)
        finally:
            self.progress = (0, 0)
        on_compiled(program_id, error, memory)

    @own_settings
    def _load(self, registered: Program, *, tell: bool = False) -> tuple[executables.Executable, ...]:
        """Compiles a program's launches; equal modules are compiled once per host. `tell`: counts it in `progress`."""
        bound = registered.bound
        loaded: list[executables.Executable] = []
        for launch in registered.plan.launches:
            if tell:
                self.progress = len(loaded), len(registered.plan.launches)
            computation = bound.program.computations[launch.computation]
            if computation.is_move:
                loaded.append(memory_moves.load(bound.moved(computation), self._devices))
                continue
            if computation.views:
                loaded.append(raw_computations.view(bound, computation, self._devices))
                continue
            if computation.is_host_call:
                loaded.append(host_calls.load(bound, computation, self._devices, registered.asker(1)))
                continue
            devices = [self._devices.device(number) for number in bound.bindings[computation.mesh]]
            if computation.options:
                compile_it = functools.partial(raw_computations.compile_raw, computation, devices)
                compiled = self._executables.once((computation.fingerprint, *(d.id for d in devices)), compile_it)
                loaded.append(raw_computations.load(compiled, bound, computation, self._devices, launch.donates))
                continue
            axes = bound.program.meshes[computation.mesh].axes
            loaded.append(
                self._executables.load(computation, devices, launch.donates, registered.client, registered.asker, axes)
            )
        return tuple(loaded)

    # ---- from the enqueue thread

    @own_settings
    def placeholder(self, plan: int, node: int, index: int) -> jax.Array:
        """Zeros in place of a failed input, so that this host still launches its part of the gang (GANG-1). The launch
        of this node is the next one.
        """
        self._on_stand_ins = plan, node
        registered = self.by_number[plan]
        value = _native.describe_plan(registered.plan.block)[node]["inputs"][index]
        placed = registered.bound.placed(registered.plan.values[value])
        return LocalPlacement(placed, self._devices).zeros()

    def take_stand_ins(self, plan: int, node: int) -> bool:
        """Whether the launch of a node, which is under way, is on placeholders."""
        found = self._on_stand_ins == (plan, node)
        self._on_stand_ins = None
        return found

    def remove(self, client: int, program_id: int) -> None:
        """Removes a client's program, when its last run is over; one that is not stored yet, as soon as it is: its call
        ended before (END-1). A program of another client stays.
        """
        with self._lock:
            registered = self.by_number.get(program_id)
            if registered is None:
                self._early.setdefault(client, collections.deque(maxlen=MOST_EARLY)).append(program_id)
            elif registered.client == client:
                self._core.remove_plan(program_id)

    def drop(self, program_id: int) -> None:
        """Drops a removed program, because its last run is over."""
        registered = self.by_number.pop(program_id, None)
        if registered is not None:
            self._sidecars.drop(registered.client, registered.bound.program.host_functions)

    def forget(self, client: int) -> None:
        """Drops what calls a client that is gone. Its programs go when their last runs are over."""
        self._early.pop(client, None)
        self._executables.forget(client)

    def stop(self) -> None:
        """Ends the compiler's thread when it has nothing left to compile."""
        self._compiler.stop()


class CompileCounter:
    """Counts and times XLA compilations of this process, by JAX's own monitoring events.

    `hits`: those of them that JAX's persistent cache had.
    """

    def __init__(self) -> None:
        self.count = self.hits = 0
        self.seconds = 0.0
        jax.monitoring.register_event_listener(self._hear)
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            self.seconds += duration

    def _hear(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.hits += 1
