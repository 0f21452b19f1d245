"""The order of callbacks as data flow: a value goes from call to call where JAX would pass a token.

The compiler adds that value to a body that has callbacks (`order_var`, `in_order`), and lowering makes a number of each
token (`tokens_to_data`). Pure, but for one primitive that the import registers.
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

from pathways._jaxlib.callbacks import ORDERED_EFFECTS
from pathways._jaxlib.jaxprs import new_jaxpr
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
_in_order_p.def_abstract_eval(lambda *_, jaxpr: [_token_aval(), *(v.aval for v in jaxpr.jaxpr.outvars)])


def _lower_in_order(ctx: Any, before: ir.Value, *args: ir.Value, jaxpr: Any) -> Sequence[ir.Value]:
    found = {effect for eqn in jaxpr.jaxpr.eqns for effect in eqn.effects if isinstance(effect, ORDERED_EFFECTS)}
    ordered = sorted(found, key=str)
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
    after = [cast(results=[data], operands=[tokens.get(effect)]).result for effect in ordered]
    return [functools.reduce(lambda a, b: stablehlo.AndOp(a, b).result, after), *outs]


jax_mlir.register_lowering(_in_order_p, _lower_in_order, cacheable=False)


def in_order(
    eqns: Sequence[Any],
    constants: Sequence[core.Var],
    inputs: Sequence[core.Var],
    outputs: Sequence[core.Var],
    before: core.Var | None,
    after: core.Var,
    like: core.Jaxpr,
) -> tuple[list[Any], list[Any]]:
    """Equations and outputs of a body that has callbacks.

    `after`, one of the outputs, exists when the body's callbacks are over. `before`, one of the inputs, comes before
    the ordered callbacks; None: the body has no ordered callbacks.
    """
    if before is None:
        done = core.Literal(np.bool_(False), _token_aval())
        return list(eqns), [done if v is after else v for v in outputs]
    args = [*constants, *(v for v in inputs if v is not before)]
    results = [v for v in outputs if v is not after]
    body = new_jaxpr({}, args, results, eqns, like=like)
    new = {v: core.Var(v.aval) for v in results}
    eqn = core.new_jaxpr_eqn([before, *args], [after, *new.values()], _in_order_p, {"jaxpr": body}, core.no_effects)
    return [eqn], [new.get(v, v) for v in outputs]
