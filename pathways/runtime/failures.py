"""From the text of a failure, as it travels through shared memory, back to the exception a user catches."""

from __future__ import annotations

from typing import NoReturn

from pathways import errors

_KINDS: dict[str, type[errors.PathwaysError]] = {
    kind.__name__: kind
    for kind in (errors.HostLostError, errors.ControllerLostError, errors.ClusterClosedError, errors.ComputationError,
                 errors.CancelledError, errors.ResourceExhaustedError, errors.DeletedArrayError, errors.PlanError)
}


def to_error(text: str, default: type[errors.PathwaysError]) -> errors.PathwaysError:
    """The exception that `text` names in front ("HostLostError: host 1 ..."), or one of kind `default`."""
    name, colon, rest = text.partition(": ")
    kind = _KINDS.get(name)
    if kind is not None and colon:
        return kind(rest)
    return default(text or "no further word of it reached this process")


def raise_cluster_failure(text: str, was_closed: bool) -> NoReturn:
    """Raises what befell the whole cluster."""
    if was_closed:
        raise errors.ClusterClosedError(text)
    raise to_error(text, errors.HostLostError)
