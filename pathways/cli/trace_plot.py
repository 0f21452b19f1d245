"""The picture of a trace: a row per device with its computations, coloured by client; transfers between hosts below."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING

from pathways import errors

if TYPE_CHECKING:
    from pathways.cluster.trace_timeline import Timeline

_LONGEST = 60  # characters of a client's name in the legend
_LEGEND = 170  # characters that fit a line of it


def check_path(path: str) -> None:
    """Checks that a picture can be written there, before anything is recorded. Needs matplotlib.

    Raises:
        TraceFileError: the name's ending is no picture's, or there is no such folder.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    folder = os.path.dirname(path) or "."
    if not path or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise errors.TraceFileError(
            f"the picture cannot be written to {path!r}: expected a file's name in a folder that exists"
        )
    known = FigureCanvasBase.get_supported_filetypes()
    if _format(path) not in known:
        raise errors.TraceFileError(
            f"the picture cannot be written to {path!r}: expected a name that ends in one of {', '.join(sorted(known))}"
        )


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST // 2 - 1]}…{label[-_LONGEST // 2 :]}"


def _format(path: str) -> str:
    return os.path.splitext(path)[1][1:].lower() or "png"


def draw(timeline: Timeline, path: str) -> None:
    """Writes the picture. Needs matplotlib.

    Raises:
        TraceFileError: for example, the disk is full. Then no part of a picture is left.

    Each device has a thick row with computations, and above it a thin one: where a computation of that device's host
    waits. Each host has a row with its transfers.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    each, hosts = timeline.about.devices_per_host or 1, timeline.about.hosts or 1
    clients = sorted({each.client for each in timeline.computations} | {each.client for each in timeline.runs})
    color = {client: f"C{position % 10}" for position, client in enumerate(clients)}

    def seconds(start: int, end: int) -> tuple[float, float]:
        return (start - timeline.begin_ns) / 1e9, max(end - start, 1) / 1e9

    rows: list[str] = []
    figure, axis = pyplot.subplots(figsize=(14, 1.2 + 0.5 * hosts * (each + 2)))
    for host in range(hosts):
        for device in range(host * each, (host + 1) * each):
            here = [item for item in timeline.computations if device in item.devices]
            _bars(axis, len(rows), 0.8, [(seconds(item.start_ns, item.end_ns), color[item.client]) for item in here])
            rows.append(f"device {device}")
        sent = [item for item in timeline.transfers if item.host == host]
        waits = [item for item in timeline.waits if item.host == host]
        if sent:
            _bars(axis, len(rows), 0.4, [(seconds(item.start_ns, item.end_ns), color[item.client]) for item in sent])
            rows.append(f"host {host} sends")
        if waits:
            _bars(axis, len(rows), 0.4, [(seconds(item.start_ns, item.end_ns), color[item.client]) for item in waits])
            rows.append(f"host {host} waits")
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, max(timeline.end_ns - timeline.begin_ns, 1) / 1e9)
    axis.set_xlabel("seconds since the trace began")
    axis.grid(axis="x", alpha=0.3)
    labels = [_short(timeline.label(client)) for client in clients]
    if labels:
        legend = [Patch(color=color[client], label=label) for client, label in zip(clients, labels, strict=True)]
        columns = max(1, min(6, len(labels), _LEGEND // (max(map(len, labels)) + 6)))
        # Above the rows: however many lines it has, it hides none of them.
        axis.legend(handles=legend, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=columns)
    is_new = not os.path.exists(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # in a client's name: it is shown as a box
            figure.savefig(path, dpi=110, format=_format(path), bbox_inches="tight")
    except OSError as error:
        if is_new:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise errors.TraceFileError(f"the picture cannot be written to {path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)


def _bars(axis, row: int, height: float, spans) -> None:  # type: ignore[no-untyped-def]
    if spans:
        axis.broken_barh(
            [span for span, _ in spans], (row - height / 2, height), facecolors=[color for _, color in spans]
        )
