"""`pw.trace`: what a cluster did, in a file that Perfetto opens."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pathways import errors
from pathways.api import session
from pathways.cluster.trace_file import TraceFile
from pathways.cluster.trace_timeline import Timeline

if TYPE_CHECKING:
    from pathways.api.connect import Cluster
    from pathways.cluster.recording import Recording


class trace:
    """Records what the cluster does within the block, and writes it to a file.

        with pw.trace("step.json.gz"):
            y = step(x)
            y.block_until_ready()

    The file is in Chrome's JSON trace event format: open it at https://ui.perfetto.dev, or query it with Perfetto's
    trace_processor. It has a track per device, coloured by client, with programs and their computations; the transfers
    and waits of each host; and each client's runs, from their submission on, with what they waited for.

    It has the runs that hosts read within the block, of all clients. What is not over at the end of the block is marked
    so; wait for it within the block. A client that did not start the cluster sees the names of its own programs only.
    While a trace is on, each run costs the controller and its hosts a little time; a cluster that is not traced
    measures nothing.

    Args:
        path: the file; it is compressed when its name ends in ".gz". An existing file is replaced.
        cluster: what is traced; the cluster that this process connected to last when not given.

    Raises:
        OptionError: `cluster` is no cluster.
        TraceFileError: at the beginning, when the file cannot be written or the cluster is traced already; at the end,
            when the disk is full. When the cluster ends within the block, the file has what was recorded before.
    """

    def __init__(self, path: str | os.PathLike[str], *, cluster: Cluster | None = None) -> None:
        if not (cluster is None or isinstance(cluster, session.Session)):
            raise errors.OptionError(
                f"trace expects cluster= what pw.connect returned, got {cluster!r:.100} of type "
                f"{type(cluster).__name__}"
            )
        self._path = path
        self._cluster = cluster
        self._file: TraceFile | None = None
        self._recording: Recording | None = None

    @property
    def path(self) -> str | os.PathLike[str]:
        """The file."""
        return self._path

    def __enter__(self) -> Self:
        """Begins the trace."""
        if self._recording is not None:
            raise errors.TraceFileError("this trace is on already: make another one, with a file of its own")
        cluster = self._cluster or session.current()
        file = TraceFile(self._path)
        try:
            self._recording = cluster.control().open_trace()
        except BaseException:
            file.discard()
            raise
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the trace and writes the file. An error of the block itself comes first."""
        recording, file = self._recording, self._file
        assert recording is not None and file is not None
        self._recording = self._file = None
        try:
            recorded = recording.finish()
            file.write(Timeline(recorded))
        except BaseException as failure:
            file.discard()
            if error is None:
                raise
            error.add_note(f"its trace was not written: {failure}")
            return
        if recorded.failure is not None and error is None:
            recorded.failure.add_note(f"{file.path} has what was recorded before")
            raise recorded.failure
