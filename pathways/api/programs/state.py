"""What runs of compiled programs do to variables (`pw.Variable`) and references (`jax.new_ref`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pathways import _core, _jaxlib
from pathways.api.arrays import references
from pathways.api.arrays.array import Array
from pathways.api.programs.tracing import living
from pathways.api.session import Session
from pathways.compiler.trace import Argument, Given, Traced, as_argument


class State:
    """What a compiled program does to variables and references: each run takes their values of now, and they take its
    results.

    A reference is closed over, or an argument of the call. To a run, both are what has an array: a variable, or the
    holder of a reference (`references.Holder`).

    Runs that use state of a cluster are submitted one at a time, so that none takes a value which another one that
    is being submitted takes over. State takes its new value where the run is submitted (`_call.pxi`), so that
    nothing is lost when the call is interrupted behind that. It does not, if somebody has set it since the
    run took its value: then the set comes after the run.
    """

    def __init__(
        self,
        call: _core.Call,
        name: str,
        read: Sequence[tuple[int, Any]],
        given: Sequence[tuple[int, Argument]],
        updates: tuple[Any, ...],
        session: Session,
        copy: Callable[[Array], Array],
        move: Callable[[Array, Any, Any], Array],
    ) -> None:
        """`name`: of the program. `read`: positions in `call.closed_over`, and variables or references. `given`:
        positions in `call.inputs`, and the references that stand there. `copy`, `move`: those of `compiled`."""
        self._call, self._name, self._read, self._given, self._updates = call, name, read, given, updates
        self._lock, self._copy, self._move = session.state_lock, copy, move
        self._stand_ins = {at: call.closed_over[at] for at, _ in read}
        self._now: list[Any] = []  # of the run that has its turn: what `_given` and then `_read` are

    @classmethod
    def of(
        cls,
        call: _core.Call,
        traced: Traced,
        session: Session,
        copy: Callable[[Array], Array],
        move: Callable[[Array, Any, Any], Array],
    ) -> State | None:
        """Of a program; None: it uses none.

        Raises:
            ProgramError: a variable is no more.
        """
        given = [(at, each) for at, each in enumerate(traced.arguments[: traced.given]) if each.is_reference]
        read = [
            (at, value if _jaxlib.is_reference(value) else living(value))
            for at, value in enumerate(traced.closed_over)
            if _jaxlib.is_reference(value) or (type(value) is Array and value.raw_handle == 0)
        ]
        if not read and not given and not traced.updates:
            return None
        call.first_written = len(traced.returned)
        return cls(call, traced.name, read, given, traced.updates, session, copy, move)

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether the references among the leaves are such as the program was compiled for."""
        return len(leaves) == len(self._call.inputs) and all(
            _jaxlib.is_reference(leaves[at]) and as_argument(leaves[at], "") == argument for at, argument in self._given
        )

    @contextlib.contextmanager
    def turn(self, leaves: list[Any]) -> Iterator[list[Any]]:
        """For one run: the call has the arrays of now. Gives the leaves, with arrays instead of references.

        Raises:
            EffectError: a reference is there twice.
        """
        used = [*(leaves[at] for at, _ in self._given), *(what for _, what in self._read)]
        references.refuse_twice([each for each in used if _jaxlib.is_reference(each)], self._name)
        with self._lock:
            try:
                self._now = [_holder(each) for each in used]
                yield self.look(leaves)
            finally:
                self._now = []
                self._call.written, self._call.taken = (), []  # an array knows the call that has made it
                for at, stand_in in self._stand_ins.items():
                    self._call.closed_over[at] = stand_in

    def look(self, leaves: list[Any]) -> list[Any]:
        """Takes the arrays of now. Gives the leaves with those of the references among them."""
        call, leaves = self._call, [*leaves]
        written = tuple(self._written(leaves))
        # Each array is read once, because somebody may set the state meanwhile.
        arrays = {each: each._array for each in (*written, *self._now)}
        for number, (at, _) in enumerate(self._given):
            leaves[at] = self._take(arrays, self._now[number], at)
        for number, (at, _) in enumerate(self._read, len(self._given)):
            call.closed_over[at] = self._take(arrays, self._now[number], len(call.inputs) + at)
        call.written, call.taken = written, [arrays[each] for each in written]
        return leaves

    def _take(self, arrays: dict[Any, Any], state: Any, position: int) -> Array:
        """What the run takes at this position. `arrays` has the arrays of now."""
        layout = self._call.layouts[position]
        array: Array = state.present(arrays[state], layout)
        arrays[state] = array
        if position in self._call.donated and (array.shared or array.cached is not None):  # somebody reads it (MEM-4)
            array = self._copy(array)
        return array if array.layout is layout else self._move(array, layout.slice, layout.spec[: len(layout.shape)])

    def _written(self, leaves: Sequence[Any]) -> Iterator[Any]:
        numbers = {at: number for number, (at, _) in enumerate(self._given)}
        for what in self._updates:
            yield self._now[numbers[what.position]] if isinstance(what, Given) else _holder(what)

    def take(self, out: list[Array]) -> list[Array]:
        """The results that are no new values of state."""
        return out[: self._call.first_written]

    def is_given(self, position: int) -> bool:
        """Whether a reference stands at this position of a call."""
        return any(at == position for at, _ in self._given)

    def arrays(self, leaves: Sequence[Any]) -> list[tuple[Any, Array]]:
        """What a run with these leaves sets, with the arrays of now."""
        changed = [_holder(leaves[each.position] if isinstance(each, Given) else each) for each in self._updates]
        return [(each, each._array) for each in changed]


def _holder(what: Any) -> Any:
    """A variable itself; the holder of a reference."""
    return references.holder_of(what) if _jaxlib.is_reference(what) else what
