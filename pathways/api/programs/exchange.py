"""`pw.exchange`: rows that go to shards chosen at run time."""

from __future__ import annotations

from typing import Any, Literal

from pathways import errors
from pathways.api.programs.tracing import remember
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.added_primitives.exchange import Exchanged
from pathways.compiler.added_primitives.exchange import exchange as traced_exchange

__all__ = ["Exchanged", "exchange"]


def exchange(
    values: Any,
    destinations: Any,
    *,
    to: Slice,
    capacity: int,
    overflow: Literal["error", "drop"] = "error",
    unsent: int | None = None,
) -> Exchanged:
    """Inside a program: sends each row to the shard of a slice that the program chooses for it.

    A slice of T devices has T shards. Of the rows that go to a shard, in their order, number k gets slot k of the
    shard. Only rows that are sent move; a host that has sent and received what concerns it goes on. Differentiable in
    `values`, any number of times.

        sent = pw.exchange(tokens, expert_of_token, to=experts, capacity=64, overflow="drop")
        results = sent.back(run_experts(sent.rows, sent.count))    # beside `tokens`; zero for dropped rows

    Args:
        values: arrays of n rows each, `[n, ...]`, on one slice, in any pytree. n must be a multiple of the slice's
            devices; the rows are cut over them.
        destinations: `int32[n]`: the number of a shard for each row, from 0 to T - 1, or `unsent`.
        to: the slice that the rows go to. It may be the one where they are.
        capacity: how many rows a shard has room for. This memory is reserved, whatever is sent.
        overflow: what happens to rows beyond the capacity: "error" fails the run; "drop" leaves them where they are,
            and their `slots` are -1.
        unsent: the destination of rows that go nowhere.

    Returns:
        `Exchanged`: a named tuple of `rows` `[T * capacity, ...]`, in the tree of `values`; `numbers`, `count`,
        `offered` and `slots`; and a method `back(results)`.

    Raises:
        ProgramError: an argument is of another kind, with what was expected and what came.
        TraceError: it is called outside of a program, or in a placed function.
        ComputationError: at the results, if a destination is no shard, or more rows go to a shard than it has room for.
    """
    if not isinstance(to, Slice):
        raise errors.ProgramError(f"to of pw.exchange is {to!r:.100} of type {type(to).__name__}; expected a slice")
    remember(to)
    return traced_exchange(values, destinations, to.mesh_spec, capacity, overflow, unsent)
