"""Graphs of the door on a cluster: several modules and the moves between them are one program of the cluster. So a run
of it is one record, and each host learns all it has to do for the run at once.

What a part does with an array is decided by how XLA has compiled it. Where that is not how the graph says that the
array is cut, it is moved in between (`_Maker`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools

from pathways import _jaxlib, errors
from pathways.compiler.ir import Tiling
from pathways.proxy.behind import Cut, ExecutableMetadata, Graph, Parameter, Result, Step
from pathways.proxy.cluster_buffers import ClusterBuffer, Form
from pathways.proxy.cluster_executables import ClusterExecutable
from pathways.proxy.cluster_kinds import DeviceList, Kind, Places, tiled
from pathways.proxy.cluster_runs import Runs
from pathways.proxy.layouts import default_text
from pathways.proxy.shard_programs import Builder, ShardProgram
from pathways.proxy.waiter import Waiter

#: Parts that are compiled at a time.
_AT_A_TIME = 4


class ClusterGraph(Runs):
    """See `pathways.proxy.behind.GraphExecutable`."""

    def __init__(self, places: Places, waiter: Waiter, graph: Graph) -> None:
        """Waits until the hosts have compiled all of it.

        Raises:
            PathwaysError: they cannot, its devices are not there, or a part makes other arrays than the graph says.
        """
        self._places, self._graph = places, graph
        with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME, "pathways-parts") as threads:
            self._parts = list(threads.map(functools.partial(ClusterExecutable, places, waiter), graph.parts))
        self._kinds = [_kind(cut, devices) for cut, devices in graph.values]
        for step in graph.steps:
            self._check(step)
        super().__init__(waiter, [self._kinds[value] for value in graph.results], graph.donated)
        #: For each part, what is known of it.
        self.parts = tuple(part.metadata for part in self._parts)
        self.metadata = self._metadata()

    def _check(self, step: Step) -> None:
        if step.part < 0:
            return
        made = self._parts[step.part]
        module = made.part.module
        takes = list(module.parameters)
        given = [(cut.shape, cut.dtype) for cut, _ in (self._graph.values[value] for value in step.inputs)]
        said = [(cut.shape, cut.dtype) for cut, _ in (self._graph.values[value] for value in step.outputs)]
        if takes != given or list(module.results) != said:
            raise errors.CompileError(
                f"the program {module.name} takes {takes} and gives {list(module.results)}, but a call of it has "
                f"{given} and expects {said}"
            )
        for kind, value in zip(made.results, step.outputs, strict=True):
            own = self._kinds[value]
            if kind != own and (kind.shape, kind.is_alike) != (own.shape, True):
                raise errors.CompileError(
                    f"XLA cuts a result of the program {module.name} into parts {kind.shard_shape} that are not those "
                    f"of an array of {own.shape}; say in the program how it is cut"
                )

    def _metadata(self) -> ExecutableMetadata:
        graph, parts = self._graph, self.parts
        cuts = [cut for cut, _ in graph.values]
        results = [
            Result(
                cuts[value].shape,
                cuts[value].dtype.name,
                self._kinds[value].shard_shape,
                _jaxlib.op_sharding(cuts[value].tiling.grid, cuts[value].tiling.cells),
                default_text(len(cuts[value].shape)),
                ClusterBuffer.memory_kind,
            )
            for value in graph.results
        ]
        memory: collections.Counter[str] = collections.Counter()
        for part in parts:
            memory.update(part.memory)
        return ExecutableMetadata(
            name=graph.name,
            fingerprint=b"".join(part.fingerprint for part in parts),
            parameters=tuple(
                Parameter(_jaxlib.op_sharding(cut.tiling.grid, cut.tiling.cells), default_text(len(cut.shape)))
                for cut in cuts[: graph.arguments]
            ),
            results=tuple(results),
            donated=tuple(sorted(graph.donated)),
            memory=memory,
            code_bytes=sum(part.code_bytes for part in parts),
            cost={},
            text="\n\n".join(part.text for part in parts),
        )

    def _build(self, forms: tuple[Form, ...], given: tuple[int, ...]) -> ShardProgram:
        maker = _Maker(Builder(self._places, self._graph.name), self._graph, self._kinds, self._parts)
        first = 0
        for number, form in enumerate(forms):
            maker.argument(number, form, form.is_whole and first in given)
            first += len(form.kinds)
        for step in self._graph.steps:
            maker.step(step)
        return maker.build(given)


class _Maker:
    """Makes the program of a graph for arguments of certain forms."""

    def __init__(self, builder: Builder, graph: Graph, kinds: list[Kind], parts: list[ClusterExecutable]) -> None:
        self._builder, self._graph, self._kinds, self._parts = builder, graph, kinds, parts
        self._values: dict[int, int] = {}  # the builder's, by those of the graph
        self._shows_arguments = False
        #: Values whose memory is theirs alone, so that a call may take it over.
        self._own: set[int] = set()
        self._reads = collections.Counter(value for step in graph.steps for value in step.inputs)
        self._reads.update(graph.results)
        moved = {value for step in graph.steps if step.part < 0 for value in step.inputs}
        #: Values that must be cut as the graph says; a call takes the shards as they lie.
        self._exact = moved | set(graph.results)

    def argument(self, number: int, form: Form, is_given: bool) -> None:
        """The next argument."""
        shown = self._kinds[number] if number in self._exact else None
        self._values[number] = form.add_to(self._builder, shown)
        if is_given and shown in (None, form.kinds[0]):
            self._own.add(number)

    def step(self, step: Step) -> None:
        """The next step."""
        if step.part < 0:
            (source,), (target,) = step.inputs, step.outputs
            kind = self._kinds[target]
            self._values[target] = self._builder.move(self._values[source], kind)
            # On a device that both are on, the shard may be the same memory.
            if set(kind.devices).isdisjoint(self._kinds[source].devices):
                self._own.add(target)
            else:
                self._shows_arguments = True
                self._own.discard(source)
            self._reads[source] -= 1
            return
        part, made = self._graph.parts[step.part], self._parts[step.part].results
        inputs = [self._input(step.part, place, value) for place, value in enumerate(step.inputs)]
        donates = [
            place in step.donated and value in self._own and self._reads[value] == 1
            for place, value in enumerate(step.inputs)
        ]
        outputs = self._builder.call(
            part.devices,
            inputs,
            made,
            module=part.module.data,
            options=part.options,
            donates=donates,
            name=part.module.name,
        )
        for value, output, kind in zip(step.outputs, outputs, made, strict=True):
            wanted = self._kinds[value]
            self._values[value] = output if kind == wanted else self._builder.move(output, wanted)
            self._own.add(value)
        self._reads.subtract(step.inputs)

    def _input(self, part: int, place: int, value: int) -> int:
        """The value as a part takes it."""
        sharding = self._parts[part].metadata.parameters[place].sharding
        kind = self._kinds[value]
        if sharding is None:
            return self._values[value]
        grid, cells, is_alike = _jaxlib.tiles_of(sharding, len(kind.shape), len(kind.devices))
        if not is_alike or Tiling(grid, cells) == self._graph.values[value][0].tiling:
            return self._values[value]
        return self._builder.move(self._values[value], tiled(kind.shape, kind.dtype, kind.devices, Tiling(grid, cells)))

    def build(self, given: tuple[int, ...]) -> ShardProgram:
        """The program."""
        arguments = set(range(self._graph.arguments))
        results = [
            # What was given is no new array. It is copied, as it may be of other shards than an array of its own.
            self._builder.move(self._values[value], self._kinds[value]) if value in arguments else self._values[value]
            for value in self._graph.results
        ]
        shows = self._shows_arguments or not arguments.isdisjoint(self._graph.results)
        return self._builder.build(results, given, is_view=shows and bool(self._graph.arguments))


def _kind(cut: Cut, devices: DeviceList) -> Kind:
    return tiled(cut.shape, cut.dtype, devices, cut.tiling)
