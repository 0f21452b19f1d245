"""`pw.profile`: XLA's profiles of all hosts, beside the cluster's own timeline, in one folder for TensorBoard."""

from __future__ import annotations

import datetime
import os
import pathlib
import time
import warnings
import zlib
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pathways import _jaxlib, errors
from pathways.api import session
from pathways.cluster.trace_file import TraceFile
from pathways.cluster.trace_timeline import Timeline

if TYPE_CHECKING:
    from pathways.api.connect import Cluster
    from pathways.cluster.profiling import Profile
    from pathways.cluster.recording import Recorded, Recording

#: Seconds that the end of a block waits for what the cluster sends; the rest of 5 s is for the files.
END_S = 4.0
#: The largest profile of a host, not compressed.
MOST_BYTES = 1 << 30


class profile:
    """Records XLA's profiles of every host and of this process, and the cluster's timeline.

        with pw.profile("profiles"):
            y = step(x)
            y.block_until_ready()

    Writes `profiles/plugins/profile/RUN/`, where RUN is the time in UTC, with

    - `client.xplane.pb` and `host0.xplane.pb`, `host1.xplane.pb`, ...: what XLA and JAX did in each process.
      TensorBoard with XProf opens them (`xprof profiles`, `tensorboard --logdir profiles`);
    - `pathways.trace.json.gz`: the timeline of `pw.trace`, for https://ui.perfetto.dev.

    On an embedded cluster the host is this process, so there is `client.xplane.pb` alone. A host that is lost within
    the block has the file of its successor, if that comes within the block. The end of the block waits for the cluster
    4 s at most, then it writes the files: a host that does not answer is left out. What is left out is in `remarks`,
    and is warned of.

    A host's profile shows what all clients run there, with the names of their computations. So an operator may record
    one, and the client that started the cluster; to others it is refused. `jax.profiler.trace` in the client records
    this process alone.

    Args:
        path: the folder; it is made if it is not there.
        cluster: what is profiled; the cluster that this process connected to last when not given.

    Raises:
        OptionError: `cluster` is no cluster.
        PermissionDeniedError: a guest's profile.
        TraceFileError: at the beginning, when the folder cannot be written, or the cluster or this process is profiled
            or traced already; at the end, when the disk is full.

    Warns:
        RuntimeWarning: something is missing, such as the profile of a lost host.
    """

    def __init__(self, path: str | os.PathLike[str], *, cluster: Cluster | None = None) -> None:
        if not (cluster is None or isinstance(cluster, session.Session)):
            raise errors.OptionError(
                f"profile expects cluster= what pw.connect returned, got {cluster!r:.100} of type "
                f"{type(cluster).__name__}"
            )
        try:
            self._path = pathlib.Path(path)
        except TypeError:
            raise errors.TraceFileError(f"a profile is written to a folder, got {path!r}") from None
        self._cluster = cluster
        self._folder: pathlib.Path | None = None
        self._on: tuple[Profile, Recording, TraceFile] | None = None
        #: What is missing in the profile, for people.
        self.remarks: list[str] = []

    @property
    def folder(self) -> pathlib.Path | None:
        """The folder of the run; None before the block."""
        return self._folder

    def __enter__(self) -> Self:
        """Begins the profile."""
        if self._on is not None:
            raise errors.TraceFileError("this profile is on already: make another one")
        control = (self._cluster or session.current()).control()
        run = datetime.datetime.now(datetime.UTC).strftime("%Y_%m_%d_%H_%M_%S_%f")
        folder = self._path / "plugins" / "profile" / run
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise errors.TraceFileError(f"a profile cannot be written to {folder}: {error.strerror}") from error
        file = TraceFile(folder / "pathways.trace.json.gz")
        on: Profile | None = None
        recording: Recording | None = None
        try:
            on = control.open_profile()
            recording = control.open_trace()
            try:
                _jaxlib.start_profile(python=True)
            except RuntimeError as error:
                raise errors.TraceFileError(str(error)) from error
        except BaseException:
            if recording is not None:
                recording.cancel()
            if on is not None:
                on.begin_end()
            file.discard()
            folder.rmdir()
            raise
        self._folder, self._on, self.remarks = folder, (on, recording, file), []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the profile and writes the files. An error of the block itself comes first."""
        assert self._on is not None and self._folder is not None
        (on, recording, file), self._on = self._on, None
        until = time.monotonic() + END_S
        on.begin_end()  # the hosts gather meanwhile
        try:
            own = _jaxlib.stop_profile()
            recorded = recording.finish(_left(until))
            planes, self.remarks = on.finish(_left(until))
            self._write(own, planes, recorded, file)
        except BaseException as failure:
            file.discard()
            if error is None:
                raise
            error.add_note(f"its profile was not written: {failure}")
            return
        if recorded.failure is not None:
            self.remarks.append(f"the timeline ended early: {recorded.failure}")
        if self.remarks and error is None:
            warnings.warn(f"the profile in {self._folder} is not whole: {'; '.join(self.remarks)}", RuntimeWarning, 2)

    def _write(self, own: bytes, planes: dict[int, bytes], recorded: Recorded, file: TraceFile) -> None:
        assert self._folder is not None
        recorded.remarks += [remark for remark in self.remarks if remark not in recorded.remarks]
        try:
            (self._folder / "client.xplane.pb").write_bytes(own)
            for host, packed in sorted(planes.items()):
                if (space := _unpacked(packed)) is None:
                    self.remarks.append(f"what host {host} sent is no profile")
                else:
                    (self._folder / f"host{host}.xplane.pb").write_bytes(space)
        except OSError as error:
            raise errors.TraceFileError(f"a profile cannot be written to {self._folder}: {error.strerror}") from error
        file.write(Timeline(recorded))


def _unpacked(packed: bytes) -> bytes | None:
    """What a host compressed; None if it is no whole file of gzip, or has more than `MOST_BYTES` (TRUST-1)."""
    unpacking = zlib.decompressobj(wbits=31)
    try:
        space = unpacking.decompress(packed, MOST_BYTES)
    except zlib.error:
        return None
    return space if unpacking.eof else None


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())
