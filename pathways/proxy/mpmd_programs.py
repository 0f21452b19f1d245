"""Programs in IFRT IR, as Shardy's MPMD compiler makes them: several programs on parts of a list of devices, with moves
between them. They become one graph (`behind.Graph`), and so one program of the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from pathways import _jaxlib
from pathways._jaxlib.proxy_messages import message
from pathways.compiler.ir import Tiling
from pathways.proxy import dtypes, shardings
from pathways.proxy.array_making import check_devices
from pathways.proxy.behind import Cut, Graph, GraphExecutable, Part, Step
from pathways.proxy.errors import Code, Refused, not_implemented
from pathways.proxy.loaded import Loaded, LoadedResult, MpmdParts
from pathways.proxy.state import State

_NAME = "mpmd"
_MOST_STEPS = 1 << 16


def parse(state: State, program: bytes, options: bytes) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    """The graph of an IfrtIrProgram and its options, and the devices of each of its meshes.

    Raises:
        Refused: it is malformed, of another jaxlib, or for devices that are not there.
        NotImplementedError: it does more than calls and moves.
    """
    try:
        given = message("xla.ifrt.IfrtIrProgramProto").FromString(program)
        asked = message("pathways.proxy.IfrtIrOptions").FromString(options)
    except DecodeError:
        raise Refused(Code.INVALID_ARGUMENT, "what came is no program in IFRT IR with its options") from None
    if given.ifrt_version or given.atom_programs:
        raise not_implemented(
            f"IFRT IR in the portable form, version {given.ifrt_version[:20]!r}; compile_mpmd sends the other one"
        )
    devices = tuple(asked.device_ids)
    check_devices(state, devices)
    overrides = {each.key: each.value for each in asked.compile_option_overrides}
    read, modules = state.reader.ifrt_ir(given.ifrt_program)
    if len(read.steps) > _MOST_STEPS:
        raise Refused(Code.INVALID_ARGUMENT, f"a program of {len(read.steps)} steps; the most are {_MOST_STEPS}")
    numbers: dict[tuple[str, tuple[int, ...], str], int] = {}
    parts: list[Part] = []
    steps: list[Step] = []
    meshes: dict[str, tuple[int, ...]] = {}
    for step in read.steps:
        if not step.program:
            steps.append(Step(-1, step.inputs, step.outputs))
            continue
        where = _named(devices, step.devices)
        meshes.setdefault(step.mesh or step.program, where)
        key = (step.program, where, step.options)
        if key not in numbers:
            numbers[key] = len(parts)
            compiled = _jaxlib.mpmd_compile_options(len(where), overrides.get(step.options, b""))
            parts.append(Part(modules[step.program], compiled, where))
        steps.append(Step(numbers[key], step.inputs, step.outputs, step.donated))
    graph = Graph(
        _NAME,
        tuple((_cut(each), _named(devices, each.devices)) for each in read.values),
        read.arguments,
        tuple(parts),
        tuple(steps),
        read.results,
        read.donated,
    )
    _check(graph)
    return graph, meshes


def loaded(graph: Graph, meshes: dict[str, tuple[int, ...]], made: GraphExecutable) -> Loaded:
    """What the session keeps of a graph that can be run."""
    results = []
    for number, found in zip(graph.results, made.metadata.results, strict=True):
        cut, devices = graph.values[number]
        told = shardings.even(devices, found.memory_kind, cut.shape, found.shard_shape)
        assert found.sharding is not None
        own = shardings.by_hlo(found.sharding, devices, found.memory_kind)
        results.append(LoadedResult(dtypes.of_name(found.dtype), cut.shape, own, told))
    layouts = [each.layout for each in made.metadata.parameters], [each.layout for each in made.metadata.results]
    every = tuple(sorted({device for _, devices in graph.values for device in devices}))
    takes = graph.values[: graph.arguments]
    parts = {part.module.name: metadata for part, metadata in zip(graph.parts, made.parts, strict=True)}
    mpmd = MpmdParts(meshes, parts)
    return Loaded(made, graph.name, every, tuple(results), graph.donated, layouts, takes, mpmd)


def _named(devices: tuple[int, ...], positions: Sequence[int]) -> tuple[int, ...]:
    if not all(0 <= position < len(devices) for position in positions) or len(set(positions)) != len(positions):
        raise Refused(
            Code.INVALID_ARGUMENT, f"a program for {len(devices)} devices that names {list(positions)[:16]} of them"
        )
    return tuple(devices[position] for position in positions)


def _cut(array: _jaxlib.IfrtArray) -> Cut:
    if array.memory_kind not in ("", "device"):
        raise not_implemented(f"an array in the memory {array.memory_kind!r} in IFRT IR")
    return Cut(array.shape, array.dtype, Tiling(array.grid, array.cells))


def _check(graph: Graph) -> None:
    """A call's arrays lie on its devices; a move changes neither shape nor type."""
    for step in graph.steps:
        arrays = [graph.values[value] for value in (*step.inputs, *step.outputs)]
        if step.part >= 0 and any(devices != graph.parts[step.part].devices for _, devices in arrays):
            name = graph.parts[step.part].module.name
            raise Refused(Code.INVALID_ARGUMENT, f"a call of {name} with arrays that are not on its devices")
        if step.part < 0 and len({(cut.shape, cut.dtype) for cut, _ in arrays}) > 1:
            raise Refused(Code.INVALID_ARGUMENT, "a move that makes an array of another shape or type")
