"""`pw.while_loop`: a loop that the data ends, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pathways import errors
from pathways.compiler.added_primitives.loop_rules import while_loop as traced_loop

__all__ = ["LoopStatus", "while_loop"]


class LoopStatus(NamedTuple):
    """How a loop ended: two scalars, beside what its test reads.

    iterations: int32, how many there were.
    is_complete: bool; False: `max_iterations` ended the loop, and its test would have gone on.
    """

    iterations: Any
    is_complete: Any


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_iterations: int | None = None,
    save_every: int = 1,
    overflow: Literal["nan", "stop"] = "nan",
    return_status: bool = False,
) -> Any:
    """`jax.lax.while_loop`, also in reverse mode: `jax.grad` needs `max_iterations`, and no other change.

    As there, any pytree is carried; `cond_fun` and `body_fun` may close over arrays and call placed functions of
    several slices. Derivatives are those of the iterations that there were, with respect to `init_val` and to all that
    the two functions close over. They have any order, in forward and in reverse mode. With zero iterations the gradient
    is the identity for what is carried, and zero for the rest. Inside a program and outside, under `jax.jit`,
    `jax.vmap` and `jax.checkpoint`, and in other loops and branches.

        def newton(x, a):                                    # the square root of `a`
            far = lambda x: jnp.abs(x * x - a) > 1e-6
            return pw.while_loop(far, lambda x: (x + a / x) / 2, x, max_iterations=30)

        jax.grad(newton, 1)(1.0, 2.0)                        # 1 / (2 sqrt(2))

    A loop that is not differentiated saves nothing. One that is reserves `max_iterations` rows for each carried array
    that the derivative of the body reads, on the array's slice. The backward pass has as many iterations as there were.
    Each computes the body once more, and its derivative. Sent are what the body sends, cotangents, and scalars.
    `save_every=k` saves one in k iterations, and the k between while it goes back: `max_iterations / k + k` rows, for
    one more computation of the body. Without `max_iterations` the loop has forward mode only, which then saves nothing.

    The method is that of `jax.lax.scan`, with recomputation (Griewank, 1992, doi:10.1080/10556789208805505) and a count
    that is data.

    Args:
        cond_fun: from the carry to a boolean scalar: whether there is another iteration.
        body_fun: from the carry to the next one, of the same tree, shapes and dtypes.
        init_val: the first carry.
        max_iterations: the largest number of iterations; at least 1.
        save_every: see above; at least 1.
        overflow: what happens if the loop wants more iterations than `max_iterations`. It ends there in any case. "nan"
            makes all floating arrays of the result NaN, and so their gradients. "stop" gives the last carry.
        return_status: also return a `LoopStatus`: (last carry, status).

    Returns:
        The last carry, in the tree of `init_val`.

    Raises:
        ProgramError: an option is not as described; nothing that is carried can be NaN, and neither `overflow="stop"`
            nor a status is asked for; reverse mode without `max_iterations`.
        TypeError: JAX's own, for a test or a body that does not fit.
    """
    if max_iterations is not None:
        max_iterations = _checked("max_iterations", max_iterations, ", or None")
    save_every = _checked("save_every", save_every)
    if overflow not in ("nan", "stop"):
        raise errors.ProgramError(f'overflow of pw.while_loop is {overflow!r}; expected "nan" or "stop"')
    if max_iterations is None and save_every != 1:
        raise errors.ProgramError(
            f"pw.while_loop has save_every={save_every} and no max_iterations; without it nothing is saved"
        )
    count, more, carry = traced_loop(cond_fun, body_fun, init_val, max_iterations, save_every)
    if max_iterations is not None and overflow == "nan":
        real = [jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact) for leaf in jax.tree.leaves(carry)]
        if not any(real) and not return_status:
            raise errors.ProgramError(
                "pw.while_loop carries no floating array, so it cannot say by NaN that it wanted more than "
                f'{max_iterations} iterations; give return_status=True, which says it, or overflow="stop"'
            )
        carry = jax.tree.map(lambda x, is_real: _nan_if(x, more) if is_real else x, carry, _like(carry, real))
    return (carry, LoopStatus(count, jnp.logical_not(more))) if return_status else carry


def _like(tree: Any, leaves: list[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _nan_if(x: Any, is_bad: Any) -> Any:
    """A product, so that the gradient is NaN, too. Its factor is weakly typed, so `x` keeps its type."""
    factor = jnp.where(is_bad, jnp.nan, 1.0)
    if not jnp.iscomplexobj(x):
        return x * factor
    return jax.lax.complex(jnp.real(x) * factor, jnp.imag(x) * factor)  # x * factor is NaN where one part is infinite


def _checked(name: str, value: Any, other: str = "") -> int:
    """`other`: what may be given instead of a number."""
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_number or value < 1 or value >= 1 << 31:
        raise errors.ProgramError(
            f"{name} of pw.while_loop is {value!r:.100} of type {type(value).__name__}; expected an int of at least 1"
            f"{other}, that does not depend on traced values"
        )
    return int(value)
