"""Runs of an executable of the door on a cluster.

How its arguments consist of shards may differ from call to call, and each way is a program of its own; so is each
choice of what a call takes over.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from typing import Any

from pathways import _core
from pathways.proxy.behind import Buffer, Shard
from pathways.proxy.cluster_buffers import ClusterBuffer, Form, form_of, form_of_kind, whole
from pathways.proxy.cluster_kinds import Kind
from pathways.proxy.shard_programs import KeptPrograms, ShardProgram
from pathways.proxy.waiter import Waiter

#: So many programs of one executable are kept, those that ran last.
MOST_PROGRAMS = 64


class Runs(abc.ABC):
    """What executables have in common. Its methods are called by one thread at a time."""

    def __init__(self, waiter: Waiter, results: Sequence[Kind], donated: Collection[int]) -> None:
        self._waiter, self._donated = waiter, frozenset(donated)
        self._forms = [form_of_kind(kind) for kind in results]
        self._programs = KeptPrograms(MOST_PROGRAMS)
        #: Of the last run: its arguments' forms, if all are whole and it may take what it donates; and the program.
        self._usual: tuple[tuple[Form, ...], ShardProgram] | None = None

    @abc.abstractmethod
    def _build(self, forms: tuple[Form, ...], given: tuple[int, ...]) -> ShardProgram:
        """The program for arguments of these forms. `given`: of the arrays that they consist of, those that it takes
        over.
        """

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
