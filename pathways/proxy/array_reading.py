"""Requests about arrays that exist: reading, readiness, deletion; and about futures."""

from __future__ import annotations

from typing import Any

from pathways.proxy import host_arrays
from pathways.proxy.array_views import usable
from pathways.proxy.arrays import Array, StringBuffer
from pathways.proxy.calls import Call, Kind, Outcome
from pathways.proxy.errors import Code, Refused, refusal_of
from pathways.proxy.futures import READY, when_all_ready
from pathways.proxy.replies import Fill
from pathways.proxy.state import State


def copy_to_host_buffer(state: State, call: Call) -> Outcome:
    """Reads an array on one device, or one that is replicated, into a host buffer, which the client fetches then."""
    if isinstance(call.admitted, Refused):
        raise call.admitted
    handle = call.body.host_buffer_handle
    try:
        array = _readable(state, call)
        held, number = array.parts[0]
        strides = host_arrays.strides_of(call.body)
        shard = array.shards()[0]
    except BaseException:
        state.buffers.release(handle)
        raise

    def read(values: Any) -> None:
        try:
            if isinstance(values, BaseException):
                raise values
            is_string = array.dtype.is_string
            data = host_arrays.strings_to(values) if is_string else host_arrays.to_bytes(values, strides)
            state.buffers.put(handle, data)
        except BaseException as error:
            state.buffers.release(handle)
            call.fail(refusal_of(error).within(held.context))
        else:
            call.reply()

    if isinstance(held.buffer, StringBuffer):
        held.buffer.read(number, read)
    else:
        state.devices.fetch(shard, read)
    return Outcome.LATER


def check_value_ready(state: State, call: Call) -> Outcome:
    """Waits until arrays are computed."""
    held = dict.fromkeys(one for array in usable(state, call.body.value_handles) for one in array.held)
    when_all_ready(tuple(held), lambda error: call.reply() if error is None else call.fail(error))
    return Outcome.LATER


def check_future(state: State, call: Call) -> Outcome:
    """Waits for what was started; a client asks once."""
    if call.body.future_handle == READY:
        call.reply(is_counted=False)  # the client asks of deletions on its own
        return Outcome.LATER
    future = state.futures.pop(call.body.future_handle)
    when_all_ready(future.held, lambda error: call.reply() if error is None else call.fail(error))
    return Outcome.LATER


def delete(state: State, call: Call) -> Outcome:
    """Frees the memory of arrays. The client learns of unknown ones by the future."""
    future = READY
    for handle in call.body.array_handle:
        try:
            state.arrays.find(handle).lose(is_donated=False)
        except Refused as refusal:
            if future == READY:
                future = state.futures.add_error(refusal)
    call.reply(lambda response: setattr(response, "deletion_future_handle", future), is_counted=False)
    return Outcome.LATER


def destruct(state: State, call: Call) -> Outcome:
    """The client has no use for handles any more."""
    state.arrays.drop(call.body.array_handle)
    call.reply(is_counted=False)
    return Outcome.LATER


def is_deleted(state: State, call: Call) -> Fill:
    """Whether an array was deleted or donated."""
    found = state.arrays.find(call.body.array_handle).is_deleted
    return lambda response: setattr(response, "deleted", found)


def _may_read(state: State, call: Call) -> bool:
    """Reads in order of the requests, when there is room for the bytes."""
    if call.admitted is None:
        array = _readable(state, call)
        if array.dtype.is_string:
            held, number = array.parts[0]
            assert isinstance(held.buffer, StringBuffer)
            size = held.buffer.most_bytes(number)
        else:
            numpy = host_arrays.numpy_of(array.dtype)
            size = host_arrays.region_bytes(numpy, array.shape, host_arrays.strides_of(call.body))
            least = host_arrays.region_bytes(numpy, array.shape, None)
            if size > 16 * least + 4096:
                raise Refused(Code.INVALID_ARGUMENT, f"strides that spread {least} bytes over {size}")
        call.admitted = False

        def admitted(error: Refused | None) -> None:
            call.admitted = error or True
            state.wake()

        state.buffers.reserve(call.body.host_buffer_handle, size, admitted, is_read=True)
    return call.admitted is not False


def _readable(state: State, call: Call) -> Array:
    (array,) = usable(state, [call.body.array_handle])
    if array.parts[0][0].buffer.shape != array.shape:
        raise Refused(Code.INVALID_ARGUMENT, f"an array of shape {array.shape} is read shard by shard")
    return array


REQUESTS = {
    "copy_to_host_buffer_request": Kind(copy_to_host_buffer, may_begin=_may_read),
    "check_value_ready_request": Kind(check_value_ready),
    "check_future_request": Kind(check_future),
    "delete_array_request": Kind(delete),
    "destruct_array_request": Kind(destruct),
    "is_array_deleted_request": Kind(is_deleted),
}
