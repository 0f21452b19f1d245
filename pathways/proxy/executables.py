"""Executables of a state, and the requests about them: running, metadata, what they cost, their text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pathways.proxy import layouts
from pathways.proxy.array_views import usable
from pathways.proxy.arrays import Array, Held, of_buffer
from pathways.proxy.attributes import fill_attributes
from pathways.proxy.calls import Call, Kind, Outcome, many, one
from pathways.proxy.errors import Code, Refused, not_implemented, refusal_of
from pathways.proxy.futures import Future, when_all_ready
from pathways.proxy.loaded import Loaded, LoadedResult
from pathways.proxy.replies import Fill
from pathways.proxy.state import State

NO_LAYOUTS = not_implemented("the layouts of a program whose results depend on its arguments")
NO_MPMD = Refused(Code.INVALID_ARGUMENT, "LoadedExecutable is not an MPMD executable")


def execute(state: State, call: Call) -> Fill:
    """Runs an executable. The first time the client has no handles for the results yet, and learns what they are.

    Lost data fails the results, the first time too: a program that asks which islands are there, as
    `pathwaysutils.elastic` does, runs something on each, and then waits for each.
    """
    body = call.body
    program = state.executables.find(body.loaded_executable_handle)
    try:
        handles, status, results = _start(state, call, program)
    except Exception as error:
        refusal = refusal_of(error).within(call.context)
        if body.result_array_handle or refusal.code is not Code.DATA_LOSS or program.results_of is not None:
            raise
        results = program.results
        handles = [state.arrays.add_error(refusal) for _ in program.results]
        status = state.futures.add_error(refusal) if body.execute_options.fill_status else 0
    if body.result_array_handle:
        return (lambda response: setattr(response, "status_handle", status)) if status else None

    def fill(response: Any) -> None:
        response.status_handle = status
        for handle, result in zip(handles, results, strict=True):
            output = response.outputs.add(array_handle=handle)
            output.dtype.kind = result.dtype.kind
            output.shape.dims.extend(result.shape)
            result.told.fill(output.sharding)

    return fill


def _start(state: State, call: Call, program: Loaded) -> tuple[list[int], int, Sequence[LoadedResult]]:
    """Starts an executable; the handles of its results, and of their future, or 0, and what the results are."""
    body = call.body
    if body.device_ids and tuple(body.device_ids) != program.devices:
        raise not_implemented("a program that is compiled for no devices cannot be run here")
    arrays = usable(state, body.args_handles)
    _check_arguments(program, arrays)
    results = program.results if program.results_of is None else program.results_of(arrays)
    state.arrays.check_free(body.result_array_handle, len(results))
    options = body.execute_options
    if options.fill_status:
        state.futures.check_free(one("result_status_handle")(body), 1)
    kept = frozenset(options.non_donatable_input_indices)
    donated = [arrays[number] for number in program.donated - kept] if program.donated else []
    if donated:
        _check_donated(donated, arrays)
    buffers = program.executable.execute([array.shards() for array in arrays], kept)
    for array in donated:
        array.lose(is_donated=True)
    name = program.name
    count = len(buffers) - program.tokens
    made = [
        of_buffer(buffer, name, result.dtype, result.shape, result.sharding, call.context)
        for buffer, result in zip(buffers[:count], results, strict=True)
    ]
    tokens = [Held(buffer, name, call.context) for buffer in buffers[count:]]
    handles = state.arrays.add_checked(body.result_array_handle, made)
    return handles, _status(state, body, made, tokens) if options.fill_status else 0, results


def fetch_result(state: State, call: Call) -> Outcome:
    """Waits until a run is over."""
    future = state.futures.pop(call.body.result_status_handle)
    when_all_ready(future.held, lambda error: call.reply() if error is None else call.fail(error))
    return Outcome.LATER


def metadata(state: State, call: Call) -> Fill:
    """What the client's JAX asks of a new executable."""
    program = state.executables.find(call.body.loaded_executable_handle)
    found = program.metadata

    def fill(response: Any) -> None:
        _fill_shardings([parameter.sharding for parameter in found.parameters], response, "parameter_shardings")
        _fill_shardings([result.sharding for result in found.results], response, "output_shardings")
        if program.results_of is None:
            _fill_layouts(program.layouts[0], response.parameter_layouts_list)
            _fill_layouts(program.layouts[1], response.output_layouts_list)
        else:
            NO_LAYOUTS.fill(response.parameter_layouts_error)
            NO_LAYOUTS.fill(response.output_layouts_error)
        response.output_memory_kinds.memory_kind_lists.add(memory_kinds=[one.memory_kind for one in found.results])
        response.donated_input_indices.SetInParent()
        response.donated_input_indices.donated_input_indices.extend(sorted(found.donated))
        response.compiled_memory_stats.SetInParent()
        _fill_numbers(found.memory, response.compiled_memory_stats)
        response.size_of_generated_code_in_bytes = found.code_bytes

    return fill


def cost_analysis(state: State, call: Call) -> Fill:
    """What a run costs, as the compiler estimates it."""
    cost = state.executables.find(call.body.loaded_executable_handle).metadata.cost

    def fill(response: Any) -> None:
        response.attributes.SetInParent()
        fill_attributes(cost, response.attributes)

    return fill


def program_text(state: State, call: Call) -> Fill:
    """The compiled program for people."""
    text = state.executables.find(call.body.loaded_executable_handle).metadata.text
    return lambda response: setattr(response, "human_readable_program_text", text)


def destruct(state: State, call: Call) -> Fill:
    """The client has no use for an executable any more. What runs of it goes on."""
    state.executables.drop([call.body.loaded_executable_handle])
    state.devices.tidy()
    return None


def is_deleted(state: State, call: Call) -> Fill:
    """Old clients ask; executables are never deleted while they have a handle."""
    return lambda response: setattr(response, "is_deleted", False)


def delete(state: State, call: Call) -> Fill:
    """Old clients ask."""
    raise not_implemented("an executable is not deleted; it is freed when nobody uses it")


def mpmd_metadata(state: State, call: Call) -> Fill:
    """What each program of an MPMD executable needs."""
    parts = state.executables.find(call.body.mpmd_loaded_executable_handle).mpmd

    def fill(response: Any) -> None:
        if parts is None:
            NO_MPMD.fill(response.mpmd_compiled_memory_stats_error)
            return
        response.mpmd_compiled_memory_stats.SetInParent()
        for name, found in parts.programs.items():
            _fill_numbers(found.memory, response.mpmd_compiled_memory_stats.compiled_memory_stats[name])

    return fill


def mpmd_cost_analysis(state: State, call: Call) -> Fill:
    """What each program of an MPMD executable costs."""
    parts = state.executables.find(call.body.loaded_executable_handle).mpmd

    def fill(response: Any) -> None:
        if parts is None:
            NO_MPMD.fill(response.status)
            return
        response.attributes.SetInParent()
        for name, found in parts.programs.items():
            fill_attributes(found.cost, response.attributes.attributes[name])

    return fill


def _check_arguments(program: Loaded, arrays: Sequence[Array]) -> None:
    expected = len(program.metadata.parameters)
    if len(arrays) != expected:
        raise Refused(Code.INVALID_ARGUMENT, f"{program.name} takes {expected} arrays; {len(arrays)} came")
    for number, array in enumerate(arrays):
        devices = program.devices
        if program.takes is not None:
            cut, devices = program.takes[number]
            if cut is not None and (array.shape, array.dtype.numpy) != (cut.shape, cut.dtype):
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f"argument {number} of {program.name} is {array.dtype.name}{list(array.shape)}, but the program "
                    f"takes {cut.dtype}{list(cut.shape)}",
                )
        if array.devices != devices:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"argument {number} of {program.name} lies on the devices {list(array.devices)[:16]}, but the "
                f"program takes it on {list(devices)[:16]}",
            )
        if array.dtype.is_string:
            raise Refused(Code.INVALID_ARGUMENT, f"argument {number} of {program.name} has strings")


def _check_donated(donated: Sequence[Array], arrays: Sequence[Array]) -> None:
    """A program cannot take memory that another of its arguments has, too."""
    users: dict[tuple[Held, int], int] = {}
    for array in arrays:
        for part in array.parts:
            users[part] = users.get(part, 0) + 1
    if any(users[part] > 1 for array in donated for part in array.parts):
        raise Refused(Code.INVALID_ARGUMENT, "an array is donated and given to the same call once more")


def _status(state: State, body: Any, made: Sequence[Array], tokens: Sequence[Held]) -> int:
    held = (*tokens, *(one for array in made for one in array.held))
    (handle,) = state.futures.add(one("result_status_handle")(body), [Future(held)])
    return handle


def _fill_shardings(found: Collection[bytes | None], response: Any, field: str) -> None:
    if all(sharding is not None for sharding in found):
        getattr(response, field).SetInParent()
        for sharding in found:
            getattr(response, field).shardings.add().ParseFromString(sharding)


def _fill_layouts(texts: Sequence[str], made: Any) -> None:
    made.SetInParent()
    for text in texts:
        layouts.fill(text, made.layouts.add())


def _fill_numbers(numbers: Mapping[str, int], proto: Any) -> None:
    known = {field.name for field in proto.DESCRIPTOR.fields}
    for name, value in numbers.items():
        if name in known:
            setattr(proto, name, value)


REQUESTS = {
    "loaded_executable_execute_request": Kind(
        execute, results=many("result_array_handle"), statuses=one("result_status_handle")
    ),
    "loaded_executable_fetch_execute_result_request": Kind(fetch_result),
    "loaded_executable_metadata_request": Kind(metadata),
    "loaded_executable_cost_analysis_request": Kind(cost_analysis),
    "loaded_executable_human_readable_program_text_request": Kind(program_text),
    "loaded_executable_destruct_request": Kind(destruct),
    "loaded_executable_is_deleted_request": Kind(is_deleted),
    "loaded_executable_delete_request": Kind(delete),
    "loaded_executable_mpmd_metadata_request": Kind(mpmd_metadata),
    "loaded_executable_mpmd_cost_analysis_request": Kind(mpmd_cost_analysis),
}
