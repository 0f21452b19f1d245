"""Reads back what `trace_file` wrote: the runs of a trace, with the times of their computations and transfers.

`pathways/api/schedule_plot.py` joins them with a program.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pathways import errors


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A computation on one device, of the run with this place in the order. Times in nanoseconds since the trace began.

    `is_estimated`: its end was noticed together with others, and the time is divided among them.
    """

    name: str
    order: int
    device: int
    launched_ns: int
    start_ns: int
    end_ns: int
    is_estimated: bool


@dataclasses.dataclass(frozen=True)
class TracedTransfer:
    """A transfer between the devices of one host and those of one host. Times in nanoseconds since the trace began."""

    name: str
    from_devices: tuple[int, ...]
    to_devices: tuple[int, ...]
    start_ns: int
    end_ns: int


@dataclasses.dataclass
class TracedRun:
    """A run: the name of its program, its place in the order, and what the hosts did for it.

    `is_whole` is False if a computation failed, or was not over when the trace ended.
    """

    program: str
    order: int
    calls: list[TracedCall] = dataclasses.field(default_factory=list)
    transfers: list[TracedTransfer] = dataclasses.field(default_factory=list)
    is_whole: bool = True


def read_runs(path: str | os.PathLike[str]) -> list[TracedRun]:
    """The runs in a trace's file, in the order of the cluster.

    Raises:
        TraceFileError: the file cannot be read, or is no trace of `pw.trace`.
    """
    events = _events(path)
    devices: dict[tuple[int, int], int] = {}  # by process and thread of the trace
    runs: dict[int, TracedRun] = {}
    try:
        for event in events:
            named = event["ph"] == "M" and re.fullmatch(r"device (\d+)", event["args"].get("name", ""))
            if named:
                devices[event["pid"], event["tid"]] = int(named[1])
        for event in events:
            if event["ph"] != "X" or event.get("cat") not in ("computation", "transfer"):
                continue
            told = event["args"]
            run = runs.setdefault(told["run"], TracedRun(told["program"], told["run"]))
            if event["cat"] == "computation":
                run.is_whole &= told["over"] and not told["failed"]
                device = devices[event["pid"], event["tid"]]
                run.calls.append(
                    TracedCall(
                        event["name"],
                        run.order,
                        device,
                        told["launched_ns"],
                        told["start_ns"],
                        told["end_ns"],
                        told["estimated"],
                    )
                )
            else:
                start = round(event["ts"] * 1000)
                run.transfers.append(
                    TracedTransfer(
                        event["name"].rpartition(" to host ")[0],
                        tuple(told["from_devices"]),
                        tuple(told["to_devices"]),
                        start,
                        start + round(event["dur"] * 1000),
                    )
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_trace(path, f"{type(error).__name__}: {error}") from error
    return [runs[order] for order in sorted(runs)]


def _events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            data = file.read()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except OSError as error:
        raise errors.TraceFileError(f"the trace {os.fspath(path)} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, KeyError, TypeError) as error:
        raise _no_trace(path, str(error)) from error
    return events


def _no_trace(path: str | os.PathLike[str], why: str) -> errors.TraceFileError:
    return errors.TraceFileError(
        f"{os.fspath(path)} is no trace that pw.trace wrote ({why}); give the file of pw.trace"
    )


def programs_of(runs: list[TracedRun]) -> str:
    """The programs of these runs, for an error's text."""
    counts = collections.Counter(run.program for run in runs)
    return ", ".join(f"{name!r} ({count} runs)" for name, count in counts.items()) or "no run at all"


def divide_again(runs: Sequence[TracedRun], kinds: Mapping[str, str]) -> dict[str, float]:
    """Divides the time of computations whose ends were noticed together by how long such computations take alone.

    The trace divides it equally, in the order in which the ends were noticed. So the addition of two gradients would
    take as long as the step before it, and might stand before it. A device computes in the order of the launches.

    Args:
        runs: of one program; their calls are replaced.
        kinds: by the name of a call, what computation it is. Calls of one computation take as long.

    Returns:
        How long each computation takes alone, in nanoseconds: the median. Without those whose ends were never alone.
    """
    alone: dict[str, list[int]] = collections.defaultdict(list)
    clusters = [cluster for run in runs for cluster in _clusters(run)]
    for cluster in clusters:
        if len(cluster) == 1 and not cluster[0].is_estimated:
            alone[kinds[cluster[0].name]].append(cluster[0].end_ns - cluster[0].start_ns)
    usual = {kind: statistics.median(lengths) for kind, lengths in alone.items()}
    for run in runs:
        run.calls = []
    by_order = {run.order: run for run in runs}
    for cluster in clusters:
        by_order[cluster[0].order].calls += _divided(cluster, usual, kinds)
    return usual


def _clusters(run: TracedRun) -> Iterator[list[TracedCall]]:
    """The calls of a run, those together whose ends were noticed together."""
    calls = sorted(run.calls, key=lambda call: (call.device, call.start_ns, call.end_ns))
    cluster: list[TracedCall] = []
    for call in calls:
        last = cluster[-1] if cluster else call
        if cluster and not (last.is_estimated and (last.device, last.end_ns) == (call.device, call.start_ns)):
            yield cluster
            cluster = []
        cluster.append(call)
    if cluster:
        yield cluster


def _divided(
    cluster: Sequence[TracedCall], usual: Mapping[str, float], kinds: Mapping[str, str]
) -> Iterator[TracedCall]:
    if len(cluster) == 1:
        yield cluster[0]
        return
    start, end = cluster[0].start_ns, max(call.end_ns for call in cluster)
    calls = sorted(cluster, key=lambda call: call.launched_ns)
    lengths = [usual.get(kinds[call.name]) for call in calls]
    known = sum(length for length in lengths if length is not None)
    unknown = lengths.count(None)
    each = max(0.0, end - start - known) / unknown if unknown else 0.0
    scale = min(1.0, (end - start) / known) if known else 1.0
    at = float(start)
    for n, (call, length) in enumerate(zip(calls, lengths, strict=True)):
        begin = min(max(at, call.launched_ns), end)
        is_last_seen = n + 1 == len(calls) and not call.is_estimated
        at = float(end) if is_last_seen else min(begin + (each if length is None else length * scale), end)
        yield dataclasses.replace(call, start_ns=round(begin), end_ns=round(at))
