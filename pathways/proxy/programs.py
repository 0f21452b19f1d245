"""Compile requests, by the type of their program.

StableHLO and IFRT IR are compiled, Python functions for hosts are loaded, and requests of pathwaysutils are read. Other
types are refused by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from pathways._jaxlib.proxy_messages import message
from pathways.proxy import colocated, mpmd_programs, plugin_programs
from pathways.proxy.array_making import check_devices
from pathways.proxy.behind import Executable, GraphExecutable, Part
from pathways.proxy.calls import Call, Kind, Outcome
from pathways.proxy.errors import Code, Refused, not_implemented
from pathways.proxy.futures import READY
from pathways.proxy.loaded import Loaded, loaded
from pathways.proxy.shardings import MOST_DEVICES, PREFIX
from pathways.proxy.state import State

MAX_NAME = 200
Made = TypeVar("Made", bound=Executable)


def compile_program(state: State, call: Call) -> Outcome:
    """Compiles. The reply comes when the executable is loaded."""
    # A client waits for its compilation, so its own traceback has the line; of this error it would print the number.
    call.context = None
    if call.body.host_callbacks:
        raise not_implemented(
            "callbacks to Python (jax.pure_callback, io_callback, debug.print) do not work through a stock JAX client, "
            "which cannot run them; use Pathways' own client (`import pathways`), or compute on the host between calls"
        )
    kind = call.body.program.type_name
    compiler = PROGRAMS.get(kind)
    if compiler is None:
        raise not_implemented(f"a program of the type {kind[:MAX_NAME]!r}; this proxy compiles StableHLO")
    compiler(state, call)
    return Outcome.LATER


def compile_stablehlo(state: State, call: Call) -> None:
    """A module of StableHLO with XLA's options, which have the devices.

    PROXY-6: layouts are the client's own record. Arrays lie in memory as their devices have them by default, because
    what moves and reads them takes their bytes as those of rows; the client is told what it has asked for.
    """
    body = call.body
    if body.compile_options.type_name != f"{PREFIX}XlaCompileOptions":
        raise Refused(Code.INVALID_ARGUMENT, f"options of the type {body.compile_options.type_name[:MAX_NAME]!r}")
    options, devices = options_of(body.compile_options.data)
    check_devices(state, devices)

    module, *asked = state.reader.stablehlo(body.program.data)

    def compiled(outcome: Executable | BaseException) -> None:
        state.post(lambda: _made(state, call, outcome, lambda made: loaded(made, devices, *asked)))

    state.devices.compile(Part(module, options, devices), compiled)


def compile_ifrt_ir(state: State, call: Call) -> None:
    """A program of several programs over meshes, as Shardy's MPMD compiler makes them."""
    body = call.body
    if body.compile_options.type_name != f"{PREFIX}IfrtIRCompileOptions":
        raise Refused(Code.INVALID_ARGUMENT, f"options of the type {body.compile_options.type_name[:MAX_NAME]!r}")
    graph, meshes = mpmd_programs.parse(state, body.program.data, body.compile_options.data)

    def joined(outcome: GraphExecutable | BaseException) -> None:
        state.post(lambda: _made(state, call, outcome, lambda made: mpmd_programs.loaded(graph, meshes, made)))

    state.devices.join(graph, joined)


def compile_custom_call(state: State, call: Call) -> None:
    """A Python function for hosts, of jax.experimental.colocated_python."""
    function, results = colocated.parse(state, call.body.program.data)

    def loaded(outcome: Executable | BaseException) -> None:
        state.post(lambda: _made(state, call, outcome, lambda made: colocated.loaded(state, function, made, results)))

    state.devices.load(function, loaded)


def compile_plugin(state: State, call: Call) -> None:
    """A request of pathwaysutils in JSON."""
    program = plugin_programs.parse(state, call.body.program.data)
    (handle,) = state.executables.add([], [program])
    call.reply(lambda response: _fill(response, handle, program))


PROGRAMS: dict[str, Callable[[State, Call], None]] = {
    f"{PREFIX}XlaProgram": compile_stablehlo,
    f"{PREFIX}IfrtIRProgram": compile_ifrt_ir,
    f"{PREFIX}CustomCallProgram": compile_custom_call,
    f"{PREFIX}PluginProgram": compile_plugin,
}


def options_of(data: bytes) -> tuple[bytes, tuple[int, ...]]:
    """XLA's options, serialized, and the devices: replica by replica, the partitions of each in order."""
    try:
        options = message("pathways.proxy.XlaOptions").FromString(data).compile_options
        build = message("pathways.proxy.CompileOptions").FromString(options).executable_build_options
    except DecodeError:
        raise Refused(Code.INVALID_ARGUMENT, "the options of a program are malformed") from None
    assignment = build.device_assignment
    replicas, partitions = assignment.replica_count, assignment.computation_count
    rows = [list(one.replica_device_ids) for one in assignment.computation_devices]
    if not (0 < replicas <= MOST_DEVICES and len(rows) == partitions and all(len(row) == replicas for row in rows)):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"a program for {replicas} replicas of {partitions} partitions, whose options name devices for "
            f"{len(rows)} partitions; a program is compiled for the devices that its options name",
        )
    devices = tuple(row[replica] for replica in range(replicas) for row in rows)
    if len(set(devices)) != len(devices):
        raise Refused(Code.INVALID_ARGUMENT, "a program whose options name a device twice")
    return options, devices


def _made(state: State, call: Call, outcome: Made | BaseException, load: Callable[[Made], Loaded]) -> None:
    """The executable is there, or its error. In the session's thread."""
    if isinstance(outcome, BaseException):
        call.fail(outcome)
        return
    try:
        program = load(outcome)
        (handle,) = state.executables.add([], [program])
    except Exception as error:
        call.fail(error)
        return
    call.reply(lambda response: _fill(response, handle, program))


def _fill(response: Any, handle: int, program: Loaded) -> None:
    response.loaded_executable_handle, response.ready_future_handle = handle, READY
    response.name, response.num_devices = program.metadata.name, len(program.devices)
    response.device_ids.extend(program.devices)
    response.addressable_device_ids.extend(program.devices)
    if program.mpmd is not None:
        response.mpmd_addressable_devices.SetInParent()
        for mesh, devices in program.mpmd.meshes.items():
            response.mpmd_addressable_devices.mpmd_addressable_devices[mesh].mpmd_addressable_device_ids.extend(devices)
    if program.metadata.fingerprint:
        response.fingerprint_value = program.metadata.fingerprint


REQUESTS = {"compile_request": Kind(compile_program)}
