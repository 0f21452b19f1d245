"""This process as a whole cluster: controller, one host and one client, which run on the calling threads.

It starts no process and opens no port. The parts are the same as in a cluster of many processes; the rings are on the
heap.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import jax

from pathways import _jaxlib, _native, errors
from pathways.cluster.callbacks import call
from pathways.cluster.control_plane import Late
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.profiling import NoHosts, Profile
from pathways.cluster.recording import EmbeddedRecording
from pathways.cluster.slice_moves import Move
from pathways.compiler.ir import LogicalProgram
from pathways.controller import client_limits
from pathways.controller.native_numbers import NativeNumbers
from pathways.controller.offloading import leave_devices, return_to_devices
from pathways.controller.resource_manager import ResourceManager
from pathways.host import jax_host
from pathways.plan.composite import Composite
from pathways.plan.memory_profile import UNLIMITED, ProgramMemory
from pathways.plan.topology import SliceBinding, Topology
from pathways.process import environment
from pathways.process.client_terms import ClientTerms
from pathways.process.memory import memory_bytes
from pathways.protocol import control_pb2 as pb
from pathways.protocol import payloads
from pathways.quirks import quirks_of

_has_warned = False


def _local_devices() -> list[jax.Device]:
    """This process's devices. If JAX's CPU backend does not exist yet, it gets the threads that collectives need."""
    global _has_warned
    exists = bool(_jaxlib.initialized_backends())
    if not exists and "NPROC" not in os.environ:
        wanted = environment.asked_cpu_devices(jax.config.jax_num_cpu_devices, os.environ)
        with environment.enough_cpu_threads(wanted, os.environ):
            devices = jax.local_devices()
        _has_warned = True  # a later cluster in this process has the same backend
        return devices
    devices = jax.local_devices()
    is_exposed = not _has_warned and quirks_of(devices[0].platform).collects_on_threads
    if is_exposed and not environment.has_cpu_threads(len(devices), os.environ):
        _has_warned = True
        why = "JAX was used before pathways.connect()" if exists else f"NPROC={os.environ['NPROC']} is set"
        enough = environment.cpu_threads(len(devices))
        warnings.warn(
            f"{why}, so XLA's thread pool may be too small for collectives of {len(devices)} CPU devices: they can "
            f"wait for ever. Set NPROC={enough} in the environment before the program starts"
            f"{', or call pathways.connect() before JAX makes its first array' if exists else ''}.",
            RuntimeWarning,
            stacklevel=_levels_to_user(),
        )
    return devices


def _levels_to_user() -> int:
    """The `stacklevel` with which a warning of the caller names the user's line."""
    package = __name__.partition(".")[0] + "."
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(package):
        frame, level = frame.f_back, level + 1
    return level


class EmbeddedControl:
    """The `ControlPlane` of this process's own devices."""

    def __init__(self, terms: ClientTerms | None = None) -> None:
        self._terms = terms or ClientTerms()
        devices = _local_devices()
        self.topology = Topology.grid(
            1,
            1,
            len(devices),
            platform=devices[0].platform,
            jax_version=jax.__version__,
            jaxlib_version=_jaxlib.VERSION,
        )
        self.client_id = 0
        # This is virtual memory: the kernel gives a page when it is first used.
        arena = memory_bytes() // 4
        self._controller_segment = _native.controller_segment(shared=False)
        self.status_segment = _native.status_segment(shared=False)
        self.bell_segment = _native.bell_segment(shared=False)
        self.client_segment = _native.client_segment(
            futures=1 << 20, ring_bytes=1 << 22, arena_bytes=arena, shared=False
        )
        self._host_segment = _native.host_segment(0, 1, ring_bytes=1 << 22, arena_bytes=0, shared=False)
        self.controller = _native.Controller(
            self._controller_segment,
            [self._host_segment],
            window=1 << 16,
            budgets=[UNLIMITED] * (len(devices) + 1),
            spaces=[str(device) for device in devices] + ["memory for transfers"],
            status=self.status_segment,
            devices=len(devices),
        )
        self.driver = jax_host.JaxHost(0, devices, devices, 0, [self._host_segment], self._controller_segment)
        self.driver.attach_client(0, self.client_segment, _native.futures_of(self.client_segment), None)
        limits = client_limits.native(_native, self._terms)
        self.controller.add_client(0, self.client_segment, self.bell_segment, limits)
        self._resources = ResourceManager(self.topology)
        if self.driver.coordinates:
            self._resources.tori.put(0, self.driver.coordinates, environment.torus_wraps(os.environ))
        self._numbers = NativeNumbers(self.controller, self._resources)
        self._programs = 0
        self._errors: dict[int, str] = {}
        self._compiling: dict[int, threading.Event] = {}  # set when a program is compiled, or the cluster closed
        self._lock = threading.Lock()
        self._closed = False
        self._suspending = threading.Lock()
        self._suspended = False
        self._requests = 0
        self._moved: dict[int, tuple[str, int]] = {}  # the host's answers to requests: error text and bytes
        self.driver.on_offloaded = self._offloaded
        self._recordings: list[EmbeddedRecording] = []

    def allocate_slice(
        self,
        shape: tuple[int, ...],
        axis_names: tuple[str, ...],
        island: int | None = None,
        kind: str | None = None,
        devices: tuple[int, ...] = (),
    ) -> SliceBinding:
        """See `ControlPlane`."""
        with self._lock:
            return self._numbers.bind(self._resources.allocate(shape, axis_names, island, kind, devices))

    def release_slice(self, slice_id: int) -> None:
        """See `ControlPlane`."""
        with self._lock:
            self._resources.release(slice_id)

    def remap_slice(self, slice_id: int, devices: tuple[int, ...], shape: tuple[int, ...] = ()) -> SliceBinding:
        """See `ControlPlane`."""
        with self._lock:
            return self._numbers.bind(self._resources.remap(slice_id, devices, shape))

    def end_remap(self, slice_id: int, undone: bool) -> None:
        """See `ControlPlane`."""
        with self._lock:
            (self._resources.undo if undone else self._resources.settle)(slice_id)

    def serve_moves(self, move: Move) -> None:
        """See `ControlPlane`. Nobody can ask: there is no other host."""

    def group(self, hosts: tuple[int, ...]) -> int:
        """See `ControlPlane`."""
        with self._lock:
            return self._numbers.group(hosts)

    def register_program(
        self, program: LogicalProgram, bindings: tuple[tuple[int, ...], ...], late: Late | None = None
    ) -> int:
        """See `ControlPlane`."""
        with self._lock:
            self._programs += 1
            number = self._programs
            self._compiling[number] = threading.Event()

        def compiled(_: int, error: str | None, memory: ProgramMemory | None) -> None:
            with self._lock:
                if error is not None:
                    self._errors[number] = error
                if memory is not None and not self._closed:
                    self._numbers.admit_by(number, 0, program.name, bindings, {0: memory})
                if (done := self._compiling.pop(number, None)) is not None:
                    done.set()

        self.controller.register_plan(number, 0, self.group((0,)))
        try:
            self.driver.register_program(0, number, program, bindings, compiled)
        except BaseException:
            del self._compiling[number]
            raise
        return number

    def wait_compiled(self, program_id: int, timeout: float | None = None) -> None:
        """See `ControlPlane`."""
        done = self._compiling.get(program_id)
        if done is not None and not done.wait(timeout):
            raise TimeoutError
        if (failure := self.failure()) is not None:
            raise failure
        if program_id in self._errors:
            raise errors.from_text(self._errors[program_id], errors.ComputationError)

    def register_composite(
        self, name: str, composite: Composite, plans: Sequence[int], group: int, late: Late | None = None
    ) -> int:
        """See `ControlPlane`."""
        with self._lock:
            self._programs += 1
            number = self._programs
        NativeNumbers.register_composite(self.controller, number, 0, name, composite, plans, group)
        return number

    def analyze(self, program_id: int) -> dict[int, pb.ComputationAnalysis]:
        """See `ControlPlane`."""
        found: dict[int, pb.ComputationAnalysis] = self.driver.analyze(program_id)
        return found

    def forget_programs(self, numbers: Sequence[int]) -> None:
        """See `ControlPlane`."""
        for number in numbers:
            self._errors.pop(number, None)
        self.controller.take_forgotten()  # no host has a successor here

    def name_variables(self, variables: pb.VariablesRequest) -> None:
        """See `ControlPlane`. Nobody else looks at this cluster."""

    def serve_callbacks(self, callbacks: Mapping[int, _jaxlib.Callback]) -> None:
        """See `ControlPlane`."""
        self.driver.callbacks.local = functools.partial(call, callbacks)

    def suspend(self, client: int, to_disk: bool, pause: Callable[[float], None]) -> int:
        """See `ControlPlane`."""

        async def wait(seconds: float) -> None:
            pause(seconds)

        ask = functools.partial(self._ask, pause)
        return self._move(client, True, lambda: leave_devices(self.controller, client, ask, wait, to_disk))

    def resume(self, client: int, pause: Callable[[float], None]) -> int:
        """See `ControlPlane`."""
        ask = functools.partial(self._ask, pause)
        return self._move(client, False, lambda: return_to_devices(self.controller, client, ask))

    def limit(self, client: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """See `ControlPlane`. There is nobody to share with, so any weight and priority will do."""
        self._check_number(client)
        with self._lock:
            self._terms = client_limits.with_changes(self._terms, changes)
            self.controller.limit(client, client_limits.native(_native, self._terms))
            return client_limits.as_data(self._terms)

    def _check_number(self, client: int) -> None:
        if client != self.client_id:
            raise errors.ClusterClosedError(f"client {client!r} is not part of this cluster; the only one is 0")

    def _move(self, client: int, suspended: bool, steps: Callable[[], Coroutine[Any, Any, int]]) -> int:
        self._check_number(client)
        with self._suspending:
            if self._suspended == suspended:
                return 0
            try:
                steps().send(None)  # waits by `pause` only, so it runs to its end
            except StopIteration as end:
                self._suspended = suspended
                return int(end.value)
            raise AssertionError("the steps waited for an event loop")

    async def _ask(self, pause: Callable[[float], None], kind: int, to_disk: bool) -> list[tuple[str, int]]:
        self._requests += 1
        request = self._requests
        self.controller.command_for(self.client_id, kind, payloads.offload(request, to_disk))
        while request not in self._moved:
            pause(0.001)
        return [self._moved.pop(request)]

    def _offloaded(self, request: int, error: str | None, nbytes: int) -> None:
        self._moved[request] = error or "", nbytes

    def drain(self, target: DrainTarget, timeout_s: float, force: bool) -> int:
        """See `ControlPlane`."""
        raise errors.ConnectError(f"{target} cannot be drained: this cluster is this process itself")

    def undrain(self, target: DrainTarget) -> int:
        """See `ControlPlane`."""
        raise errors.ConnectError(f"{target} is not drained: this cluster is this process itself")

    def cluster_stats(self) -> dict[str, Any]:
        """See `ControlPlane`."""
        return {"controller": self.controller.stats(), "hosts": [{"host": 0, **self.driver.stats()}]}

    def compiling(self) -> list[tuple[int, int, int]]:
        """See `ControlPlane`."""
        done, count = self.driver.programs.progress
        return [(0, done, count)] if count else []

    def present_topology(self) -> Topology:
        """See `ControlPlane`."""
        return self.topology

    def hosts_there(self) -> tuple[int, ...]:
        """See `ControlPlane`."""
        return (0,)

    def open_trace(self) -> EmbeddedRecording:
        """See `ControlPlane`."""
        about = pb.TraceAbout(
            cluster=self.topology.describe(),
            devices_per_host=self.topology.devices_per_host,
            hosts=1,
            clients={self.client_id: ""},
        )
        return EmbeddedRecording(self.controller, self.driver.trace, about, self._recordings)

    def open_profile(self) -> Profile:
        """See `ControlPlane`."""
        return NoHosts()

    def alive(self) -> bool:
        """See `ControlPlane`."""
        return not self._closed

    def failure(self) -> errors.PathwaysError | None:
        """See `ControlPlane`."""
        return errors.ClusterClosedError("the embedded cluster was closed") if self._closed else None

    def abandon(self, reason: str) -> None:
        """See `ControlPlane`."""
        self._closed = True

    def close(self) -> None:
        """Drops every buffer."""
        if not self._closed:
            with self._lock:
                self._closed = True
                for done in self._compiling.values():
                    done.set()
            self.controller.close()
            self.driver.close()
