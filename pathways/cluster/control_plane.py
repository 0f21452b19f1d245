"""`ControlPlane`: what the API needs of a cluster besides dispatch. Any thread may call any method.

`remote.py` has the one of a cluster in other processes, `embedded.py` the one of this process as a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pathways import errors
from pathways._jaxlib import Callback
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.profiling import Profile
from pathways.cluster.recording import Recording
from pathways.cluster.slice_moves import Move
from pathways.compiler.ir import LogicalProgram
from pathways.plan.composite import Composite
from pathways.plan.topology import SliceBinding, Topology
from pathways.protocol.control_pb2 import ComputationAnalysis, VariablesRequest

#: Takes the number of a program that was registered when nobody waited for that any more.
Late = Callable[[int], object]


class ControlPlane(Protocol):
    """What the API needs of a cluster besides dispatch. The cluster is a remote one, or this process itself."""

    topology: Topology  # as it was when it was last heard of: islands may have been added
    client_id: int  # this client's number in the cluster
    client_segment: Any  # this client's `_native.Segment`
    status_segment: Any  # the segment with the cluster's status, which clients only read
    bell_segment: Any  # the segment of the doorbell at which this client rings the controller

    def present_topology(self) -> Topology:
        """The cluster as it is now. It asks the controller where islands may be added."""

    def allocate_slice(
        self,
        shape: tuple[int, ...],
        axis_names: tuple[str, ...],
        island: int | None = None,
        kind: str | None = None,
        devices: tuple[int, ...] = (),
    ) -> SliceBinding:
        """Binds a new slice; to `devices`, if there are some. Raises `SliceError` when that is impossible."""

    def release_slice(self, slice_id: int) -> None:
        """Ends a slice."""

    def remap_slice(self, slice_id: int, devices: tuple[int, ...], shape: tuple[int, ...] = ()) -> SliceBinding:
        """Binds a slice to other devices (none: the controller chooses), or gives it another shape (none: it stays).
        Raises `SliceError` when that cannot be. The client itself must move the slice's arrays, and then call
        `end_remap`.
        """

    def end_remap(self, slice_id: int, undone: bool) -> None:
        """All arrays of a slice lie where it is bound to; undone: none has left, and it is bound as it was before."""

    def serve_moves(self, move: Move) -> None:
        """Moves slices from now on as the controller asks."""

    def group(self, hosts: tuple[int, ...]) -> int:
        """The number of the group of exactly these hosts."""

    def register_program(
        self, program: LogicalProgram, bindings: tuple[tuple[int, ...], ...], late: Late | None = None
    ) -> int:
        """Sends a program, bound to devices mesh by mesh, to its hosts. Returns its number, and waits for no host.
        `late` gets the number if this call ends before it is known, by a deadline or Ctrl-C: then somebody must forget
        the program. It may be called by any thread, and must not wait.
        """

    def wait_compiled(self, program_id: int, timeout: float | None = None) -> None:
        """Waits until the program is compiled. Raises `ComputationError` with the host and XLA's message, `PlanError`
        if a host refuses the program, `HostLostError` if one is lost meanwhile (END-1), and TimeoutError if it is not
        compiled after `timeout` seconds; the hosts go on compiling.
        """

    def register_composite(
        self, name: str, composite: Composite, plans: Sequence[int], group: int, late: Late | None = None
    ) -> int:
        """Gives the controller a program with loops, whose plans have these numbers and are compiled. Returns its
        number. Raises `PlanError` for one that cannot be run. `late`: as of `register_program`."""

    def analyze(self, program_id: int) -> dict[int, ComputationAnalysis]:
        """XLA's analysis of a compiled program, by number of a computation."""

    def forget_programs(self, numbers: Sequence[int]) -> None:
        """Removes programs from the controller's records. The hosts get a command that names them, in the order."""

    def name_variables(self, variables: VariablesRequest) -> None:
        """Says which variables this client has, to those who look at the cluster: the biggest, and how many in all."""

    def serve_callbacks(self, callbacks: Mapping[int, Callback]) -> None:
        """Answers the calls of hosts from now on, with these functions by number. The mapping may grow later."""

    def suspend(self, client: int, to_disk: bool, pause: Callable[[float], None]) -> int:
        """Takes a client off the devices. Returns the bytes that left them. An embedded cluster calls `pause(seconds)`
        to run meanwhile.
        """

    def resume(self, client: int, pause: Callable[[float], None]) -> int:
        """Brings a suspended client back. Returns the bytes that came back to the devices."""

    def limit(self, client: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Changes what a client may have: `weight`, `priority`, `memory`, `runs`, `bytes`; 0 of the last three takes
        the limit away. Returns all limits of the client. Raises `OptionError` and `PermissionDeniedError`.
        """

    def drain(self, target: DrainTarget, timeout_s: float, force: bool) -> int:
        """Drains hosts; returns their island. Raises `ConnectError` when there is no such target, `SliceError` when
        slices still lie there after the time, and `PermissionDeniedError`.
        """

    def undrain(self, target: DrainTarget) -> int:
        """Lets slices lie on drained hosts again; returns their island. Raises as `drain`."""

    def cluster_stats(self) -> dict[str, Any]:
        """Statistics of the cluster."""

    def compiling(self) -> list[tuple[int, int, int]]:
        """The hosts that compile a program now: number, and how many of how many of its computations are compiled."""

    def hosts_there(self) -> tuple[int, ...]:
        """The hosts that are up. It asks no host."""

    def open_trace(self) -> Recording:
        """Records what the whole cluster does from now on. Raises `TraceFileError` when somebody does so already."""

    def open_profile(self) -> Profile:
        """Has XLA's profiler record on the hosts from now on. Raises `TraceFileError` when somebody does so already,
        and `PermissionDeniedError` for a guest."""

    def alive(self) -> bool:
        """Whether the cluster still works, by a check that takes a few microseconds."""

    def failure(self) -> errors.PathwaysError | None:
        """Why the cluster no longer works; None while it works."""

    def close(self) -> None:
        """Leaves the cluster."""

    def abandon(self, reason: str) -> None:
        """For a forked child: refuses every later use with `reason`, and leaves the parent's connection as it is."""
