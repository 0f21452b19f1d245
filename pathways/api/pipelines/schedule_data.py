"""What a `SchedulePlot` knows: rows of computations, transfers between them, the bubble. Plain data."""

from __future__ import annotations

import dataclasses

from pathways.compiler.lengths import Lengths


@dataclasses.dataclass(frozen=True)
class Span:
    """One computation. `start` and `end` have the unit of the plot.

    `kind` is "forward", "backward", "weights", "sum" (of gradients) or "other". `microbatch` is -1 if the program has
    no schedule, or the computation belongs to no microbatch. `name` is that of the call in the plan.
    """

    kind: str
    name: str
    microbatch: int
    chunk: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Devices (global numbers) that do the same, the slices that lie on them, and what they compute, by start."""

    devices: tuple[int, ...]
    slices: tuple[str, ...]
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Arrow:
    """One transfer, from a row to another one. `source` and `target` index `SchedulePlot.rows`."""

    name: str
    source: int
    target: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class PlotData:
    """What each device does when.

    Attributes:
        program, schedule: their names; the schedule is "none" if the order is the text's.
        source: from where the times are, in words.
        unit: of all times: "s", "flops", or "forward steps".
        rows: one per group of devices that do the same, see `Row`.
        transfers: between different rows, see `Arrow`.
        bubble: percent of the pipeline's time, from its first step to its last, in which its devices do nothing for it.
        bound: percent, the bubble of the same order if each computation took as long and transfers took no time: the
            schedule's own. None if the program has no schedule. What `bubble` has above it is due to transfers and to
            the runtime.
        lengths: of each stage's steps, as `lengths=` takes them; measured ones are medians over the microbatches. Empty
            if the program has no pipeline, or several.
    """

    program: str
    schedule: str
    source: str
    unit: str
    rows: tuple[Row, ...]
    transfers: tuple[Arrow, ...]
    bubble: float
    bound: float | None
    lengths: tuple[Lengths, ...] = ()

    @property
    def end(self) -> float:
        """When the last computation ends; the first one starts at 0."""
        return max((span.end for row in self.rows for span in row.spans), default=0.0)
