"""Jaxprs, their equations and variables: made, read and changed alike in every version of JAX.

The compiler works on them. Pure.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import core, pjit, sharding_impls
from jax._src.interpreters import partial_eval
from jax._src.mesh import empty_concrete_mesh
from jax.sharding import AbstractMesh

#: The module of a type that loops have among their parameters since JAX 0.12.
flattree: Any = importlib.import_module("jax._src.flattree") if jax.__version_info__ >= (0, 12) else None

Literal = core.Literal
DropVar = core.DropVar
jit_p = pjit.jit_p


#: A jaxpr with its constants; JAX 0.11 merged it into `Jaxpr`.
_Closed: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)


def opened(value: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """A jaxpr, open or closed, as the open jaxpr and its constants."""
    return (value.jaxpr, value.consts) if isinstance(value, _Closed) else (value, ())


def bind_jit(params: Mapping[str, Any], arguments: Sequence[Any]) -> list[Any]:
    """Calls a jit with the parameters of another jit equation, as under no mesh."""
    return list(jit_p.bind(*arguments, **{**params, "ctx_mesh": empty_concrete_mesh}))


def closed_jaxpr(jaxpr: core.Jaxpr, constants: Sequence[Any]) -> Any:
    """An open jaxpr with its constants."""
    return _Closed(jaxpr, constants)


def new_var(aval: Any) -> core.Var:
    """A fresh jaxpr variable."""
    return core.Var(aval)


def new_jaxpr(
    constants: Mapping[core.Var, Any],
    invars: Sequence[core.Var],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
    like: core.Jaxpr,
    effects: Any = core.no_effects,
) -> Any:
    """A closed jaxpr of those equations, with the debug info of `like`."""
    info = like.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = core.Jaxpr(list(constants), list(invars), list(outvars), list(eqns), effects, info, like.is_high)
    return _Closed(jaxpr, list(constants.values()))


def extend_jit(eqn: Any, inputs: Sequence[Any], more: Sequence[Any], closed: Any) -> Any:
    """The jit equation `eqn` with the jaxpr `closed` and with the arguments `inputs`, then `more`."""
    params = dict(eqn.params, jaxpr=closed)
    for name, value in (
        ("in_shardings", sharding_impls.UNSPECIFIED),
        ("in_layouts", None),
        ("donated_invars", False),
    ):
        params[name] = (*eqn.params[name], *(value for _ in more))
    return eqn.replace(invars=[*inputs, *more], params=params)


def jit_of(eqn: Any, closed: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """The jit equation `eqn` with the jaxpr `closed`, and with these arguments and results."""
    unspecified = sharding_impls.UNSPECIFIED
    params = dict(
        eqn.params,
        jaxpr=closed,
        in_shardings=(unspecified,) * len(inputs),
        out_shardings=(unspecified,) * len(outputs),
        in_layouts=(None,) * len(inputs),
        out_layouts=(None,) * len(outputs),
        donated_invars=(False,) * len(inputs),
    )
    return eqn.replace(invars=list(inputs), outvars=list(outputs), params=params, effects=opened(closed)[0].effects)


def scan_of(
    eqn: Any, body: Any, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]
) -> tuple[Any, list[Any], Sequence[Any]]:
    """A loop like that of the scan equation `eqn`, with the closed jaxpr `body`.

    The body goes from (*consts, *carry, *row of xs) to (*carry, *row of ys). `consts`, `carry` and `xs` are the
    variables or literals that the loop reads. Returns an open jaxpr, what it reads, and the values of its constants.
    """
    fun = as_function(body)

    def run(*flat: Any) -> Any:
        before = flat[: len(consts)]

        def step(state: Any, x: Any) -> Any:
            out = fun(*before, *state, *x)
            return tuple(out[: len(carry)]), tuple(out[len(carry) :])

        start, rows = flat[len(consts) : len(consts) + len(carry)], flat[len(consts) + len(carry) :]
        loop = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        return jax.tree.leaves(jax.lax.scan(step, start, rows, **loop))

    arguments = [*consts, *carry, *xs]
    jaxpr, values = opened(jax.make_jaxpr(run)(*(v.aval for v in arguments)))
    return jaxpr, arguments, values


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters, open or closed."""
    if "donated_invars" in params and "jaxpr" in params:  # a jit's others have an item per argument and result
        yield params["jaxpr"]
        return
    for value in params.values():
        yield from filter(is_jaxpr, value if isinstance(value, (tuple, list)) else (value,))


def sub_jaxprs(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs among an equation's parameters, without their constants."""
    return (opened(jaxpr)[0] for jaxpr in jaxprs_in(params))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Of the inputs of a scan equation: how many are the same in each iteration, and how many are carried."""
    params = eqn.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].update(eqn.invars).unpack()  # since JAX 0.12
    return len(list(constants)), len(list(carried))


def in_low_terms(closed: Any) -> Any:
    """A closed jaxpr without the equations that only say what they are made of, such as `jax.lax.custom_root` since JAX
    0.12: what they are made of stands in their place.
    """
    return partial_eval.lower_jaxpr2(closed) if getattr(closed, "is_high", False) else closed


def solver_of(eqn: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What an equation of `jax.lax.custom_linear_solve` computes: a closed jaxpr, and which of `inputs` it takes."""
    counts = eqn.params["const_lengths"]
    start = counts.matvec + counts.vecmat
    return eqn.params["jaxprs"].solve, [*inputs[start : start + counts.solve], *inputs[sum(counts) :]]


def new_literal(value: Any, aval: Any) -> core.Literal:
    """A constant of a jaxpr, a scalar of the type `aval`."""
    return core.Literal(value, aval)


def is_jaxpr(value: Any) -> bool:
    """True for a jaxpr, open or closed."""
    return isinstance(value, core.Jaxpr | _Closed)


def is_plain_parameter(value: Any) -> bool:
    """True for a hashable value of JAX's own types without code or arrays in it: specs, shardings, dimension numbers.

    False for a value that names physical devices.
    """
    if isinstance(value, AbstractMesh | jax.sharding.PartitionSpec | sharding_impls.UnspecifiedValue):
        return True
    if isinstance(value, jax.sharding.NamedSharding):
        return isinstance(value.mesh, AbstractMesh) and value.memory_kind is None
    if isinstance(value, jax.sharding.Mesh):
        return bool(value.empty)
    if flattree is not None and isinstance(value, flattree.FlatTree):
        return _has_only_nones(value)
    return type(value).__name__ in _PLAIN_PARAMETERS and type(value).__module__.startswith("jax.")


def _has_only_nones(tree: Any) -> bool:
    if isinstance(tree, flattree.FTTuple):
        return all(map(_has_only_nones, tree.elts))
    if isinstance(tree, flattree.FTFiltered):
        return _has_only_nones(tree.unfilter())
    leaves = tree.xs if isinstance(tree, flattree.FTPyTree) else (getattr(tree, "val", tree),)
    return all(leaf is None for leaf in leaves)


_PLAIN_PARAMETERS = frozenset({"GatherDimensionNumbers", "ScatterDimensionNumbers", "ConvDimensionNumbers", "PRNGImpl"})


def equation_context(eqn: Any) -> tuple[Any, ...]:
    """What decides how an equation is lowered, besides its primitive, parameters and operands."""
    return str(eqn.source_info.name_stack), eqn.ctx


@dataclasses.dataclass(frozen=True)
class Scope:
    """The microbatch of a pipeline, and perhaps its stage, to which the name of a scope says that a call belongs.

    Within a `jax.jit` that all microbatches call, a scope has no microbatch: it is that of the call.
    """

    pipeline: str
    microbatch: int | None
    stage: int | None = None


_SCOPE = re.compile(r"(?<![\w.])pw\.(\w+)\.mb(?:(\d+)|(?=\.s\d))(?:\.s(\d+))?(?![\w.])")


def scope_of(eqn: Any) -> Scope | None:
    """The innermost scope of an equation with a name such as `pw.p0.mb3`, `pw.p0.mb3.s1` or `pw.p0.mb.s1`."""
    found = _SCOPE.findall(str(eqn.source_info.name_stack))
    if not found:
        return None
    pipeline, microbatch, stage = found[-1]
    if not microbatch:  # a scope around it says it
        microbatch = next((number for other, number, _ in reversed(found) if number and other == pipeline), "")
    return Scope(pipeline, int(microbatch) if microbatch else None, int(stage) if stage else None)


def is_transposed(eqn: Any) -> bool:
    """True for an equation that reverse-mode differentiation made."""
    return "transpose(" in str(eqn.source_info.name_stack)


def transposed_times(eqn: Any) -> int:
    """How often reverse-mode differentiation was applied to make an equation."""
    return str(eqn.source_info.name_stack).count("transpose(")


def as_function(closed: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of its flat arguments."""
    return core.jaxpr_as_fun(closed)


def live(closed: Any) -> tuple[Any, list[bool]]:
    """The closed jaxpr without equations whose results nobody reads; and which of its arguments it still reads."""
    jaxpr, consts = opened(closed)
    constants, arguments = list(jaxpr.constvars), list(jaxpr.invars)
    whole = opened(new_jaxpr({}, [*constants, *arguments], jaxpr.outvars, jaxpr.eqns, jaxpr, jaxpr.effects))[0]
    kept, used = partial_eval.dce_jaxpr(whole, [True] * len(jaxpr.outvars))
    values = {v: c for v, c, is_used in zip(constants, consts, used, strict=False) if is_used}
    smaller = new_jaxpr(values, arguments, kept.outvars, kept.eqns, jaxpr, kept.effects)
    return smaller, list(used[len(constants) :])


def evaluated(eqn: Any, values: Sequence[Any], like: core.Jaxpr) -> list[Any]:
    """The results of an equation for the values that it reads; with the debug info of `like`."""
    variables = [core.Var(v.aval) for v in eqn.invars]
    closed = new_jaxpr({}, variables, eqn.outvars, [eqn.replace(invars=variables)], like, eqn.effects)
    return as_function(closed)(*values)
