"""`pw.accumulate_gradients`: the gradients of a batch, microbatch by microbatch, added where they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pathways import errors
from pathways.api.pipelines.microbatches import add_up, check_reduce, checked_count, cut, scoped
from pathways.api.programs.program import Program
from pathways.api.programs.tracing import call_pipeline, is_tracing
from pathways.compiler.pipeline_spec import PipelineSpec
from pathways.compiler.placed import function_name


class AccumulatedGradients(Program[..., Any]):
    """A function whose gradients are accumulated over microbatches. Made by `accumulate_gradients`."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        super().__init__(loop.run, name=loop.name)
        self.__name__ = self.__qualname__ = loop.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a program's trace: the calls of each microbatch. Alone: one run of a program of its own."""
        return self._loop.run(*args, **kwargs) if is_tracing() else super().__call__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<pw.accumulate_gradients of {self._loop.name!r}>"


class _Loop:
    """What a call of accumulated gradients calls."""

    def __init__(
        self, loss: Callable[..., Any], spec: PipelineSpec, argnums: int | tuple[int, ...], has_aux: bool, reduce: str
    ) -> None:
        self._gradient = jax.value_and_grad(loss, argnums, has_aux)
        self._numbers = (argnums,) if isinstance(argnums, int) else argnums
        self._has_aux = has_aux
        self._reduce = reduce
        self._spec = spec
        self.name = spec.name

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The calls of all microbatches, and the sums of what they make."""
        what = f"accumulate_gradients of {self._spec.name!r}"
        whole = {n + len(args) if n < 0 else n for n in self._numbers}
        if missing := sorted(n for n in whole if not 0 <= n < len(args)):
            raise errors.ProgramError(
                f"argnums of {what}: expected numbers of its {len(args)} positional arguments, got {missing[0]}"
            )
        rest = {n: arg for n, arg in enumerate(args) if n not in whole}
        _, part_of = cut({f"argument {n}": arg for n, arg in rest.items()}, self._spec.microbatches, what)
        name = call_pipeline(self._spec)
        values, gradients, more = [], [], []
        for number in range(self._spec.microbatches):
            with scoped(name, number):
                part = part_of(number)
                mine = [arg if n in whole else part[f"argument {n}"] for n, arg in enumerate(args)]
                value, gradient = self._gradient(*mine, **kwargs)
            if self._has_aux:
                value, extra = value
                more.append(extra)
            values.append(value)
            gradients.append(gradient)
        total = add_up(values, self._reduce)
        aux = (total, jax.tree.map(lambda *leaves: jnp.stack(leaves), *more)) if self._has_aux else total
        return aux, add_up(gradients, self._reduce)


def accumulate_gradients(
    loss: Callable[..., Any],
    microbatches: int,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduce: str = "mean",
) -> AccumulatedGradients:
    """`jax.value_and_grad(loss)` over the microbatches of a batch: `(params, batch, ...) -> (loss, gradients)`.

    Positional arguments that are not in `argnums` are cut along the first dimension of their leaves, one part per
    microbatch. Those in `argnums` and keyword arguments are whole for every microbatch. Each gradient is added on the
    slice that makes it as soon as it exists. The order of the calls is the text's, one microbatch after the other,
    unless the program has a schedule.

    Args:
        loss: `loss(params, batch, ...)` over placed functions; returns a scalar, with `has_aux` (scalar, more).
        microbatches: into how many equal parts the batch is cut.
        argnums: as in `jax.value_and_grad`.
        has_aux: the result is then ((loss, more), gradients); the leaves of `more` are stacked, with a first dimension
            of `microbatches`.
        reduce: "mean" or "sum" over the microbatches, of the loss and of the gradients.

    Raises:
        ProgramError: an argument is not as described; when called, also a batch that does not divide. It names the
            argument.
    """
    if not callable(loss):
        raise errors.ProgramError(
            f"loss of accumulate_gradients: expected a function, got {loss!r} of type {type(loss).__name__}"
        )
    name = function_name(loss)
    what = f"accumulate_gradients of {name!r}"
    microbatches = checked_count(microbatches, what)
    check_reduce(reduce, what)
    numbers = argnums if isinstance(argnums, int) else tuple(argnums)
    if isinstance(argnums, bool) or numbers == () or not all(isinstance(n, int) for n in _each(numbers)):
        raise errors.ProgramError(f"argnums of {what}: expected an integer, or some, got {argnums!r}")
    return AccumulatedGradients(_Loop(loss, PipelineSpec(name, None, microbatches), numbers, bool(has_aux), reduce))


def _each(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else numbers
