"""What runs of compiled programs do to variables (`pw.Variable`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pathways import _core
from pathways.api.array import Array
from pathways.api.session import Session
from pathways.api.tracing import living
from pathways.compiler.trace import Traced


class State:
    """What a compiled program does to variables: each run takes their values of now, and they take its results.

    Runs that use variables of a cluster are submitted one at a time, so that none takes a value which another one that
    is being submitted takes over. A variable takes its new value where the run is submitted (`_call.pxi`), so that
    nothing is lost when the call is interrupted behind that. It does not, if somebody has set the variable since the
    run took its value: then the set comes after the run.
    """

    def __init__(self, call: _core.Call, read: Sequence[tuple[int, Any]], written: tuple[Any, ...], lock: Any) -> None:
        """`read`: positions in `call.closed_over`, and variables."""
        self._call, self._read, self._written, self._lock = call, read, written, lock
        first = len(call.inputs)
        self._donated = {position - first for position in call.donated if position >= first}
        self._stand_ins = {at: call.closed_over[at] for at, _ in read}

    @classmethod
    def of(cls, call: _core.Call, traced: Traced) -> State | None:
        """Of a program; None: it uses no variables.

        Raises:
            ProgramError: a variable is no more.
        """
        read = [(at, living(array)) for at, array in enumerate(traced.closed_over) if array.raw_handle == 0]
        if not read and not traced.updates:
            return None
        session: Session = (traced.updates or [variable for _, variable in read])[0].slice.cluster
        call.first_written = len(traced.returned)
        return cls(call, read, traced.updates, session.state_lock)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """For one run: the call has the variables' arrays of now."""
        with self._lock:
            try:
                self.look()
                yield
            finally:
                self._call.written, self._call.taken = (), []  # a variable's array knows the call that has made it
                for at, stand_in in self._stand_ins.items():
                    self._call.closed_over[at] = stand_in

    def look(self) -> None:
        """Takes the variables' arrays of now."""
        # Each array is read once, because somebody may set the variable meanwhile.
        arrays = {variable: variable._array for variable in (*self._written, *(each for _, each in self._read))}
        self._call.written = self._written
        self._call.taken = [arrays[variable] for variable in self._written]
        for at, variable in self._read:
            layout = self._call.layouts[len(self._call.inputs) + at]
            self._call.closed_over[at] = variable.array_for(arrays[variable], layout, at in self._donated)

    def take(self, out: list[Array]) -> list[Array]:
        """The results that are no new values of variables."""
        return out[: self._call.first_written]

    def arrays(self) -> list[tuple[Any, Array]]:
        """The variables that it sets, with their arrays now."""
        return [(variable, variable._array) for variable in self._written]
