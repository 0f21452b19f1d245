"""The Python half of a host: what the native executor asks beside launches, each kind in a part of its own.

`pathways._core.Host` owns the enqueue loop. It calls the parts by their names, from one thread, the enqueue thread,
with the GIL held. Control threads call the methods of `JaxHost`. Compilation runs on a thread of its own. A value is
a `jax.Array` over the devices of a slice; this process sees its own shards of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pathways import _core, _jaxlib
from pathways.compiler.ir import LogicalProgram
from pathways.host import executables, memory_moves
from pathways.host.attendants import Attendants
from pathways.host.callbacks import Questions
from pathways.host.checkpoint_io import Tasks
from pathways.host.client_values import ClientValues
from pathways.host.commands import Commands
from pathways.host.devices import HostDevices
from pathways.host.exchanges import Exchanges
from pathways.host.failures import Failures
from pathways.host.own_settings import own_settings
from pathways.host.placements import Placements
from pathways.host.programs import OnCompiled, Programs
from pathways.host.recording import HostTrace
from pathways.host.sidecars import Sidecars
from pathways.host.successors import Successor
from pathways.host.transfers import Transfers
from pathways.host.watchers import Watchers
from pathways.plan.binding import Bindings
from pathways.protocol.control_pb2 import ComputationAnalysis


class JaxHost:
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
        swap_every_for_testing: int = 0,
        epochs: tuple[int, ...] = (),
        hidden: Callable[[], list[str]] | None = None,
        per_host: int | None = None,
    ) -> None:
        """`devices` are this host's; `all_devices` are the island's, in global order from number `first_device` on, of
        which each host has `per_host`: see `HostDevices`.

        `device_bytes`: memory of each device that may be used; 0: no bound. `transfer_bytes`: memory of the host for
        the receive buffers of transfers. `directory`: the cluster's directory, where files of offloaded buffers lie.
        `swap_every_for_testing`: see `pathways.testing.faults`. `epochs`: see `HostConfig`. `hidden`: see `Sidecars`.
        """
        self.device_bytes = device_bytes
        here = HostDevices(host, devices, all_devices, first_device, per_host)
        self.coordinates = here.coordinates
        self.core = _core.Host(
            self,
            host,
            len(devices),
            here.quirks,
            list(segments),
            controller,
            device_bytes=device_bytes,
            swap_every_for_testing=swap_every_for_testing,
            epochs=epochs,
        )
        self.sidecars = Sidecars(host, hidden)
        self.callbacks = Questions(host, self.sidecars)
        #: Called with the reason when a computation cannot come to its end; may end the process.
        self.give_up: Callable[[str], None] = lambda why: None
        #: Called after each offload or restore: (request, error or None, bytes that left the devices or came back).
        self.on_offloaded: Callable[[int, str | None, int], None] = lambda request, error, nbytes: None
        self._placements = Placements(here)
        self.programs = Programs(self.core, here, self.sidecars)
        self.transfers = Transfers(self.core, here, self.programs.by_number, transfer_bytes)
        self.exchanges = Exchanges(self.core, here, self.programs.by_number, transfer_bytes, self.transfers)
        self._tasks = Tasks(self.core, host)
        self.watchers = Watchers(self.core)
        self.values = ClientValues(self.core, self._placements, here.quirks)
        self.commands = Commands(
            here,
            self._placements,
            self.programs,
            self._tasks,
            directory,
            lambda request, error, nbytes: self.on_offloaded(request, error, nbytes),
        )
        self.trace = HostTrace(self.core, self.programs.by_number)
        self.failures = Failures(here, self.programs.by_number)
        describe = self.failures.describe
        self.attendants = Attendants(self.core, here, self.callbacks, describe, lambda why: self.give_up(why))
        self.attendants.take_stand_ins = self.programs.take_stand_ins
        self.local = self.values.local  # embedded: objects that client and host hand to each other, by key

        # `_core.Host` calls these, and the parts' methods, by name (pathways/_host_callbacks.pxi).
        self.is_jit_disabled, self.launch_with_jit = _jaxlib.is_jit_disabled, executables.launch_with_jit
        self.scalar_to_host = memory_moves.scalar_to_host

    # ---- from any thread

    def attach_client(self, client: int, segment: Any, futures: int, checkpoint_root: str | None) -> None:
        """Starts completing a client's futures; there are `futures` of them. `checkpoint_root`: see
        `pathways.host.checkpoint_root`.
        """
        self._tasks.attach_client(client, checkpoint_root)
        self.core.attach_client(client, segment, futures)

    def succeed(self, predecessor_failure: str, youngest_client: int) -> None:
        """Tells this host that it replaces a lost one (ERR-2). Call it before `run`.

        From then on, a use of a buffer that is not here fails with `predecessor_failure`, if the buffer's client is not
        younger than `youngest_client`: the lost host may have had that buffer.
        """
        self.core.set_predecessor_failure(predecessor_failure, youngest_client)

    def open_streams(self, address: str, far: Mapping[int, str], credentials: str = "") -> None:
        """Opens the streams to the hosts `far` on other machines; see `Streams`. Call it before `run`."""
        self.transfers.open_streams(address, far, credentials)

    def replace_peers(self, successors: Sequence[Successor]) -> Mapping[int, Exception]:
        """Replaces lost hosts by their successors, each when the order tells of the loss. Returns when this host uses
        no memory any more of predecessors on this machine: by host, the error of a successor that it refuses.
        """
        for new in successors:
            self.transfers.expect_peer(new.host, new.epoch, new.stream)
        return dict(
            self.core.replace_peers(
                [(new.host, new.segment, new.epoch, new.loss, bool(new.stream)) for new in successors]
            )
        )

    def register_program(
        self,
        client: int,
        program_id: int,
        program: LogicalProgram,
        bindings: Bindings,
        on_compiled: OnCompiled,
        islands: Mapping[int, int] | None = None,
    ) -> None:
        """Stores a program and compiles it in the background; then calls `on_compiled(program_id, error, memory)`.
        `islands`: see `BoundProgram`; None: all hosts are in one.
        """
        asker = functools.partial(self.attendants.asker, client)
        self.programs.register(client, program_id, program, bindings, asker, on_compiled, islands or {})

    def analyze(self, program_id: int) -> dict[int, ComputationAnalysis]:
        """Memory and cost of a compiled program's computations on one device, from XLA; by computation number."""
        return self.programs.analyze(program_id)

    def stats(self) -> dict[str, Any]:
        """Statistics, for people to read."""
        stats = self.core.stats()
        for account in stats["memory"]["accounts"]:
            account["program"] = self.programs.name_of(account["plan"])
        moved = stats["bytes_sent"] + stats["bytes_shipped"] + stats["bytes_kept"] + self.transfers.local_bytes
        return {**stats, "bytes_moved": moved, **self.programs.stats(), **self._tasks.stats(), **self.sidecars.stats()}

    def stop(self) -> None:
        """Makes `run` return."""
        self.core.stop()

    # ---- from the enqueue thread

    @own_settings
    def run(self) -> None:
        """Runs until `stop`."""
        try:
            self.core.run(self.watchers.arm, _jaxlib.collect_garbage)
        finally:
            self.close()

    def close(self) -> None:
        """Ends this host's threads and drops every value."""
        self.watchers.stop()
        self.transfers.stop()
        self._tasks.stop()
        self.sidecars.stop()
        self.attendants.stop()
        self.programs.stop()
        self.core.clear()

    def program_gone(self, program_id: int) -> None:
        """Drops a removed program, because its last run is over."""
        self.trace.keep(program_id)
        self.programs.drop(program_id)

    def client_gone(self, client: int) -> None:
        """Drops what a client owned, because the notice of the client's end has come (OWN-1).

        The client's programs go when their last runs are over.
        """
        self._tasks.forget(client)
        self.callbacks.forget(client)
        self.sidecars.forget(client)
        self.programs.forget(client)
        self._placements.forget(client)
