"""What a call takes and returns is taken apart and put together as JAX does it (`pathways._core.Tree`)."""

import collections
import dataclasses
import random
from typing import Any

import jax
import numpy as np
import pytest
from jax.tree_util import tree_flatten, tree_structure

from pathways import _core
from pathways.api.arrays.array import Array

Pair = collections.namedtuple("Pair", "first second")


class Named(dict[str, Any]):
    """A leaf to JAX."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    first: Any
    second: Any


def drawn(chance: random.Random, depth: int, rare: bool) -> Any:
    """A random tree whose leaves are NumPy arrays; `rare`: with containers that are not built in."""
    kind = chance.randrange(9 if rare else 5) if depth else 0
    if kind == 0:
        return None if chance.random() < 0.1 else np.zeros(chance.randrange(3))
    inner = [drawn(chance, depth - 1, rare) for _ in range(chance.randrange(4))]
    keys = chance.sample("abcdefgh", len(inner))
    match kind:
        case 1 | 2:
            return inner if kind == 1 else tuple(inner)
        case 3:
            return dict(zip(keys, inner, strict=True))
        case 4:
            return dict(zip(chance.sample(range(9), len(inner)), inner, strict=True))
        case 5:
            return collections.OrderedDict(zip(keys, inner, strict=True))
        case 6:
            return collections.defaultdict(list, zip(keys, inner, strict=True))
        case _:
            both = drawn(chance, depth - 1, rare), drawn(chance, depth - 1, rare)
            return Pair(*both) if kind == 7 else State(*both)


def same(value: Any, other: Any) -> bool:
    """The same containers with the same leaves, and dicts in the same order."""
    if type(value) is not type(other) or isinstance(value, np.ndarray):
        return value is other
    if isinstance(value, dict):
        return list(value) == list(other) and all(same(value[key], other[key]) for key in value)
    if isinstance(value, State):
        return same((value.first, value.second), (other.first, other.second))
    return value is other or (len(value) == len(other) and all(map(same, value, other)))


@pytest.mark.parametrize("rare", [False, True], ids=["built-in", "any"])
def test_as_jax_does_it(rare: bool) -> None:
    chance = random.Random(1)
    values = [((drawn(chance, 4, rare),), {"x": drawn(chance, 2, rare)}) for _ in range(120)]
    for value in values:
        leaves, structure = tree_flatten(value)
        tree = _core.Tree(structure, Array)
        found = tree.leaves(value)
        assert found is not None and len(found) == len(leaves) and all(map(lambda a, b: a is b, found, leaves))
        assert same(tree.fill(found), structure.unflatten(leaves))
        for other in values[:40]:
            is_like = tree_structure(other) == structure
            assert (tree.leaves(other) is not None) == is_like, (value, other)


x = np.zeros(2)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ([x, x], (x, x)),
        ([x, x], [x, x, x]),
        ([x], [None]),
        ([None], [x]),
        ({"a": x, "b": x}, {"a": x, "c": x}),
        ({"a": x}, {"a": x, "b": x}),
        ({"a": x}, collections.OrderedDict(a=x)),
        ((x, x), Pair(x, x)),
        ([x], [[x]]),
        ([[x]], [x]),
        ({"a": {}}, {"a": ()}),
    ],
)
def test_another_tree_is_refused(value: Any, other: Any) -> None:
    assert _core.Tree(tree_structure(value), Array).leaves(other) is None
    assert _core.Tree(tree_structure(value), Array).leaves(value) is not None


def test_a_leaf_of_any_type() -> None:
    tree = _core.Tree(tree_structure([0, {"a": 0}]), Array)
    for leaf in (1, 2.0, "s", jax.numpy.ones(2), object(), Named(b=x), np.float32(1)):
        assert tree.leaves([x, {"a": leaf}])[1] is leaf


def test_a_key_whose_comparison_changes_the_list() -> None:
    value: list[Any] = []

    class Key:
        def __hash__(self) -> int:
            return hash("a")

        def __eq__(self, other: object) -> bool:
            value.clear()
            return True

    tree = _core.Tree(tree_structure([{"a": 0}, 0, 0]), Array)
    value += [{Key(): x}, x, x]
    with pytest.raises(IndexError):
        tree.leaves(value)
