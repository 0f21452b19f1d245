"""This process as a whole cluster: controller, one host and one client, run by the threads that call.

No process is started and no port opened; the rooms are the same as in a cluster of many, over rings on the heap.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import jax

from pathways import _jaxlib, _native, errors
from pathways.compiler.ir import LogicalProgram
from pathways.runtime import driver
from pathways.runtime.resource_manager import ResourceManager
from pathways.runtime.topology import SliceBinding, Topology


class EmbeddedControl:
    """The `ControlPlane` of this process's own devices."""

    def __init__(self) -> None:
        devices = jax.local_devices()
        self.topology = Topology.grid(
            1,
            1,
            len(devices),
            platform=devices[0].platform,
            jax_version=jax.__version__,
            jaxlib_version=_jaxlib.VERSION,
        )
        self.client_id = 0
        # Virtual memory: pages are taken as they are used.
        arena = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        self.controller_segment = _native.controller_segment(shared=False)
        self.client_segment = _native.client_segment(
            futures=1 << 20, ring_bytes=1 << 22, arena_bytes=arena, shared=False
        )
        self._host_segment = _native.host_segment(0, 1, ring_bytes=1 << 22, arena_bytes=0, shared=False)
        self.controller = _native.Controller(self.controller_segment, [self._host_segment], window=1 << 16)
        self.driver = driver.HostDriver(0, devices, devices, 0, [self._host_segment], self.controller_segment)
        self.driver.attach_client(0, self.client_segment)
        self.controller.add_client(0, self.client_segment)
        self._manager = ResourceManager(self.topology)
        self._programs = 0
        self._errors: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closed = False

    def allocate_slice(
        self, shape: tuple[int, ...], axis_names: tuple[str, ...], island: int | None = None
    ) -> SliceBinding:
        """See `ControlPlane`."""
        with self._lock:
            binding = self._manager.allocate(shape, axis_names, island)
            self.controller.add_group(binding.group, list(binding.hosts))
            return binding

    def release_slice(self, slice_id: int) -> None:
        """See `ControlPlane`."""
        with self._lock:
            self._manager.release(slice_id)

    def group(self, hosts: tuple[int, ...]) -> int:
        """See `ControlPlane`."""
        with self._lock:
            number = self._manager.group(hosts)
            self.controller.add_group(number, list(hosts))
            return number

    def register_program(self, program: LogicalProgram, bindings: tuple[tuple[int, ...], ...]) -> int:
        """See `ControlPlane`. Compiles at once: there is nobody to run meanwhile."""
        with self._lock:
            self._programs += 1
            number = self._programs
        done = threading.Event()

        def compiled(_: int, error: str | None) -> None:
            if error is not None:
                self._errors[number] = error
            done.set()

        self.driver.register_program(0, number, program, bindings, compiled)
        done.wait()
        return number

    def wait_compiled(self, program_id: int, timeout: float | None = None) -> None:
        """See `ControlPlane`."""
        if program_id in self._errors:
            raise errors.from_text(self._errors[program_id], errors.ComputationError)

    def cluster_stats(self) -> dict[str, Any]:
        """See `ControlPlane`."""
        return {"controller": self.controller.stats(), "hosts": [{"host": 0, **self.driver.stats()}]}

    def alive(self) -> bool:
        """See `ControlPlane`."""
        return not self._closed

    def failure(self) -> errors.PathwaysError | None:
        """See `ControlPlane`."""
        return errors.ClusterClosedError("the embedded cluster was closed") if self._closed else None

    def close(self) -> None:
        """Drops every buffer."""
        if not self._closed:
            self._closed = True
            self.controller.close()
            self.driver.close()
