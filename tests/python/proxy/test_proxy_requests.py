"""Requests by hand: what is wrong fails the request or the handle, with the right code, and nothing else.

PROXY-1 (one reply for each request, in order of effect): test_what_a_failed_request_should_have_made_is_its_error,
test_a_request_waits_for_its_bytes
PROXY-2 (views): test_views_tell_nobody
"""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from doors import PACKAGE, Door, Wire, array_request, single

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import Code
from pathways.proxy.kinds import KINDS

XLA = {"type_name": "xla::ifrt::XlaProgram"}
ONES = np.ones((2, 3), np.float32)


def test_every_kind_of_request_has_a_handler() -> None:
    fields = message(f"{PACKAGE}.IfrtRequest").DESCRIPTOR.oneofs_by_name["request"].fields
    assert {field.name for field in fields} == set(KINDS)


def test_a_put_and_a_read(wire: Wire) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    wire.put(5, values)
    assert np.array_equal(wire.read(5, (2, 3)), values)


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("check_value_ready_request", {"value_handles": [77]}, Code.NOT_FOUND),
        ("check_future_request", {"future_handle": 77}, Code.NOT_FOUND),
        ("copy_to_host_buffer_request", {"array_handle": 77, "host_buffer_handle": 78}, Code.NOT_FOUND),
        ("is_array_deleted_request", {"array_handle": 77}, Code.NOT_FOUND),
        ("destruct_array_request", {"array_handle": [77]}, Code.NOT_FOUND),
        ("disassemble_into_single_device_arrays_request", {"array_handle": 77}, Code.NOT_FOUND),
        ("fully_replicated_shard_request", {"array_handle": 77}, Code.NOT_FOUND),
        ("copy_arrays_request", {"array_handles": [77]}, Code.NOT_FOUND),
        ("reshard_arrays_request", {"array_handles": [77]}, Code.NOT_FOUND),
        ("bitcast_arrays_request", {"array_handles": [77]}, Code.NOT_FOUND),
        ("remap_arrays_request", {"array_handles": [77]}, Code.NOT_FOUND),
        ("assemble_array_from_single_device_arrays_request", {}, Code.INVALID_ARGUMENT),
        ("loaded_executable_execute_request", {"loaded_executable_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_metadata_request", {"loaded_executable_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_cost_analysis_request", {"loaded_executable_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_human_readable_program_text_request", {"loaded_executable_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_destruct_request", {"loaded_executable_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_fetch_execute_result_request", {"result_status_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_mpmd_metadata_request", {"mpmd_loaded_executable_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_mpmd_cost_analysis_request", {"loaded_executable_handle": 77}, Code.NOT_FOUND),
        ("loaded_executable_delete_request", {"loaded_executable_handle": 77}, Code.UNIMPLEMENTED),
        ("loaded_host_callback_poll_request", {}, Code.UNIMPLEMENTED),
        ("loaded_host_callback_return_request", {}, Code.UNIMPLEMENTED),
        ("get_default_device_assignment_request", {"num_replicas": 9, "num_partitions": 1}, Code.INVALID_ARGUMENT),
        (
            "get_default_device_assignment_request",
            {"num_replicas": 1 << 63},
            Code.INVALID_ARGUMENT,
        ),
        ("get_default_layout_request", {"device_id": 99}, Code.NOT_FOUND),
        ("get_default_layout_request", {"dims": [-1], "dtype": {"kind": 11}}, Code.INVALID_ARGUMENT),
        ("compile_request", {"program": {"type_name": "xla::ifrt::IfrtIRProgram"}}, Code.INVALID_ARGUMENT),
        ("compile_request", {"program": {"type_name": "xla::ifrt::PluginProgram"}}, Code.INVALID_ARGUMENT),
        ("compile_request", {"program": {"type_name": "xla::ifrt::CustomCallProgram"}}, Code.UNIMPLEMENTED),
        ("compile_request", {"program": {"type_name": "nonsense"}}, Code.UNIMPLEMENTED),
        (
            "compile_request",
            {"program": XLA, "host_callbacks": [b"x"]},
            Code.UNIMPLEMENTED,
        ),
        ("compile_request", {"program": XLA}, Code.INVALID_ARGUMENT),
    ],
)
def test_a_wrong_request_fails_alone(wire: Wire, name: str, fields: dict[str, object], code: Code) -> None:
    found, text = wire.error(name, **fields)
    assert found == code, text
    wire.put(5, ONES)
    assert np.array_equal(wire.read(5, (2, 3)), ONES)


def test_a_request_of_no_kind(wire: Wire) -> None:
    request = message(f"{PACKAGE}.IfrtRequest")()
    request.request_metadata.op_id = 1000
    wire.send_raw(request.SerializeToString())
    assert wire.reply(1000).response_metadata.status.code == Code.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("shape", "kind", "strides", "code"),
    [
        ((2, 4), 11, None, Code.INVALID_ARGUMENT),  # another size
        ((-2, -3), 11, None, Code.INVALID_ARGUMENT),
        ((1 << 62, 1 << 62), 11, None, Code.INVALID_ARGUMENT),
        ((2, 3), 1234, None, Code.INVALID_ARGUMENT),  # an element type that nobody knows
        ((2, 3), 17, None, Code.INVALID_ARGUMENT),  # a token
        ((2, 3), 99, None, Code.INVALID_ARGUMENT),  # strings
        ((2, 3), 11, [12], Code.INVALID_ARGUMENT),
        ((2, 3), 11, [1 << 62, 1 << 62], Code.INVALID_ARGUMENT),
        ((2, 3), 11, [-12, 4], Code.UNIMPLEMENTED),
        ((1,) * 100 + (6,), 11, None, Code.INVALID_ARGUMENT),  # more dimensions than NumPy has
    ],
)
def test_nonsense_sizes(wire: Wire, shape: tuple[int, ...], kind: int, strides: list[int] | None, code: Code) -> None:
    wire.store(5, ONES.tobytes())
    request = array_request(5, shape, kind=kind)
    if strides is not None:
        request.byte_strides.strides.extend(strides)
    found, text = wire.error("make_array_from_host_buffer_request", request)
    assert found == code, text
    assert wire.error("check_value_ready_request", value_handles=[5]) == (found, text)  # the error is in its place
    wire.ask("destruct_array_request", array_handle=[5])
    wire.put(5, ONES)


def test_strides_of_a_read(wire: Wire) -> None:
    wire.put(5, np.arange(6, dtype=np.float32).reshape(2, 3))
    body = message(f"{PACKAGE}.CopyToHostBufferRequest")(array_handle=5, host_buffer_handle=6)
    body.byte_strides.strides.extend([4, 8])
    wire.ask("copy_to_host_buffer_request", body)
    assert np.array_equal(np.frombuffer(wire.look_up(6), np.float32), [0, 3, 1, 4, 2, 5])
    body.host_buffer_handle = 7
    body.byte_strides.strides[:] = [4, 1 << 50]
    assert wire.error("copy_to_host_buffer_request", body)[0] == Code.INVALID_ARGUMENT


def test_a_handle_twice(wire: Wire) -> None:
    wire.put(5, ONES)
    wire.store(6, ONES.tobytes())
    request = array_request(6, (2, 3))
    request.array_handle = 5
    assert wire.error("make_array_from_host_buffer_request", request)[0] == Code.ALREADY_EXISTS
    assert np.array_equal(wire.read(5, (2, 3)), ONES)  # the first keeps it


@pytest.mark.parametrize("handle", [1 << 60, (1 << 64) - 1])
def test_a_handle_that_no_client_may_give(wire: Wire, handle: int) -> None:
    wire.store(6, ONES.tobytes())
    request = array_request(6, (2, 3))
    request.array_handle = handle
    assert wire.error("make_array_from_host_buffer_request", request)[0] == Code.INVALID_ARGUMENT


def test_unknown_devices(wire: Wire) -> None:
    wire.store(5, ONES.tobytes())
    assert wire.error("make_array_from_host_buffer_request", array_request(5, (2, 3), 999))[0] == Code.NOT_FOUND
    wire.put(6, ONES)
    assert wire.error("copy_arrays_request", array_handles=[6], device_ids=[999])[0] == Code.NOT_FOUND
    assert wire.error("copy_arrays_request", array_handles=[6], device_ids=[1, 2])[0] == Code.INVALID_ARGUMENT


def test_a_deleted_array(wire: Wire) -> None:
    wire.put(5, ONES)
    (view,) = wire.ask("disassemble_into_single_device_arrays_request", array_handle=5).array_handles
    future = wire.ask("delete_array_request", array_handle=[5]).deletion_future_handle
    wire.ask("check_future_request", future_handle=future)
    assert wire.ask("is_array_deleted_request", array_handle=5).deleted
    assert wire.ask("is_array_deleted_request", array_handle=view).deleted  # its memory is gone for all views
    for handle in (5, view):
        code, text = wire.error("check_value_ready_request", value_handles=[handle])
        assert (code, "deleted" in text) == (Code.INVALID_ARGUMENT, True)
    future = wire.ask("delete_array_request", array_handle=[5, 77]).deletion_future_handle
    assert wire.error("check_future_request", future_handle=future)[0] == Code.NOT_FOUND
    assert wire.error("check_future_request", future_handle=future)[0] == Code.NOT_FOUND  # asked once, it is gone


def test_what_a_failed_request_should_have_made_is_its_error(wire: Wire) -> None:
    code, text = wire.error("copy_arrays_request", array_handles=[77], result_handles=[80])
    for name, fields in (
        ("check_value_ready_request", {"value_handles": [80]}),
        ("copy_arrays_request", {"array_handles": [80], "result_handles": [81]}),
        ("check_value_ready_request", {"value_handles": [81]}),
    ):
        assert wire.error(name, **fields) == (code, text)
    wire.ask("destruct_array_request", array_handle=[80, 81])
    assert wire.error("check_value_ready_request", value_handles=[80])[0] == Code.NOT_FOUND


def test_an_error_names_the_request_that_it_comes_from(wire: Wire) -> None:
    failed = wire.reply(wire.send("copy_arrays_request", context=31, array_handles=[77], result_handles=[80]))
    later = wire.reply(wire.send("check_value_ready_request", context=32, value_handles=[80]))
    for response in (failed, later):
        assert dict(response.response_metadata.status.payload) == {"type.googleapis.com/ifrt.UserContext": b"31"}


def test_contexts_are_told_once_nothing_refers_to_them(wire: Wire) -> None:
    wire.store(5, ONES.tobytes())
    made = wire.reply(wire.send("make_array_from_host_buffer_request", array_request(5, (2, 3)), context=41))
    asked = wire.reply(wire.send("is_array_deleted_request", context=42, array_handle=5))
    after = wire.reply(wire.send("is_array_deleted_request", array_handle=5))
    wire.ask("destruct_array_request", array_handle=[5])
    last = wire.reply(wire.send("init_request"))
    assert [one.response_metadata.status.code for one in (made, asked, after, last)] == [0] * 4
    told = [list(one.response_metadata.destroyed_user_context_ids) for one in (made, asked, after, last)]
    assert [41 in ids for ids in told] == [False, False, False, True], told
    assert sum(ids.count(42) for ids in told) == 1
    numbers = [one.response_metadata.seq_num for one in (made, asked, after, last)]
    assert numbers == list(range(numbers[0], numbers[0] + 4))  # the client does not count what it sends in batches


def test_a_request_waits_for_its_bytes(wire: Wire) -> None:
    made = wire.send("make_array_from_host_buffer_request", array_request(5, (2, 3)))
    ready = wire.send("check_value_ready_request", value_handles=[5])
    wire.store(6, ONES.tobytes())  # another one's
    wire.store(5, ONES.tobytes())
    assert wire.reply(made).response_metadata.status.code == 0
    assert wire.reply(ready).response_metadata.status.code == 0


def test_errors_that_a_client_makes(wire: Wire) -> None:
    body = message(f"{PACKAGE}.MakeErrorArraysRequest")(array_handles=[5, 6])
    body.error.code, body.error.message = Code.ABORTED, "it was I"
    assert wire.error("make_error_arrays_request", body)[0] == Code.INVALID_ARGUMENT  # no specs
    wire.ask("destruct_array_request", array_handle=[5, 6])
    for _ in range(2):
        body.array_specs.add().sharding.CopyFrom(single(0))
    wire.ask("make_error_arrays_request", body)
    assert wire.error("check_value_ready_request", value_handles=[6]) == (Code.ABORTED, "it was I")


def assembled(wire: Wire, handle: int, parts: list[int], devices: list[int]) -> object:
    even = message("xla.ifrt.ConcreteEvenShardingProto")()
    even.devices.device_ids.extend(devices)
    even.shape.dims.extend([2 * len(parts), 3])
    even.shard_shape.dims.extend([2, 3])
    body = message(f"{PACKAGE}.AssembleArrayFromSingleDeviceArraysRequest")(
        single_device_array_handles=parts, copy_semantics=2, result_handle=handle
    )
    body.shape.dims.extend([2 * len(parts), 3])
    body.sharding.serialized_sharding.type_name = "xla::ifrt::ConcreteEvenSharding"
    body.sharding.serialized_sharding.data = even.SerializeToString()
    return body


def test_views_tell_nobody(door: Door, wire: Wire) -> None:
    for device in range(3):
        wire.put(10 + device, ONES * device, device)
    before = door.stats()["calls"]
    wire.ask("assemble_array_from_single_device_arrays_request", assembled(wire, 20, [10, 11, 12], [0, 1, 2]))
    wire.ask("disassemble_into_single_device_arrays_request", array_handle=20, result_handles=[30, 31, 32])
    plan = message(f"{PACKAGE}.RemapArraysRequest")(array_handles=[20], copy_semantics=2, result_handles=[40])
    plan.plan.input_specs.add()
    target = plan.plan.output_specs.add()
    target.dtype.kind = 11
    target.shape.dims.extend([2, 3])
    target.sharding.CopyFrom(single(2))
    mapping = plan.plan.mappings.add(from_start=[2], from_end=[3], from_step=[1])
    mapping.to_start[:], mapping.to_end[:], mapping.to_step[:] = [0], [1], [1]
    wire.ask("remap_arrays_request", plan)
    wire.ask("fully_replicated_shard_request", array_handle=40, result_handle=50)
    assert door.stats()["calls"] == before
    for handle, factor in ((30, 0), (31, 1), (32, 2), (40, 2), (50, 2)):
        assert np.array_equal(wire.read(handle, (2, 3)), ONES * factor)
    wire.ask("destruct_array_request", array_handle=[10, 11, 12, 20])
    assert np.array_equal(wire.read(50, (2, 3)), ONES * 2)  # a view keeps its buffer


@pytest.mark.parametrize(
    "interval",
    [(0, 9, 1), (5, 6, 1), (-1, 0, 1), (0, -1, -1), (-1, 1, 1), (0, 1, 0), (0, 1, -1), (0, 1 << 62, 1), (1, 1, 1)],
)
def test_a_plan_that_leads_out_of_an_array(wire: Wire, interval: tuple[int, int, int]) -> None:
    wire.put(10, ONES)
    plan = message(f"{PACKAGE}.RemapArraysRequest")(array_handles=[10], result_handles=[40])
    plan.plan.input_specs.add()
    target = plan.plan.output_specs.add()
    target.dtype.kind = 11
    target.sharding.CopyFrom(single(0))
    mapping = plan.plan.mappings.add(to_start=[0], to_end=[1], to_step=[1])
    mapping.from_start[:], mapping.from_end[:], mapping.from_step[:] = ([n] for n in interval)
    assert wire.error("remap_arrays_request", plan)[0] == Code.INVALID_ARGUMENT


def test_parts_that_do_not_lie_where_the_sharding_says(wire: Wire) -> None:
    for device in range(2):
        wire.put(10 + device, ONES, device)
    for parts, devices in (([10, 11], [1, 0]), ([10, 11], [0, 1, 2]), ([10], [0, 1])):
        body = assembled(wire, 0, parts, devices)
        assert wire.error("assemble_array_from_single_device_arrays_request", body)[0] == Code.INVALID_ARGUMENT


def test_an_array_that_is_given_away(wire: Wire) -> None:
    for device in range(2):
        wire.put(10 + device, ONES, device)
    body = assembled(wire, 20, [10, 11], [0, 1])
    body.copy_semantics = 3
    wire.ask("assemble_array_from_single_device_arrays_request", body)
    assert wire.ask("is_array_deleted_request", array_handle=10).deleted
    assert not wire.ask("is_array_deleted_request", array_handle=20).deleted
    wire.ask("delete_array_request", array_handle=[10])  # as clients do: what has the parts now keeps them
    wire.ask("check_value_ready_request", value_handles=[20])


def test_a_bitcast(wire: Wire) -> None:
    wire.put(5, ONES)
    body = message(f"{PACKAGE}.BitcastArraysRequest")(array_handles=[5], result_handles=[6], copy_semantics=3)
    spec = body.array_specs.add()
    spec.dtype.kind = 8  # uint32
    spec.shape.dims.extend([3, 2])
    spec.sharding.CopyFrom(single(0))
    wire.ask("bitcast_arrays_request", body)
    assert np.array_equal(wire.read(6, (3, 2)).view(np.uint32), np.full((3, 2), 0x3F800000))
    body.array_handles[:], body.result_handles[:] = [6], [7]
    spec.shape.dims[:] = [4, 2]
    assert wire.error("bitcast_arrays_request", body)[0] == Code.INVALID_ARGUMENT


def test_host_buffers_that_are_not_there(wire: Wire) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        wire.look_up(77)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as refused:
        wire.store(5, b"12345678", size=9)
    assert refused.value.code() == grpc.StatusCode.DATA_LOSS
    with pytest.raises(grpc.RpcError) as refused:
        wire.store(5, b"12345678", size=7)
    assert refused.value.code() == grpc.StatusCode.DATA_LOSS
    wire.store(5, b"12345678")
    with pytest.raises(grpc.RpcError) as refused:
        wire.store(5, b"12345678")
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    wire.drop(5)
    wire.drop(5)  # a client that deletes twice is told nothing
    wire.store(5, b"12345678")
    assert wire.look_up(5) == b"12345678"
