"""Divides a jaxpr in two: what some of its results need, and the rest.

`split` uses it for backward steps: the first half makes the gradient that another stage waits for, the second half the
gradients of weights. No equation is computed twice, except those that read nothing but constants. What the second half
needs of the first one is a result more of the first one (a residual).

Calls are opened, so also recomputed layers (`jax.checkpoint`). A loop (`scan`) over layers makes both kinds of
gradients in one equation. It becomes two loops: the first one stacks what the second one needs of each step. Branches
and `while_loop`s are not divided: all that they make is in the first half.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pathways import _jaxlib

#: Calls: equations that only apply the one jaxpr among their parameters.
_CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "closed_call", "eval_jaxpr"}


@dataclasses.dataclass(frozen=True)
class Halves:
    """A jaxpr as two. The numbers are those of the arguments and results of the whole.

    `first` takes `first_inputs` and returns `first_outputs`, then the residuals. `second` takes `second_inputs`, then
    the results of `first` with the numbers `handed`; it is None if nothing is left for it. `costs` are floating-point
    operations, roughly. `undivided` names the costliest operation that makes results of both halves, or is "".
    """

    first: Any
    first_inputs: tuple[int, ...]
    first_outputs: tuple[int, ...]
    residuals: tuple[Any, ...]  # their avals
    second: Any
    second_inputs: tuple[int, ...]
    second_outputs: tuple[int, ...]
    handed: tuple[int, ...]
    costs: tuple[float, float]
    undivided: str


def halves(closed: Any, asked: Sequence[bool]) -> Halves:
    """Divides the closed jaxpr into what the results with `asked` need, and the rest."""
    whole = _opened(closed)
    outs = whole.outvars
    wanted = {v for v, is_asked in zip(outs, asked, strict=True) if is_asked and _is_var(v)}
    cut = _divide(whole, wanted, {v for v in outs if _is_var(v)} - wanted, set())
    outs = [cut.known(v) for v in outs]
    in_second = {v for eqn in cut.second for v in eqn.outvars} - cut.made
    later = [n for n, v in enumerate(outs) if _is_var(v) and v in in_second]
    sooner = [n for n in range(len(outs)) if n not in later]
    last = [outs[n] for n in later]
    returned = [outs[n] for n in sooner]
    handed = cut.residuals(last)
    residuals = [v for v in handed if not any(v is other for other in returned)]
    results = [*returned, *residuals]
    places = {v: n for n, v in reversed(list(enumerate(results))) if _is_var(v)}
    first_inputs = _numbers(whole.invars, _reads(cut.first, results))
    second_inputs = _numbers(whole.invars, _reads(cut.second, last))
    like = _jaxlib.opened(closed)[0]
    given = [*(whole.invars[n] for n in second_inputs), *handed]
    return Halves(
        _closed(whole, [whole.invars[n] for n in first_inputs], results, cut.first, like),
        first_inputs,
        tuple(sooner),
        tuple(v.aval for v in residuals),
        _closed(whole, given, last, cut.second, like) if later else None,
        second_inputs,
        tuple(later),
        tuple(places[v] for v in handed),
        (cost(cut.first), cost(cut.second)),
        max(cut.undivided, key=lambda eqn: cost([eqn])).primitive.name if cut.undivided else "",
    )


def cost(eqns: Iterable[Any]) -> float:
    """About how many floating-point operations these equations take: those of matrix products and convolutions, and one
    per element for all else.
    """
    return sum(map(_cost, eqns))


@dataclasses.dataclass
class _Equations:
    """A jaxpr whose calls are opened. `constants` has the values of the variables that it closes over."""

    invars: list[Any]
    eqns: list[Any]
    outvars: list[Any]
    constants: dict[Any, Any]


@dataclasses.dataclass
class _Cut:
    """Equations in two halves, each in order. `renamed` has results that are another variable or a literal now."""

    first: list[Any] = dataclasses.field(default_factory=list)
    second: list[Any] = dataclasses.field(default_factory=list)
    undivided: list[Any] = dataclasses.field(default_factory=list)
    renamed: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def made(self) -> set[Any]:
        """What the first half makes."""
        return {v for eqn in self.first for v in eqn.outvars}

    def known(self, v: Any) -> Any:
        """A variable or literal after renaming."""
        while _is_var(v) and v in self.renamed:
            v = self.renamed[v]
        return v

    def rename(self) -> None:
        """Renames what the equations read."""
        for half in (self.first, self.second):
            half[:] = [eqn.replace(invars=[self.known(v) for v in eqn.invars]) for eqn in half]

    def residuals(self, outs: Sequence[Any], more: Iterable[Any] = ()) -> list[Any]:
        """What the second half and `outs` read of what the first half makes, and of `more`."""
        own = {v for eqn in self.second for v in eqn.outvars}
        given = (self.made | set(more)) - own
        return [v for v in _reads(self.second, outs) if v in given]


def _divide(whole: _Equations, asked: set[Any], others: set[Any], free: set[Any]) -> _Cut:
    """Divides equations into what `asked` needs, and what only `others` need. Equations that read only `free`, or
    nothing, may be in both halves.
    """
    cut = _Cut()
    need, late = set(asked), set(others)
    for eqn in reversed(whole.eqns):
        if any(v in need for v in eqn.outvars) or eqn.effects:
            only_late = [v for v in eqn.outvars if v in late and v not in need]
            loops = _divide_loop(eqn, whole, need, late, cut) if only_late and eqn.primitive.name == "scan" else None
            if loops is None:
                cut.undivided += [eqn] if only_late else []
                loops = [eqn], []
            cut.first += reversed(loops[0])
            cut.second += reversed(loops[1])
            need.update(_reads(loops[0]))
            late.update(_reads(loops[1]))
            for group in (need, late):
                group.update(v for name, v in cut.renamed.items() if name in group and _is_var(v))
        elif any(v in late for v in eqn.outvars):
            cut.second.append(eqn)
            late.update(_reads([eqn]))
    cut.first.reverse()
    cut.second.reverse()
    cut.rename()
    _repeat(cut, late, free)
    return cut


def _repeat(cut: _Cut, late: set[Any], free: set[Any]) -> None:
    """Adds to the second half the equations of the first one that read only `free`, and that the second half needs."""
    known = set(free)
    same = []
    for eqn in cut.first:
        if not eqn.effects and all(v in known for v in _reads([eqn])):
            known.update(eqn.outvars)
            same.append(eqn)
    needed = set(late)
    again = []
    for eqn in reversed(same):
        if any(v in needed for v in eqn.outvars):
            again.append(eqn)
            needed.update(_reads([eqn]))
    cut.second[:0] = reversed(again)


def _divide_loop(
    eqn: Any, whole: _Equations, need: set[Any], late: set[Any], cut: _Cut
) -> tuple[list[Any], list[Any]] | None:
    """A loop as two: the equations of the first half and those of the second. None if all is needed in the first."""
    if eqn.effects:
        return None
    body = _opened(eqn.params["jaxpr"])
    start, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, state, rows = body.invars[:start], body.invars[start : start + carries], body.invars[start + carries :]
    asked = {n for n, v in enumerate(eqn.outvars) if v in need}
    stacked = {n for n, v in enumerate(eqn.outvars) if n >= carries and v in late}
    while True:
        rest = [n for n in range(len(eqn.outvars)) if n not in asked and (n < carries or n in stacked)]
        wanted = {body.outvars[n] for n in asked if _is_var(body.outvars[n])}
        inner = _divide(body, wanted, {body.outvars[n] for n in rest if _is_var(body.outvars[n])}, set(consts))
        outs = [inner.known(v) for v in body.outvars]
        used, made = set(_reads(inner.first, [outs[n] for n in asked])), inner.made
        more = {n for n, v in enumerate(state) if v in used}  # the first loop carries what it reads
        more |= {n for n in rest if n >= carries and _is_var(outs[n]) and outs[n] in made}
        if more <= asked:
            break
        asked |= more
    if not inner.second:
        return None
    cut.undivided += inner.undivided
    first = sorted(asked)
    residuals = inner.residuals([outs[n] for n in rest], [state[n] for n in first if n < carries])
    place = dict(zip(body.invars, eqn.invars, strict=True))
    like = _jaxlib.opened(eqn.params["jaxpr"])[0]

    def loop(
        eqns: list[Any], numbers: list[int], given: list[Any], stacks: list[Any], more: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The loop of some of the results, which reads `stacks` row by row as `given`. Returns its equations, and the
        stacks that it makes of the values `more`.
        """
        results = [*(outs[n] for n in numbers), *more]
        reads = set(_reads(eqns, results))
        before, along = ([v for v in part if v in reads] for part in (consts, rows))
        carry = [state[n] for n in numbers if n < carries]
        closed = _closed(body, [*before, *carry, *along, *given], results, eqns, like)
        atoms = [[place[v] for v in part] for part in (before, carry, along)]
        jaxpr, arguments, values = _jaxlib.scan_of(eqn, closed, atoms[0], atoms[1], [*atoms[2], *stacks])
        whole.constants.update(zip(jaxpr.constvars, values, strict=True))
        new = [_jaxlib.new_var(v.aval) for v in jaxpr.outvars[len(numbers) :]]
        names = [*(eqn.outvars[n] for n in numbers), *new]
        made = _inlined(jaxpr, dict(zip(jaxpr.invars, arguments, strict=True)), names, cut.renamed)
        return [each.replace(source_info=eqn.source_info) for each in made], new

    one, stacks = loop(inner.first, first, [], [], residuals)
    two, _ = loop(inner.second, rest, residuals, stacks, [])
    return one, two


def _inlined(jaxpr: Any, env: dict[Any, Any], names: Sequence[Any], renamed: dict[Any, Any]) -> list[Any]:
    """The equations of `jaxpr`, whose results get `names`. A result that no equation makes, or that has a name already,
    goes into `renamed`.
    """
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    for v, name in zip(jaxpr.outvars, names, strict=True):
        if _is_var(v) and v in made and v not in env:
            env[v] = name
        else:
            renamed[name] = _read(env, v)
    eqns = []
    for eqn in jaxpr.eqns:
        outs = [v if isinstance(v, _jaxlib.DropVar) else env.setdefault(v, v) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=[_read(env, v) for v in eqn.invars], outvars=outs))
    return eqns


def _opened(closed: Any) -> _Equations:
    """A jaxpr, with its calls opened."""
    jaxpr, values = _jaxlib.opened(closed)
    found = _Equations(list(jaxpr.invars), [], [], dict(zip(jaxpr.constvars, values, strict=True)))
    env: dict[Any, Any] = {}
    _open(jaxpr, env, found, fresh=False)
    found.outvars = [_read(env, v) for v in jaxpr.outvars]
    return found


def _open(jaxpr: Any, env: dict[Any, Any], found: _Equations, fresh: bool) -> None:
    for eqn in jaxpr.eqns:
        inputs = [_read(env, v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner, values = _jaxlib.opened(next(_jaxlib.jaxprs_in(eqn.params)))
            inside = dict(zip(inner.invars, inputs, strict=True))
            for v, value in zip(inner.constvars, values, strict=True):
                inside[v] = _jaxlib.new_var(v.aval)
                found.constants[inside[v]] = value
            _open(inner, inside, found, fresh=True)
            env.update((v, _read(inside, result)) for v, result in zip(eqn.outvars, inner.outvars, strict=True))
            continue
        outs = []
        for v in eqn.outvars:
            new = _jaxlib.new_var(v.aval) if fresh and not isinstance(v, _jaxlib.DropVar) else v
            env[v] = new
            outs.append(new)
        found.eqns.append(eqn.replace(invars=inputs, outvars=outs))


def _closed(whole: _Equations, invars: Sequence[Any], outvars: Sequence[Any], eqns: list[Any], like: Any) -> Any:
    reads = set(_reads(eqns, outvars))
    constants = {v: value for v, value in whole.constants.items() if v in reads}
    effects = {effect for eqn in eqns for effect in eqn.effects}
    return _jaxlib.new_jaxpr(constants, invars, outvars, eqns, like, effects)


def _is_var(v: Any) -> bool:
    return not isinstance(v, _jaxlib.Literal)


def _read(env: dict[Any, Any], v: Any) -> Any:
    return env.get(v, v) if _is_var(v) else v


def _reads(eqns: Iterable[Any], outs: Iterable[Any] = ()) -> list[Any]:
    """The variables that equations and results read, each once."""
    reads = [v for eqn in eqns for v in eqn.invars]
    return list(dict.fromkeys(v for v in (*reads, *outs) if _is_var(v)))


def _numbers(invars: Sequence[Any], reads: Iterable[Any]) -> tuple[int, ...]:
    wanted = set(reads)
    return tuple(n for n, v in enumerate(invars) if v in wanted)


def _cost(eqn: Any) -> float:
    name = eqn.primitive.name
    sizes = [math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    inside = [cost(jaxpr.eqns) for jaxpr in _jaxlib.sub_jaxprs(eqn.params)]
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * sizes[-1] * math.prod(eqn.invars[0].aval.shape[n] for n in contracted)
    if name == "conv_general_dilated":
        features = eqn.invars[1].aval.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * sizes[-1] * sizes[1] / max(features, 1)
    if name == "scan":
        return float(eqn.params["length"] * sum(inside))
    if name == "cond":
        return max(inside, default=0.0)
    return sum(inside) if inside else float(max(sizes, default=0))
