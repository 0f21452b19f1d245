"""Recordings of a cluster: what a client, or an operator, holds while it traces.

    recording = control.open_trace()   # everything is recorded from now on
    recorded = recording.finish()      # what was recorded; the trace is off
    recording.cancel()                 # the trace is off, and nothing is kept

A recording that is neither finished nor cancelled ends with its process.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc
import numpy as np
from google.protobuf.empty_pb2 import Empty

from pathways import errors
from pathways.protocol import control_pb2 as pb
from pathways.protocol.trace_records import ORDER, RUN

#: The controller waits less for its hosts.
FINISH_S = 20.0
#: An embedded cluster's records are taken only at the end: 21 MiB.
EMBEDDED_CAPACITY = 1 << 18


@dataclasses.dataclass
class Recorded:
    """What was recorded: by whom, and what is missing.

    `orders` are chunks of ORDER records of the controller; `runs` of RUN records by host. `plans` are the programs of
    each host, by number. `failure`: why the recording ended early. All times are of the controller's clock.
    """

    about: pb.TraceAbout = dataclasses.field(default_factory=pb.TraceAbout)
    orders: list[bytes] = dataclasses.field(default_factory=list)
    runs: dict[int, list[bytes]] = dataclasses.field(default_factory=dict)
    plans: dict[int, dict[int, pb.TracedProgram]] = dataclasses.field(default_factory=dict)
    dropped: dict[int, int] = dataclasses.field(default_factory=dict)  # by host; -1: the controller
    remarks: list[str] = dataclasses.field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    failure: Exception | None = None

    def add(self, part: pb.TracePart) -> None:
        """Takes in one part."""
        if part.HasField("about"):
            self.about.MergeFrom(part.about)
            self.begin_ns, self.end_ns = self.begin_ns or part.now_ns, part.now_ns
        if part.remark and part.remark not in self.remarks:
            self.remarks.append(part.remark)
        if part.dropped:
            self.dropped[part.host] = self.dropped.get(part.host, 0) + part.dropped
        self.plans.setdefault(part.host, {}).update(part.programs)
        if part.records:
            chunks = self.orders if part.host < 0 else self.runs.setdefault(part.host, [])
            chunks.append(_on_the_controllers_clock(part))

    def parts(self) -> Iterator[pb.TracePart]:
        """Parts of which `add` makes the same."""
        yield pb.TracePart(host=-1, about=self.about, now_ns=self.begin_ns)
        for host, chunks in ((-1, self.orders), *self.runs.items()):
            yield pb.TracePart(host=host, records=b"".join(chunks))
        for host, programs in self.plans.items():
            yield pb.TracePart(host=host, programs=programs)
        for host, dropped in self.dropped.items():
            yield pb.TracePart(host=host, dropped=dropped)
        yield from (pb.TracePart(remark=remark) for remark in self.remarks)
        if self.failure is not None:
            yield pb.TracePart(remark=f"the recording ended early: {self.failure}")
        yield pb.TracePart(host=-1, about=self.about, now_ns=self.end_ns)


def _on_the_controllers_clock(part: pb.TracePart) -> bytes:
    """The records of a part, with times of the controller's clock. Their own clock may be another machine's."""
    if part.clock_ahead_ns == 0:
        return part.records
    rows = np.frombuffer(part.records, RUN if part.host >= 0 else ORDER).copy()
    for name in rows.dtype.names or ():
        if name.endswith("_ns"):
            rows[name] -= np.where(rows[name] != 0, part.clock_ahead_ns, 0)
    return rows.tobytes()


class Recording(Protocol):
    """A trace that is on."""

    def finish(self, seconds: float = FINISH_S) -> Recorded:
        """Ends the trace. What came before a failure is kept; see `Recorded.failure`. It waits for so many seconds."""

    def cancel(self) -> None:
        """Ends the trace and keeps nothing. Does nothing when it has ended."""


class RemoteRecording:
    """The `Recording` of a cluster in other processes. The controller sends what was recorded as it comes."""

    def __init__(
        self, open_stream: Callable[[Iterator[Empty]], Any], translated: Callable[[grpc.RpcError], Exception]
    ) -> None:
        """`open_stream(requests)` calls `Trace`; `translated` makes our errors of gRPC's.

        Raises:
            TraceFileError: somebody traces this cluster already.
        """
        self._translated = translated
        self._out: queue.SimpleQueue[Empty | None] = queue.SimpleQueue()
        self._recorded = Recorded()
        self._stream = open_stream(iter(self._out.get, None))
        try:
            while not self._recorded.begin_ns:
                self._recorded.add(next(self._stream))
        except grpc.RpcError as error:
            self._out.put(None)
            raise translated(error) from None
        self._reader = threading.Thread(target=self._read, name="pw-trace", daemon=True)
        self._reader.start()

    @property
    def is_on(self) -> bool:
        """False when the cluster has ended, or the controller has ended the trace."""
        return self._reader.is_alive()

    def finish(self, seconds: float = FINISH_S) -> Recorded:
        """See `Recording`."""
        self._out.put(None)
        self._reader.join(seconds)
        if self._reader.is_alive():
            self._recorded.remarks.append(f"the controller did not answer within {seconds:.3g} s")
            self.cancel()
            self._reader.join(1.0)
        return self._recorded

    def cancel(self) -> None:
        """See `Recording`."""
        self._stream.cancel()
        self._out.put(None)

    def _read(self) -> None:
        try:
            for part in self._stream:
                self._recorded.add(part)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED:
                self._recorded.failure = self._translated(error)


class EmbeddedRecording:
    """The `Recording` of this process as a cluster. `guard` holds who records now: at most one."""

    def __init__(self, controller: Any, trace: Any, about: pb.TraceAbout, guard: list[Any]) -> None:
        """`trace`: the host's `HostTrace`.

        Raises:
            TraceFileError: this process traces already.
        """
        if guard:
            raise errors.TraceFileError(
                "this process traces its embedded cluster already, and one trace is recorded at a time: end that first"
            )
        guard.append(self)
        self._controller, self._trace, self._guard = controller, trace, guard
        self._recorded = Recorded(about=about, begin_ns=time.monotonic_ns())
        self._trace.start(EMBEDDED_CAPACITY)
        self._controller.start_trace(EMBEDDED_CAPACITY)

    def finish(self, seconds: float = FINISH_S) -> Recorded:
        """See `Recording`."""
        recorded = self._recorded
        recorded.end_ns = time.monotonic_ns()
        if self not in self._guard:
            return recorded
        self._guard.remove(self)
        records, dropped, plans = self._trace.stop()
        part = pb.TracePart(host=0, records=records, dropped=dropped, programs=plans)
        recorded.add(part)
        self._controller.stop_trace()
        records, dropped = self._controller.take_trace()
        recorded.add(pb.TracePart(host=-1, records=records, dropped=dropped))
        return recorded

    def cancel(self) -> None:
        """See `Recording`."""
        self.finish()
