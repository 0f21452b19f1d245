"""What a program says of its pipelines: the scopes of their microbatches, and what each scope's pipeline is.

A *scope* is a `jax.named_scope` whose name says to which microbatch the calls inside belong: `pw.p0.mb3` is microbatch
3 of pipeline `p0`, and `pw.p0.mb3.s1` is its stage 1. So is `pw.p0.mb.s1` within a `jax.jit` that is called in
`pw.p0.mb3`. JAX keeps the names of scopes through differentiation, batching and `jax.jit`, so a backward step has the
scope of its forward step. `_jaxlib.scope_of` reads it.

`pw.pipeline` and `pw.accumulate_gradients` open scopes of pipelines that are registered here. A scope of any other name
is the user's own; the program's `schedule` option is for it.

Equal pipelines get equal names, in each program anew, so a program that is traced again is the same program (`memo`).
Called while a program is traced, by any thread, and by `schedule/labels.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pathways.compiler.ir import MeshSpec
from pathways.compiler.lengths import Lengths

#: A schedule of the user's own: see `schedule/own.py`.
OwnSchedule = Callable[[int, int, int, int], Sequence[tuple[str, int, int]]]


@dataclasses.dataclass(frozen=True)
class PipelineSpec:
    """A pipeline that a program calls.

    `meshes` has the slice of each stage; it is empty if the stages are to be found from the calls. `beside` has the
    other slices of each stage that has several, such as those of a mixture's experts; it is empty if no stage has.
    `schedule` is a name of `options.BUILT` or the user's own order; None: the program's. `lengths` has one item per
    entry of `meshes`, or none.
    """

    name: str
    schedule: str | OwnSchedule | None
    microbatches: int
    meshes: tuple[MeshSpec, ...] = ()
    lengths: tuple[Lengths, ...] = ()
    beside: tuple[tuple[MeshSpec, ...], ...] = ()

    def stages(self) -> dict[MeshSpec, int]:
        """The stage of each slice. A slice that several stages have beside their own is of the first."""
        places = self.places()
        stages = {mesh: stage for mesh, (stage, _) in zip(self.meshes, places, strict=True)}
        for others, (stage, _) in zip(self.beside, places, strict=False):
            for mesh in others:
                stages.setdefault(mesh, stage)
        return stages

    def places(self) -> list[tuple[int, int]]:
        """Per entry of `meshes`, its stage and its chunk: the number of its slice, in the order in which microbatches
        come there, and how often they have left that slice before.
        """
        slices = list(dict.fromkeys(self.meshes))
        visits: collections.Counter[MeshSpec] = collections.Counter()
        places = []
        for n, mesh in enumerate(self.meshes):
            visits[mesh] += not n or mesh != self.meshes[n - 1]
            places.append((slices.index(mesh), visits[mesh] - 1))
        return places

    def stage_lengths(self) -> tuple[Lengths, ...]:
        """The lengths of each stage; chunk c of stage s has item c * (number of slices) + s, as in `PipelineInfo`.

        What neighbours on one slice take is one after the other.
        """
        places = self.places() if self.lengths else []
        depth = 1 + max((stage for stage, _ in places), default=-1)
        found = [Lengths(0.0, 0.0)] * (depth * (1 + max((chunk for _, chunk in places), default=-1)))
        for (stage, chunk), each in zip(places, self.lengths, strict=True):
            found[chunk * depth + stage] = found[chunk * depth + stage].then(each)
        return tuple(found)


_lock = threading.Lock()
_names: dict[tuple[PipelineSpec, int], str] = {}  # guarded by _lock; grows with the distinct pipelines of this process
_specs: dict[str, PipelineSpec] = {}  # guarded by _lock


def register(spec: PipelineSpec, earlier: int) -> str:
    """The name of a pipeline for its scopes. `earlier`: how many equal pipelines the program has called before."""
    with _lock:
        name = _names.get((spec, earlier))
        if name is None:
            name = _names[spec, earlier] = f"pipeline{len(_names)}"
            _specs[name] = spec
        return name


def find(name: str) -> PipelineSpec | None:
    """The pipeline of this name; None if the name is of the user's own scopes."""
    return _specs.get(name.partition("[")[0])


def iteration_name(pipeline: str, rows: Sequence[int]) -> str:
    """The name of what a pipeline is in one iteration of unrolled loops: a pipeline of its own."""
    return f"{pipeline}[{', '.join(map(str, rows))}]"


def scope_name(pipeline: str, microbatch: int | None, stage: int | None = None) -> str:
    """The name of a scope, for `jax.named_scope`. None: a scope around says the microbatch; there is no one stage."""
    return f"pw.{pipeline}.mb{'' if microbatch is None else microbatch}" + ("" if stage is None else f".s{stage}")


def is_own(schedule: Any) -> bool:
    """True for an order of the user's own."""
    return callable(schedule)


def schedule_name(schedule: str | OwnSchedule) -> str:
    """The schedule for an error's text."""
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "of your own")
