"""Remembers compiled programs, so that a program which is traced again from other Python is not compiled again.

`key_of` describes a traced program by value. Two programs of one key give the same `LogicalProgram`. So a lambda that
is made and placed anew in each round of a loop is partitioned and lowered once. `key_of` returns None for a program
that it cannot describe by value: one with effects, with big constants, with functions among an equation's parameters,
or with too many equations. Such a program is compiled each time. Nothing here keeps a user's array or function alive.

Called by `pipeline`. `Memo` may be used from any thread.
"""

from __future__ import annotations

import collections
import enum
import threading
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from pathways import _jaxlib
from pathways.compiler.added_primitives.transfers import transfer_p
from pathways.compiler.ir import LogicalProgram, MeshSpec
from pathways.compiler.trace import Traced

#: How many programs are kept, and how many equations one may have: a function that a user places inline is small.
KEPT = 256
MOST_EQUATIONS = 256
#: The biggest constant that a key may have.
MOST_CONSTANT_BYTES = 1 << 10
#: Parameters that say how to differentiate. They do not matter in a jaxpr that is about to be lowered.
_RULES = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "bwd", "fwd"}),
}


class _NoKey(Exception):
    """The program cannot be described by value."""


def key_of(traced: Traced) -> Hashable | None:
    """A key that only equal programs share; None: the program cannot be described by value."""
    try:
        jaxpr = _Describer().jaxpr(traced.jaxpr)
    except _NoKey:
        return None
    return (
        traced.name,
        traced.arguments,
        traced.argument_names,
        traced.result_names,
        traced.donated,
        jaxpr,
        _jaxlib.trace_modes(),
    )


class _Describer:
    """Describes one jaxpr and the jaxprs inside it. An inner jaxpr that comes again is described by its number."""

    def __init__(self) -> None:
        self._jaxprs: dict[int, int] = {}
        self._pairs: dict[int, int] = {}  # numbers in order, by uid; a transfer and that of its cotangent share a uid
        self._equations = 0

    def jaxpr(self, closed: Any) -> Hashable:
        number = self._jaxprs.setdefault(id(closed), len(self._jaxprs))
        if number != len(self._jaxprs) - 1:
            return ("again", number)
        jaxpr, constants = _jaxlib.opened(closed)
        if jaxpr.effects:
            raise _NoKey
        numbers: dict[Any, int] = {}
        for v in (*jaxpr.constvars, *jaxpr.invars):
            numbers[v] = len(numbers)
        consts = tuple(self.value(const) for const in constants)
        equations = []
        for eqn in jaxpr.eqns:
            self._equations += 1
            if self._equations > MOST_EQUATIONS:
                raise _NoKey
            inputs = tuple(self._atom(v, numbers) for v in eqn.invars)
            for v in eqn.outvars:
                numbers[v] = len(numbers)
            params = eqn.params
            if eqn.primitive is transfer_p:
                params = {**params, "uid": self._pairs.setdefault(params["uid"], len(self._pairs))}
            left_out = _RULES.get(eqn.primitive.name, frozenset())
            params = tuple((name, self.value(param)) for name, param in params.items() if name not in left_out)
            equations.append(
                (eqn.primitive, params, inputs, tuple(v.aval for v in eqn.outvars), *_jaxlib.equation_context(eqn))
            )
        arguments = tuple(v.aval for v in (*jaxpr.constvars, *jaxpr.invars))
        return (arguments, consts, tuple(equations), tuple(self._atom(v, numbers) for v in jaxpr.outvars))

    def _atom(self, v: Any, numbers: Mapping[Any, int]) -> Hashable:
        return ("literal", self.value(v.val), v.aval) if isinstance(v, _jaxlib.Literal) else numbers[v]

    def value(self, value: Any) -> Hashable:
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes):
            return (kind, value)
        if isinstance(value, float | complex):  # by repr, because 0.0 == -0.0
            return (kind, repr(value))
        if isinstance(value, np.ndarray | np.generic) or _jaxlib.is_concrete(value):
            return self._array(value)
        if isinstance(value, np.dtype | enum.Enum | MeshSpec):
            return (kind, value)
        if kind is frozenset:
            return (kind, frozenset(self.value(item) for item in value))
        if kind in (tuple, list):
            return (kind, tuple(self.value(item) for item in value))
        if kind is dict:
            return (kind, tuple((self.value(name), self.value(item)) for name, item in value.items()))
        if _jaxlib.is_jaxpr(value):
            return self.jaxpr(value)
        if _jaxlib.is_plain_parameter(value):  # with the slice: equal shardings may be of different slices
            return (kind, value, getattr(getattr(value, "slice", None), "mesh_spec", None))
        raise _NoKey

    def _array(self, value: Any) -> Hashable:
        if _jaxlib.is_concrete(value) and not value.is_fully_addressable:
            raise _NoKey
        if value.nbytes > MOST_CONSTANT_BYTES or value.dtype.hasobject:
            raise _NoKey
        weak = bool(getattr(value, "weak_type", False))
        return (type(value), value.dtype, value.shape, weak, np.asarray(value).tobytes())


class Memo:
    """The programs used last, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[Hashable, LogicalProgram] = collections.OrderedDict()  # guarded by _lock

    def get(self, key: Hashable) -> LogicalProgram | None:
        """The program of this key, or None if it is not kept."""
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            return known

    def put(self, key: Hashable, program: LogicalProgram) -> None:
        """Keeps a program; drops the least recently used one if there are too many."""
        with self._lock:
            self._known[key] = program
            if len(self._known) > KEPT:
                self._known.popitem(last=False)

    def clear(self) -> None:
        """Forgets all programs."""
        with self._lock:
            self._known.clear()
