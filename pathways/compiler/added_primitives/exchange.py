"""Rows that go to shards chosen at run time: two primitives, each with a derivative made of the second.

- `exchange_p` sends row i of `values` to the shard `destinations[i]` of a slice. Of the rows that go to a shard, in
  their order, number k gets slot k of the shard's `capacity` slots. In the result, row i is at `shard * capacity + k`.
- `permute_p` sends rows along known routes: `out[to[i]] = x[i]` for `to[i] >= 0`, and zero elsewhere. `origins` is the
  inverse: `origins[to[i]] == i`, and -1 where no row comes. `to` lives beside `x`, and `origins` beside the result. The
  transpose has the two swapped.

The tangent of the rows of an exchange is a permute of the tangent, and a permute is linear. So JAX differentiates both
any number of times. `flatten` reads them; `control.exchanging` puts them into a program.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from pathways import _jaxlib, errors
from pathways.compiler.ir import MeshSpec

exchange_p = jex.core.Primitive("pathways_exchange")
exchange_p.multiple_results = True
permute_p = jex.core.Primitive("pathways_permute")
PRIMITIVES = (exchange_p, permute_p)

_MOST = np.iinfo(np.int32).max


class Exchanged(NamedTuple):
    """What an exchange gives. T shards of C slots each, for n rows of values.

    rows:     like the values, with T * C rows, on the target slice; zero in slots without a row.
    numbers:  int32[T * C], beside the rows: for each slot the number of its row in the values; -1: none.
    count:    int32[T], on the target slice: how many rows each shard has.
    offered:  int32[T], beside it: how many rows were sent to each shard; more than `count` if some were dropped.
    slots:    int32[n], beside the values: for each row its slot, shard * C + place; -1: it was dropped, or not sent.
    """

    rows: Any
    numbers: Any
    count: Any
    offered: Any
    slots: Any

    def back(self, results: Any) -> Any:
        """Sends results of the slots back to where their rows came from.

        results: a pytree of arrays with T * C rows. Returns arrays with n rows, which live where the values do; zero
        for rows that have no slot. Differentiable.
        """
        rows = self.numbers.shape[0]
        return _each(results, rows, "results", "slots", lambda x: _permute(x, self.numbers, self.slots))


def exchange(
    values: Any,
    destinations: Any,
    mesh: MeshSpec,
    capacity: int,
    overflow: Literal["error", "drop"] = "error",
    unsent: int | None = None,
) -> Exchanged:
    """Under trace: sends each row of `values`, a pytree of arrays with n rows, to the shard of `mesh` that
    `destinations`, int32[n], names.

    `capacity`: rows that a shard has room for. `overflow`: what happens to more: "error" fails the run, "drop" leaves
    them where they are. `unsent`: the destination of rows that go nowhere. A run fails if a destination is neither a
    shard nor `unsent`.

    Raises:
        ProgramError: arguments of another kind.
    """
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise errors.ProgramError(f"capacity of pw.exchange is {capacity!r}; expected an int of at least 1")
    if mesh.size * capacity > _MOST:
        raise errors.ProgramError(
            f"pw.exchange to {mesh.size} shards with a capacity of {capacity} rows has more than {_MOST} slots; give a "
            "smaller capacity"
        )
    if overflow not in ("error", "drop"):
        raise errors.ProgramError(f'overflow of pw.exchange is {overflow!r}; expected "error" or "drop"')
    if unsent is not None and (not isinstance(unsent, int) or isinstance(unsent, bool) or abs(unsent) > _MOST):
        raise errors.ProgramError(f"unsent of pw.exchange is {unsent!r}; expected an int of 32 bits, or None")
    destinations = _array(destinations, "destinations")
    if destinations.ndim != 1 or destinations.dtype != np.int32:
        raise errors.ProgramError(
            f"destinations of pw.exchange are {destinations.dtype}{list(destinations.shape)}; expected int32[rows], "
            "the number of a shard for each row (.astype(jnp.int32))"
        )
    first: list[Exchanged] = []

    def send(x: Any) -> Any:
        if first:  # further arrays go along the routes of the first
            return _permute(x, first[0].slots, first[0].numbers)
        drops = overflow == "drop"
        results = exchange_p.bind(x, destinations, mesh=mesh, capacity=capacity, drops=drops, unsent=unsent)
        first.append(Exchanged(*results))
        return first[0].rows

    rows = _each(values, destinations.shape[0], "values", "destinations", send)
    if not first:
        raise errors.ProgramError("values of pw.exchange have no array; expected at least one")
    return first[0]._replace(rows=rows)


def _array(x: Any, what: str) -> Any:
    if not (_jaxlib.is_tracer(x) or _jaxlib.valid_jaxtype(x)):
        raise errors.ProgramError(f"{what} of pw.exchange is {x!r:.100} of type {type(x).__name__}; expected an array")
    return x if _jaxlib.is_tracer(x) else jnp.asarray(x)


def _each(tree: Any, rows: int, what: str, per: str, send: Any) -> Any:
    """A pytree of arrays with `rows` rows, each sent; `per` names what there are as many of."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    out = []
    for path, leaf in leaves:
        name = f"{what}{jax.tree_util.keystr(path)}"
        x = _array(leaf, name)
        if not isinstance(x.dtype, np.dtype):
            raise errors.ProgramError(
                f"{name} of pw.exchange has type {x.dtype}; expected numbers: send jax.random.key_data(keys), and make "
                "keys of the rows with jax.random.wrap_key_data"
            )
        if x.ndim == 0 or x.shape[0] != rows:
            raise errors.ProgramError(
                f"{name} of pw.exchange has shape {x.shape}; expected {rows} rows, as there are {rows} {per}"
            )
        out.append(send(x))
    return jax.tree_util.tree_unflatten(treedef, out)


def _permute(x: Any, to: Any, origins: Any) -> Any:
    return permute_p.bind(x, to, origins)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise errors.TraceError(
        "pw.exchange is called outside of a program, or inside a function that jax.jit, a placed function or the like "
        "compiles. Call it in the program itself: pw.program(...). A transformation belongs in there, too: "
        "pw.program(jax.grad(f)) instead of jax.grad(pw.program(f))"
    )


def _refuse_batch(*_: Any, **__: Any) -> NoReturn:
    raise errors.TraceError(
        "jax.vmap batches a pw.exchange; expected one set of rows. Put the batch into the dimensions behind the rows, "
        "or call it once per element"
    )


def _exchange_types(values: Any, destinations: Any, *, mesh: MeshSpec, capacity: int, **_: Any) -> list[Any]:
    slots, rest = mesh.size * capacity, tuple(values.shape[1:])
    return [
        _jaxlib.shaped_array((slots, *rest), values.dtype, False),
        _jaxlib.shaped_array((slots,), np.dtype(np.int32), False),
        _jaxlib.shaped_array((mesh.size,), np.dtype(np.int32), False),
        _jaxlib.shaped_array((mesh.size,), np.dtype(np.int32), False),
        _jaxlib.shaped_array(tuple(destinations.shape), np.dtype(np.int32), False),
    ]


def _exchange_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    results = Exchanged(*exchange_p.bind(*primals, **params))
    derivatives = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if type(tangents[0]) is not ad.Zero:
        derivatives[0] = _permute(tangents[0], results.slots, results.numbers)
    return list(results), derivatives


def _permute_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, to, origins = primals
    result = permute_p.bind(*primals)
    if type(tangents[0]) is ad.Zero:
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, _permute(tangents[0], to, origins)


def _permute_transpose(cotangent: Any, x: Any, to: Any, origins: Any) -> list[Any]:
    del x
    return [None if type(cotangent) is ad.Zero else _permute(cotangent, origins, to), None, None]


exchange_p.def_impl(_refuse)
exchange_p.def_abstract_eval(_exchange_types)
ad.primitive_jvps[exchange_p] = _exchange_jvp
permute_p.def_impl(_refuse)
permute_p.def_abstract_eval(
    lambda x, to, origins: _jaxlib.shaped_array((origins.shape[0], *x.shape[1:]), x.dtype, False)
)
ad.primitive_jvps[permute_p] = _permute_jvp
ad.primitive_transposes[permute_p] = _permute_transpose
for _primitive in PRIMITIVES:
    batching.primitive_batchers[_primitive] = _refuse_batch
    mlir.register_lowering(_primitive, _refuse)
