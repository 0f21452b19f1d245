"""Executables of the door on a cluster: a module as XLA gave it to its client, and the programs by which it runs.

Hosts compile a module once. How its arguments consist of shards may differ from call to call, and each way is a small
program of its own; so is each choice of what a call takes over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pathways import _core, _jaxlib
from pathways.compiler.ir import Tiling
from pathways.proxy.behind import Buffer, ExecutableMetadata, Parameter, Result, Shard
from pathways.proxy.cluster_buffers import ClusterBuffer, Form, form_of, form_of_kind, whole
from pathways.proxy.cluster_kinds import DeviceList, Kind, Places, tiled
from pathways.proxy.shard_programs import Builder, KeptPrograms, ShardProgram
from pathways.proxy.waiter import Waiter

#: So many programs of one executable are kept, those that ran last.
MOST_PROGRAMS = 64


@dataclasses.dataclass(frozen=True)
class Module:
    """What a client has given to be compiled."""

    name: str
    module: bytes
    options: bytes
    devices: DeviceList
    parameters: tuple[tuple[tuple[int, ...], np.dtype], ...]
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]


class ClusterExecutable:
    """See `pathways.proxy.behind.Executable`. Its methods are called by one thread at a time."""

    def __init__(self, places: Places, waiter: Waiter, module: Module) -> None:
        """Waits until the hosts have compiled it.

        Raises:
            PathwaysError: they cannot, or its devices are not there.
        """
        self._places, self._waiter, self._module = places, waiter, module
        self._programs = KeptPrograms(MOST_PROGRAMS)
        #: Of the last run: its arguments' forms, if all are whole and it may take what it donates; and the program.
        self._usual: tuple[tuple[Form, ...], ShardProgram] | None = None
        builder = Builder(places, module.name)
        where = places.islands.stand_in(module.devices)  # XLA says the same of it there
        # Nothing runs by this program, so it does not matter how its arguments are cut.
        inputs = [builder.argument(self._replicated(shape, dtype, where)) for shape, dtype in module.parameters]
        builder.call(where, inputs, [], module=module.module, options=module.options)
        self._compiled = builder.build([])  # keeps it compiled
        found = self._compiled.analyze()
        count = len(module.devices)

        def kind_of(number: int) -> Kind:
            shape, dtype = module.results[number]
            shardings = found.form.output_shardings
            if not shardings:
                return self._replicated(shape, dtype, module.devices)
            grid, cells, is_alike = _jaxlib.tiles_of(shardings[number], len(shape), count)
            return tiled(shape, dtype, module.devices, Tiling(grid, cells), is_alike)

        self._results = [kind_of(number) for number in range(len(module.results))]
        self._forms = [form_of_kind(kind) for kind in self._results]
        self._donated = frozenset(found.form.donated)
        self.metadata = self._metadata(found)

    def _replicated(self, shape: tuple[int, ...], dtype: np.dtype, devices: DeviceList) -> Kind:
        return Kind(shape, dtype, devices, Tiling((1,) * len(shape), (0,) * len(devices)))

    def _metadata(self, found: Any) -> ExecutableMetadata:
        form, memory = found.form, found.memory
        parameters = [
            Parameter(form.parameter_shardings[n] if form.parameter_shardings else None, form.parameter_layouts[n])
            for n in range(len(self._module.parameters))
        ]
        results = [
            Result(
                shape,
                dtype.name,
                kind.shard_shape,
                form.output_shardings[n] if form.output_shardings else None,
                form.output_layouts[n],
                form.output_memory_kinds[n] if form.output_memory_kinds else "",
            )
            for n, ((shape, dtype), kind) in enumerate(zip(self._module.results, self._results, strict=True))
        ]
        return ExecutableMetadata(
            name=self._module.name,
            fingerprint=form.fingerprint,
            parameters=tuple(parameters),
            results=tuple(results),
            donated=tuple(form.donated),
            memory={
                "argument_size_in_bytes": memory.argument_bytes,
                "output_size_in_bytes": memory.output_bytes,
                "temp_size_in_bytes": memory.temporary_bytes,
                "alias_size_in_bytes": memory.alias_bytes,
                "generated_code_size_in_bytes": memory.code_bytes,
            },
            code_bytes=memory.code_bytes,
            cost=dict(found.cost),
            text=form.text,
        )

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> Sequence[Buffer]:
        """See `Executable`."""
        forms: list[Form] = []
        arrays: list[Any] = []
        given: list[int] = []  # of the arrays, those that the run takes over
        taken: list[Any] = []  # what is gone after this call
        for number, shards in enumerate(arguments):
            form, parts = form_of(shards)
            if number in self._donated and number not in kept:
                taken += [array for array, is_all in zip(parts, form.takes_all(), strict=True) if is_all]
                if form.is_whole:
                    given.append(len(arrays))
            forms.append(form)
            arrays += parts
        made = self._run(tuple(forms), tuple(given), arrays)
        if made is _core.Refusal.SHARED:  # another view, or a reader, has some of it: the run gets a copy
            given.clear()
            made = self._run(tuple(forms), (), arrays)
        if isinstance(made, _core.Refusal):
            raise RuntimeError(f"the cluster does not take this call: {made.value}")
        for array in taken:
            array.delete()
        if len(given) == len(self._donated) and all(form.is_whole for form in forms):
            self._usual = tuple(forms), self._programs.last
        return [whole(array, form, self._waiter) for array, form in zip(made, self._forms, strict=True)]

    def run_again(self, arguments: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """See `Executable`."""
        if self._usual is None:
            return None
        forms, program = self._usual
        if len(arguments) != len(forms):
            return None
        arrays = []
        for buffer, form in zip(arguments, forms, strict=True):
            if not isinstance(buffer, ClusterBuffer) or (buffer.form is not form and buffer.form != form):
                return None
            arrays.append(buffer.first)
        made = program(arrays)
        if isinstance(made, _core.Refusal):
            self._usual = None
            return None
        for number in self._donated:
            arrays[number].delete()
        return [whole(array, form, self._waiter) for array, form in zip(made, self._forms, strict=True)]

    def _run(self, forms: tuple[Form, ...], given: tuple[int, ...], arrays: list[Any]) -> Any:
        return self._programs.run((forms, given), lambda: self._build(forms, given), arrays)

    def _build(self, forms: tuple[Form, ...], given: tuple[int, ...]) -> ShardProgram:
        module, builder = self._module, Builder(self._places, self._module.name)
        inputs = [form.add_to(builder) for form in forms]
        donates, first = [], 0
        for form in forms:
            donates.append(form.is_whole and first in given)
            first += len(form.kinds)
        outputs = builder.call(
            module.devices, inputs, self._results, module=module.module, options=module.options, donates=donates
        )
        return builder.build(outputs, given)
