"""The leaves of a user's pytree with their paths, as rules of `pw.place` see them. Pure; for `place` and pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways import errors

#: The classes of flax that hold one array in a tree, by name: flax itself is not imported.
_BOXES = {"AxisMetadata", "Variable"}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf, and the keys that lead to it."""

    keys: tuple[str, ...]
    value: Any

    @property
    def path(self) -> str:
        """The keys, joined by "/"."""
        return "/".join(self.keys)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an array or a number."""
        return tuple(np.shape(self.value))


def leaves_of(tree: Any, what: str) -> tuple[list[Leaf], Callable[[Sequence[Any]], Any]]:
    """The leaves of a tree in the order of JAX, and a function that makes the same tree of other leaves.

    A box of flax (`nn.Partitioned`, `nnx.Variable` and their kin) adds no key to the path of its array.

    Raises:
        ProgramError: a leaf is neither an array nor a number, nor one of those that `is_kept`; names its path.
    """
    leaves: list[Leaf] = []
    outer, outer_tree = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)
    inner_trees = []
    for path, node in outer:
        inner, inner_tree = jax.tree_util.tree_flatten_with_path(node)
        inner_trees.append(inner_tree)
        for rest, value in inner:
            whole = path if len(inner) == 1 and _is_box(node) else (*path, *rest)
            leaf = Leaf(tuple(jax.tree_util.keystr((key,), simple=True) for key in whole), value)
            _check(leaf, what)
            leaves.append(leaf)

    def rebuild(values: Sequence[Any]) -> Any:
        rest = iter(values)
        return outer_tree.unflatten(
            each.unflatten([next(rest) for _ in range(each.num_leaves)]) for each in inner_trees
        )

    return leaves, rebuild


def is_kept(value: Any) -> bool:
    """Whether a leaf stays as it is: a function or a string, which modules of the kind of equinox have among them."""
    return isinstance(value, str | bytes) or (callable(value) and not hasattr(value, "dtype"))


def _is_box(node: Any) -> bool:
    return any(c.__name__ in _BOXES and c.__module__.startswith("flax.") for c in type(node).__mro__)


def _check(leaf: Leaf, what: str) -> None:
    value = leaf.value
    if isinstance(value, bool | int | float | complex) or hasattr(value, "dtype") or is_kept(value):
        return
    hint = (
        "; make it a pytree: jax.tree_util.register_dataclass" if dataclasses.is_dataclass(value) else "; take it out"
    )
    raise errors.ProgramError(
        f"leaf {leaf.path!r} of {what}: expected an array or a number, got an object of type "
        f"{type(value).__name__}{hint}"
    )
