"""The one primitive that Pathways adds to JAX: `transfer`, the identity that moves a value to a slice.

JAX differentiates, batches and partially evaluates it like any linear identity; only `flatten` reads it.
A cotangent goes back to where the value came from: its equation carries the same `uid` with `back=True`, and
`flatten` knows from the forward equation which mesh that was.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.extend as jex
from jax.interpreters import ad, batching, mlir

from pathways.compiler.ir import MeshSpec, Spec

transfer_p = jex.core.Primitive("pathways_transfer")
_uids = itertools.count()


def transfer(x: Any, mesh: MeshSpec, spec: Spec) -> Any:
    """`x` moved to `mesh`, cut by `spec`; only under trace."""
    return transfer_p.bind(x, mesh=mesh, spec=spec, uid=next(_uids), back=False)


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
mlir.register_lowering(transfer_p, lambda ctx, x, **_: [x])
