"""The one primitive that Pathways adds to JAX: `transfer`, the identity that moves a value to a slice.

JAX differentiates, batches and partially evaluates it like any linear identity; only `flatten` reads it. Within a
placed function, it stays on that function's slice, and is a sharding constraint.
A cotangent goes back to the slice that the value came from. Its equation has the same `uid` as the forward equation,
with `back=True`, and `flatten` finds that slice's mesh by the forward equation.

On a slice with explicit axes, the sharding is part of a value's type. So a transfer has the `sharding` of its result's
type as a parameter: None if the slice has no such axes. `entered` gives the arguments of a placed function a type of
its slice by a transfer within the function. Its `spec` is None where only the type changes.
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
from pathways.compiler.specs import chosen, entries_of, sharding_in_type

transfer_p = jex.core.Primitive("pathways_transfer")
_uids = itertools.count()


def transfer(x: Any, mesh: MeshSpec, spec: Spec | None) -> Any:
    """Moves `x` to `mesh`, cut by `spec`; only under trace. None: it is there already, and may be cut in any way."""
    return transfer_p.bind(x, mesh=mesh, spec=spec, uid=next(_uids), back=False, sharding=sharding_in_type(mesh, spec))


def constrained(x: Any, mesh: MeshSpec, spec: Spec) -> Any:
    """`x` cut by `spec`, within a computation on that slice; only under trace.

    For explicit axes that is its type, for automatic ones a constraint.
    """
    sharding = sharding_in_type(mesh, spec)
    if sharding is not None:
        x = jax.sharding.reshard(x, sharding)
        if len(mesh.explicit) == len(mesh.axes):
            return x
        spec = chosen(spec, [name for name, _ in mesh.axes if name not in mesh.explicit])
    wanted = NamedSharding(specs.abstract_mesh(mesh), specs.to_partition_spec(spec))
    return jax.lax.with_sharding_constraint(x, wanted)


def entered(x: Any, mesh: MeshSpec) -> Any:
    """An argument of a function on that slice, as a value of a type on the slice; only under trace.

    If the slice has explicit axes, a value that comes from elsewhere is cut as before over those axes that have the
    same name and size in both places.
    """
    aval = jax.typeof(x) if _jaxlib.is_tracer(x) and not _jaxlib.is_traced_reference(x) else None
    held = getattr(getattr(aval, "sharding", None), "mesh", None)
    if aval is None or held is None or held is specs.abstract_mesh(mesh):
        return x
    if not mesh.explicit:  # an automatic axis takes a value however it is cut
        return transfer(x, mesh, None) if held.explicit_axes else x
    sizes = dict(mesh.axes)
    shared = [name for name in held.explicit_axes if sizes.get(name) == held.shape[name] and name in mesh.explicit]
    return transfer(x, mesh, chosen(entries_of(aval.sharding.spec, len(aval.shape)), shared))


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
            cut = {"mesh": mesh, "spec": spec, "sharding": sharding_in_type(mesh, spec)}
            params = {**cut, "uid": next(_uids), "back": False}
            out.append(eqn.replace(**ends, primitive=transfer_p, params=params))
    return out


def _lower(ctx: Any, x: Any, *, mesh: MeshSpec, spec: Spec | None, uid: int, back: bool, sharding: Any) -> Any:
    """Within one slice, where the compiler has let it be, a transfer is a sharding constraint."""
    del uid, sharding
    if not _jaxlib.is_lowering_for_slices():
        refuse_here()
    if back or spec is None:
        return [x]
    constrain = functools.partial(constrained, mesh=mesh, spec=spec)
    return mlir.lower_fun(constrain, multiple_results=False)(ctx, x)


def refuse_here() -> NoReturn:
    """Raises an error: JAX is about to lower a transfer for this process."""
    raise errors.TraceError(
        "a value is put to a slice inside a function that jax.jit (or scan, or the like) compiles for this process. "
        "Put it there outside (of a jnp function with device=, put the result), or make the whole a program: "
        "pw.program(...)"
    )


def _transpose(cotangent: Any, operand: Any, *, back: bool, sharding: Any, **params: Any) -> list[Any]:
    del sharding
    aval = operand.aval.to_ct_aval()  # the cotangent is cut as the value was
    if type(cotangent) is ad.Zero:
        return [ad.Zero(aval)]
    sharding = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return [transfer_p.bind(cotangent, back=not back, sharding=sharding, **params)]


def _batch(args: Any, dims: Any, *, spec: Spec | None, sharding: Any, **params: Any) -> tuple[Any, Any]:
    (x,), (dim,) = args, dims
    cut: tuple[str, ...] = ()  # how the new dimension is
    if sharding is not None:
        aval, sizes = jax.typeof(x), sharding.mesh.shape
        held = entries_of(aval.sharding.spec, len(aval.shape))[dim]
        is_shared = all(sizes.get(name) == aval.sharding.mesh.shape[name] for name in held)
        cut = held if is_shared and set(held) <= set(sharding.mesh.explicit_axes) else ()
        sharding = sharding.update(
            spec=sharding.spec.update(partitions=_insert(tuple(sharding.spec.partitions), dim, cut or None))
        )
    if spec is not None:
        spec = _insert(spec, dim, cut)
    return transfer_p.bind(x, spec=spec, sharding=sharding, **params), dim


def _insert(entries: tuple[Any, ...], dim: int, entry: Any) -> tuple[Any, ...]:
    entries = (*entries, *(None,) * (dim - len(entries)))
    return (*entries[:dim], entry, *entries[dim:])


transfer_p.def_impl(lambda x, **_: x)
transfer_p.def_abstract_eval(lambda x, *, sharding, **_: x.update(sharding=sharding))
ad.deflinear2(transfer_p, _transpose)
batching.primitive_batchers[transfer_p] = _batch
mlir.register_lowering(transfer_p, _lower)
