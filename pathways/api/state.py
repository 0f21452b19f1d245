"""What runs of compiled programs do to variables (`pw.Variable`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pathways import _core
from pathways.api.array import Array
from pathways.api.session import Session
from pathways.api.tracing import variable_of
from pathways.compiler.trace import Traced


class State:
    """What a compiled program does to variables: each run takes their values of now, and they take its results.

    Runs that use variables of a cluster are submitted one at a time, so that none takes a value which another one that
    is being submitted takes over.
    """

    def __init__(self, call: _core.Call, read: Sequence[tuple[int, Any]], written: Sequence[Any], lock: Any) -> None:
        """`read`: positions in `call.closed_over`, and variables. `written`: those whose new values are the last
        results."""
        self._call, self._read, self._written, self._lock = call, read, written, lock
        first = len(call.inputs)
        self._donated = {position - first for position in call.donated if position >= first}
        self._stand_ins = {at: call.closed_over[at] for at, _ in read}

    @classmethod
    def of(cls, call: _core.Call, traced: Traced) -> State | None:
        """Of a program; None: it uses no variables."""
        read = [(at, variable_of(array)) for at, array in enumerate(traced.closed_over)]
        read = [(at, variable) for at, variable in read if variable is not None]
        if not read and not traced.updates:
            return None
        session: Session = (traced.updates or [variable for _, variable in read])[0].slice.cluster
        return cls(call, read, traced.updates, session.state_lock)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """For one run: the call has the variables' arrays of now."""
        closed_over = self._call.closed_over
        with self._lock:
            try:
                for at, variable in self._read:
                    layout = self._call.layouts[len(self._call.inputs) + at]
                    closed_over[at] = variable.array_for(layout, at in self._donated)
                yield
            finally:
                for at, stand_in in self._stand_ins.items():
                    closed_over[at] = stand_in

    def take(self, out: list[Array]) -> list[Array]:
        """The variables take their new values. Returns the other results."""
        count = len(out) - len(self._written)
        for variable, array in zip(self._written, out[count:], strict=True):
            variable.replace(array)
        return out[:count]
