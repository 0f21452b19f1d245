"""More operands for an equation that has jaxprs inside: what a jaxpr inside takes besides, the equation passes to it.

`pathways/compiler/closures.py` makes arguments of closed-over arrays with it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core
from jax.sharding import PartitionSpec

from pathways._jaxlib.jaxprs import extend_jit, flattree, is_jaxpr, jit_p, new_jaxpr, opened, scan_counts

#: A jaxpr inside, closed, which takes some more arguments at its end; and what they are around it.
Wider = tuple[Any, Sequence[Any]]


def pass_down(eqn: Any, inputs: Sequence[Any], inside: Sequence[Wider]) -> Any:
    """The equation with the operands `inputs`, and with other jaxprs inside: one of `inside` for each of
    `jaxprs_in(eqn.params)`, in their order. `takes_more` says of which equations this works.
    """
    return _PASS_DOWN[eqn.primitive.name](eqn, inputs, inside)


def takes_more(eqn: Any) -> bool:
    """Whether `pass_down` knows the equation."""
    return eqn.primitive.name in _PASS_DOWN


def teach_pass_down(primitive: Any, pass_down: Callable[[Any, Sequence[Any], Sequence[Wider]], Any]) -> None:
    """From now on `pass_down` knows the equations of a primitive."""
    _PASS_DOWN[primitive.name] = pass_down


def put_last_at(closed: Any, count: int, at: int) -> Any:
    """The closed jaxpr with its last `count` arguments before the argument number `at`."""
    jaxpr, constants = opened(closed)
    rest, last = jaxpr.invars[: len(jaxpr.invars) - count], jaxpr.invars[len(jaxpr.invars) - count :]
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    order = [*rest[:at], *last, *rest[at:]]
    return new_jaxpr(values, order, jaxpr.outvars, jaxpr.eqns, jaxpr, jaxpr.effects)


def _jit(eqn: Any, inputs: Sequence[Any], inside: Sequence[Wider]) -> Any:
    ((closed, more),) = inside
    return extend_jit(eqn, inputs, more, closed)


def _call(eqn: Any, inputs: Sequence[Any], inside: Sequence[Wider]) -> Any:
    """What only groups equations: its operands are the arguments of its jaxpr."""
    ((closed, more),) = inside
    ((name, old),) = ((name, value) for name, value in eqn.params.items() if is_jaxpr(value))
    params = {**eqn.params, name: _like(old, closed)}
    if "in_specs" in params:
        params["in_specs"] = (*params["in_specs"], *(PartitionSpec() for _ in more))
    return eqn.replace(invars=[*inputs, *more], params=params)


def _like(old: Any, closed: Any) -> Any:
    """The closed jaxpr, without its constants, of which it has none, if the equation had an open one."""
    return opened(closed)[0] if type(old) is core.Jaxpr and type(closed) is not core.Jaxpr else closed


def _scan(eqn: Any, inputs: Sequence[Any], inside: Sequence[Wider]) -> Any:
    ((closed, more),) = inside
    fixed, _ = scan_counts(eqn)
    params = {**eqn.params, "jaxpr": put_last_at(closed, len(more), fixed)}
    if "num_consts" in params:
        params["num_consts"] = fixed + len(more)
        if "linear" in params:
            linear = params["linear"]
            params["linear"] = (*linear[:fixed], *(False for _ in more), *linear[fixed:])
    else:  # since JAX 0.12
        _, carry, rows = params["ft_in"].unpack()
        params["ft_in"] = flattree.pack((flattree.nones(fixed + len(more)), carry, rows))
    return eqn.replace(invars=[*inputs[:fixed], *more, *inputs[fixed:]], params=params)


def _while(eqn: Any, inputs: Sequence[Any], inside: Sequence[Wider]) -> Any:
    by_name = dict(zip((name for name, value in eqn.params.items() if is_jaxpr(value)), inside, strict=True))
    params, counts, operands, rest = dict(eqn.params), 0, [], [*inputs]
    for part in ("cond", "body"):
        closed, more = by_name[f"{part}_jaxpr"]
        counts = params[f"{part}_nconsts"]
        operands += [*rest[:counts], *more]
        rest = rest[counts:]
        params[f"{part}_jaxpr"] = put_last_at(closed, len(more), counts)
        params[f"{part}_nconsts"] = counts + len(more)
    return eqn.replace(invars=[*operands, *rest], params=params)


def _cond(eqn: Any, inputs: Sequence[Any], inside: Sequence[Wider]) -> Any:
    """Each branch takes what any of them takes."""
    more = list(dict.fromkeys(v for _, each in inside for v in each))
    branches = []
    for closed, mine in inside:
        jaxpr, constants = opened(closed)
        first = len(jaxpr.invars) - len(mine)
        own = dict(zip(mine, jaxpr.invars[first:], strict=True))
        invars = [*jaxpr.invars[:first], *(own[v] if v in own else core.Var(v.aval) for v in more)]
        values = dict(zip(jaxpr.constvars, constants, strict=True))
        branches.append(new_jaxpr(values, invars, jaxpr.outvars, jaxpr.eqns, jaxpr, jaxpr.effects))
    return eqn.replace(invars=[*inputs, *more], params={**eqn.params, "branches": tuple(branches)})


def _linear_solve(eqn: Any, inputs: Sequence[Any], inside: Sequence[Wider]) -> Any:
    """Its four functions (the operator, the solver, and both of the transpose) have operands of their own, which come
    first, function by function; those that all of them have come last."""
    wider, rest = iter(inside), [*inputs]
    operands, lengths, jaxprs = [], [], []
    for closed, length in zip(eqn.params["jaxprs"], eqn.params["const_lengths"], strict=True):
        closed, more = (None, ()) if closed is None else next(wider)
        operands += [*rest[:length], *more]
        rest = rest[length:]
        lengths.append(length + len(more))
        jaxprs.append(None if closed is None else put_last_at(closed, len(more), length))
    params = {
        "jaxprs": type(eqn.params["jaxprs"])(*jaxprs),
        "const_lengths": type(eqn.params["const_lengths"])(*lengths),
    }
    return eqn.replace(invars=[*operands, *rest], params={**eqn.params, **params})


_PASS_DOWN: dict[str, Callable[[Any, Sequence[Any], Sequence[Wider]], Any]] = {
    jit_p.name: _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    **dict.fromkeys(
        (
            "closed_call",
            "core_call",
            "eval_jaxpr",  # `closed_call` since JAX 0.12
            "remat2",
            "checkpoint",
            "custom_jvp_call",
            "custom_vjp_call",
            "custom_vmap_call",
            "shard_map",
        ),
        _call,
    ),
}
