"""A host's rare half: registers programs, compiles them, and does what the executor asks beside launches.

`pathways._core.Host` owns the enqueue loop and calls in here with Python's lock held, from one thread; registration
comes from control threads, compilation runs on threads of its own. Values are `jax.Array`s over the devices of a slice,
of which this process sees its own shards.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pathways import _core, _jaxlib, errors
from pathways.compiler import specs
from pathways.compiler.ir import LogicalProgram
from pathways.host import executables, offload, read_back
from pathways.host.callbacks import Asker, Questions
from pathways.host.checkpoint_io import Target, Tasks
from pathways.host.host_buffers import Inputs
from pathways.host.network_transfer import Streams
from pathways.host.receive import ReceiveAllocation, allocate_receive
from pathways.plan.binding import Bindings, BoundProgram, HostPlan, host_plan, local_mask
from pathways.plan.host_resharding import HostReshardPlan, host_reshard_plan
from pathways.plan.memory_profile import Profile, ProgramMemory, sizes_of
from pathways.plan.resharding import Placement, Region
from pathways.process.worker_threads import WorkerThreads
from pathways.protocol import payloads
from pathways.protocol.payloads import Mode

#: Launches that a CPU device takes before the enqueue itself blocks, other devices' too (32, less one).
CPU_IN_FLIGHT = 31
#: How long an error that smells of a lost peer waits for the controller's word.
PEER_LOST_GRACE_S = 1.0
_PEER_LOST = re.compile(r"gloo|nccl|connection (was )?(reset|closed|refused)|socket closed", re.IGNORECASE)

F = TypeVar("F", bound=Callable[..., Any])


def all_dtypes(function: F) -> F:
    """Runs `function` with 64-bit types on: which types a program has was settled by the client's x64 mode."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


class Program:
    """A registered program on one host. Immutable after it is compiled."""

    def __init__(self, client: int, bound: BoundProgram, plan: HostPlan, host: int) -> None:
        self.client = client
        self.bound = bound
        self.plan = plan
        self.host_reshard_plans = [
            host_reshard_plan(
                plan_here, bound.placed(node.inputs[0]), bound.placed(node.outputs[0]), host, bound.devices_per_host
            )
            for plan_here, node in zip(plan.routes, plan.transfers, strict=True)
        ]


class JaxBackend:
    """One host on JAX. `run` is the enqueue thread's loop."""

    def __init__(
        self,
        host: int,
        devices: Sequence[jax.Device],
        all_devices: Sequence[jax.Device],
        first_device: int,
        segments: Sequence[Any],
        controller: Any,
        device_bytes: int = 0,
        transfer_bytes: int = 0,
        directory: str | None = None,
    ) -> None:
        """`devices` are this host's, `all_devices` the island's in global order from number `first_device` on.

        `device_bytes`: memory of each device that may be used; 0: no bound. `transfer_bytes`: memory of the host that
        transfers may land in. `directory` is the cluster's: files without a name lie there.
        """
        self.host = host
        self.device_bytes = device_bytes
        self.transfer_bytes = transfer_bytes
        self._devices = tuple(devices)
        self._all_devices = tuple(all_devices)
        self._first_device = first_device
        self._platform = devices[0].platform
        # A host of one CPU device runs what it enqueues inline, so nothing is ever in flight there.
        bound = CPU_IN_FLIGHT if self._platform == "cpu" and len(devices) > 1 else 0
        self.core = _core.Host(
            self,
            host,
            len(devices),
            bound,
            list(segments),
            controller,
            device_bytes=device_bytes,
            # Measured: XLA computes a cheap gang on one device in the call, and those on several one after the other.
            gangs_block=self._platform == "cpu",
        )
        self._programs: dict[int, Program] = {}
        self._executables = executables.ExecutableCache()
        self._placements: dict[tuple[int, int], Placement] = {}  # by client and number
        self._inputs: dict[tuple[int, int], Inputs] = {}  # the same, as puts need them
        self._shardings: dict[Any, NamedSharding] = {}
        self._targets: dict[int, Any] = {}  # by a passage's identity: abstract value, sharding, devices, itself
        self._receives: dict[tuple[int, int, int], ReceiveAllocation] = {}  # by order, plan and route
        self._compiler: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._compiler_thread: threading.Thread | None = None
        self._watchers = Watchers(self.core)
        self._tasks = Tasks(self.core, host, all_dtypes)
        self.callbacks = Questions(host)
        self._attendants = WorkerThreads("pw-attend")
        self._fence: Fence | None = None  # GANG-3, where launches of several threads meet
        #: Called when a computation cannot be brought to its end, with the reason; may end the process.
        self.give_up: Callable[[str], None] = lambda why: None
        self._streams: Streams | None = None  # to hosts on other machines
        self._local_bytes = 0  # by transfers within this host
        self._compiles = CompileCounter()
        self.local: dict[int, Any] = {}  # embedded: objects handed over between client and host
        #: Told of each offload: (request, error or None, bytes that left the devices or came back).
        self.on_offloaded: Callable[[int, str | None, int], None] = lambda request, error, nbytes: None
        self.directory = directory

    # ------------------------------------------------------------------------------------- registration, any thread

    def attach_client(self, client: int, segment: Any) -> None:
        """Starts completing a client's futures."""
        self.core.attach_client(client, segment)

    def succeed(self, predecessor_failure: str, youngest_client: int) -> None:
        """This host succeeds a lost one: what is missing here fails with `predecessor_failure` (ERR-2). Before
        `run`.
        """
        self.core.set_predecessor_failure(predecessor_failure, youngest_client)

    def open_streams(self, address: str, far: Mapping[int, str]) -> None:
        """Some hosts are on other machines; see `Streams`. Before `run`."""
        self._streams = Streams(self.core, address, far)

    def replace_peer(self, host: int, segment: Any, loss: int, stream: str = "") -> None:
        """A lost host's successor has `segment`, and takes network transfers at `stream`; returns when nothing of its
        predecessor's is used any more."""
        self.core.replace_peer(host, segment, loss)
        if self._streams is not None:
            self._streams.replace(host, stream)

    def register_program(
        self,
        client: int,
        program_id: int,
        program: LogicalProgram,
        bindings: Bindings,
        on_compiled: Callable[[int, str | None, ProgramMemory | None], None],
    ) -> None:
        """Stores a program and compiles it in the background; then `on_compiled(program_id, error, memory)`."""
        bound = BoundProgram(program, tuple(map(tuple, bindings)), len(self._devices))
        registered = Program(client, bound, host_plan(bound, self.host, self._platform == "cpu"), self.host)
        self._programs[program_id] = registered
        try:
            for route, plan_here in enumerate(registered.host_reshard_plans):
                for destination, words in plan_here.copy_plans.items():
                    self.core.add_copy_plan(program_id, route, destination, words)
            self.core.add_plan(program_id, registered.plan.block, client)
        except BaseException:
            del self._programs[program_id]
            raise
        if self._compiler_thread is None:
            self._compiler_thread = threading.Thread(target=self._compile_loop, name="pw-compile", daemon=True)
            self._compiler_thread.start()
        self._compiler.put(lambda: self._compile(program_id, registered, on_compiled))

    def client_gone(self, client: int) -> None:
        """The order has passed a client's end (OWN-1); enqueue thread. Its programs follow with their last runs."""
        self._tasks.forget(client)
        self.callbacks.forget(client)
        self._executables.forget(client)
        for key in [key for key in self._placements if key[0] == client]:
            del self._placements[key]
            self._inputs.pop(key, None)

    def program_gone(self, program_id: int) -> None:
        """The last run that named a removed program is over; enqueue thread."""
        registered = self._programs.pop(program_id, None)
        for plan_here in registered.host_reshard_plans if registered is not None else ():
            self._targets.pop(id(plan_here), None)

    def _compile_loop(self) -> None:
        while (job := self._compiler.get()) is not None:
            job()

    def _compile(
        self,
        program_id: int,
        registered: Program,
        on_compiled: Callable[[int, str | None, ProgramMemory | None], None],
    ) -> None:
        error = memory = None
        if program_id not in self._programs:
            on_compiled(program_id, "the program was forgotten before it was compiled", None)
            return
        try:
            loaded = self.compile_now(registered)
            temporaries = [each.memory.temporary_bytes for each in loaded]
            profile = Profile(registered.bound, self.host, receives_on_host=self._platform == "cpu")
            memory = profile.memory(registered.plan, temporaries)
            sizes = sizes_of(registered.plan, profile, temporaries)
            self.core.set_launchables(program_id, tuple(each.call for each in loaded), *sizes)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem} (on host {self.host})"
            self.core.set_failed(program_id, error)
        on_compiled(program_id, error, memory)

    @all_dtypes
    def compile_now(self, registered: Program) -> tuple[executables.Executable, ...]:
        """A program's launches; equal modules are compiled once per host."""
        bound = registered.bound
        loaded = []
        for launch in registered.plan.launches:
            computation = bound.program.computations[launch.computation]
            devices = [self._device(number) for number in bound.bindings[computation.mesh]]
            asker = functools.partial(self._asker, registered.client)
            loaded.append(self._executables.load(computation, devices, launch.donates, registered.client, asker))
        return tuple(loaded)

    def _asker(self, client: int, devices: int) -> Asker:
        if self._fence is None and self._platform == "cpu" and len(self._all_devices) > len(self._devices):
            self._fence = Fence(self._devices)
        return Asker(functools.partial(self.callbacks.ask, client), devices, lambda why: self.give_up(why))

    def analyze(self, program_id: int) -> dict[str, Any]:
        """By number of a computation of a compiled program: its memory and cost on one device, as XLA has them."""
        registered = self._programs.get(program_id)
        if registered is None:
            return {}
        return {
            str(launch.computation): {"memory": dataclasses.asdict(loaded.memory), "cost": loaded.cost()}
            for launch, loaded in zip(registered.plan.launches, self.compile_now(registered), strict=True)
        }

    def _device(self, number: int) -> jax.Device:
        return self._all_devices[number - self._first_device]

    # ---------------------------------------------------------------------------------------------- the enqueue thread

    @all_dtypes
    def run(self) -> None:
        """Runs until `stop`."""
        try:
            self.core.run(self._watchers.arm, _jaxlib.collect_garbage)
        finally:
            self.close()

    def close(self) -> None:
        """Ends this host's threads and drops every value; on the enqueue thread."""
        self._watchers.stop()
        if self._streams is not None:
            self._streams.stop()
        self._tasks.stop()
        self._attendants.stop()
        self._compiler.put(None)
        self.core.clear()

    def stop(self) -> None:
        """Makes `run` return; any thread."""
        self.core.stop()

    def stats(self) -> dict[str, Any]:
        """Numbers for people."""
        stats = self.core.stats()
        for account in stats["memory"]["accounts"]:
            known = self._programs.get(account["plan"])
            account["program"] = known.bound.program.name if known is not None else None
        return {
            **stats,
            "compiles": self._compiles.count,
            "executables": len(self._executables),
            "bytes_moved": stats["bytes_sent"] + stats["bytes_shipped"] + stats["bytes_kept"] + self._local_bytes,
            "programs": len(self._programs),
            **self._tasks.stats(),
        }

    def set_faults(self, swap_every: int = 0, slow_copies_s: float = 0.0) -> None:
        """Test hook: makes this host break the order, or take so much longer over each copy to another host."""
        self.core.set_faults(swap_every, int(slow_copies_s * 1e9))

    def describe(self, doing: str, error: BaseException | None, plan: int, node: int) -> str:
        """One line of an error for the client: what failed, where, and XLA's own words (ERR-1)."""
        name = ""
        if plan in self._programs and node > 0:
            program = self._programs[plan].bound.program
            name = self._node_name(plan, node)
            name = f" of computation {name!r} of program {program.name!r}" if name else f" of program {program.name!r}"
        if len(self._all_devices) > len(self._devices) and _PEER_LOST.search(str(error)):
            # The collective library often hears of a peer's death before the controller does, who knows which host it
            # was and ends this one; give it the time to say so.
            time.sleep(PEER_LOST_GRACE_S)
        devices = ", ".join(str(device) for device in self._devices)
        kind = type(error).__name__ if isinstance(error, errors.PathwaysError) else "ComputationError"
        return f"{kind}: {doing}{name} failed on host {self.host} ({devices}): {type(error).__name__}: {error}"

    def _node_name(self, plan: int, node: int) -> str:
        from pathways import _native

        registered = self._programs[plan]
        nodes = _native.describe_plan(registered.plan.block)
        return registered.bound.program.nodes[nodes[node]["node"]].name if node < len(nodes) - 1 else ""

    def attend(self, order: int, plan: int, node: int, launch: executables.Attended) -> None:
        """Makes a launch on a thread of its own, for it calls its client back; `core.launched` hears of its end."""
        earlier = self._fence.now(launch.gang_devices) if self._fence is not None and launch.gang_devices else None

        @all_dtypes
        def see_to_it() -> None:
            made: tuple[jax.Array, ...] = ()
            error = None
            try:
                if earlier is not None:
                    jax.block_until_ready(earlier)
                made = launch.run()
            except BaseException as problem:
                error = self.describe("run", problem, plan, node)
            self.core.launched(order, node, made, error)

        self._attendants.do(see_to_it)

    @all_dtypes
    def placeholder(self, plan: int, node: int, index: int) -> jax.Array:
        """Zeros in place of a failed input, so that a gang stays whole (GANG-1)."""
        from pathways import _native

        registered = self._programs[plan]
        value = _native.describe_plan(registered.plan.block)[node]["inputs"][index]
        placed = registered.bound.placed(registered.plan.values[value])
        return self._prepare(placed).cut(np.zeros(placed.type.shape, placed.type.dtype))

    def arm(self, values: list[jax.Array]) -> None:
        """Sees to it that the host's doorbell rings when one of `values` is ready."""
        self._watchers.arm(values)

    def block(self, value: jax.Array) -> None:
        """Embedded: waits for a value; its error is found when it is looked at."""
        try:  # noqa: SIM105  (on the way of every embedded wait, where a context manager would cost more)
            value.block_until_ready()
        except Exception:  # deleted, or failed: the executor's look will tell
            pass

    # ------------------------------------------------------------------------------------------------------ transfers

    def transfer(self, plan: int, route: int, value: jax.Array) -> jax.Array:
        """A transfer whose two ends are on this host alone: shards that fit are shown as they are, or copied from one
        device to another (MEM-4)."""
        plan_here = self._programs[plan].host_reshard_plans[route]
        if all(plan_here.direct):
            self._local_bytes += plan_here.copied
            return self._show(plan_here, _jaxlib.shards_of(value), [])
        if value.size == 0:  # JAX itself cannot reshard one without elements onto other devices
            kind = plan_here.target.type
            return self._prepare(plan_here.target).cut(np.zeros(kind.shape, kind.dtype))
        self._local_bytes += value.nbytes
        return jax.device_put(value, self._sharding(plan_here.target))

    def begin_receive(self, order: int, plan: int, route: int) -> tuple[tuple[int, ...], list[int]] | None:
        """Takes room for what comes: who sends, and the offsets of all blocks; or None: no room now."""
        plan_here = self._programs[plan].host_reshard_plans[route]
        receive = allocate_receive(self.core, self.host, plan_here, self.transfer_bytes)
        if receive is None:
            return None
        self._receives[order, plan, route] = receive
        if self._streams is not None:
            self._streams.expect(order, self.transfer_number(plan, route), plan_here.sources, receive.views)
        return plan_here.sources, receive.offsets

    def transfer_number(self, plan: int, route: int) -> int:
        """What all hosts know a transfer by: its number in the program."""
        return self._programs[plan].plan.numbers[route]

    def send_remote(self, outgoing: Any) -> None:
        """Brings a host on another machine what it is sent; `core.remote_send_done` hears of the end."""
        assert self._streams is not None
        self._streams.send(outgoing)

    def shards(self, plan: int, route: int, value: jax.Array) -> tuple[Any, list[int]]:
        """The ready source shards that the route's copy plans read: what keeps them, and their addresses."""
        plan_here = self._programs[plan].host_reshard_plans[route]
        shards = _jaxlib.shards_of(value)
        if self._platform == "cpu" and not _jaxlib.is_sub_byte(plan_here.target.type.dtype):
            return value, [_jaxlib.address_of(shards[at]) for at in plan_here.reads]
        copies = [np.ascontiguousarray(shards[at]) for at in plan_here.reads]
        return copies, [copy.__array_interface__["data"][0] for copy in copies]

    def direct(self, order: int, plan: int, route: int, value: jax.Array) -> None:
        """This host receives shards of its own value as they are."""
        self._receives[order, plan, route].shards = _jaxlib.shards_of(value)

    def finish_receive(self, order: int, plan: int, route: int) -> jax.Array:
        """Makes an array of blocks that are all written; on CPU the array is the blocks."""
        receive = self._receives.pop((order, plan, route))
        plan_here = self._programs[plan].host_reshard_plans[route]
        self._local_bytes += plan_here.copied
        return self._show(plan_here, receive.shards, receive.views)

    def _show(
        self, plan_here: HostReshardPlan, shards: Sequence[jax.Array], views: Sequence[np.ndarray | None]
    ) -> jax.Array:
        known = self._targets.get(id(plan_here))
        if known is None:
            kind = plan_here.target.type
            aval = _jaxlib.shaped_array(kind.shape, kind.dtype, False)
            known = self._targets[id(plan_here)] = (
                aval,
                self._sharding(plan_here.target),
                [self._device(number) for number in plan_here.devices],
                plan_here,
            )
        parts = [views[at] if shard < 0 else shards[shard] for at, shard in plan_here.shows]
        return _jaxlib.assemble(known[0], known[1], parts, known[2])

    def abandon_receive(self, order: int, plan: int, route: int) -> None:
        """Gives the room of a failed transfer back."""
        self._receives.pop((order, plan, route), None)
        if self._streams is not None:
            self._streams.forget(
                order, self.transfer_number(plan, route), self._programs[plan].host_reshard_plans[route].sources
            )

    # ---------------------------------------------------------------------------------------------- the client's
    # commands

    def command(self, client: int, payload: bytes) -> None:
        """A placement's description, or the end of a program, of a save or of a restore."""
        if payload[:1] == b"E":
            self._tasks.drop(client, *payloads.parse_end(payload))
            return
        if payload[:1] == b"U":
            program_id = payloads.parse_forget(payload)
            if program_id in self._programs and self._programs[program_id].client == client:
                self.core.remove_plan(program_id)
            return
        number, placed = payloads.parse_define(payload)
        self._inputs.pop((client, number), None)
        self._placements.pop((client, number), None)
        last = self._first_device + len(self._all_devices)
        if any(not self._first_device <= device < last for device in placed.devices):
            raise ValueError(f"a placement names devices {placed.devices} of {self._first_device} to {last - 1}")
        self._placements[client, number] = placed

    def start_task(self, client: int, task: int, value: jax.Array | None, payload: bytes) -> None:
        """A step of a save or restore; `core.task_done` hears of its end."""
        fields = payloads.parse_task(payload)
        try:
            if fields["op"] == "stage":
                self._tasks.stage(client, task, fields, value)
            elif fields["op"] == "read":
                self._tasks.read(client, task, fields, self._target(self._placements[client, fields["placement"]]))
            elif fields["op"] == "end":
                self._tasks.end(client, task, fields)
            else:
                self._tasks.submit(client, task, fields)
        except Exception as problem:
            self._tasks.refuse(task, problem)

    def _target(self, placed: Placement) -> Target:
        """What an array of this placement is here."""
        shards: dict[Region, list[jax.Device]] = {}
        first = self.host * len(self._devices)
        for device, cell in zip(placed.devices, placed.cells, strict=True):
            if first <= device < first + len(self._devices):
                shards.setdefault(placed.region(cell), []).append(self._device(device))
        mask = local_mask(placed.devices, self.host, len(self._devices))
        return Target(placed.type.shape, self._sharding(placed), list(shards.items()), mask)

    @all_dtypes
    def put(self, client: int, payload: bytes) -> tuple[jax.Array, int]:
        """Makes a buffer of a client's bytes, on CPU without another copy; and says on which local devices."""
        number, _, what = payloads.parse_put(payload)
        placed = self._placements.get((client, number))
        if placed is None:
            raise ValueError(f"client {client} has not described its placement {number}, or not as it should")
        known = self._inputs.get((client, number))
        if known is None:
            known = self._inputs[client, number] = self._prepare(placed)
        if isinstance(what, tuple):  # Mode.ARENA
            block = self.core.client_block(client, *what)
            if block.nbytes < known.packing.nbytes:
                raise ValueError(f"a block of {block.nbytes} bytes, the array takes {known.packing.nbytes}")
            return known.unpack(memoryview(block)), known.mask
        if isinstance(what, int):  # Mode.LOCAL
            value = self.local.pop(what, None)
            if value is None:
                raise ValueError(f"nothing was handed over under key {what}")
            if isinstance(value, jax.Array):  # the caller's own, and may be donated here (MEM-4)
                if not value.devices().isdisjoint(known.sharding.device_set):
                    value = value.copy()  # `may_alias=False` is not heeded here
                return jax.device_put(value, known.sharding), known.mask
            return known.unpack(value), known.mask
        full = np.frombuffer(what, placed.type.dtype) if what else np.empty(0, placed.type.dtype)
        return known.cut(full.reshape(placed.type.shape)), known.mask

    def refuse_put(self, client: int, payload: bytes) -> None:
        """Gives back the client's memory of a put that nobody has room for."""
        _, _, what = payloads.parse_put(payload)
        if isinstance(what, tuple):  # Mode.ARENA
            self.core.client_block(client, *what)
        elif isinstance(what, int):  # Mode.LOCAL
            self.local.pop(what, None)

    def _prepare(self, placed: Placement) -> Inputs:
        return Inputs(placed, self.host, len(self._devices), self._device, self._sharding(placed))

    @all_dtypes
    def fetch(self, client: int, value: jax.Array, payload: bytes) -> None:
        """Writes this host's share of a ready buffer where the client reads it: each distinct part once."""
        mode, what = payloads.parse_fetch(payload)
        if mode is Mode.LOCAL:
            if what[0] in self.local:  # else its reader is gone
                self.local[what[0]] = read_back.whole(value)
            return
        offset, nbytes = what
        block = self.core.client_block(client, offset, nbytes)
        read_back.write(value, memoryview(block))

    @all_dtypes
    def read_back_recipe(self, value: jax.Array) -> read_back.Recipe:
        """How `_core` reads back arrays like `value`."""
        return read_back.recipe(value, self._platform)

    @all_dtypes
    def read_back(self, value: jax.Array, memory: memoryview) -> None:
        """Writes this host's share of a small result where the client reads it."""
        read_back.write(value, memory)

    @all_dtypes
    def offload(self, client: int, values: list[Any], payload: bytes, away: bool) -> list[Any] | None:
        """What stands for a client's values while they are off the devices, or the values again; None: it failed, and
        they stay as they are. Says so in either case."""
        request, to_disk = payloads.parse_offload(payload)
        try:
            if away:
                moved, nbytes = offload.offload(values, self.directory if to_disk else None, to_disk)
            else:
                moved, nbytes = offload.restore(values)
        except Exception as problem:
            doing = f"move client {client}'s buffers " + ("off the devices" if away else "back to the devices")
            kind = "ResourceExhaustedError" if isinstance(problem, OSError | MemoryError) else "ComputationError"
            self.on_offloaded(request, f"{kind}: host {self.host} could not {doing}: {problem}", 0)
            return None
        self.on_offloaded(request, None, nbytes)
        return moved

    def refuse_fetch(self, client: int, payload: bytes) -> None:
        """Gives back the client's memory of a fetch of nothing."""
        mode, what = payloads.parse_fetch(payload)
        if mode is Mode.ARENA:
            self.core.client_block(client, *what)

    def _sharding(self, placed: Placement) -> NamedSharding:
        key = (placed.mesh.axes, placed.devices, placed.type.spec)
        known = self._shardings.get(key)
        if known is None:
            devices = np.empty(len(placed.devices), dtype=object)
            devices[:] = [self._device(number) for number in placed.devices]
            axes = placed.mesh.axes or (("_devices", len(placed.devices)),)
            mesh = Mesh(devices.reshape([size for _, size in axes]), tuple(name for name, _ in axes))
            known = self._shardings[key] = NamedSharding(mesh, specs.to_partition_spec(placed.type.spec))
        return known


class CompileCounter:
    """Counts XLA compilations of this process, by JAX's own monitoring events."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


class Fence:
    """Lets a gang that another thread launches wait for the gangs that the enqueue thread launched before it (GANG-3).

    XLA's CPU client runs the single-device launches of one thread in their order. It does not order those of two
    threads, so their collectives could be paired wrongly. A fence is a tiny computation that the enqueue thread
    launches: when it has run, all earlier single-device launches of that thread have run. One gang with callbacks runs
    at a time, so a device has one fence at most, within the bound of `CPU_IN_FLIGHT`.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._ones = {device: jax.device_put(np.int32(1), device) for device in devices}
        self._step = jax.jit(lambda x: x + 1)
        jax.block_until_ready(self.now(devices))  # compiled

    def now(self, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Launches a fence on each of `devices`; ready when the earlier launches of the calling thread have run."""
        return [self._step(self._ones[device]) for device in devices]


class Watchers:
    """Threads that sleep in `block_until_ready` so that the enqueue thread need not.

    The enqueue thread, when it has nothing else to do, names the oldest value of each lane; a watcher waits for it with
    Python's lock released and then rings the host's doorbell.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._watched: set[int] = set()  # ids of values being waited for; they are kept alive by their waiter
        self._threads = 0

    def arm(self, values: list[Any]) -> None:
        """Sees to it that the doorbell rings when one of `values` is ready. Enqueue thread only."""
        for value in values:
            if id(value) in self._watched:
                continue
            self._watched.add(id(value))
            if self._threads < len(self._watched):
                self._threads += 1
                threading.Thread(target=self._loop, name="pw-watch", daemon=True).start()
            self._work.put(value)

    def stop(self) -> None:
        """Ends the threads as they come out of their waits."""
        for _ in range(self._threads):
            self._work.put(None)

    def _loop(self) -> None:
        while (value := self._work.get()) is not None:
            try:
                value.block_until_ready()
            except Exception:  # failed or donated: the executor's look will tell
                pass
            except BaseException:
                traceback.print_exc()
            self._watched.discard(id(value))
            value = None
            self._core.ring()
