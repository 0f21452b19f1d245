"""A host process. The fork server makes it for the controller, and calls `main`.

The main thread joins the island's group, starts the driver and then runs the driver's loop. The control thread takes
the controller's requests from the session stream. Another thread takes the clients' programs, which come from the
process that has started this one (ONCE-1). The process dies with its controller (the kernel sends SIGKILL), and ends in
good order when the controller asks it to stop. If something ends it earlier, it reports the error text to the
controller, or the text is in its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.metadata
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc

from pathways import errors
from pathways.compiler.ir import LogicalProgram
from pathways.host import profiling
from pathways.host.successors import Successor
from pathways.plan.memory_profile import ProgramMemory
from pathways.process import environment, fd_passing, log_lines
from pathways.process.children import ParentLost, die_with_parent, resident_bytes
from pathways.process.config import HostConfig, load_host
from pathways.process.memory import memory_bytes
from pathways.process.outgoing import incoming
from pathways.process.run_directory import secret_folders, state_folder
from pathways.process.tcp_sockets import tcp_sockets
from pathways.protocol import control_pb2 as pb
from pathways.protocol import control_pb2_grpc as rpc
from pathways.protocol import wire
from pathways.protocol.serialization import dump, load_program
from pathways.protocol.wire import Stage
from pathways.quirks import quirks_of
from pathways.trust.files import hideable_folder

_log = logging.getLogger("pathways.host.main")

FD_TIMEOUT_S = 10.0
LAST_WORDS_S = 2.0

Report = Callable[[pb.HostReport], None]


class Driver(Protocol):
    """What a host process runs: `pathways.host.jax_host.JaxHost`, or a test's double."""

    #: Called with (request, error or None, bytes) after each offload of a client's buffers.
    on_offloaded: Callable[[int, str | None, int], None]

    def attach_client(self, client: int, segment: Any, futures: int, checkpoint_root: str | None) -> None:
        """Starts to take a client's work, until the notice of the client's end. Control thread.

        `futures`: how many the client has. `checkpoint_root`: see `pathways.host.checkpoint_root`.
        """

    def replace_peers(self, successors: Sequence[Successor]) -> Mapping[int, Exception]:
        """Replaces lost hosts by their successors. Returns when all are in force: by host, the error of a successor
        that it refuses. Control thread.
        """

    def register_program(
        self,
        client: int,
        program_id: int,
        program: LogicalProgram,
        bindings: tuple[tuple[int, ...], ...],
        on_compiled: Callable[[int, str | None, ProgramMemory | None], None],
        islands: Mapping[int, int],
    ) -> None:
        """Stores a program and compiles it in the background; then calls `on_compiled(program_id, error, memory)`. The
        thread of programs. `islands`: by host of the program, its island.
        """

    def run(self) -> None:
        """Runs the main thread's loop until `stop`."""

    def stop(self) -> None:
        """Makes `run` return. Control thread."""

    def analyze(self, program_id: int) -> dict[int, pb.ComputationAnalysis]:
        """Memory and cost of a compiled program's computations, from XLA; by computation number."""

    def stats(self) -> dict[str, Any]:
        """The fields of `HostCounts`, for people to read. Control thread."""


def default_device_bytes(device: Any, devices: int) -> int:
    """Memory of a device that may be used: its own limit, or its part of the machine's memory; 0: unknown."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if quirks_of(device.platform).is_host_memory:
        return memory_bytes() // devices
    return 0


def hidden_folders(config: HostConfig) -> list[str]:
    """What the clients' own functions do not see on a machine that serves clients from elsewhere."""
    from pathways.host import kept_executables

    certificate = [hideable_folder(config.credentials)] if config.credentials else []
    with contextlib.suppress(errors.OptionError):
        state_folder()  # so that it is there, and hidden, before the first certificate comes
    return [*secret_folders(), *certificate, *kept_executables.folders(os.environ)]


def meet_hosts(config: HostConfig) -> None:
    """Tells the island's hosts the port at which the collectives of this one listen, and the agent those of all."""
    from pathways import _jaxlib

    own = next(each.port for each in tcp_sockets(os.getpid()) if each.listens and each.address == config.fabric)
    told = _jaxlib.told_by_all("port", str(own), int(config.options.start_timeout_s))
    tell_ports(config, [int(port) for port in told])


def tell_ports(config: HostConfig, ports: Sequence[int]) -> None:
    """Tells the agent where the collectives of its island's hosts listen. It makes those of other machines reachable.

    Raises:
        ConnectError: one is not.
    """
    with fd_passing.connect(config.tell_ports) as agent:
        fd_passing.send(agent, {"host": config.host, "ports": dict(zip(config.island, ports, strict=True))})
        answer, _ = fd_passing.receive(agent, config.options.start_timeout_s)
    if answer["error"]:
        raise errors.ConnectError(answer["error"])


def start_jax_driver(
    config: HostConfig, segments: Sequence[Any], controller: Any, joined: Callable[[], None]
) -> Driver:
    """Joins the island's group, takes this host's devices and starts the driver on them.

    Raises:
        RuntimeError: JAX does not show the devices that this host should have.
    """
    from pathways import _jaxlib

    options, island = config.options, config.island
    if config.coordinator:
        limit_s = int(options.start_timeout_s)
        made = functools.partial(meet_hosts, config) if config.tell_ports else None
        _jaxlib.join_island(config.coordinator, len(island), config.rank, limit_s, config.fabric, made)
    joined()
    import jax

    local = sorted(jax.local_devices(), key=lambda device: device.id)
    _jaxlib.drop_tracebacks()
    limit = options.device_memory or default_device_bytes(local[0], config.device_count * config.hosts_here)
    platform = jax.default_backend()
    if len(local) != config.device_count:
        raise RuntimeError(
            f"host {config.host} should have {config.device_count} {config.platform} devices, but JAX shows "
            f"{len(local)}: {local}"
        )
    if quirks_of(platform).is_host_memory != quirks_of(config.platform).is_host_memory:
        raise RuntimeError(f"host {config.host} should have {config.platform} devices, but JAX shows {local}")
    everyone = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(everyone) != config.device_count * len(island):
        raise RuntimeError(
            f"the island of host {config.host} should have {len(island)} hosts of "
            f"{config.device_count} devices, but JAX shows {len(everyone)} devices: {everyone}"
        )
    first = config.rank * config.device_count
    if everyone[first : first + len(local)] != local:
        raise RuntimeError(
            f"host {config.host} is number {config.rank} of its island, but JAX calls it process "
            f"{jax.process_index()}: start the machines of an island in the order that their platform gives them"
        )
    from pathways.host import kept_executables
    from pathways.host.jax_host import JaxHost
    from pathways.testing import faults, stand_in

    kept_executables.keep(local, os.environ)
    if platform == "cpu":
        stand_in.register()
    driver = JaxHost(
        host=config.host,
        hidden=functools.partial(hidden_folders, config) if config.is_linked else None,
        devices=local,
        all_devices=everyone,
        first_device=island[0] * options.devices_per_host,
        per_host=options.devices_per_host,
        segments=[*segments, *[None] * (options.room - len(segments))],
        controller=controller,
        device_bytes=limit,
        transfer_bytes=options.transfer_bytes,
        directory=os.path.dirname(config.address.removeprefix("unix:")),
        swap_every_for_testing=faults.swap_every(config.host),
        epochs=(*config.epochs, *[-1] * (options.room - len(config.epochs))),
    )
    far = {host: stream for host, stream in enumerate(config.streams) if stream is not None}
    if far or (config.is_linked and options.room > config.hosts_here):  # others may come
        driver.open_streams(config.stream, far, config.credentials)
    if config.predecessor_failure:
        driver.succeed(config.predecessor_failure, config.predecessor_client)
    faults.install(driver)
    return driver


class HostProcess:
    """One host process. Call `run` once, on the main thread."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._reports: queue.SimpleQueue[pb.HostReport | None] = queue.SimpleQueue()
        self._socket = socket.socket(fileno=config.socket_fd)
        self._native: Any = None
        self._pulse: Any = None
        self._driver: Driver | None = None
        self._stopping = False

    def run(self) -> int:
        """Starts, and serves until the controller asks it to stop. Returns the exit status."""
        channel = grpc.insecure_channel(self._config.address, options=self._channel_options())
        # It proves who this host is, because nobody else has the socket. Beside it is the way of the programs.
        token, (programs,) = fd_passing.receive(self._socket, FD_TIMEOUT_S)
        requests = rpc.HostsStub(channel).Session(
            iter(self._reports.get, None), wait_for_ready=True, metadata=wire.bearer(token["token"])
        )
        try:
            driver = self._driver = self._start()
            driver.on_offloaded = self._offloaded
            if (callbacks := getattr(driver, "callbacks", None)) is not None:
                callbacks.send = lambda part: self._report(pb.HostReport(callback=part))
                driver.give_up = _give_up  # type: ignore[attr-defined]
            _log.info("has its devices, %s", ", ".join(map(str, self._config.devices)))
            self._report(
                pb.HostReport(
                    stage=pb.HostStage(
                        stage=Stage.HOST_READY,
                        device_bytes=getattr(driver, "device_bytes", 0),
                        coordinates=getattr(driver, "coordinates", ()),
                        wraps=environment.torus_wraps(os.environ),
                    )
                )
            )
            store = functools.partial(self._store_programs, socket.socket(fileno=programs))
            for name, serve in (("control", functools.partial(self._serve, requests)), ("programs", store)):
                threading.Thread(target=_or_end, args=(serve, driver), name=name, daemon=True).start()
            driver.run()
            if not self._stopping:
                raise RuntimeError("the driver's loop ended although nobody stopped it")
        except BaseException as error:
            _log.critical("this host ends", exc_info=True)
            self._say_last(f"{type(error).__name__}: {error}", requests)
            return 1
        return 0

    def _channel_options(self) -> list[tuple[str, Any]]:
        if self._config.machine == 0:  # that of the controller
            return wire.CHANNEL_OPTIONS
        return wire.LINKED_OPTIONS if self._config.is_linked else wire.FAR_OPTIONS

    def _start(self) -> Driver:
        self._native = importlib.import_module(self._config.options.native)
        segments = [self._native.Segment.attach(fd) if fd >= 0 else None for fd in self._config.segment_fds]
        controller = self._native.Segment.attach(self._config.controller_fd)
        self._pulse = self._native.Pulse(segments[self._config.host])
        module, _, name = self._config.options.driver.partition(":")
        start = getattr(importlib.import_module(module), name)
        driver: Driver = start(self._config, segments, controller, lambda: self._stage(Stage.HOST_JOINED))
        return driver

    def _say_last(self, error: str, requests: Any) -> None:
        """Reports the error that ends this host, and waits up to `LAST_WORDS_S` until the controller has it."""
        self._report(pb.HostReport(error=pb.HostError(error=pb.Error(type="HostLostError", message=error))))
        self._reports.put(None)
        over = threading.Event()
        requests.add_done_callback(lambda _: over.set())
        over.wait(LAST_WORDS_S)

    # -- the control thread ------------------------------------------------------------------------------------------

    def _serve(self, requests: Iterator[pb.HostRequest], driver: Driver) -> None:
        try:
            for request in requests:
                if request.WhichOneof("what") == "stop":
                    break
                if (answer := self._answer(request, driver)) is not None:
                    answer.request = request.request
                    self._report(answer)
        except grpc.RpcError as error:
            _log.warning("the controller is gone: %s", error)
        self._stopping = True
        driver.stop()

    def _answer(self, request: pb.HostRequest, driver: Driver) -> pb.HostReport | None:
        match request.WhichOneof("what"):
            case "attach_client":
                return pb.HostReport(client_attached=self._attach_client(request.attach_client, driver))
            case "report_stats":
                return _stats(driver)
            case "analyze":
                return pb.HostReport(analysis=_analysis(driver, request.analyze.program_id))
            case "replace_peers":
                return pb.HostReport(peers_replaced=self._replace_peers(request.replace_peers, driver))
            case "trace":
                return pb.HostReport(traced=self._trace(request.trace, driver))
            case "profile":
                profiling.answer(
                    self._config.host,
                    request.profile,
                    lambda part: self._report(pb.HostReport(request=request.request, profiled=part)),
                )
                return None
            case "callback":
                driver.callbacks.answer(request.callback)  # type: ignore[attr-defined]
                return None
            case what:
                raise RuntimeError(f"the controller asks for {what!r}, which this host does not know")

    def _attach_client(self, request: pb.AttachClient, driver: Driver) -> pb.Error:
        def attach() -> None:
            segment = self._segment("client", "client", request.client)
            driver.attach_client(request.client, segment, request.futures, request.checkpoint_root or None)

        return _try(attach)

    def _segment(self, key: str, what: str, number: int) -> Any:
        """The segment of client or host `number`, which the controller sends with `number` under `key`."""
        message, fds = fd_passing.receive(self._socket, FD_TIMEOUT_S)
        if message.get(key) != number or len(fds) != 1:
            raise RuntimeError(f"expected the segment of {what} {number}, got {message} with {len(fds)} fds")
        return self._native.Segment.attach(fds[0])

    def _replace_peers(self, request: pb.ReplacePeers, driver: Driver) -> pb.PeersReplaced:
        """What is wrong with one successor is answered for that one alone; the others are in force."""
        errors: dict[int, pb.Error] = {}
        successors: list[Successor] = []

        def take(each: pb.Successor) -> None:
            segment = self._segment("peer", "host", each.host) if each.has_segment else None
            successors.append(Successor(each.host, segment, each.epoch, each.loss, each.stream))

        def replace() -> None:
            errors.update((host, _error(failure)) for host, failure in driver.replace_peers(successors).items())

        for each in request.successors:
            errors[each.host] = _try(functools.partial(take, each))
        if (failure := _try(replace)).type:
            errors.update((each.host, failure) for each in successors)
        refused = [pb.Answer(number=host, error=error) for host, error in errors.items() if error.type]
        return pb.PeersReplaced(refused=refused)

    def _trace(self, request: pb.HostTrace, driver: Driver) -> pb.TracePart:
        part = pb.TracePart(host=self._config.host)
        trace = getattr(driver, "trace", None)
        try:
            if trace is None:
                part.remark = f"host {self._config.host} cannot record"
            elif request.action == pb.HostTrace.START:
                trace.start()
            else:
                rest = trace.stop() if request.action == pb.HostTrace.STOP else trace.take()
                part.records, part.dropped = rest[:2]
                for number, program in rest[2].items():
                    part.programs[number].CopyFrom(program)
        except Exception as failure:
            _log.exception("nothing could be recorded")
            part.remark = f"host {self._config.host} could not record: {failure}"
        return part

    # -- the thread of programs --------------------------------------------------------------------------------------

    def _store_programs(self, programs: socket.socket, driver: Driver) -> None:
        for message in incoming(programs):
            request = pb.StoreProgram.FromString(message)
            error = _try(functools.partial(self._store_program, request, driver))
            self._report(pb.HostReport(program_stored=pb.Answer(number=request.program_id, error=error)))

    def _store_program(self, request: pb.StoreProgram, driver: Driver) -> None:
        bindings = tuple(tuple(binding.devices) for binding in request.bindings)
        program = load_program(request.program)
        islands = dict(request.islands)
        driver.register_program(request.client, request.program_id, program, bindings, self._compiled, islands)

    # -- reports, from any thread ------------------------------------------------------------------------------------

    def _compiled(self, program_id: int, error: str | None, memory: ProgramMemory | None = None) -> None:
        report = pb.ProgramCompiled(program_id=program_id, error=(error or "")[: 1 << 16])
        if memory is not None:
            report.memory.CopyFrom(dump(memory, pb.ProgramMemory))
        self._report(pb.HostReport(program_compiled=report))

    def _offloaded(self, request: int, error: str | None, nbytes: int) -> None:
        text = (error or "")[: 1 << 16]
        moved = pb.ClientOffloaded(error=text, bytes=nbytes)
        self._report(pb.HostReport(request=request, client_offloaded=moved))

    def _stage(self, stage: pb.StartupEvent.Stage, detail: str = "") -> None:
        self._report(pb.HostReport(stage=pb.HostStage(stage=stage, detail=detail)))

    def _report(self, report: pb.HostReport) -> None:
        self._reports.put(report)


def _or_end(serve: Callable[[Driver], None], driver: Driver) -> None:
    """Runs a thread's work. Its failure, which is one of this code, ends the process."""
    try:
        serve(driver)
    except BaseException:
        _log.critical("this host ends", exc_info=True)
        os._exit(1)


def _stats(driver: Driver) -> pb.HostReport:
    try:
        return pb.HostReport(stats=pb.HostCounts(**driver.stats(), resident_bytes=resident_bytes(os.getpid())))
    except Exception:
        _log.exception("the counts of this host could not be read")
        return pb.HostReport()


def _analysis(driver: Driver, program_id: int) -> pb.Analysis:
    try:
        return pb.Analysis(computations=driver.analyze(program_id))
    except Exception as failure:
        return pb.Analysis(error=str(failure) or type(failure).__name__)


def _give_up(why: str) -> None:
    _log.critical("this host ends, for %s", why)
    os._exit(1)


def _try(do: Callable[[], None]) -> pb.Error:
    """Does a request of the controller, and returns its error, which is empty if there is none."""
    try:
        do()
    except Exception as failure:
        _log.exception("a request of the controller failed")
        return _error(failure)
    return pb.Error()


def _error(failure: Exception) -> pb.Error:
    return pb.Error(type=type(failure).__name__, message=f"{type(failure).__name__}: {failure}")


def main(fds: list[int], config_json: str) -> None:
    """Entry of the process, with the descriptors of `HostConfig.fds`. Does not return."""
    config = load_host(config_json).with_fds(fds)
    log_lines.begin(f"host {config.host}")
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 writes every thread's stack to the log
    with open("/proc/self/comm", "w") as comm:  # the command line is the fork server's
        comm.write(f"pathways-host{config.host}"[:15])
    try:
        die_with_parent(config.parent)
    except ParentLost as lost:
        _log.error("%s", lost)
        os._exit(1)
    island = f"{len(config.island)} hosts in its island" if len(config.island) > 1 else "alone in its island"
    _log.info("begins: start %d, process %d, %s", config.incarnation, os.getpid(), island)
    status = HostProcess(config).run()
    _log.info("ends with status %d", status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip all destructors: the group's shutdown would wait for members that are gone, and XLA's threads may still run.
    os._exit(status)
