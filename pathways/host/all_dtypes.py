"""A host runs its Python code with JAX's 64-bit types on. The mode is per thread, so each entry into JAX sets it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def all_dtypes(function: F) -> F:
    """Runs `function` with 64-bit types on: the client's x64 mode has already decided the types of a program."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
