"""Python functions of the door on a cluster: host functions, which each host calls with its shards."""

from __future__ import annotations

import itertools
from typing import Any

from pathways.compiler.ir import HostFunction
from pathways.process.host_functions import write
from pathways.proxy.behind import Cut, ExecutableMetadata, Function, Parameter, Result
from pathways.proxy.cluster_buffers import Form, form_of_kind
from pathways.proxy.cluster_kinds import Kind, Places
from pathways.proxy.cluster_runs import Runs
from pathways.proxy.layouts import default_text
from pathways.proxy.shard_programs import Builder, ShardProgram
from pathways.proxy.waiter import Waiter

_numbers = itertools.count(1)


class ClusterFunction(Runs):
    """See `pathways.proxy.behind.Executable`."""

    def __init__(self, places: Places, waiter: Waiter, function: Function, deadline_s: float) -> None:
        """Waits until the hosts have it. A call may take `deadline_s`.

        Raises:
            PathwaysError: they refuse it, or its devices are not there.
        """
        self._places = places
        self._name, self._devices = function.name, function.devices
        arguments: Any = tuple(range(1 + len(function.parameters))), {}
        data = write(function.call, arguments, list(range(len(function.results))), x64=True)
        what = f"jax.experimental.colocated_python ({function.name})"
        self._function = HostFunction(next(_numbers), what, data, deadline_s, ())
        self._results = [self._kind(cut) for cut in function.results]
        super().__init__(waiter, self._results, ())
        # Hosts keep what the function keeps as long as they have a program with it.
        self._kept = self._build(tuple(form_of_kind(self._kind(cut)) for cut in function.parameters), ())
        self.metadata = ExecutableMetadata(
            name=function.name,
            fingerprint=b"",
            parameters=tuple(Parameter(None, default_text(len(cut.shape))) for cut in function.parameters),
            results=tuple(
                Result(cut.shape, cut.dtype.name, kind.shard_shape, None, default_text(len(cut.shape)), "")
                for cut, kind in zip(function.results, self._results, strict=True)
            ),
            donated=(),
            memory={},
            code_bytes=0,
            cost={},
            text=what,
        )

    def _kind(self, cut: Cut) -> Kind:
        return Kind(cut.shape, cut.dtype, self._devices, cut.tiling)

    def _build(self, forms: tuple[Form, ...], given: tuple[int, ...]) -> ShardProgram:
        builder = Builder(self._places, self._name)
        inputs = [form.add_to(builder) for form in forms]
        return builder.build(builder.call(self._devices, inputs, self._results, function=self._function), given)
