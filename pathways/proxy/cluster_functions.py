"""Python functions of the door on a cluster: host functions, which each host calls with its shards."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from pathways import _core
from pathways.compiler.ir import HostFunction
from pathways.process.host_functions import write
from pathways.proxy.behind import Buffer, Cut, ExecutableMetadata, Function, Parameter, Result, Shard
from pathways.proxy.cluster_buffers import Form, form_of, form_of_kind, whole
from pathways.proxy.cluster_kinds import Kind, Places
from pathways.proxy.layouts import default_text
from pathways.proxy.shard_programs import Builder, KeptPrograms, ShardProgram
from pathways.proxy.waiter import Waiter

#: So many programs of one function are kept, those that ran last.
MOST_PROGRAMS = 64

_numbers = itertools.count(1)


class ClusterFunction:
    """See `pathways.proxy.behind.Executable`. Its methods are called by one thread at a time."""

    def __init__(self, places: Places, waiter: Waiter, function: Function, deadline_s: float) -> None:
        """Waits until the hosts have it. A call may take `deadline_s`.

        Raises:
            PathwaysError: they refuse it, or its devices are not there.
        """
        self._places, self._waiter = places, waiter
        self._name, self._devices = function.name, function.devices
        arguments: Any = tuple(range(1 + len(function.parameters))), {}
        data = write(function.call, arguments, list(range(len(function.results))), x64=True)
        what = f"jax.experimental.colocated_python ({function.name})"
        self._function = HostFunction(next(_numbers), what, data, deadline_s, ())
        self._results = [self._kind(cut) for cut in function.results]
        self._forms = [form_of_kind(kind) for kind in self._results]
        self._programs = KeptPrograms(MOST_PROGRAMS)
        # Hosts keep what the function keeps as long as they have a program with it.
        self._kept = self._build(tuple(form_of_kind(self._kind(cut)) for cut in function.parameters))
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

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> Sequence[Buffer]:
        """See `Executable`."""
        given = [form_of(shards) for shards in arguments]
        forms = tuple(form for form, _ in given)
        made = self._programs.run(forms, lambda: self._build(forms), [array for _, parts in given for array in parts])
        if isinstance(made, _core.Refusal):
            raise RuntimeError(f"the cluster does not take this call: {made.value}")
        return [whole(array, form, self._waiter) for array, form in zip(made, self._forms, strict=True)]

    def run_again(self, arguments: Sequence[Buffer]) -> None:
        """See `Executable`. A call of a function takes so long that nothing is saved."""

    def _build(self, forms: tuple[Form, ...]) -> ShardProgram:
        builder = Builder(self._places, self._name)
        inputs = [form.add_to(builder) for form in forms]
        return builder.build(builder.call(self._devices, inputs, self._results, function=self._function))
