"""The Python half of a host: registers programs, compiles them, and does what the executor asks beside launches.

`pathways._core.Host` owns the enqueue loop. It calls this module from one thread, the enqueue thread, with the GIL
held. Control threads call the registration methods. Compilation runs on a thread of its own. A value is a `jax.Array`
over the devices of a slice; this process sees its own shards of it.
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

#: Launches in flight per CPU device. XLA takes 32; then the enqueue call blocks, for other devices too. So 32 less one.
CPU_IN_FLIGHT = 31
#: When an error looks as if a peer was lost, the host waits so long for the controller before it reports the error.
PEER_LOST_GRACE_S = 1.0
_PEER_LOST = re.compile(r"gloo|nccl|connection (was )?(reset|closed|refused)|socket closed", re.IGNORECASE)

F = TypeVar("F", bound=Callable[..., Any])


def all_dtypes(function: F) -> F:
    """Runs `function` with 64-bit types on: the client's x64 mode has already decided the types of a program."""

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
    """One host that runs on JAX. `run` is the loop of the enqueue thread."""

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
        """`devices` are this host's; `all_devices` are the island's, in global order from number `first_device` on.

        `device_bytes`: memory of each device that may be used; 0: no bound. `transfer_bytes`: memory of the host for
        the receive buffers of transfers. `directory`: the cluster's directory, where files of offloaded buffers lie.
        """
        self.host = host
        self.device_bytes = device_bytes
        self.transfer_bytes = transfer_bytes
        self._devices = tuple(devices)
        self._all_devices = tuple(all_devices)
        self._first_device = first_device
        self._platform = devices[0].platform
        # On a host with one CPU device, the enqueue call itself runs the computation, so nothing is ever in flight.
        bound = CPU_IN_FLIGHT if self._platform == "cpu" and len(devices) > 1 else 0
        self.core = _core.Host(
            self,
            host,
            len(devices),
            bound,
            list(segments),
            controller,
            device_bytes=device_bytes,
            # Measured on CPU: XLA runs a cheap gang on one device inside the launch call, and runs the gangs on several
            # devices one after the other. So a gang holds up later launches (GANG-2).
            gangs_block=self._platform == "cpu",
        )
        self._programs: dict[int, Program] = {}
        self._executables = executables.ExecutableCache()
        self._placements: dict[tuple[int, int], Placement] = {}  # by client and number
        self._inputs: dict[tuple[int, int], Inputs] = {}  # the same placements, prepared for puts
        self._shardings: dict[Any, NamedSharding] = {}
        self._targets: dict[int, Any] = {}  # by id() of a host reshard plan: abstract value, sharding, devices, plan
        self._receives: dict[tuple[int, int, int], ReceiveAllocation] = {}  # by order, plan and reshard plan (`route`)
        self._compiler: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._compiler_thread: threading.Thread | None = None
        self._watchers = Watchers(self.core)
        self._tasks = Tasks(self.core, host, all_dtypes)
        self.callbacks = Questions(host)
        self._attendants = WorkerThreads("pw-attend")
        self._fence: Fence | None = None  # GANG-3; made when gangs may be launched by two threads
        #: Called with the reason when a computation cannot come to its end; may end the process.
        self.give_up: Callable[[str], None] = lambda why: None
        self._streams: Streams | None = None  # to hosts on other machines
        self._local_bytes = 0  # moved by transfers within this host
        self._compiles = CompileCounter()
        self.local: dict[int, Any] = {}  # embedded: objects that client and host hand to each other, by key
        #: Called after each offload or restore: (request, error or None, bytes that left the devices or came back).
        self.on_offloaded: Callable[[int, str | None, int], None] = lambda request, error, nbytes: None
        self.directory = directory

    # ------------------------------------------------------------------------------------- registration, any thread

    def attach_client(self, client: int, segment: Any) -> None:
        """Starts completing a client's futures."""
        self.core.attach_client(client, segment)

    def succeed(self, predecessor_failure: str, youngest_client: int) -> None:
        """Tells this host that it replaces a lost one (ERR-2). Call it before `run`.

        From then on, a use of a buffer that is not here fails with `predecessor_failure`, if the buffer's client is not
        younger than `youngest_client`: the lost host may have had that buffer.
        """
        self.core.set_predecessor_failure(predecessor_failure, youngest_client)

    def open_streams(self, address: str, far: Mapping[int, str]) -> None:
        """Opens the streams to the hosts `far` on other machines; see `Streams`. Call it before `run`."""
        self._streams = Streams(self.core, address, far)

    def replace_peer(self, host: int, segment: Any, loss: int, stream: str = "") -> None:
        """Replaces lost host `host` by its successor, which has `segment` and takes network transfers at `stream`.

        Returns when this host uses nothing of the predecessor's any more.
        """
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
        """Stores a program and compiles it in the background; then calls `on_compiled(program_id, error, memory)`."""
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
        """Drops what a client owned, because the order has passed the client's end (OWN-1). Enqueue thread.

        The client's programs go when their last runs are over.
        """
        self._tasks.forget(client)
        self.callbacks.forget(client)
        self._executables.forget(client)
        for key in [key for key in self._placements if key[0] == client]:
            del self._placements[key]
            self._inputs.pop(key, None)

    def program_gone(self, program_id: int) -> None:
        """Drops a removed program, because its last run is over. Enqueue thread."""
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
        """Compiles a program's launches; equal modules are compiled once per host."""
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
        """Memory and cost of a compiled program's computations on one device, from XLA; by computation number."""
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
        """Ends this host's threads and drops every value. Enqueue thread."""
        self._watchers.stop()
        if self._streams is not None:
            self._streams.stop()
        self._tasks.stop()
        self._attendants.stop()
        self._compiler.put(None)
        self.core.clear()

    def stop(self) -> None:
        """Makes `run` return. Any thread."""
        self.core.stop()

    def stats(self) -> dict[str, Any]:
        """Statistics, for people to read."""
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
        """Test hook: this host breaks the order, or each of its copies to another host takes `slow_copies_s` longer."""
        self.core.set_faults(swap_every, int(slow_copies_s * 1e9))

    def describe(self, doing: str, error: BaseException | None, plan: int, node: int) -> str:
        """One line of error text for the client: what failed, where, and XLA's own text (ERR-1)."""
        name = ""
        if plan in self._programs and node > 0:
            program = self._programs[plan].bound.program
            name = self._node_name(plan, node)
            name = f" of computation {name!r} of program {program.name!r}" if name else f" of program {program.name!r}"
        if len(self._all_devices) > len(self._devices) and _PEER_LOST.search(str(error)):
            # The collective library often notices a peer's death before the controller does. But the controller knows
            # which host was lost, and ends this process. Wait, so that the controller can report the loss first.
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
        """Launches on another thread a computation that calls its client back; calls `core.launched` at its end."""
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

    is_jit_disabled = staticmethod(_jaxlib.is_jit_disabled)

    def launch_with_jit(self, function: Callable[..., Any], inputs: Sequence[jax.Array]) -> Any:
        """A launch that was refused because `jax.disable_jit` is on for this thread, which is the embedded user's."""
        with jax.disable_jit(False):
            return function(*inputs)

    @all_dtypes
    def placeholder(self, plan: int, node: int, index: int) -> jax.Array:
        """Zeros in place of a failed input, so that this host still launches its part of the gang (GANG-1)."""
        from pathways import _native

        registered = self._programs[plan]
        value = _native.describe_plan(registered.plan.block)[node]["inputs"][index]
        placed = registered.bound.placed(registered.plan.values[value])
        return self._prepare(placed).cut(np.zeros(placed.type.shape, placed.type.dtype))

    def arm(self, values: list[jax.Array]) -> None:
        """Makes the host's doorbell ring when one of `values` is ready."""
        self._watchers.arm(values)

    def block(self, value: jax.Array) -> None:
        """Embedded: waits until a value is ready or failed; the executor finds an error when it polls the value."""
        try:  # noqa: SIM105  (every embedded wait runs this line; a context manager would cost more)
            value.block_until_ready()
        except Exception:  # deleted or failed: the executor finds out when it polls the value
            pass

    # ------------------------------------------------------------------------------------------------------ transfers

    def transfer(self, plan: int, route: int, value: jax.Array) -> jax.Array:
        """Runs a transfer whose source and target are both on this host alone.

        If every shard fits as it is, the result shows the same shards, or copies of whole shards on other devices
        (MEM-4). Otherwise JAX reshards the value.
        """
        plan_here = self._programs[plan].host_reshard_plans[route]
        if all(plan_here.direct):
            self._local_bytes += plan_here.copied
            return self._show(plan_here, _jaxlib.shards_of(value), [])
        if value.size == 0:  # JAX cannot reshard an array without elements onto other devices
            kind = plan_here.target.type
            return self._prepare(plan_here.target).cut(np.zeros(kind.shape, kind.dtype))
        self._local_bytes += value.nbytes
        return jax.device_put(value, self._sharding(plan_here.target))

    def begin_receive(self, order: int, plan: int, route: int) -> tuple[tuple[int, ...], list[int]] | None:
        """Allocates a receive's blocks. Returns the sending hosts and the offsets of all blocks; None: no room now."""
        plan_here = self._programs[plan].host_reshard_plans[route]
        receive = allocate_receive(self.core, self.host, plan_here, self.transfer_bytes)
        if receive is None:
            return None
        self._receives[order, plan, route] = receive
        if self._streams is not None:
            self._streams.expect(order, self.transfer_number(plan, route), plan_here.sources, receive.views)
        return plan_here.sources, receive.offsets

    def transfer_number(self, plan: int, route: int) -> int:
        """The number by which all hosts know a transfer: its number in the program."""
        return self._programs[plan].plan.numbers[route]

    def send_remote(self, outgoing: Any) -> None:
        """Sends an outgoing transfer to a host on another machine; `core.remote_send_done` is called at its end."""
        assert self._streams is not None
        self._streams.send(outgoing)

    def shards(self, plan: int, route: int, value: jax.Array) -> tuple[Any, list[int]]:
        """The source shards, already ready, that the transfer's copy plans read.

        Returns an object that keeps the shards alive, and their addresses.
        """
        plan_here = self._programs[plan].host_reshard_plans[route]
        shards = _jaxlib.shards_of(value)
        if self._platform == "cpu" and not _jaxlib.is_sub_byte(plan_here.target.type.dtype):
            return value, [_jaxlib.address_of(shards[at]) for at in plan_here.reads]
        copies = [np.ascontiguousarray(shards[at]) for at in plan_here.reads]
        return copies, [copy.__array_interface__["data"][0] for copy in copies]

    def direct(self, order: int, plan: int, route: int, value: jax.Array) -> None:
        """Gives a receive the shards of this host's own value, which it shows as they are."""
        self._receives[order, plan, route].shards = _jaxlib.shards_of(value)

    def finish_receive(self, order: int, plan: int, route: int) -> jax.Array:
        """Makes an array of a receive's blocks, which are all written; on CPU the array uses the blocks' memory."""
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
        """Returns the memory of a failed transfer's receive."""
        self._receives.pop((order, plan, route), None)
        if self._streams is not None:
            self._streams.forget(
                order, self.transfer_number(plan, route), self._programs[plan].host_reshard_plans[route].sources
            )

    # ------------------------------------------------------------------------------------------- the client's commands

    def command(self, client: int, payload: bytes) -> None:
        """Does a client's command: stores a placement's description, or ends a program, a save or a restore."""
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
        """Starts a step of a save or restore; `core.task_done` is called at its end."""
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
        """What an array of this placement is on this host."""
        shards: dict[Region, list[jax.Device]] = {}
        first = self.host * len(self._devices)
        for device, cell in zip(placed.devices, placed.cells, strict=True):
            if first <= device < first + len(self._devices):
                shards.setdefault(placed.region(cell), []).append(self._device(device))
        mask = local_mask(placed.devices, self.host, len(self._devices))
        return Target(placed.type.shape, self._sharding(placed), list(shards.items()), mask)

    @all_dtypes
    def put(self, client: int, payload: bytes) -> tuple[jax.Array, int]:
        """Makes a buffer of a client's bytes, on CPU without another copy. Returns it and the mask of local devices."""
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
            if isinstance(value, jax.Array):  # the caller keeps it, so copy it: this buffer may be donated (MEM-4)
                if not value.devices().isdisjoint(known.sharding.device_set):
                    value = value.copy()  # `device_put` ignores `may_alias=False` here
                return jax.device_put(value, known.sharding), known.mask
            return known.unpack(value), known.mask
        full = np.frombuffer(what, placed.type.dtype) if what else np.empty(0, placed.type.dtype)
        return known.cut(full.reshape(placed.type.shape)), known.mask

    def refuse_put(self, client: int, payload: bytes) -> None:
        """Returns the client's memory of a put that was refused because there is no room for its buffer."""
        _, _, what = payloads.parse_put(payload)
        if isinstance(what, tuple):  # Mode.ARENA
            self.core.client_block(client, *what)
        elif isinstance(what, int):  # Mode.LOCAL
            self.local.pop(what, None)

    def _prepare(self, placed: Placement) -> Inputs:
        return Inputs(placed, self.host, len(self._devices), self._device, self._sharding(placed))

    @all_dtypes
    def fetch(self, client: int, value: jax.Array, payload: bytes) -> None:
        """Writes this host's share of a ready buffer into the client's memory: each distinct part once."""
        mode, what = payloads.parse_fetch(payload)
        if mode is Mode.LOCAL:
            if what[0] in self.local:  # else the reader is gone
                self.local[what[0]] = read_back.whole(value)
            return
        offset, nbytes = what
        block = self.core.client_block(client, offset, nbytes)
        read_back.write(value, memoryview(block))

    @all_dtypes
    def read_back_recipe(self, value: jax.Array) -> read_back.Recipe:
        """The recipe by which `_core` reads back arrays like `value`."""
        return read_back.recipe(value, self._platform)

    @all_dtypes
    def read_back(self, value: jax.Array, memory: memoryview) -> None:
        """Writes this host's share of a small result into `memory`, where the client reads it."""
        read_back.write(value, memory)

    @all_dtypes
    def offload(self, client: int, values: list[Any], payload: bytes, away: bool) -> list[Any] | None:
        """Offloads a client's values from the devices (`away`), or restores them.

        Returns what replaces each value, or None: it failed, and the values stay as they are. Calls `on_offloaded` in
        both cases.
        """
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
        """Returns the client's memory of a fetch whose buffer was deleted or has failed."""
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
    """Threads that sleep in `block_until_ready`, so that the enqueue thread can sleep on its doorbell instead.

    When the enqueue thread has nothing else to do, it gives `arm` one pending value of each ready queue. A watcher
    waits for that value with the GIL released, then rings the host's doorbell.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._watched: set[int] = set()  # id() of each value that a watcher waits for; the watcher keeps it alive
        self._threads = 0

    def arm(self, values: list[Any]) -> None:
        """Makes the doorbell ring when one of `values` is ready. Enqueue thread only."""
        for value in values:
            if id(value) in self._watched:
                continue
            self._watched.add(id(value))
            if self._threads < len(self._watched):
                self._threads += 1
                threading.Thread(target=self._loop, name="pw-watch", daemon=True).start()
            self._work.put(value)

    def stop(self) -> None:
        """Ends each thread when its wait is over."""
        for _ in range(self._threads):
            self._work.put(None)

    def _loop(self) -> None:
        while (value := self._work.get()) is not None:
            try:
                value.block_until_ready()
            except Exception:  # failed or donated: the executor finds out when it polls the value
                pass
            except BaseException:
                traceback.print_exc()
            self._watched.discard(id(value))
            value = None
            self._core.ring()
