"""The one primitive that Pathways adds to JAX: `transfer`, the identity that moves a value to a slice.

JAX differentiates, batches and partially evaluates it like any linear identity; only `flatten` reads it. Within a
placed function, it stays on that function's slice, and is a sharding constraint.
A cotangent goes back to the slice that the value came from. Its equation has the same `uid` as the forward equation,
with `back=True`, and `flatten` finds that slice's mesh by the forward equation.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NoReturn

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from pathways import _jaxlib, errors
from pathways.compiler import specs
from pathways.compiler.ir import MeshSpec, Spec

transfer_p = jex.core.Primitive("pathways_transfer")
_uids = itertools.count()


def transfer(x: Any, mesh: MeshSpec, spec: Spec) -> Any:
    """Moves `x` to `mesh`, cut by `spec`; only under trace."""
    return transfer_p.bind(x, mesh=mesh, spec=spec, uid=next(_uids), back=False)


def targets_of(eqn: Any) -> list[MeshSpec]:
    """The slices to which an equation transfers values, or `jax.device_put` puts them."""
    if eqn.primitive is transfer_p:
        return [eqn.params["mesh"]]
    devices = eqn.params["devices"] if eqn.primitive.name == "device_put" else ()
    return [mesh for mesh in map(specs.slice_mesh, devices) if mesh is not None]


def as_transfers(eqn: Any) -> list[Any]:
    """Splits a `jax.device_put` to slices into one equation per value, a transfer for each value that goes to a slice.

    Any other equation is returned as it is.
    """
    if eqn.primitive.name != "device_put" or not any(map(specs.slice_mesh, eqn.params["devices"])):
        return [eqn]
    out = []
    for n, (x, result, device) in enumerate(zip(eqn.invars, eqn.outvars, eqn.params["devices"], strict=True)):
        ends = {"invars": [x], "outvars": [result]}
        mesh = specs.slice_mesh(device)
        if mesh is None:
            out.append(eqn.replace(**ends, params={name: value[n : n + 1] for name, value in eqn.params.items()}))
        else:
            sharding = getattr(device, "sharding", device)
            spec = specs.normalize(sharding.spec, x.aval.shape, mesh, "value of device_put")
            params = {"mesh": mesh, "spec": spec, "uid": next(_uids), "back": False}
            out.append(eqn.replace(**ends, primitive=transfer_p, params=params))
    return out


def _lower(ctx: Any, x: Any, *, mesh: MeshSpec, spec: Spec, uid: int, back: bool) -> Any:
    """Within one slice, where the compiler has let it be, a transfer is a sharding constraint."""
    del uid
    if not _jaxlib.is_lowering_for_slices():
        refuse_here()
    if back:
        return [x]
    wanted = NamedSharding(specs.abstract_mesh(mesh), specs.to_partition_spec(spec))
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=wanted)
    return mlir.lower_fun(constrain, multiple_results=False)(ctx, x)


def refuse_here() -> NoReturn:
    """Raises an error: JAX is about to lower a transfer for this process."""
    raise errors.TraceError(
        "a value is put to a slice inside a function that jax.jit (or scan, or the like) compiles for this process. "
        "Put it there outside (of a jnp function with device=, put the result), or make the whole a program: "
        "pw.program(...)"
    )


def _transpose(cotangent: Any, operand: Any, *, mesh: MeshSpec, spec: Spec, uid: int, back: bool) -> list[Any]:
    del operand
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [transfer_p.bind(cotangent, mesh=mesh, spec=spec, uid=uid, back=not back)]


def _batch(args: Any, dims: Any, *, mesh: MeshSpec, spec: Spec, uid: int, back: bool) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    spec = (*spec[:dim], (), *spec[dim:])
    return transfer_p.bind(x, mesh=mesh, spec=spec, uid=uid, back=back), dim


transfer_p.def_impl(lambda x, **_: x)
transfer_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(transfer_p, _transpose)
batching.primitive_batchers[transfer_p] = _batch
mlir.register_lowering(transfer_p, _lower)
