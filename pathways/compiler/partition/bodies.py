"""Bodies: the StableHLO of each distinct computation of a program, lowered once and shared by equal call sites.

The key of a body is made of its equations and of the constants inside. An inner jaxpr is compared by identity, because
JAX's own tracing caches make equal placed calls share one jaxpr. Used by `emit`, one `Bodies` per program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways import _jaxlib
from pathways.compiler import specs
from pathways.compiler.flatten import FlatProgram, Step
from pathways.compiler.ir import MeshSpec
from pathways.compiler.partition.groups import Group

_callbacks = itertools.count(1)  # numbers of this process's callbacks


@dataclasses.dataclass(frozen=True)
class Body:
    """A lowered function `main` on a slice. `number` is its place in the program."""

    number: int
    module: bytes
    mesh: MeshSpec


class Bodies:
    """The distinct bodies of one program, in order of first use. They take their debug info from `like`."""

    def __init__(self, program: FlatProgram, platforms: Sequence[str], like: Any) -> None:
        self.constants = program.constants
        self.platforms = tuple(platforms)
        self.like = like
        self.all: list[Body] = []
        self._known: dict[Any, Body] = {}
        self._alive: list[Any] = []  # keeps alive every object whose id() is in a key
        self._types: dict[int, str] = {}  # by id()
        self.callbacks: dict[int, _jaxlib.Callback] = {}  # by number

    def key(self, group: Group) -> Any:
        """What a group of steps shares with all groups that have its body, while this object lives."""
        numbers: dict[Any, int] = {v: n for n, v in enumerate(group.inputs)}
        steps = tuple([self._step_key(step, numbers) for step in group.steps])
        self._alive.append(group)
        inputs = tuple([self.type_key(v.aval) for v in group.inputs])
        return (group.mesh, inputs, steps, tuple([numbers[v] for v in group.outputs]))

    def of(self, group: Group) -> Body:
        """The body of a group of steps, from its inputs to its outputs."""
        key = self.key(group)
        body = self._known.get(key)
        if body is None:
            used = {v for step in group.steps for v in step.reads}
            constants = {v: value for v, value in self.constants.items() if v in used}
            eqns = [step.eqn.replace(invars=step.inputs, outvars=step.outputs) for step in group.steps]
            inputs, outputs, eqns = _jaxlib.cross_physically(group.inputs, group.outputs, eqns)
            body = self._add(key, group.mesh, _jaxlib.new_jaxpr(constants, inputs, outputs, eqns, like=self.like))
        return body

    def type_key(self, aval: Any) -> str:
        """The text of a type."""
        known = self._types.get(id(aval))
        if known is None:
            self._alive.append(aval)
            known = self._types[id(aval)] = str(aval)
        return known

    def _step_key(self, step: Step, numbers: dict[Any, int]) -> Any:
        params = step.eqn.params
        if step.eqn.primitive is _jaxlib.jit_p:
            what: Any = (params["name"], id(params["jaxpr"]))
        else:
            what = tuple(sorted([(k, _value_key(v)) for k, v in params.items()]))
        reads = tuple(
            [
                ("literal", _value_key(v.val), self.type_key(v.aval))
                if isinstance(v, _jaxlib.Literal)
                else ("constant", id(self.constants[v]))
                if v in self.constants
                else numbers[v]
                for v in step.inputs
            ]
        )
        for v in step.outputs:
            numbers[v] = len(numbers)
        return (step.eqn.primitive.name, what, reads, tuple([self.type_key(v.aval) for v in step.outputs]))

    def constant(self, v: Any, mesh: MeshSpec) -> Body:
        """A body without inputs that gives the constant or literal `v`."""
        value = v.val if isinstance(v, _jaxlib.Literal) else self.constants[v]
        key = ("constant", _value_key(value), str(v.aval), mesh)
        body = self._known.get(key)
        if body is None:
            self._alive.append(value)
            new = _jaxlib.new_var(v.aval)
            _, outputs, eqns = _jaxlib.cross_physically([], [new], [])
            body = self._add(key, mesh, _jaxlib.new_jaxpr({new: value}, [], outputs, eqns, like=self.like))
        return body

    def _add(self, key: Any, mesh: MeshSpec, closed: Any) -> Body:
        module = _jaxlib.lower_jaxpr(closed, self.platforms, specs.abstract_mesh(mesh), self._number)
        body = self._known[key] = Body(len(self.all), module, mesh)
        self.all.append(body)
        return body

    def _number(self, callback: _jaxlib.Callback) -> int:
        number = next(_callbacks)
        self.callbacks[number] = callback
        return number


def _value_key(value: Any) -> Any:
    """A key; two values share it only if they lower to the same text. By value for plain data, else by identity."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value).__name__, repr(value))
    if isinstance(value, tuple):
        return ("tuple", *(_value_key(v) for v in value))
    if isinstance(value, np.dtype):
        return ("dtype", str(value))
    if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) == 0:
        return ("scalar", str(value.dtype), np.asarray(value).tobytes())
    if _jaxlib.is_plain_parameter(value):  # a sharding
        return (type(value).__name__, value, getattr(getattr(value, "slice", None), "mesh_spec", None))
    return ("object", id(value))
