"""The pieces of functions in Python through the proxy: programs by hand, strings as bytes, code of another Python."""

from __future__ import annotations

import opcode
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doors import Wire

from pathways._jaxlib.proxy_messages import message
from pathways.proxy import shardings
from pathways.proxy.behind import Done
from pathways.proxy.colocated import MOST_FUNCTION_BYTES, TYPE
from pathways.proxy.errors import Code, Refused
from pathways.proxy.foreign_code import is_own
from pathways.proxy.late_strings import LateStrings
from pathways.proxy.packed_strings import MOST_BYTES, pack, unpack

FLOAT, STRING = 11, 99


def program(devices: Sequence[int] = (0, 1), text: bytes = b"x", kind: str = TYPE) -> Any:
    made = message("xla.ifrt.CustomCallProgramProto")(type=kind, name="f", serialized_program_text=text)
    made.devices.device_ids.extend(devices)
    return made


def add_array(specs: Any, shape: Sequence[int], kind: int, devices: tuple[int, ...], cut: Sequence[int] = ()) -> None:
    """One that is cut so over its devices; replicated, if nothing is said."""
    spec = specs.add()
    spec.dtype.kind = kind
    spec.shape.dims.extend(shape)
    op = message("xla.OpSharding")()
    if cut:
        op.type = 3
        op.tile_assignment_dimensions.extend(cut)
        op.tile_assignment_devices.extend(range(len(devices)))
    shardings.by_hlo(op.SerializeToString(), devices, "").fill(spec.sharding)


def error(wire: Wire, made: Any) -> tuple[int, str]:
    data = made if isinstance(made, bytes) else made.SerializeToString()
    program = {"type_name": "xla::ifrt::CustomCallProgram", "data": data}
    return wire.error("compile_request", program=program)


def test_what_is_no_function(wire: Wire) -> None:
    for made, code, words in (
        (b"\xff\xff", Code.INVALID_ARGUMENT, "no custom call program"),
        (program(kind="other"), Code.UNIMPLEMENTED, "a custom call program of the type 'other'"),
        (program(devices=()), Code.INVALID_ARGUMENT, "for the devices []"),
        (program(devices=(1, 1)), Code.INVALID_ARGUMENT, "for the devices [1, 1]"),
        (program(devices=(0, 99)), Code.NOT_FOUND, "unknown devices [99]"),
        (program(text=bytes(MOST_FUNCTION_BYTES + 1)), Code.RESOURCE_EXHAUSTED, "give it big arrays as arguments"),
        (program(), Code.UNIMPLEMENTED, "these devices call no functions"),  # it is good: the test's devices refuse it
    ):
        found, text = error(wire, made)
        assert found == code and words in text, text


@pytest.mark.parametrize("field", ["input_specs", "output_specs"])
@pytest.mark.parametrize(
    ("array", "code", "words"),
    [
        (((4,), FLOAT, (0, 1), [2]), Code.UNIMPLEMENTED, "call no functions"),  # a good one
        (((4,), FLOAT, (1, 0), [2]), Code.UNIMPLEMENTED, "on the devices [1, 0], but the function runs on [0, 1]"),
        (((4,), FLOAT, (0,)), Code.UNIMPLEMENTED, "on the devices [0], but"),
        (((3,), FLOAT, (0, 1), [2]), Code.UNIMPLEMENTED, "cannot be cut into (2,) equal parts"),
        (((4,), 1234, (0, 1)), Code.INVALID_ARGUMENT, "element type 1234"),
        (((4,), 17, (0, 1)), Code.INVALID_ARGUMENT, "token"),
        (((-4,), FLOAT, (0, 1), [2]), Code.INVALID_ARGUMENT, "(-4,)"),
        (((-4,), STRING, (0, 1), [2]), Code.INVALID_ARGUMENT, "[-4]"),
        (((1 << 40, 1 << 20), FLOAT, (0, 1)), Code.INVALID_ARGUMENT, "is float32[1099511627776, 1048576]"),
    ],
)
def test_arrays_that_a_function_cannot_have(wire: Wire, field: str, array: Any, code: Code, words: str) -> None:
    made = program()
    add_array(getattr(made, field), *array)
    found, text = error(wire, made)
    assert found == code and words in text, text


def test_a_function_takes_no_strings_and_gives_them(wire: Wire) -> None:
    for field, words in (("input_specs", "takes strings"), ("output_specs", "call no functions")):
        made = program()
        add_array(getattr(made, field), (), STRING, (0, 1))
        assert words in error(wire, made)[1]


def test_strings_as_bytes() -> None:
    for strings in ([], [""], ["a", "", "ü" * 1000]):
        packed = pack(np.array(strings, np.dtypes.StringDType()))
        assert (packed.shape, packed.dtype) == ((MOST_BYTES,), np.uint8)
        assert unpack(packed, len(strings)) == tuple(each.encode() for each in strings)
    with pytest.raises(ValueError, match="expected at most"):
        pack(np.array(["x" * MOST_BYTES], np.dtypes.StringDType()))


@pytest.mark.parametrize(
    "data", [b"", b"\1", b"\2\0\0\0\0\0\0\0", b"\1\0\0\0\5\0\0\0abcd", b"\1\0\0\0\xff\xff\xff\xff", b"\0\0\0\0"]
)
def test_bytes_that_are_no_strings(data: bytes) -> None:
    """TRUST-1: they come from a process that runs a client's Python."""
    with pytest.raises(Refused, match="are not 1 strings"):
        unpack(np.frombuffer(data, np.uint8), 1)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("failure", [None, ValueError("on another host")])
def test_strings_are_there_when_all_hosts_have_made_theirs(is_last: bool, failure: Exception | None) -> None:
    waits: list[Done] = []
    fetches: list[Callable[[Any], None]] = []
    told: list[Any] = []
    packed: Any = SimpleNamespace(devices=(0, 1), when_ready=waits.append)
    devices: Any = SimpleNamespace(fetch=lambda shard, then: fetches.append(then))
    LateStrings(devices, packed, (), "").read(0, told.append)
    steps = [lambda: fetches[0](pack(np.array(["here"], np.dtypes.StringDType()))), lambda: waits[0](failure)]
    for step in steps[:: -1 if is_last else 1]:
        assert not told
        step()
    assert told == [failure or (b"here",)]


def codes(code: types.CodeType) -> list[types.CodeType]:
    return [code, *(each for const in code.co_consts if isinstance(const, types.CodeType) for each in codes(const))]


def test_own_code_is_told_from_that_of_another_python() -> None:
    with open(__file__) as file:
        ours = codes(compile(file.read(), __file__, "exec"))
    assert len(ours) > 10 and all(is_own(code.co_code) for code in ours)
    unknown = next(number for number, name in enumerate(opcode.opname) if name.startswith("<"))
    simple = (lambda x: x.y).__code__.co_code
    assert is_own(simple)
    # x.y, by another Python: its first instruction has another number; it has one that is none here; the room behind
    # an instruction is shorter, or longer.
    resume, attribute, end = (opcode.opmap[name] for name in ("RESUME", "LOAD_ATTR", "RETURN_VALUE"))
    assert not is_own(simple.replace(bytes([resume]), bytes([end]), 1))
    assert not is_own(simple.replace(bytes([end, 0]), bytes([unknown, 0]), 1))
    assert not is_own(simple.replace(bytes([resume, 0]), b"", 1))
    at = simple.index(attribute)
    assert not is_own(simple[: at + 2] + simple[at + 4 :])
    assert not is_own(simple[: at + 2] + b"\0\0" + simple[at + 2 :])
    assert not is_own(simple[:-1]) and not is_own(b"")
