"""The order of callbacks as data flow: a value goes from call to call where JAX would pass a token.

The compiler adds that value to equations that have callbacks (`order_var`, `in_order`), and lowering makes a number of
each token (`tokens_to_data`). Pure, but for one primitive that the import registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jaxlib._jax as xla
import numpy as np
from jax._src import core
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways._jaxlib.effects import ORDERED_EFFECTS
from pathways._jaxlib.jaxprs import new_jaxpr, opened
from pathways._jaxlib.mlir_modules import operations, tensor_type


def tokens_to_data(module: ir.Module) -> None:
    """Makes a number of each token. Then the order of callbacks is data flow, which every compiler keeps."""
    token, data = ir.Type.parse("!stablehlo.token"), tensor_type((), np.dtype(np.bool_))

    def turn(values: Any) -> None:
        for value in values:
            if value.type == token:
                value.set_type(data)

    for op in operations(module.body):
        name = op.operation.name
        if name == "stablehlo.create_token":
            with ir.InsertionPoint(op), op.operation.location:
                start = stablehlo.ConstantOp(
                    ir.DenseElementsAttr.get(np.array(False), type=data.element_type, shape=())
                )
            op.operation.results[0].replace_all_uses_with(start.result)
            op.operation.erase()
            continue
        turn(op.operation.results)
        for region in op.operation.regions:
            for block in region.blocks:
                turn(block.arguments)
        if name == "func.func":
            kind = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
            inputs, results = (
                [data if each == token else each for each in types] for types in (kind.inputs, kind.results)
            )
            op.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
        elif name == "builtin.unrealized_conversion_cast":
            op.operation.results[0].replace_all_uses_with(op.operation.operands[0])
            op.operation.erase()


def _token_aval() -> Any:
    return core.ShapedArray((), np.dtype(np.bool_))


def order_var() -> core.Var:
    """A variable for the order of callbacks: callbacks that read it run after the callbacks that wrote it."""
    return core.Var(_token_aval())


_in_order_p = core.Primitive("pathways_in_order")
_in_order_p.multiple_results = True


def _ordered_effects(eqns: Sequence[Any]) -> set[Any]:
    return {effect for eqn in eqns for effect in eqn.effects if isinstance(effect, ORDERED_EFFECTS)}


def _lower_in_order(ctx: Any, before: ir.Value, *args: ir.Value, jaxpr: Any) -> Sequence[ir.Value]:
    ordered = sorted(_ordered_effects(jaxpr.jaxpr.eqns), key=str)
    token, data = ir.Type.parse("!stablehlo.token"), before.type
    cast = functools.partial(ir.Operation.create, "builtin.unrealized_conversion_cast")
    tokens = jax_mlir.TokenSet({effect: cast(results=[token], operands=[before]).result for effect in ordered})
    outs, tokens = jax_mlir.jaxpr_subcomp(
        ctx.module_context,
        jaxpr.jaxpr,
        ctx.name_stack,
        tokens,
        (),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=xla.Traceback(),
    )
    if not ordered:  # no value of its own is handed on: the partitioner would take it for the one that came in
        return [stablehlo.NotOp(before).result, *outs]
    after = [cast(results=[data], operands=[tokens.get(effect)]).result for effect in ordered]
    return [functools.reduce(lambda a, b: stablehlo.AndOp(a, b).result, after), *outs]


jax_mlir.register_lowering(_in_order_p, _lower_in_order, cacheable=False)


def in_order(eqns: Sequence[Any], before: Any, after: core.Var, like: core.Jaxpr) -> Any:
    """Equations as one. It also reads `before`, a variable or a literal, after which their ordered callbacks come, and
    makes `after`, which comes after these. Other callbacks are over when the computation is.
    """
    made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, core.DropVar)]
    read = [v for eqn in eqns for v in eqn.invars if not isinstance(v, core.Literal) and v not in made]
    args = list(dict.fromkeys(read))
    effects = {effect for eqn in eqns for effect in eqn.effects}
    inner = new_jaxpr({}, args, made, eqns, like, effects)
    return core.new_jaxpr_eqn(
        [before, *args],
        [after, *made],
        _in_order_p,
        {"jaxpr": inner},
        {effect for effect in effects if not isinstance(effect, ORDERED_EFFECTS)},
        eqns[0].source_info if eqns else None,
    )


def jaxpr_in_order(closed: Any, ordered: bool) -> Any:
    """A closed jaxpr with callbacks that also takes `before` and gives `after`: see `in_order`. `ordered`: there are
    ordered ones.
    """
    jaxpr, constants = opened(closed)
    before = now = order_var()
    eqns = []
    for eqn in jaxpr.eqns:
        if _ordered_effects([eqn]):
            eqn = in_order([eqn], now, order_var(), jaxpr)
            now = eqn.outvars[0]
        eqns.append(eqn)
    if not ordered:
        eqns.append(in_order([], before, order_var(), jaxpr))
        now = eqns[-1].outvars[0]
    effects = {effect for eqn in eqns for effect in eqn.effects}
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    return new_jaxpr(values, [*jaxpr.invars, before], [*jaxpr.outvars, now], eqns, jaxpr, effects)
