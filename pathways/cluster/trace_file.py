"""Writes a trace as a file that Perfetto opens: https://ui.perfetto.dev, or its trace_processor. And reads it again.

The format is Chrome's JSON trace event format, compressed by gzip when the file's name ends in ".gz". The file also
carries the records of the trace, so `read` gives the same timeline.

A host is a process of the trace, with a track per device, and tracks of its transfers and waits. A client is a process
too, with tracks of its runs. Perfetto colours a slice by its name. So on a device's track an outer slice is named by
the client, and has its colour; the computations lie in it. Arrows (the format's flow events) lead from the computation
that made a value to the transfer of it, and on to the computations that read it elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import heapq
import io
import itertools
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from pathways import errors
from pathways.cluster.recording import Recorded
from pathways.cluster.trace_arrows import arrows
from pathways.cluster.trace_timeline import SHORTEST_WAIT_NS, Computation, Run, Timeline
from pathways.process.config import PROTOCOL_VERSION
from pathways.protocol import control_pb2 as pb
from pathways.protocol.trace_records import Outcome

# Numbers of processes. No track has the number of its process: Perfetto shows such a track first, as the main thread.
_HOSTS, _CLIENTS = 1_000_000, 2_000_000
_TRANSFERS, _WAITS = 1_000, 10_000  # numbers of tracks of a host
# What chrome://tracing calls its colours; Perfetto does not read them.
_COLORS = ("thread_state_running", "rail_response", "rail_animation", "rail_load", "cq_build_passed", "yellow", "olive")

_Item = TypeVar("_Item")


class TraceFile:
    """A file that will hold a trace. It is opened first, so that what is wrong with it is known before the trace.

    The trace is written beside it and then takes its name, so that a file of that name is whole. When the name is a
    link, the file that it leads to is replaced, and the link stays.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file.

        Raises:
            TraceFileError: the file cannot be written there; the message says why.
        """
        try:
            self.path = os.fspath(path)
        except TypeError:
            self.path = path  # type: ignore[assignment]
        if not isinstance(self.path, str) or not self.path:
            raise errors.TraceFileError(f'a trace is written to a file like "trace.json.gz", got {path!r}')
        if os.path.isdir(self.path):
            raise errors.TraceFileError(
                f"a trace is written to a file, and {self.path} is a directory: name a file in it, like "
                f"{os.path.join(self.path, 'trace.json.gz')}"
            )
        try:
            self._is_special = os.path.exists(self.path) and not stat.S_ISREG(os.stat(self.path).st_mode)
            self._target = os.path.realpath(self.path)
            self._part = self.path if self._is_special else f"{self._target}.part-{os.getpid()}"
            self._file: io.BufferedWriter | None = open(self._part, "wb")  # noqa: SIM115 - `write` or `discard` closes it
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL
            raise self._error(error) from error

    def write(self, timeline: Timeline) -> None:
        """Writes the trace and closes the file.

        Raises:
            TraceFileError: for example, the disk is full. Then no file is left.
        """
        assert self._file is not None, "a trace file is written once"
        try:
            with self._file as raw:
                if self.path.endswith(".gz"):
                    with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=3, mtime=0) as packed:
                        _write(packed, timeline)
                else:
                    _write(raw, timeline)
            if not self._is_special:
                os.replace(self._part, self._target)
        except OSError as error:
            self.discard()
            raise self._error(error) from error
        except BaseException:
            self.discard()
            raise
        self._file = None

    def discard(self) -> None:
        """Closes the file without a trace; nothing is left of it."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = None
        if not self._is_special:
            with contextlib.suppress(OSError):
                os.unlink(self._part)

    def _error(self, error: OSError | ValueError) -> errors.TraceFileError:
        reason = getattr(error, "strerror", None) or str(error)
        path = self.path if self.path.isprintable() else repr(self.path)
        return errors.TraceFileError(f"the trace cannot be written to {path}: {reason}")


def _write(out: Any, timeline: Timeline) -> None:
    text = io.TextIOWrapper(out, encoding="utf-8", write_through=False)
    records = pb.RecordedTrace(parts=timeline.recorded.parts()).SerializeToString()
    about = {
        "cluster": timeline.about.cluster,
        "remarks": timeline.remarks,
        "protocol": PROTOCOL_VERSION,
        "records": base64.b64encode(zlib.compress(records)).decode(),
    }
    text.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [')
    for position, event in enumerate(events(timeline)):
        text.write(",\n" if position else "\n")
        text.write(json.dumps(event, separators=(",", ":")))
    text.write("\n]}\n")
    text.flush()
    text.detach()


def read(path: str | os.PathLike[str]) -> Timeline:
    """The timeline of a trace's file.

    Raises:
        TraceFileError: the file cannot be read, is no trace of `pw.trace`, or one of another release.
    """
    where = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read()
        about = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["otherData"]
        if about.get("protocol") != PROTOCOL_VERSION:
            theirs = f"with protocol {about['protocol']}" if "protocol" in about else "without its records"
            raise errors.TraceFileError(
                f"another release of pathways wrote the trace {where}, {theirs}; this one reads protocol "
                f"{PROTOCOL_VERSION}: record it again, or read it with the release that wrote it"
            )
        recorded = Recorded()
        for part in pb.RecordedTrace.FromString(zlib.decompress(base64.b64decode(about["records"]))).parts:
            recorded.add(part)
        return Timeline(recorded)
    except OSError as error:
        raise errors.TraceFileError(f"the trace {where} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error, DecodeError) as error:
        raise errors.TraceFileError(
            f"{where} is no trace that pw.trace wrote ({type(error).__name__}: {error}); give the file of pw.trace"
        ) from error


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The trace events. Times are in microseconds since the trace began; in `args`, in nanoseconds."""
    yield from _Writer(timeline).events()


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._of = timeline
        self._begin = timeline.begin_ns
        self._runs = {run.order: run for run in timeline.runs if run.order}
        self._pid = self._tid = 0  # the track on which the next slice lies
        self._track_of: dict[int, tuple[int, int]] = {}  # by the id of a transfer

    def events(self) -> Iterator[dict[str, Any]]:
        of = self._of
        each = of.about.devices_per_host or 1
        for host in range(of.about.hosts):
            yield from _process(_HOSTS + host, f"host {host}", host)
            for device in range(each):
                yield _thread(_HOSTS + host, 1 + device, f"device {host * each + device}")
        for position, remark in enumerate(of.remarks):
            yield {"ph": "i", "s": "g", "cat": "remark", "name": remark, "pid": _HOSTS, "tid": 1, "ts": float(position)}
        by_device: dict[int, list[Computation]] = {}
        for computation in of.computations:
            for device in computation.devices:
                by_device.setdefault(device, []).append(computation)
        for device, computations in sorted(by_device.items()):
            yield from self._device(_HOSTS + device // each, 1 + device % each, computations)
        for host in range(of.about.hosts):
            transfers = [transfer for transfer in of.transfers if transfer.host == host]
            for lane, transfer in self._lanes(transfers, _HOSTS + host, _TRANSFERS, "transfers"):
                self._track_of[id(transfer)] = (self._pid, self._tid)
                yield lane or self._slice(
                    "transfer",
                    f"{transfer.name} to host {transfer.peer}",
                    transfer,
                    {
                        "from_host": transfer.host,
                        "to_host": transfer.peer,
                        "from_devices": list(transfer.devices),
                        "to_devices": list(transfer.peer_devices),
                        "bytes_per_device": transfer.bytes,
                    },
                )
            waits = [wait for wait in of.waits if wait.host == host]
            for lane, wait in self._lanes(waits, _HOSTS + host, _WAITS, "waits"):
                yield lane or self._slice(
                    "wait", f"{wait.name} waits for {wait.reason}", wait, {"reason": wait.reason, "node": wait.name}
                )
        clients = sorted({run.client for run in of.runs} | set(of.about.clients))
        for client in clients:
            yield from _process(_CLIENTS + client, of.label(client), _CLIENTS + client)
            runs = [run for run in of.runs if run.client == client]
            spans = [_Span(run) for run in runs]
            for lane, span in self._lanes(spans, _CLIENTS + client, 1, "runs"):
                if lane:
                    yield lane
                else:
                    yield from self._run(span)
        yield from self._arrows()  # behind the slices that they connect

    def _arrows(self) -> Iterator[dict[str, Any]]:
        each = self._of.about.devices_per_host or 1
        for number, arrow in enumerate(arrows(self._of), 1):
            phases = ["s", *"t" * (len(arrow) - 2), "f"]
            for phase, point in zip(phases, arrow, strict=True):
                of = point.of
                if isinstance(of, Computation):
                    device = point.device
                    pid, tid = _HOSTS + device // each, 1 + device % each
                else:
                    pid, tid = self._track_of[id(of)]
                event = {"ph": phase, "cat": "flow", "name": "transfer", "id": number, "pid": pid, "tid": tid}
                yield {**event, "ts": self._us(point.at_ns), **({} if phase == "s" else {"bp": "e"})}

    def _lanes(
        self, items: list[_Item], pid: int, first: int, name: str
    ) -> Iterator[tuple[dict[str, Any] | None, _Item]]:
        """Places items that may overlap on as few tracks as needed. Yields (a new track's event, _), (None, item)."""
        free: list[tuple[int, int]] = []  # (free from, track)
        tracks = itertools.count(first)
        for item in sorted(items, key=lambda item: item.start_ns):  # type: ignore[attr-defined]
            if free and free[0][0] <= item.start_ns:  # type: ignore[attr-defined]
                track = heapq.heappop(free)[1]
            else:
                track = next(tracks)
                yield _thread(pid, track, name), item
            heapq.heappush(free, (item.end_ns, track))  # type: ignore[attr-defined]
            self._pid, self._tid = pid, track
            yield None, item

    def _slice(self, category: str, name: str, item: Any, args: dict[str, Any]) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": self._pid,
            "tid": self._tid,
            "ts": self._us(item.start_ns),
            "dur": _us(item.end_ns - item.start_ns),
            "cname": _COLORS[item.client % len(_COLORS)],
            "args": {"client": self._of.label(item.client), "program": item.program, "run": item.order, **args},
        }

    def _device(self, pid: int, tid: int, computations: list[Computation]) -> Iterator[dict[str, Any]]:
        self._pid, self._tid = pid, tid
        computations.sort(key=lambda each: (each.start_ns, each.end_ns))
        for _, group in itertools.groupby(computations, key=lambda each: each.order):
            run = list(group)
            whole = _Span(run[0], run[0].start_ns, run[-1].end_ns)
            yield self._slice("program", self._of.label(run[0].client), whole, {})
            for each in run:
                yield self._slice("computation", each.name, each, self._times(each))

    def _times(self, each: Computation) -> dict[str, Any]:
        times = {
            "dispatched_ns": each.dispatched_ns,
            "ready_ns": each.ready_ns,
            "launched_ns": each.launched_ns,
            "start_ns": each.start_ns,
            "end_ns": each.end_ns,
        }
        if run := self._runs.get(each.order):
            known = {"submitted_ns": run.submitted_ns, "ordered_ns": run.ordered_ns, "granted_ns": run.granted_ns}
            times = {**{name: at for name, at in known.items() if at}, **times}
        marks: dict[str, Any] = {"estimated": each.is_estimated, "over": each.is_over, "failed": each.has_failed}
        return {**{name: at - self._begin for name, at in times.items()}, **marks}

    def _run(self, span: _Span) -> Iterator[dict[str, Any]]:
        run: Run = span.of
        known = {"submitted_ns": run.submitted_ns, "ordered_ns": run.ordered_ns, "granted_ns": run.granted_ns}
        args: dict[str, Any] = {name: at - self._begin for name, at in known.items() if at}
        args |= {"outcome": run.outcome.name.lower(), "over": run.is_over}
        name = run.program if run.outcome != Outcome.NOT_ORDERED else f"waits for {run.waits}"
        yield self._slice("run" if run.order else "wait", name, span, args)
        if not run.order:
            return
        behind = "its client's earlier runs" if run.next_ns else "the controller"
        parts = (
            (run.submitted_ns, run.next_ns or run.ordered_ns, behind),
            (run.next_ns, run.ordered_ns, run.waits),
            (run.ordered_ns, run.granted_ns or run.end_ns, "room at its hosts"),
            (run.granted_ns, run.dispatched_ns, "its hosts to read it"),
        )
        for start, end, reason in parts:
            if start and end - start >= SHORTEST_WAIT_NS and run.outcome != Outcome.DROPPED:
                wait = _Span(run, start, end)
                yield self._slice("wait", f"waits for {reason}", wait, {"reason": reason})

    def _us(self, at_ns: int) -> float:
        return _us(max(0, at_ns - self._begin))


class _Span:
    """A run, or several computations of one, as one slice."""

    def __init__(self, of: Any, start_ns: int = 0, end_ns: int = 0) -> None:
        self.of = of
        self.client, self.program, self.order = of.client, of.program, of.order
        self.start_ns = start_ns or of.submitted_ns or of.next_ns or of.ordered_ns
        self.end_ns = max(self.start_ns, end_ns or of.end_ns)


def _us(ns: int) -> float:
    return ns / 1000


def _process(pid: int, name: str, position: int) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": position}}


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
