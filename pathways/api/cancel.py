"""`pw.cancel`: drops runs that nobody needs any more."""

from __future__ import annotations

from typing import Any

from jax.tree_util import tree_leaves

from pathways import errors
from pathways.api.arrays.array import Array


def cancel(arrays: Any, reason: str = "its client cancelled it") -> None:
    """Cancels the runs that make `arrays`; arrays that are there already stay as they are.

    A pending array fails at once: whoever waits for it gets a `CancelledError`. Its run is dropped, with all its other
    results, unless it was granted to its hosts already; then it goes on to its end, on all of them (GANG-1), and its
    other results come as usual. What depends on a dropped run fails.

    Args:
        arrays: a `pw.Array` or a pytree of them.
        reason: stands in the error.

    Raises:
        ProgramError: a leaf is no `pw.Array`.
        ClusterClosedError, HostLostError, ControllerLostError: the cluster is gone.
    """
    runs: dict[Any, list[Array]] = {}
    for number, leaf in enumerate(tree_leaves(arrays)):
        if not isinstance(leaf, Array):
            raise errors.ProgramError(
                f"pw.cancel expects pw.Arrays; leaf {number} is {leaf!r} of type {type(leaf).__name__}"
            )
        if leaf.run and not leaf.is_deleted():
            runs.setdefault((id(leaf.client), leaf.run), []).append(leaf)
    for (_, run), results in runs.items():
        client = results[0].client
        client.check_alive()
        client.cancel(run, results, f"CancelledError: the run was cancelled: {reason}")
