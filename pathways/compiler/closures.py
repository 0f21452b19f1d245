"""Makes arguments of arrays that a function closes over, so that they are not constants in the module.

JAX keeps the values that a function closes over as constants of the traced jaxpr, and of each `jax.jit` equation inside
at any depth (a placed function is such an equation). It already makes operands of the constants of other constructs
(loops, branches, remat, custom derivatives). `lift` takes the wanted constants out and passes them down as arguments,
through these constructs too. What else has a jaxpr inside keeps the constants in it.

Pure: works on jaxprs only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from pathways import _jaxlib
from pathways.compiler import placed
from pathways.compiler.added_primitives.transfers import transfer_p
from pathways.compiler.ir import MeshSpec, Spec


class Place(NamedTuple):
    """Where a value is read: on a slice, cut by `spec`; None: whole, on each device."""

    mesh: MeshSpec
    spec: Spec | None = None


class ClosedOver(NamedTuple):
    """What becomes an argument in place of a constant. `is_free`: it lies nowhere yet, so each slice that reads it has
    an argument of its own, and `place` is that slice; None: no slice is known.
    """

    value: Any
    is_free: bool = False
    place: Place | None = None


#: For a constant, what becomes an argument in its place; None: it stays.
StandsIn = Callable[[Any], ClosedOver | None]


def lift(closed: Any, stands_in: StandsIn) -> tuple[Any, list[ClosedOver]]:
    """Turns the wanted constants of `closed` into its last arguments. Returns the new jaxpr and these arguments."""
    known: dict[int, tuple[Any, ClosedOver | None]] = {}  # by id(), with the constant, which must not go meanwhile

    def once(value: Any) -> ClosedOver | None:
        if id(value) not in known:
            known[id(value)] = value, stands_in(value)
        return known[id(value)][1]

    return _lifted(closed, once, {})


def _lifted(
    closed: Any, stands_in: StandsIn, memo: dict[int, tuple[Any, list[ClosedOver]]]
) -> tuple[Any, list[ClosedOver]]:
    """`memo` has the same of the jaxprs inside, by id()."""
    arguments: dict[Hashable, tuple[ClosedOver, Any]] = {}  # with the variable of each
    jaxpr, constants = _jaxlib.opened(closed)

    def argument(what: ClosedOver, aval: Any, place: Place | None) -> Any:
        if what.is_free and what.place is None and place is not None:
            what = what._replace(place=place)
        key = id(what.value), what.place
        if key not in arguments:
            arguments[key] = what, _jaxlib.new_var(aval)
        return arguments[key][1]

    kept: dict[Any, Any] = {}
    taken: dict[Any, ClosedOver] = {}
    for v, value in zip(jaxpr.constvars, constants, strict=True):
        what = stands_in(value)
        if what is None:
            kept[v] = value
        else:
            taken[v] = what

    def read(atom: Any, place: Place | None = None) -> Any:
        what = stands_in(atom.val) if isinstance(atom, _jaxlib.Literal) else taken.get(atom)
        return atom if what is None else argument(what, atom.aval, place)

    eqns = []
    for eqn in jaxpr.eqns:
        place = _place_of(eqn)
        inputs = [read(v, place) for v in eqn.invars]
        inside: list[tuple[Any, list[Any]]] = []
        for inner in _jaxlib.jaxprs_in(eqn.params) if _jaxlib.takes_more(eqn) else ():
            if id(inner) not in memo:  # equal calls share one jaxpr, and must still share one afterwards
                memo[id(inner)] = _lifted(inner, stands_in, memo)
            wider, more = memo[id(inner)]
            types = [v.aval for v in _last(wider, len(more))]
            inside.append((wider, [argument(what, aval, place) for what, aval in zip(more, types, strict=True)]))
        if any(more for _, more in inside):
            eqns.append(_jaxlib.pass_down(eqn, inputs, inside))
            continue
        eqns.append(eqn if inputs == list(eqn.invars) else eqn.replace(invars=inputs))
    outvars = [read(v) for v in jaxpr.outvars]
    if not arguments:
        return closed, []
    invars = [*jaxpr.invars, *(v for _, v in arguments.values())]
    new = _jaxlib.new_jaxpr(kept, invars, outvars, eqns, like=jaxpr, effects=jaxpr.effects)
    return new, [what for what, _ in arguments.values()]


def _place_of(eqn: Any) -> Place | None:
    """Where an equation reads its operands: the slice of a placed function or of a transfer."""
    if eqn.primitive is _jaxlib.jit_p:
        slice_tag = placed.lookup(eqn.params["name"])
        return None if slice_tag is None else Place(slice_tag.mesh)
    return Place(eqn.params["mesh"], eqn.params["spec"]) if eqn.primitive is transfer_p else None


def _last(closed: Any, count: int) -> Sequence[Any]:
    jaxpr = _jaxlib.opened(closed)[0]
    return list(jaxpr.invars[len(jaxpr.invars) - count :])
