"""Every error that Pathways raises: one tree under `PathwaysError`; and every warning, under `PathwaysWarning`.

A message says what was expected, what came, and what to do. Where Python has a natural error of its own, ours
inherits from it as well, so that `except ValueError` written for plain JAX keeps working.

Raised by all rooms; imports nothing.
"""

from __future__ import annotations

from typing import NoReturn


class PathwaysError(Exception):
    """The root of the tree: catch this to catch everything Pathways raises on purpose."""


class ProgramError(PathwaysError, TypeError):
    """A program, or a call of one, is not what it should be: a result that is no array, a wrong shape or dtype."""


class TraceError(ProgramError):
    """The user's Python could not be traced into a program."""


class CallbackError(TraceError, NotImplementedError):
    """A callback of a kind that hosts cannot make; the message names it."""


class PlacementError(ProgramError, ValueError):
    """A value or function is placed on a slice that is unknown here, or that belongs to another cluster."""


class ShardingError(PathwaysError, ValueError):
    """A sharding does not fit its array or its mesh: a dimension that does not divide, an unknown axis."""


class SliceError(PathwaysError, ValueError):
    """A slice cannot be had: more devices than there are, a shape that fits no island."""


class OptionError(PathwaysError, ValueError):
    """A compiler option or a schedule that does not exist."""


class CompileError(PathwaysError, RuntimeError):
    """The compiler refused a program that passed every check of ours; carries its message."""


class PlanError(PathwaysError, ValueError):
    """A plan, or a logical program, is malformed."""


class ResourceExhaustedError(PathwaysError, MemoryError):
    """A run can never fit in memory; names the bytes wanted, the budget and the biggest holders."""


class ComputationError(PathwaysError, RuntimeError):
    """A computation failed on its devices; carries its name, host, device and XLA's own message."""


class CallbackFailedError(ComputationError):
    """A function that a computation calls in its client failed, or gave something else than it promised; names it."""


class DeletedArrayError(PathwaysError, RuntimeError):
    """An array was used after it was deleted or donated."""


class CancelledError(PathwaysError, RuntimeError):
    """A run was cancelled before it finished."""


class CheckpointError(PathwaysError, OSError):
    """A host could not write or read its part of a checkpoint; names the array, the path and the host."""


class DeadlineExceededError(PathwaysError, TimeoutError):
    """A run was not over when its deadline passed; names the program and the seconds."""


class HostLostError(PathwaysError, ConnectionError):
    """A host process is gone, and this depended on it. Its island is started anew: put what you need there again."""


class ControllerLostError(PathwaysError, ConnectionError):
    """The controller is gone: the cluster takes no more work."""


class ClusterClosedError(PathwaysError, RuntimeError):
    """The cluster was closed; connect again."""


class ConnectError(PathwaysError, ConnectionError):
    """Nobody answers at a cluster's address, or the cluster could not be started."""


class PermissionDeniedError(PathwaysError, PermissionError):
    """A call that is not this client's to make: it names another client, or something of another client's."""


class UnsupportedVersionError(PathwaysError, RuntimeError):
    """A jax or jaxlib that this release does not know, or client and hosts that differ."""


class PathwaysWarning(UserWarning):
    """The root of all warnings: filter this to silence everything that Pathways warns of."""


class FetchWarning(PathwaysWarning):
    """Arrays left their slice for a function that runs in this process; names the function and the bytes."""


def from_text(text: str, default: type[PathwaysError]) -> PathwaysError:
    """The exception that `text` names in front ("HostLostError: host 1 ..."), or one of kind `default`.

    Texts are what failures travel as through shared memory.
    """
    name, colon, rest = text.partition(": ")
    kind = globals().get(name)
    if colon and isinstance(kind, type) and issubclass(kind, PathwaysError):
        return kind(rest)
    return default(text or "no further word of it reached this process")


def raise_cluster_failure(text: str, was_closed: bool) -> NoReturn:
    """Raises the failure reason of a whole cluster."""
    if was_closed:
        raise ClusterClosedError(text)
    raise from_text(text, HostLostError)
