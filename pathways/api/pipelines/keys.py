"""Random keys of a pipeline: one for each microbatch and stage, derived from one key by numbers alone.

So they depend neither on the schedule nor on the slices. `Pipeline.__call__` states the rule to users.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pathways import errors
from pathways.api.programs.placed import PlacedFunction, jit
from pathways.api.programs.tracing import is_tracing

#: The parameter by which a stage or a loss asks for its key.
PARAMETER = "key"


def takes_key(function: Callable[..., Any] | None) -> tuple[bool, bool]:
    """Whether a stage or a loss has a parameter `key`, and whether it needs it: it has no default."""
    try:
        parameter = None if function is None else inspect.signature(function).parameters.get(PARAMETER)
    except (ValueError, TypeError):
        parameter = None
    if parameter is None or parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        return False, False
    return True, parameter.default is parameter.empty


def keys_of(functions: Sequence[Callable[..., Any] | None], key: Any, microbatches: int, what: str) -> list[list[Any]]:
    """By microbatch and function (the stages, and the loss last): its key, or None if it gets none.

    Raises:
        ProgramError: what is given is no key, nobody takes one, or somebody needs one and none is given.
    """
    takes = [takes_key(function) for function in functions]
    if key is None:
        needs = next((number for number, (_, needed) in enumerate(takes) if needed), None)
        if needs is not None:
            who = f"stages[{needs}]" if needs < len(functions) - 1 else "the loss"
            raise errors.ProgramError(
                f"{who} of {what} has a parameter `key`; call the model with key=, such as jax.random.key(0)"
            )
        return [[None] * len(functions)] * microbatches
    _check(key, what)
    if not any(taken for taken, _ in takes):
        raise errors.ProgramError(
            f"{what} got key=, but neither a stage nor the loss has a parameter `key`, as in stage(params, x, key)"
        )
    columns = [
        _of_function(function, key, number, microbatches) if taken else [None] * microbatches
        for number, (function, (taken, _)) in enumerate(zip(functions, takes, strict=True))
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _of_function(function: Any, key: Any, number: int, microbatches: int) -> Sequence[Any]:
    """The keys of all microbatches. The slice of a stage makes them in one computation, so one key goes to each slice.

    A loop compiles in a fifth of the time of as many calls, and gives the same keys with every implementation;
    `jax.vmap` does not with "unsafe_rbg".
    """

    def make(key: Any) -> tuple[Any, ...]:
        made = jax.lax.map(
            lambda microbatch: jax.random.fold_in(jax.random.fold_in(key, microbatch), number),
            jnp.arange(microbatches, dtype=jnp.uint32),
        )
        return tuple(made[microbatch] for microbatch in range(microbatches))

    if isinstance(function, PlacedFunction) and is_tracing():
        return jit(make, devices=function.slice, name="keys")(key)
    return make(key)


def given(key: Any) -> dict[str, Any]:
    """The keyword argument with a key; none for None."""
    return {} if key is None else {PARAMETER: key}


def _check(key: Any, what: str) -> None:
    dtype = getattr(key, "dtype", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_raw = dtype == jnp.uint32 and jnp.ndim(key) == 1
    if not (is_new and jnp.ndim(key) == 0) and not is_raw:
        got = repr(key) if dtype is None else f"{dtype}{list(jnp.shape(key))}"
        raise errors.ProgramError(f"key of {what}: expected one key, such as jax.random.key(0), got {got}")
