"""A call's arguments as its signature: static ones apart, the others by shape, dtype and where they are."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.tree_util import tree_unflatten

from pathways import errors
from pathways.api.arrays.array import Array
from pathways.api.session import Session
from pathways.compiler.placed import parameter_names
from pathways.compiler.trace import Argument, as_argument

#: Static arguments of these types are known by type and value; those of others take the long way, which compares them.
_PLAIN = frozenset({int, bool, str, bytes, type(None), types.FunctionType})


def static_key(
    args: tuple[Any, ...], kwargs: dict[str, Any], positions: tuple[int, ...], names: tuple[str, ...]
) -> Hashable:
    """A key of a call's static arguments; None: the long way compares them."""
    values = [args[n] for n in positions]
    values += [kwargs[name] for name in names]
    kinds = tuple([type(value) for value in values])
    return (kinds, tuple(values)) if _PLAIN.issuperset(kinds) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A call's arguments, static ones apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    tree: Any
    constants: Hashable
    dynamic: tuple[int, ...]


class LeafName:
    """The name of one leaf of a call in messages, by its path as JAX writes it: worked out when it is read."""

    def __init__(self, fun: Callable[..., Any], name: str, split: Split, number: int) -> None:
        self._fun, self._name, self._split, self._number = fun, name, split, number

    def __str__(self) -> str:
        split = self._split
        path = jax.tree_util.tree_flatten_with_path(tree_unflatten(split.tree, split.leaves))[0][self._number][0]
        if path[0].idx:
            where = path[1].key + jax.tree_util.keystr(path[2:])
        else:
            number = split.dynamic[path[1].idx]
            where = parameter_names(self._fun, len(split.args))[number] + jax.tree_util.keystr(path[2:])
        return f"argument {where} of {self._name!r}"


def abstractify(leaf: Any, what: object, cluster: Session | None) -> Argument:
    """The `Argument` of one leaf of a call."""
    if isinstance(leaf, Array):
        layout = leaf.layout
        if layout.slice.cluster is not cluster:
            raise errors.PlacementError(
                f"{what} lives on {layout.slice!r}, which belongs to another cluster: "
                f"{layout.slice.cluster!r}; the program runs on {cluster!r}"
            )
        return argument_of(leaf)
    return as_argument(leaf, what)


def argument_of(array: Array) -> Argument:
    """What a `pw.Array` is to a program that takes it."""
    layout = array.layout
    return Argument(
        layout.shape, layout.dtype, layout.weak_type, layout.slice.mesh_spec, layout.spec[: len(layout.shape)]
    )
