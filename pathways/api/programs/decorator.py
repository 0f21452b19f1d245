"""`pw.program`: makes a `Program` of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from pathways.api.programs.program import P, Program, R


@overload
def program(
    fun: Callable[P, R],
    *,
    name: str | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Program[P, R]: ...
@overload
def program(
    fun: None = None,
    *,
    name: str | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], Program[P, R]]: ...
def program(
    fun: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Traces calls of placed functions into one program; use it as a decorator, with or without arguments.

    Differentiation and batching go inside: `pw.program(jax.value_and_grad(loss))`.

    Args:
        fun: Python over placed functions (`pw.jit`), `pw.device_put` and JAX.
        name: shown in plans and errors.
        static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.
        **options: see `pathways.compiler.options.Options`: `schedule` (a name in `BUILT` there), `lengths` (of a
            pipeline's steps, as `schedule_plot` takes them), `merge`, `unroll` (up to how many iterations a loop with
            placed calls inside is unrolled; 16), `parallel_iterations` (of any other loop, in flight; 10 or 64),
            `offload` (what a run keeps for later leaves the devices: "auto": if they have too little memory; "none":
            never; or above a number of bytes of each device).

    Returns:
        A `Program`: a callable of the same signature whose results are `pw.Array`s, with `.lower(*args)`.

    Raises:
        ProgramError: `fun` is no function, or has no such argument; when called, also for a result that is no array.
        OptionError: an option that does not exist, or a value that it does not take.
        TraceError, EffectError: when called, if `fun` cannot be traced, or has an effect that hosts do not run.
        ScheduleError, ShardingError: when called, for a schedule or a sharding that does not fit.
        ComputationError, ResourceExhaustedError, HostLostError: at the results of a run that failed or found no room.
    """
    make = functools.partial(
        Program,
        name=name,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        options=options,
    )
    return make if fun is None else make(fun)
