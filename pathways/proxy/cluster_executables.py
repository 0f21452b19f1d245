"""Executables of the door on a cluster: a module as XLA gave it to its client. Hosts compile it once."""

from __future__ import annotations

from typing import Any

import numpy as np

from pathways import _jaxlib
from pathways.compiler.ir import Tiling
from pathways.proxy.behind import ExecutableMetadata, Parameter, Part, Result
from pathways.proxy.cluster_buffers import Form
from pathways.proxy.cluster_kinds import DeviceList, Kind, Places, tiled
from pathways.proxy.cluster_runs import Runs
from pathways.proxy.shard_programs import Builder, ShardProgram
from pathways.proxy.waiter import Waiter


class ClusterExecutable(Runs):
    """See `pathways.proxy.behind.Executable`."""

    def __init__(self, places: Places, waiter: Waiter, part: Part) -> None:
        """Waits until the hosts have compiled it.

        Raises:
            PathwaysError: they cannot, or its devices are not there.
        """
        self._places = places
        #: What was compiled.
        self.part = part
        module = part.module
        builder = Builder(places, module.name)
        where = places.islands.stand_in(part.devices)  # XLA says the same of it there
        # Nothing runs by this program, so it does not matter how its arguments are cut.
        inputs = [builder.argument(self._replicated(shape, dtype, where)) for shape, dtype in module.parameters]
        builder.call(where, inputs, [], module=module.data, options=part.options)
        self._compiled = builder.build([])  # keeps it compiled
        found = self._compiled.analyze()
        count = len(part.devices)

        def kind_of(number: int) -> Kind:
            shape, dtype = module.results[number]
            shardings = found.form.output_shardings
            if not shardings:
                return self._replicated(shape, dtype, part.devices)
            grid, cells, is_alike = _jaxlib.tiles_of(shardings[number], len(shape), count)
            return tiled(shape, dtype, part.devices, Tiling(grid, cells), is_alike)

        #: How XLA has cut each result.
        self.results = [kind_of(number) for number in range(len(module.results))]
        super().__init__(waiter, self.results, found.form.donated)
        self.metadata = self._metadata(found)

    def _replicated(self, shape: tuple[int, ...], dtype: np.dtype, devices: DeviceList) -> Kind:
        return Kind(shape, dtype, devices, Tiling((1,) * len(shape), (0,) * len(devices)))

    def _metadata(self, found: Any) -> ExecutableMetadata:
        form, memory = found.form, found.memory
        parameters = [
            Parameter(form.parameter_shardings[n] if form.parameter_shardings else None, form.parameter_layouts[n])
            for n in range(len(self.part.module.parameters))
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
            for n, ((shape, dtype), kind) in enumerate(zip(self.part.module.results, self.results, strict=True))
        ]
        return ExecutableMetadata(
            name=self.part.module.name,
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

    def _build(self, forms: tuple[Form, ...], given: tuple[int, ...]) -> ShardProgram:
        part, module = self.part, self.part.module
        builder = Builder(self._places, module.name)
        inputs = [form.add_to(builder) for form in forms]
        donates, first = [], 0
        for form in forms:
            donates.append(form.is_whole and first in given)
            first += len(form.kinds)
        outputs = builder.call(
            part.devices, inputs, self.results, module=module.data, options=part.options, donates=donates
        )
        return builder.build(outputs, given)
