"""A client's connection to a running cluster: the control plane over gRPC on a Unix socket, and the cluster's end.

    control = connect_unix("unix:/tmp/pathways-1000-x1/control.sock")
    binding = control.allocate_slice((2, 4), ("data", "model"), island=None)
    program = control.register_program(logical_program, (binding.devices,))
    control.wait_compiled(program)
    control.close()

Beside the gRPC channel a client holds one connection on the descriptor socket. The controller first sends on it the
segments that clients map, and the controller's pidfd. Later it sends at most one message, the reason of the cluster's
end.
So `failure()` needs no thread and no call: it only checks whether that socket is readable. Any thread may call any
method.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty

from pathways import _core, errors
from pathways._jaxlib import Callback
from pathways.cluster.address import Address, first_message, open_connection
from pathways.cluster.callbacks import Answers
from pathways.cluster.control_plane import Late
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.operator import client_request, limit_request
from pathways.cluster.profiling import Profile, RemoteProfile
from pathways.cluster.recording import RemoteRecording
from pathways.cluster.slice_moves import Move, SliceMover
from pathways.compiler.ir import LogicalProgram
from pathways.plan.composite import Composite
from pathways.plan.topology import SliceBinding, Topology
from pathways.process import fd_passing
from pathways.process.children import Deadline, is_readable
from pathways.process.client_terms import ClientTerms
from pathways.process.config import PROTOCOL_VERSION, ClientSizes
from pathways.protocol import control_pb2 as pb
from pathways.protocol import control_pb2_grpc as rpc
from pathways.protocol import program_pb2, wire
from pathways.protocol.serialization import dump, dump_program, load
from pathways.protocol.wire import Stage

__all__ = ["RemoteControl", "SliceBinding", "StartupEvent", "Topology", "connect_unix"]

LEAVE_TIMEOUT_S = 2.0

StartupEvent = pb.StartupEvent


def connect_unix(
    address: str,
    *,
    progress: Callable[[StartupEvent], None] | None = None,
    timeout_s: float | None = None,
    native: str = "pathways._native",
    sizes: ClientSizes | None = None,
    terms: ClientTerms | None = None,
) -> RemoteControl:
    """Becomes a client of the cluster at `address`. Waits for the cluster if it is still starting.

    Args:
        address: the address that `pathways up` printed, `unix:/…/control.sock`.
        progress: called, on this thread, with each event of the start.
        timeout_s: seconds to wait for the cluster to be ready. Default: no limit.
        native: the module that makes segments; tests pass a double.
        sizes: the sizes of this client's segment.
        terms: its name, weight, priority and quotas.

    Raises:
        OptionError: the cluster's policy has no such weight or priority, or the operator allows less.
        ConnectError: no cluster listens there, or the cluster could not start; the message has the reason and the last
            log lines.
        UnsupportedVersionError: the cluster runs another jax or jaxlib.
    """
    where = Address.parse(address)
    sizes = sizes or ClientSizes()
    deadline = Deadline(timeout_s)
    connection = open_connection(address, where)
    code = importlib.import_module(native)
    channel = grpc.insecure_channel(where.control, options=wire.CHANNEL_OPTIONS)
    control = RemoteControl(address, channel, connection)
    try:
        control._hello(code.Segment)
        control._watch_startup(progress, deadline)
        control._join(code.client_segment(sizes.futures, sizes.ring_bytes, sizes.arena_bytes), terms)
    except BaseException:
        control._release()
        raise
    return control


class RemoteControl:
    """A `ControlPlane` in other processes of this machine. Made by `connect_unix`."""

    topology: Topology
    client_id: int
    client_segment: Any
    status_segment: Any
    bell_segment: Any
    controller_pid: int
    host_pids: tuple[int, ...]
    #: pidfd of the controller: readable when the controller has ended, for callers that poll it themselves.
    controller_pidfd: int

    def __init__(self, address: str, channel: grpc.Channel, connection: Any) -> None:
        self.address = address
        self.controller_pidfd = -1
        #: Set by the process that started the cluster: returns the last lines of the controller's log.
        self.last_words: Callable[[], str] = lambda: ""
        #: Whether a process of this machine stands for a controller on another one.
        self.is_far = False
        #: Called when the connection was closed; set by who has a process for it.
        self.on_released: Callable[[], object] = lambda: None
        self._channel = channel
        self._stub = rpc.ControllerStub(channel)
        self._connection = connection
        self._token = ""  # the secret by which the controller knows this connection
        self._answers: Answers | None = None
        self._mover: SliceMover | None = None
        self._failure: errors.PathwaysError | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    # -- joining -----------------------------------------------------------------------------------------------------

    def _hello(self, segment_type: Any) -> None:
        message, fds = first_message(self.address, self._connection)
        self._token = str(message["token"])
        self.controller_pid = int(message["controller_pid"])
        self.status_segment, self.bell_segment = segment_type.attach(fds[0]), segment_type.attach(fds[1])
        self.controller_pidfd = fds[2]

    def _watch_startup(self, progress: Callable[[StartupEvent], None] | None, deadline: Deadline) -> None:
        events = self._stub.WatchStartup(Empty(), timeout=deadline.left(1e6), metadata=wire.bearer(self._token))
        last = pb.StartupEvent()
        try:
            for last in events:
                if progress is not None:
                    progress(last)
                if last.stage == Stage.FAILED:
                    raise wire.make_error(last.error.type, last.error.message)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise errors.ConnectError(
                    f"the cluster at {self.address} was not ready in time; it got as far as "
                    f"{Stage.Stage.Name(last.stage)} of host {last.host}"
                ) from error
            raise self._translated(error) from None
        finally:
            events.cancel()

    def _join(self, segment: Any, terms: ClientTerms | None = None) -> None:
        terms = terms or ClientTerms()
        self.client_segment = segment
        with contextlib.suppress(fd_passing.Closed):  # the call below raises the reason
            fd_passing.send(self._connection, {"kind": "segment"}, [segment.fd])
        reply = self._call(
            self._stub.Join,
            pb.JoinRequest(
                protocol=PROTOCOL_VERSION,
                jax_version=importlib.metadata.version("jax"),
                jaxlib_version=importlib.metadata.version("jaxlib"),
                name=terms.name,
                weight=terms.weight,
                priority=terms.priority,
                limits=pb.ClientLimits(
                    memory=terms.memory, runs=terms.runs, bytes=terms.bytes, waits=terms.at_limit == "wait"
                ),
            ),
        )
        self.client_id = reply.client
        self.topology = load(reply.topology, Topology)
        self.host_pids = tuple(reply.host_pids)

    # -- the control plane -------------------------------------------------------------------------------------------

    def allocate_slice(
        self,
        shape: tuple[int, ...],
        axis_names: tuple[str, ...],
        island: int | None = None,
        kind: str | None = None,
        devices: tuple[int, ...] = (),
    ) -> SliceBinding:
        """See `ControlPlane`."""
        try:
            request = pb.AllocateSliceRequest(
                shape=shape, axis_names=axis_names, island=island, kind=kind, devices=devices
            )
        except (TypeError, ValueError) as error:
            raise errors.SliceError(
                f"a slice needs a shape of ints, axis names, an island number or None, and a kind or None, got "
                f"{shape!r}, {axis_names!r}, {island!r}, {kind!r}"
            ) from error
        return self._known(self._call(self._stub.AllocateSlice, request, late=self._release_late))

    def _release_late(self, reply: Any) -> None:
        """Nobody waits any more for the slice that the controller has made. It is on the thread of a call's answer."""
        request = pb.ReleaseSliceRequest(slice_id=load(reply, SliceBinding).slice_id)
        with contextlib.suppress(ValueError):  # the channel was closed
            call = self._stub.ReleaseSlice.future(request, metadata=wire.bearer(self._token))
            call.add_done_callback(lambda _: None)  # a call that nobody has is cancelled

    def release_slice(self, slice_id: int) -> None:
        """See `ControlPlane`."""
        self._call(self._stub.ReleaseSlice, pb.ReleaseSliceRequest(slice_id=slice_id))

    def remap_slice(self, slice_id: int, devices: tuple[int, ...], shape: tuple[int, ...] = ()) -> SliceBinding:
        """See `ControlPlane`."""
        try:
            request = pb.RemapSliceRequest(slice_id=slice_id, devices=devices, shape=shape)
        except ValueError as error:  # beyond 32 bits, or 64
            raise errors.SliceError(f"no such devices in the cluster: {list(devices or shape)}") from error
        return self._known(self._call(self._stub.RemapSlice, request))

    def end_remap(self, slice_id: int, undone: bool) -> None:
        """See `ControlPlane`."""
        self._call(self._stub.EndRemap, pb.EndRemapRequest(slice_id=slice_id, is_undone=undone))

    def group(self, hosts: tuple[int, ...]) -> int:
        """See `ControlPlane`."""
        return int(self._call(self._stub.Group, pb.GroupRequest(hosts=hosts)).group)

    def register_program(
        self, program: LogicalProgram, bindings: tuple[tuple[int, ...], ...], late: Late | None = None
    ) -> int:
        """See `ControlPlane`."""
        request = pb.RegisterProgramRequest(
            program=dump_program(program, texts=False),
            bindings=[pb.Binding(devices=devices) for devices in bindings],
            name=program.name,
        )
        return int(self._call(self._stub.RegisterProgram, request, late=_number_to(late)).program_id)

    def wait_compiled(self, program_id: int, timeout: float | None = None) -> None:
        """See `ControlPlane`."""
        self._call(self._stub.WaitCompiled, pb.ProgramRequest(program_id=program_id), timeout)

    def register_composite(
        self, name: str, composite: Composite, plans: Sequence[int], group: int, late: Late | None = None
    ) -> int:
        """See `ControlPlane`."""
        message = dump(composite, program_pb2.Composite)
        request = pb.RegisterCompositeRequest(name=name, plans=plans, group=group, composite=message)
        return int(self._call(self._stub.RegisterComposite, request, late=_number_to(late)).program_id)

    def analyze(self, program_id: int) -> dict[int, pb.ComputationAnalysis]:
        """See `ControlPlane`."""
        request = pb.ProgramRequest(program_id=program_id)
        found: dict[int, pb.ComputationAnalysis] = {}
        for answer in self._call(self._stub.Analyze, request).hosts:
            if answer.error:
                raise errors.ComputationError(answer.error)
            found.update(answer.computations)
        return found

    def forget_programs(self, numbers: Sequence[int]) -> None:
        """See `ControlPlane`."""
        self._call(self._stub.ForgetPrograms, pb.ForgetProgramsRequest(program_ids=numbers))

    def name_variables(self, variables: pb.VariablesRequest) -> None:
        """See `ControlPlane`."""
        self._call(self._stub.NameVariables, variables)

    def serve_callbacks(self, callbacks: Mapping[int, Callback]) -> None:
        """See `ControlPlane`."""
        with self._lock:
            if self._answers is None and not self._closed:
                open_stream = functools.partial(self._stub.Callbacks, metadata=wire.bearer(self._token))
                self._answers = Answers(open_stream, callbacks)
        assert self._answers is not None or self._closed

    def serve_moves(self, move: Move) -> None:
        """See `ControlPlane`."""
        open_stream = functools.partial(self._stub.Moves, metadata=wire.bearer(self._token))
        try:
            self._mover = SliceMover(open_stream, move)
        except grpc.RpcError as error:
            raise self._translated(error) from None

    def suspend(self, client: int, to_disk: bool, pause: Callable[[float], None]) -> int:
        """See `ControlPlane`."""
        return int(self._call(self._stub.Suspend, client_request(pb.SuspendRequest, client, disk=to_disk)).bytes)

    def resume(self, client: int, pause: Callable[[float], None]) -> int:
        """See `ControlPlane`."""
        return int(self._call(self._stub.Resume, client_request(pb.ResumeRequest, client)).bytes)

    def limit(self, client: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """See `ControlPlane`."""
        return dict(wire.plain(self._call(self._stub.Limit, limit_request(client, changes))))

    def drain(self, target: DrainTarget, timeout_s: float, force: bool) -> int:
        """See `ControlPlane`."""
        return int(self._call(self._stub.Drain, target.request(timeout_s, force)).island)

    def undrain(self, target: DrainTarget) -> int:
        """See `ControlPlane`."""
        return int(self._call(self._stub.Undrain, target.request()).island)

    def cluster_stats(self) -> dict[str, Any]:
        """Islands, hosts, clients, memory and counters of the whole cluster, as plain data."""
        return wire.load_stats(self._call(self._stub.Stats, pb.StatsRequest()))

    def compiling(self) -> list[tuple[int, int, int]]:
        """See `ControlPlane`."""
        hosts = self.cluster_stats()["hosts"]
        compiling = [(host["host"], *host.get("compiling", (0, 0))) for host in hosts]
        return [(host, done, count) for host, done, count in compiling if count]

    def present_topology(self) -> Topology:
        """See `ControlPlane`."""
        if self.topology.may_grow:
            self._learn(self._call(self._stub.Stats, pb.StatsRequest(brief=True)).topology)
        return self.topology

    def _learn(self, said: pb.Topology) -> None:
        """Takes a newer topology. Of two answers the one with more islands is newer."""
        if self.topology.may_grow and len(said.islands) >= len(self.topology.islands):
            self.topology = load(said, Topology)

    def _known(self, reply: pb.SliceBinding) -> SliceBinding:
        """A binding that the controller gives. If it is on an island that is new here, that is learned first."""
        if reply.island >= len(self.topology.islands):
            self.present_topology()
        return load(reply, SliceBinding)

    def hosts_there(self) -> tuple[int, ...]:
        """See `ControlPlane`."""
        reply = self._call(self._stub.Stats, pb.StatsRequest(brief=True))
        self._learn(reply.topology)
        return tuple(host.host for host in reply.hosts if host.state == "up")

    def open_trace(self) -> RemoteRecording:
        """See `ControlPlane`."""
        self.check()
        open_stream = functools.partial(self._stub.Trace, metadata=wire.bearer(self._token))
        return RemoteRecording(open_stream, self._translated)

    def open_profile(self) -> Profile:
        """See `ControlPlane`."""
        self.check()
        open_stream = functools.partial(self._stub.Profile, metadata=wire.bearer(self._token))
        return RemoteProfile(open_stream, self._translated)

    def shutdown(self) -> None:
        """Asks the controller to end the whole cluster. Returns when the controller has received the request."""
        self._call(self._stub.Shutdown, Empty(), 5.0)

    # -- the end -----------------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether the cluster still works, by a check that takes a few microseconds."""
        return self.failure() is None

    def check(self) -> None:
        """Raises the reason if the cluster no longer works."""
        if (failure := self.failure()) is not None:
            raise failure

    def failure(self) -> errors.PathwaysError | None:
        """Why the cluster no longer works; None while it works. A reason, once returned, never changes."""
        if self._failure is not None:
            return self._failure
        with self._lock:
            if self._failure is None and not self._closed and is_readable(self._connection.fileno()):
                try:
                    message, fds = fd_passing.receive(self._connection, 0.0)
                    for fd in fds:
                        os.close(fd)
                    self._failure = self._ended_by(message)
                except fd_passing.Closed:
                    self._failure = self._lost()
                except (TimeoutError, BlockingIOError):
                    pass  # another thread was quicker
            return self._failure

    def close(self) -> None:
        """Leaves the cluster, which frees everything that this client owned. A second call does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        if self.failure() is None:
            with contextlib.suppress(grpc.RpcError):  # closing the connection below has the same effect
                self._stub.Leave(Empty(), timeout=LEAVE_TIMEOUT_S, metadata=wire.bearer(self._token))
        self._release()

    def abandon(self, reason: str) -> None:
        """See `ControlPlane`. Does not close the channel: that would wait for threads that only the parent has."""
        self._lock = threading.Lock()  # one of those threads may have held the old lock at the fork
        if self._closed:
            return
        self._closed = True
        self._failure = errors.ClusterClosedError(reason)
        self._connection.close()  # so the controller can see the parent's end: only the parent's descriptor is left
        if self.controller_pidfd >= 0:
            os.close(self.controller_pidfd)
            self.controller_pidfd = -1

    def _release(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._failure is None:
                self._failure = errors.ClusterClosedError("this connection to the cluster was closed; connect again")
        if self._answers is not None:
            self._answers.stop()
        if self._mover is not None:
            self._mover.stop()
        self._channel.close()
        self._connection.close()
        if self.controller_pidfd >= 0:
            os.close(self.controller_pidfd)
            self.controller_pidfd = -1
        self.on_released()

    def _ended_by(self, message: fd_passing.Message) -> errors.PathwaysError:
        return wire.make_error(str(message.get("error", "ClusterClosedError")), str(message.get("message", message)))

    def _lost(self) -> errors.ControllerLostError:
        words = self.last_words()
        if self.is_far:
            gone = (
                f"the process {self.controller_pid} that links this client with the cluster at {self.address} is gone"
            )
        else:
            gone = (
                f"the controller (pid {self.controller_pid}) of the cluster at {self.address} is gone, and the cluster "
                "with it"
            )
        return errors.ControllerLostError(f"{gone}; connect again.{' ' if words else ''}{words}")

    def _call(
        self, method: Any, request: Any, timeout: float | None = None, late: Callable[[Any], object] | None = None
    ) -> Any:
        """Calls the controller. `late`: of a request by which the controller makes something that somebody must take:
        called with the answer when this thread waits for it no longer, because of a deadline or Ctrl-C.
        """
        if self._closed:
            raise self._failure or errors.ClusterClosedError("this connection to the cluster was closed")
        deadline = _core.deadline_here() if timeout is None else None  # END-1: the controller may be stopped
        left = timeout if deadline is None else deadline.left()
        try:
            if late is not None:
                return _answer(method.future(request, metadata=wire.bearer(self._token)), left, late)
            return method(request, timeout=left, metadata=wire.bearer(self._token))
        except (grpc.RpcError, grpc.FutureTimeoutError) as error:
            if isinstance(error, grpc.FutureTimeoutError) or error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                if deadline is not None:
                    raise deadline.passed("waiting for the controller") from None
                raise TimeoutError(f"no answer from the cluster within {timeout:g} s") from error
            raise self._translated(error) from None
        except ValueError as error:  # grpc raises this when another thread closed the channel
            raise errors.ClusterClosedError("this connection to the cluster was closed") from error

    def _translated(self, error: grpc.RpcError) -> Exception:
        """The exception for a failed call: a refusal, the cluster's end, or a fault of the control plane itself."""
        refusal, details = wire.raised(error), error.details() or ""
        is_lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        if is_lost or details.startswith(wire.NO_SESSION):
            # The reason comes another way, perhaps a moment later.
            deadline = Deadline(1.0)
            while not deadline.passed:
                if (failure := self.failure()) is not None:
                    return failure
                threading.Event().wait(0.005)
        if refusal is None and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.ResourceExhaustedError(
                f"a message between this client and the controller is too long ({details}): give large constants of a "
                "program as arguments instead of closing over them"
            )
        return refusal or errors.PathwaysError(f"the control plane failed: {error.code().name}: {details}")


def _number_to(late: Late | None) -> Callable[[Any], object] | None:
    return None if late is None else lambda reply: late(reply.program_id)


def _answer(call: Any, timeout: float | None, late: Callable[[Any], object]) -> Any:
    """Waits for the answer of a call. If this thread stops waiting, the answer goes to `late`."""
    try:
        return call.result(timeout)
    except grpc.RpcError:
        raise
    except BaseException:
        call.add_done_callback(lambda call: late(call.result()) if call.code() is grpc.StatusCode.OK else None)
        raise
