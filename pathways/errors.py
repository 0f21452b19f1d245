"""Every error that Pathways raises, in one tree under `PathwaysError`; and every warning, under `PathwaysWarning`.

A message says what was expected, what was given, and what to do. Where Python has a fitting error class, ours inherits
from it as well, so that `except ValueError` written for plain JAX still works.

All packages raise these errors. This module imports none of them.
"""

from __future__ import annotations

from typing import NoReturn


class PathwaysError(Exception):
    """The root of the tree: catch this to catch every error that Pathways raises on purpose."""


class ProgramError(PathwaysError, TypeError):
    """A program, or a call of one, is invalid: a result that is no array, a wrong shape or dtype."""


class TraceError(ProgramError):
    """The user's Python could not be traced into a program."""


class CallbackError(TraceError, NotImplementedError):
    """A program has a kind of callback that hosts cannot make; the message names it."""


class EffectError(TraceError, NotImplementedError, ValueError):
    """A program has an effect that hosts do not run, or uses a reference (`jax.new_ref`) as nobody may; the message
    names it.
    """


class ScheduleError(ProgramError):
    """A program cannot follow the pipeline schedule that it asks for; the message says why."""


class PlacementError(ProgramError, ValueError):
    """A value or function is placed on a slice that is unknown here, or that belongs to another cluster."""


class ShardingError(PathwaysError, ValueError):
    """A sharding does not fit its array or its mesh: a dimension that does not divide, an unknown axis."""


class SliceError(PathwaysError, ValueError):
    """A slice cannot be allocated: it has more devices than exist, or a shape that fits no island."""


class SliceResizedError(SliceError):
    """What was compiled or lowered for a slice is used after the slice has got another shape."""


class OptionError(PathwaysError, ValueError):
    """A compiler option or a schedule does not exist."""


class CompileError(PathwaysError, RuntimeError):
    """The compiler refused a program that passed every check of Pathways; contains the compiler's message."""


class PlanError(PathwaysError, ValueError):
    """A plan, or a logical program, is malformed."""


class ResourceExhaustedError(PathwaysError, MemoryError):
    """A run can never fit in memory; the message names the bytes wanted, the budget and the biggest holders."""


class ComputationError(PathwaysError, RuntimeError):
    """A computation failed on its devices; the message has its name, host, device and XLA's own message."""


class CallbackFailedError(ComputationError):
    """A function that a computation calls in its client failed, or broke its declared types; the message names it."""


class DeletedArrayError(PathwaysError, RuntimeError):
    """An array was used after it was deleted or donated."""


class TransferGuardError(PathwaysError, RuntimeError):
    """A `jax.transfer_guard` does not allow a transfer between this process and a slice."""


class CancelledError(PathwaysError, RuntimeError):
    """A run was cancelled before it finished."""


class CheckpointError(PathwaysError, OSError):
    """A host could not write or read its part of a checkpoint; the message names the array, the path and the host."""


class TraceFileError(PathwaysError, OSError):
    """A trace could not be begun, or its file could not be written; the message names the file or the reason."""


class DeadlineExceededError(PathwaysError, TimeoutError):
    """A run was not over when its deadline passed; the message names the program and the seconds."""


class HostLostError(PathwaysError, ConnectionError):
    """A host process is gone, and the value depended on it. Its island starts again: put the data that you need there
    again.
    """


class ControllerLostError(PathwaysError, ConnectionError):
    """The controller is gone: the cluster takes no more work."""


class ClusterClosedError(PathwaysError, RuntimeError):
    """The cluster was closed; connect again."""


class ConnectError(PathwaysError, ConnectionError):
    """No cluster answers at the address, or the cluster could not be started."""


class PermissionDeniedError(PathwaysError, PermissionError):
    """This client may not make the call, which names another client or something of its; or a certificate or a token
    does not let its owner in, or not for this.
    """


class UnsupportedVersionError(PathwaysError, RuntimeError):
    """This release does not know the jax or jaxlib version, or client and hosts have different versions."""


class PathwaysWarning(UserWarning):
    """The root of all warnings: filter this to silence every warning of Pathways."""


class FetchWarning(PathwaysWarning):
    """Arrays left their slice for a function that runs in this process; the text names the function and the bytes."""


def from_text(text: str, default: type[PathwaysError]) -> PathwaysError:
    """The exception whose class `text` names at its beginning ("HostLostError: host 1 ..."), else one of `default`.

    Failures are sent through shared memory as such texts.
    """
    name, colon, rest = text.partition(": ")
    kind = globals().get(name)
    if colon and isinstance(kind, type) and issubclass(kind, PathwaysError):
        return kind(rest)
    return default(text or "no further word of it reached this process")


def raise_cluster_failure(text: str, was_closed: bool) -> NoReturn:
    """Raises the failure of a whole cluster, from the text of its reason."""
    if was_closed:
        raise ClusterClosedError(text)
    raise from_text(text, HostLostError)
