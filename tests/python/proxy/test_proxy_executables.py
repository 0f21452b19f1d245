"""Executables by hand: compiling, running with the client's handles and with the door's, what is wrong with a run.

PROXY-1 (one reply, and errors in the place of results): test_a_wrong_run_fails_its_results
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doors import PACKAGE, Wire
from jaxlib import _jax

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import Code

ONES = np.ones((2, 3), np.float32)


def compile_request(function: Callable[..., Any], *shapes: tuple[int, ...], device: int = 0, **options: Any) -> Any:
    """A CompileRequest as a stock client makes it, for one device."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    module = jax.jit(function, **options).lower(*arguments).compiler_ir("stablehlo")
    built = _jax.CompileOptions()
    built.num_replicas = built.num_partitions = 1
    built.device_assignment = _jax.DeviceAssignment.create(np.array([[device]]))
    request = message(f"{PACKAGE}.CompileRequest")()
    request.program.type_name = "xla::ifrt::XlaProgram"
    request.program.data = _jax.mlir.serialize_portable_artifact(str(module), "1.0.0")
    request.compile_options.type_name = "xla::ifrt::XlaCompileOptions"
    wrapped = message("pathways.proxy.XlaOptions")(compile_options=built.SerializeAsString())
    request.compile_options.data = wrapped.SerializeToString()
    return request


@pytest.fixture
def program(wire: Wire) -> int:
    """The handle of a program of two arrays, which returns their sum and their product, and takes the first."""
    asked = compile_request(lambda a, b: (a + b, a * b), (2, 3), (2, 3), donate_argnums=0)
    made = wire.ask("compile_request", asked)
    assert (made.num_devices, list(made.device_ids), list(made.addressable_device_ids)) == (1, [0], [0])
    wire.ask("check_future_request", future_handle=made.ready_future_handle)
    return made.loaded_executable_handle


def run_request(program: int, arguments: list[int], results: list[int] | None = None, status: int = 0) -> Any:
    request = message(f"{PACKAGE}.LoadedExecutableExecuteRequest")(
        loaded_executable_handle=program, args_handles=arguments, result_array_handle=results or []
    )
    request.execute_options.fill_status = bool(status)
    request.result_status_handle = status
    return request


def test_metadata(wire: Wire, program: int) -> None:
    found = wire.ask("loaded_executable_metadata_request", loaded_executable_handle=program)
    assert list(found.donated_input_indices.donated_input_indices) == [0]
    assert [list(one.minor_to_major) for one in found.output_layouts_list.layouts] == [[1, 0], [1, 0]]
    assert list(found.output_memory_kinds.memory_kind_lists[0].memory_kinds) == ["device", "device"]
    assert found.compiled_memory_stats.argument_size_in_bytes == 48
    cost = wire.ask("loaded_executable_cost_analysis_request", loaded_executable_handle=program)
    assert cost.attributes.attributes["flops"].float_value == 12
    text = wire.ask("loaded_executable_human_readable_program_text_request", loaded_executable_handle=program)
    assert "HloModule" in text.human_readable_program_text


def test_the_first_run_says_what_results_are(wire: Wire, program: int) -> None:
    wire.put(5, ONES)
    wire.put(6, ONES * 2)
    made = wire.ask("loaded_executable_execute_request", run_request(program, [5, 6]))
    assert made.status_handle == 0
    for output, expected in zip(made.outputs, (3, 2), strict=True):
        assert (output.dtype.kind, list(output.shape.dims)) == (11, [2, 3])
        assert output.sharding.serialized_sharding.type_name == "xla::ifrt::SingleDeviceSharding"
        assert output.array_handle > 1 << 60
        assert np.array_equal(wire.read(output.array_handle, (2, 3)), ONES * expected)
    assert wire.ask("is_array_deleted_request", array_handle=5).deleted  # donated
    assert not wire.ask("is_array_deleted_request", array_handle=6).deleted


def test_a_run_with_handles_of_the_client(wire: Wire, program: int) -> None:
    wire.put(5, ONES)
    wire.put(6, ONES * 2)
    request = run_request(program, [5, 6], [10, 11], status=12)
    request.execute_options.non_donatable_input_indices.append(0)
    assert not wire.ask("loaded_executable_execute_request", request).outputs
    wire.ask("loaded_executable_fetch_execute_result_request", result_status_handle=12)
    code, _ = wire.error("loaded_executable_fetch_execute_result_request", result_status_handle=12)
    assert code == Code.NOT_FOUND  # asked once, it is gone
    assert np.array_equal(wire.read(10, (2, 3)), ONES * 3) and np.array_equal(wire.read(11, (2, 3)), ONES * 2)
    assert np.array_equal(wire.read(5, (2, 3)), ONES)  # kept


def test_a_program_is_gone_when_it_is_destructed(wire: Wire, program: int) -> None:
    wire.put(5, ONES)
    wire.put(6, ONES)
    wire.ask("loaded_executable_execute_request", run_request(program, [5, 6], [10, 11]))
    wire.ask("loaded_executable_destruct_request", loaded_executable_handle=program)
    assert np.array_equal(wire.read(10, (2, 3)), ONES * 2)  # what it has made stays
    assert wire.error("loaded_executable_execute_request", run_request(program, [6, 6], [12, 13]))[0] == Code.NOT_FOUND


def test_a_wrong_run_fails_its_results(wire: Wire, program: int) -> None:
    wire.put(5, ONES)
    wire.put(6, ONES)
    wire.put(7, ONES, device=1)
    (view,) = wire.ask("disassemble_into_single_device_arrays_request", array_handle=5).array_handles
    base = 100
    for arguments, code in (
        ([5], Code.INVALID_ARGUMENT),  # too few
        ([5, 6, 6], Code.INVALID_ARGUMENT),
        ([5, 7], Code.INVALID_ARGUMENT),  # on another device
        ([5, 77], Code.NOT_FOUND),
        ([5, 5], Code.INVALID_ARGUMENT),  # donated and used
        ([5, view], Code.INVALID_ARGUMENT),
    ):
        results = [base, base + 1]
        found, text = wire.error(
            "loaded_executable_execute_request", run_request(program, arguments, results, base + 2)
        )
        assert found == code, text
        for handle in results:
            assert wire.error("check_value_ready_request", value_handles=[handle]) == (found, text)
        status = wire.error("loaded_executable_fetch_execute_result_request", result_status_handle=base + 2)
        assert status == (found, text)
        base += 10
    assert np.array_equal(wire.read(5, (2, 3)), ONES)  # no wrong run has taken it


def test_handles_of_results_that_cannot_be(wire: Wire, program: int) -> None:
    wire.put(5, ONES)
    wire.put(6, ONES)
    for results, status, code in (
        ([10], 0, Code.INVALID_ARGUMENT),
        ([6, 10], 0, Code.ALREADY_EXISTS),
        ([10, 10], 0, Code.ALREADY_EXISTS),
        ([10, 1 << 61], 0, Code.INVALID_ARGUMENT),
        ([20, 21], 1 << 61, Code.INVALID_ARGUMENT),
    ):
        request = run_request(program, [5, 6], results, status)
        assert wire.error("loaded_executable_execute_request", request)[0] == code
    assert np.array_equal(wire.read(5, (2, 3)), ONES) and np.array_equal(wire.read(6, (2, 3)), ONES)


@pytest.mark.parametrize("what", ["module", "options", "devices", "unknown devices"])
def test_a_program_that_does_not_compile(wire: Wire, what: str) -> None:
    request = compile_request(lambda a: a, (2, 3), device=0 if what != "unknown devices" else 77)
    if what == "module":
        request.program.data = request.program.data[:100]
    elif what == "options":
        request.compile_options.data = b"\xff\xff"
    elif what == "devices":
        request.compile_options.data = b""
    code, text = wire.error("compile_request", request)
    assert code in (Code.INVALID_ARGUMENT, Code.INTERNAL, Code.NOT_FOUND) and text
    wire.put(5, ONES)
    assert np.array_equal(wire.read(5, (2, 3)), ONES)
