"""What `pw.pipeline` and `pw.accumulate_gradients` share: cut a batch, open the scopes of microbatches, add results."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathways import _jaxlib, errors
from pathways.compiler.pipeline_spec import scope_name


def scoped(pipeline: str, microbatch: int | None, stage: int | None = None) -> Any:
    """The scope of a microbatch, or of a stage in it or in any microbatch; a context manager."""
    return jax.named_scope(scope_name(pipeline, microbatch, stage))


def checked_count(microbatches: Any, what: str) -> int:
    """The number of microbatches. Refused if it is no integer of at least 1."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int | np.integer) or microbatches < 1:
        raise errors.ProgramError(f"microbatches of {what}: expected an integer of at least 1, got {microbatches!r}")
    return int(microbatches)


def check_reduce(reduce: Any, what: str) -> None:
    """Refuses a way to reduce that is not known."""
    if reduce not in ("mean", "sum"):
        raise errors.ProgramError(f'reduce of {what}: expected "mean" or "sum", got {reduce!r}')


def cut(given: dict[str, Any], microbatches: int, what: str) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """Cuts the leaves of named arguments along their first dimension.

    Returns:
        How many examples a microbatch has, and a function that gives the part of a microbatch.

    Raises:
        ProgramError: a leaf has no first dimension, one that does not divide, or another one than the other leaves.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(given)
    first: tuple[str, int] | None = None
    for path, leaf in leaves:
        where = str(path[0].key) + jax.tree_util.keystr(path[1:])
        shape = jnp.shape(leaf)
        if not shape:
            raise errors.ProgramError(
                f"{where} of {what}: expected an array with the batch as its first dimension, got a scalar"
            )
        if shape[0] == 0 or shape[0] % microbatches:
            raise errors.ProgramError(
                f"{where} of {what}: expected a first dimension that divides into {microbatches} microbatches, got "
                f"shape {shape}"
            )
        first = first or (where, shape[0])
        if shape[0] != first[1]:
            raise errors.ProgramError(
                f"{where} of {what}: expected {first[1]} examples in its first dimension, as in {first[0]}, got shape "
                f"{shape}"
            )
    if first is None:
        which = " and ".join(given) or "arguments to cut"
        raise errors.ProgramError(f"{which} of {what}: expected at least one array, got none")
    size = first[1] // microbatches
    # One operation makes all parts of an array: an operation per part would be a computation of its own to compile.
    parts = [jnp.split(leaf, microbatches) if _jaxlib.is_tracer(leaf) else None for _, leaf in leaves]

    def part(number: int) -> dict[str, Any]:
        rows = slice(number * size, (number + 1) * size)
        found = (leaf[rows] if each is None else each[number] for (_, leaf), each in zip(leaves, parts, strict=True))
        return dict(tree.unflatten(found))

    return size, part


def add_up(values: Sequence[Any], reduce: str) -> Any:
    """The sum of pytrees, or their mean. All are of one structure."""
    total = functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), values)
    return jax.tree.map(lambda x: x / len(values), total) if reduce == "mean" else total
