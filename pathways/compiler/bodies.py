"""Bodies: the StableHLO of each placed function, and of each run of plain operations, lowered once and shared.

A body is keyed by its jaxpr (JAX's own tracing caches make equal calls share one) and by the constants bound into it.
Used by `emit`, one `Bodies` per program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib
from pathways.compiler import specs
from pathways.compiler.flatten import Step, bound_and_free
from pathways.compiler.ir import MeshSpec


@dataclasses.dataclass(frozen=True)
class Body:
    """A lowered function `main` over the inputs that are not bound. `number` is its place in the program."""

    number: int
    module: bytes
    mesh: MeshSpec | None


class Bodies:
    """The distinct bodies of one program, in order of first use."""

    def __init__(self, constants: dict[Any, Any], platforms: Sequence[str]) -> None:
        self.constants = constants
        self.platforms = tuple(platforms)
        self.all: list[Body] = []
        self._known: dict[Any, Body] = {}
        self._alive: list[Any] = []  # keeps what is keyed by id alive

    def placed(self, step: Step) -> tuple[Body, list[int]]:
        """The body of a placed call, and which of the step's inputs it takes."""
        closed = step.eqn.params["jaxpr"]
        bound, free = bound_and_free(step.inputs, self.constants)
        key = (id(closed), step.mesh, tuple((n, _value_key(v)) for n, v in bound.items()))
        body = self._known.get(key)
        if body is None:
            self._alive.append((closed, bound))
            jaxpr, consts = closed.jaxpr, list(closed.consts)
            if bound:
                invars = jaxpr.invars
                closed = _jaxlib.new_jaxpr(
                    [*jaxpr.constvars, *(invars[n] for n in bound)], [*consts, *bound.values()],
                    [invars[n] for n in free], jaxpr.outvars, jaxpr.eqns, like=jaxpr)
            body = self._add(key, closed, step.mesh)
        return body, free

    def plain(self, steps: Sequence[Step], inputs: Sequence[Any], outputs: Sequence[Any]) -> Body:
        """The body of a run of plain operations, from `inputs` to `outputs` (variables)."""
        numbers: dict[Any, int] = {v: n for n, v in enumerate(inputs)}
        shape: list[Any] = [tuple(str(v.aval) for v in inputs)]
        for step in steps:
            params = tuple(sorted((k, _value_key(v)) for k, v in step.eqn.params.items()))
            reads = tuple(("value", _value_key(v.val), str(v.aval)) if isinstance(v, _jaxlib.Literal)
                          else ("constant", id(self.constants[v])) if v in self.constants else numbers[v]
                          for v in step.inputs)
            for v in step.outputs:
                numbers[v] = len(numbers)
            shape.append((step.eqn.primitive.name, params, reads, tuple(str(v.aval) for v in step.outputs)))
        shape.append(tuple(numbers[v] for v in outputs))
        key = tuple(shape)
        body = self._known.get(key)
        if body is None:
            self._alive.append([step.eqn for step in steps])
            used = {v for step in steps for v in step.inputs if not isinstance(v, _jaxlib.Literal)}
            constants = {v: value for v, value in self.constants.items() if v in used}
            eqns = [step.eqn.replace(invars=step.inputs, outvars=step.outputs) for step in steps]
            closed = _jaxlib.new_jaxpr(list(constants), list(constants.values()), inputs, outputs, eqns,
                                       like=self._like)
            body = self._add(key, closed, None)
        return body

    def constant(self, v: Any, mesh: MeshSpec | None) -> Body:
        """A body without inputs that gives the constant or literal `v`."""
        value = v.val if isinstance(v, _jaxlib.Literal) else self.constants[v]
        key = ("constant", _value_key(value), str(v.aval), mesh)
        body = self._known.get(key)
        if body is None:
            self._alive.append(value)
            new = _jaxlib.new_var(v.aval)
            body = self._add(key, _jaxlib.new_jaxpr([new], [value], [], [new], [], like=self._like), mesh)
        return body

    _like: Any = None

    def borrow_debug_info(self, jaxpr: Any) -> None:
        """Runs of plain operations take their debug info from this jaxpr."""
        self._like = jaxpr

    def _add(self, key: Any, closed: Any, mesh: MeshSpec | None) -> Body:
        module = _jaxlib.lower_jaxpr(closed, self.platforms, specs.abstract_mesh(mesh) if mesh is not None else None)
        body = self._known[key] = Body(len(self.all), module, mesh)
        self.all.append(body)
        return body


def _value_key(value: Any) -> Any:
    """A key that is equal only for values that lower to the same text: by value for plain data, else by identity."""
    if isinstance(value, (np.ndarray, np.generic)) or (hasattr(value, "dtype") and np.ndim(value) == 0
                                                       and not hasattr(value, "devices")):
        if np.ndim(value) == 0:
            array = np.asarray(value)
            return ("scalar", str(array.dtype), array.tobytes())
        return ("object", id(value))
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value).__name__, repr(value))
    if isinstance(value, tuple):
        return ("tuple", *(_value_key(v) for v in value))
    if isinstance(value, np.dtype):
        return ("dtype", str(value))
    return ("object", id(value))
