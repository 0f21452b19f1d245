"""Programs in IFRT IR: several programs over parts of a list of devices, and moves between them.

jaxlib's MPMD compiler writes them (`lower_to_ifrt`), and its `compile_mpmd` sends them to a server as bytecode, which
only an equal jaxlib reads. `pathways/proxy` calls `read_ifrt_program`; any thread may.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jaxlib._jax as xla
import numpy as np
from jaxlib.mlir import ir

from pathways._jaxlib.mlir_modules import (
    main_function,
    mlir_context,
    parse,
    portable_bytecode,
    shape_and_dtype,
    standalone,
)
from pathways._jaxlib.partitioner import lower_to_ifrt

_ARRAY = re.compile(
    r"!ifrt\.array<(tensor<.*>), #ifrt\.sharding_param<([0-9x]*) to \[([0-9, ]*)\] on ([0-9x]+)>, \[([0-9, ]+)\]"
    r'(?:, memory_kind = "(\w*)")?>'
)
_DEVICES = re.compile(r"#ifrt<devices\[([0-9, ]+)\]>")
_CONTROL = "!ifrt.control"
#: The function that is the program; and the argument that it takes over.
_FUNCTION, _DONATED = "ifrt.function", "ifrt.donated"
_MOVES = ("ifrt.Reshard", "ifrt.CopyArrays")
#: The shortest program that becomes IFRT IR.
_EMPTY = 'func.func public @main() attributes {topology = #mpmd.topology<<"m" : <["x"=1]>>>} { return }'


@dataclasses.dataclass(frozen=True)
class IfrtArray:
    """An array of a program: device `devices[i]` of the program holds the part `cells[i]` of `grid`, in C order."""

    shape: tuple[int, ...]
    dtype: np.dtype
    grid: tuple[int, ...]
    cells: tuple[int, ...]
    devices: tuple[int, ...]
    memory_kind: str


@dataclasses.dataclass(frozen=True)
class IfrtStep:
    """A call of a program on devices; or, without the name of one, a move of its only input. `inputs` and `outputs` are
    numbers of values. A call takes over the inputs in the places `donated`. `options` names its compile options.
    """

    program: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    devices: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()
    mesh: str = ""
    options: str = ""


@dataclasses.dataclass(frozen=True)
class IfrtProgram:
    """Its values, of which the first `arguments` are given; its steps, in order; and the portable modules by name."""

    values: tuple[IfrtArray, ...]
    arguments: int
    donated: frozenset[int]
    steps: tuple[IfrtStep, ...]
    results: tuple[int, ...]
    modules: Mapping[str, bytes]


def read_ifrt_program(bytecode: bytes) -> IfrtProgram:
    """Reads a program.

    Raises:
        ValueError: it is malformed, or of another jaxlib.
        NotImplementedError: it has an operation that is neither a call nor a move, or an array without a sharding.
    """
    with mlir_context():
        # The pass brings the dialect `ifrt` into the context. Nothing else in jaxlib does.
        lower_to_ifrt(ir.Module.parse(_EMPTY))
        try:
            module = parse(bytecode)
        except Exception as error:
            raise ValueError(
                f"IFRT IR that this jaxlib cannot read; programs need the proxy's jaxlib: {error}"
            ) from None
        inner = {_text(op.attributes["sym_name"]): op for op in module.body.operations if _is_module(op)}
        (main,) = [op for op in module.body.operations if _FUNCTION in op.attributes] or [None]
        if main is None or not len(main.regions[0].blocks):
            raise ValueError(f"a program without a function that is marked as {_FUNCTION}")
        found = _Reader(main)
        called = {step.program for step in found.steps if step.program}
        if unknown := sorted(called - inner.keys()):
            raise ValueError(f"a program that calls {unknown[0]!r}, which it has not")
        modules = {name: _module(inner[name]) for name in sorted(called)}
    return IfrtProgram(
        tuple(found.values), found.arguments, found.donated, tuple(found.steps), tuple(found.results), modules
    )


def mpmd_compile_options(devices: int, given: bytes = b"") -> bytes:
    """Options for one program of several, on so many devices: those that are given, or as XLA has them for such
    programs.

    Raises:
        ValueError: those that are given are malformed, or for another number of devices.
    """
    if not given:
        options = xla.CompileOptions()
        options.num_partitions = devices
        build = options.executable_build_options
        build.num_partitions, build.use_spmd_partitioning, build.use_shardy_partitioner = devices, True, True
        return bytes(options.SerializeAsString())
    options = xla.CompileOptions.ParseFromString(given)
    if (count := options.num_replicas * options.num_partitions) != devices:
        raise ValueError(f"compile options for {count} devices, and the program runs on {devices}")
    return given


class _Reader:
    """Reads the operations of a program's function."""

    def __init__(self, function: Any) -> None:
        self.values: list[IfrtArray] = []
        self.steps: list[IfrtStep] = []
        self.results: list[int] = []
        self._known: dict[Any, int] = {}
        (block,) = function.regions[0].blocks
        for argument in block.arguments:
            self._add(argument)
        self.arguments = len(self.values)
        attributes = ir.ArrayAttr(function.attributes["arg_attrs"]) if "arg_attrs" in function.attributes else ()
        self.donated = frozenset(n for n, each in enumerate(attributes) if _DONATED in ir.DictAttr(each))
        for op in block.operations:
            self._read(op.operation)

    def _read(self, op: Any) -> None:
        inputs = [self._known[each] for each in op.operands if str(each.type) != _CONTROL]
        if op.name == "func.return":
            self.results = inputs
            return
        if op.name != "ifrt.Call" and op.name not in _MOVES:
            raise NotImplementedError(f"the operation {op.name} of IFRT IR; this proxy runs calls and moves of arrays")
        outputs = [self._add(each) for each in op.results if str(each.type) != _CONTROL]
        if op.name == "ifrt.Call":
            self.steps.append(_call(op, tuple(inputs), tuple(outputs)))
        else:
            self.steps += [IfrtStep("", (i,), (o,)) for i, o in zip(inputs, outputs, strict=True)]

    def _add(self, value: Any) -> int:
        self.values.append(_array(str(value.type)))
        self._known[value] = len(self.values) - 1
        return len(self.values) - 1


def _call(op: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> IfrtStep:
    name, *function = ir.SymbolRefAttr(op.attributes["callee"]).value
    if function != ["main"]:
        raise NotImplementedError(f"a call of {'::'.join([name, *function])}; programs have a function main")
    devices = _DEVICES.fullmatch(str(op.attributes["devices"]))
    if devices is None:
        raise ValueError(f"a call on the devices {op.attributes['devices']}")
    donated = set(ir.DenseI32ArrayAttr(op.attributes["donated_input_indices"]))
    donated |= {ir.DenseI32ArrayAttr(pair)[0] for pair in ir.ArrayAttr(op.attributes["io_aliases"])}
    return IfrtStep(
        name,
        inputs,
        outputs,
        _numbers(devices[1]),
        frozenset(donated),
        _text(op.attributes["ifrt.mesh_name"]) if "ifrt.mesh_name" in op.attributes else "",
        _text(op.attributes["ifrt.compile_options_key"]) if "ifrt.compile_options_key" in op.attributes else "",
    )


def _array(text: str) -> IfrtArray:
    """An array by its type."""
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise NotImplementedError(f"an array of the type {text}; this proxy needs one that says how it is cut")
    shape, dtype = shape_and_dtype(ir.Type.parse(match[1]))
    grid, order, sizes = _numbers(match[2], "x"), _numbers(match[3]), _numbers(match[4], "x")
    devices = _numbers(match[5])
    count, parts = len(devices), math.prod(grid)
    is_whole = sorted(order) == list(range(len(sizes))) and math.prod(sizes) == count and parts and count % parts == 0
    if not is_whole or len(grid) != len(shape):
        raise ValueError(f"an array whose sharding does not fit it: {text}")
    cells = [0] * count
    for place, number in enumerate(_minor_to_major(order, sizes)):
        cells[number] = place // (count // parts)
    return IfrtArray(shape, dtype, grid, tuple(cells), devices, match[6] or "")


def _minor_to_major(order: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The devices of an array in the order of its tiles. They are counted along axes of these sizes, the first one
    fastest; tiles go along the axes in the given order, its first one fastest.
    """
    steps = list(itertools.accumulate(sizes, lambda a, b: a * b, initial=1))
    coordinates = itertools.product(*(range(sizes[axis]) for axis in reversed(order)))
    return [sum(at * steps[axis] for at, axis in zip(each, reversed(order), strict=True)) for each in coordinates]


def _module(op: Any) -> bytes:
    module = parse(standalone(op))
    main_function(module)  # or it is refused
    return portable_bytecode(module)


def _is_module(op: Any) -> bool:
    return bool(op.operation.name == "builtin.module" and "sym_name" in op.attributes)


def _text(attribute: Any) -> str:
    return str(ir.StringAttr(attribute).value)


def _numbers(text: str, separator: str = ",") -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(separator)) if text.strip() else ()
