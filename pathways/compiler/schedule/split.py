"""Divides backward steps: the gradient that another stage waits for first, gradients of weights later (zero bubble).

A backward step of a stage is one placed call or several. What another stage reads of it, at any distance, decides: the
first half makes that, and is the backward step of the schedule. The rest is the weight step of the same microbatch
(`Phase.WEIGHTS`). The first stage, and one of which no other stage reads a gradient, have nothing to be early with:
their backward steps stay whole. So do calls that make no gradients of weights.

If nearly all of a stage's work is needed for what another stage reads, the schedule could be followed in name only: it
is refused (SCHED-1).

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pathways import _jaxlib
from pathways.compiler.flatten import FlatProgram, Step, StepKind
from pathways.compiler.ir import MeshSpec, Phase
from pathways.compiler.schedule.doubts import Doubt, describe
from pathways.compiler.schedule.halves import Halves, cost, halves

#: The weight steps of a stage must have at least this part of the operations of its backward steps.
_LEAST = 0.05


def split(program: FlatProgram, stages: Mapping[MeshSpec, int], pipeline: int = 0, *, may_lack: bool = False) -> None:
    """Divides the labelled backward steps of a pipeline of `program`. All labels are set.

    `stages` has the stage of each slice, `pipeline` is the number of the pipeline. `may_lack`: it need not have any.

    Raises:
        Doubt: there is nothing to divide, or a backward step that cannot be divided so that it helps.
    """
    splitter = _Splitter(program, stages, pipeline)
    if not any(map(splitter.is_backward, program.steps)):
        if may_lack:
            return
        raise Doubt("it splits backward steps, and the program has none; expected the gradients of a pipeline")
    splitter.split()


class _Splitter:
    def __init__(self, program: FlatProgram, stages: Mapping[MeshSpec, int], pipeline: int) -> None:
        self.program = program
        self.pipeline = pipeline
        self.stages = stages
        self.known: dict[tuple[int, tuple[bool, ...]], Halves] = {}
        self.alive: list[Any] = []  # keeps alive the jaxprs whose id() is in `known`
        self.calls: dict[int, _jaxlib.CallsBack] = {}
        self.slices: dict[MeshSpec, int] = {}  # their bits

    def split(self) -> None:
        """Replaces the steps of the program."""
        reach = self._reach()
        asked: dict[int, list[bool]] = {}  # per backward step: which results other stages read
        for step in self.program.steps:
            if self.is_backward(step) and step.mesh is not None and self.stages[step.mesh]:
                here = self._bit(step)
                asked[id(step)] = [bool(reach.get(v, 0) & ~here) for v in step.outputs]
        sending = {step.mesh for step in self.program.steps if any(asked.get(id(step), ()))}
        divided = [step for step in self.program.steps if id(step) in asked and step.mesh in sending]
        replaced = {id(step): self._divide(step, asked[id(step)]) for step in divided}
        self._check(divided, asked)
        if len(set(self.stages.values())) > 1 and all(all(asked[id(step)]) for step in divided):
            raise Doubt("no stage but the first one has gradients of weights that could wait. Give schedule '1F1B'")
        steps: list[Step] = []
        weights: set[Any] = set()
        for step in self.program.steps:
            for part in replaced.get(id(step), [step]):
                label = part.label
                if part.kind is StepKind.PLAIN and label is not None and not weights.isdisjoint(part.reads):
                    part.label = label = dataclasses.replace(label, phase=Phase.WEIGHTS)
                if label is not None and label.phase is Phase.WEIGHTS:
                    weights.update(part.outputs)
                steps.append(part)
        self.program.steps = steps

    def _is_mine(self, step: Step) -> bool:
        return step.label is not None and step.label.pipeline == self.pipeline

    def is_backward(self, step: Step) -> bool:
        """True for a backward call of the pipeline."""
        is_backward = step.label is not None and step.label.phase is Phase.BACKWARD
        return step.kind is StepKind.PLACED and self._is_mine(step) and is_backward

    def _reach(self) -> dict[Any, int]:
        """For each variable, the slices (as bits) whose calls of the pipeline read it, at any distance."""
        reach: dict[Any, int] = {}
        for step in reversed(self.program.steps):
            bits = 0
            for v in step.outputs:
                bits |= reach.get(v, 0)
            if step.kind is StepKind.PLACED and self._is_mine(step):
                bits |= self._bit(step)
            if bits:
                for v in step.reads:
                    reach[v] = reach.get(v, 0) | bits
        return reach

    def _bit(self, step: Step) -> int:
        assert step.mesh is not None
        return 1 << self.slices.setdefault(step.mesh, len(self.slices))

    def _halves(self, step: Step, asked: Sequence[bool]) -> Halves:
        """One object per function and `asked`, so that the steps of all microbatches have the same computations."""
        closed = step.eqn.params["jaxpr"]
        key = (id(closed), tuple(asked))
        if key not in self.known:
            self.alive.append(closed)
            self.known[key] = halves(closed, asked)
        return self.known[key]

    def _divide(self, step: Step, asked: Sequence[bool]) -> list[Step]:
        """The one or two steps that a backward step becomes."""
        assert step.label is not None
        later = dataclasses.replace(step.label, phase=Phase.WEIGHTS)
        if not any(asked):
            return [dataclasses.replace(step, label=later)]
        if all(asked):
            return [step]
        parts = self._halves(step, asked)
        if parts.second is None:
            return [step]
        outputs = [step.outputs[n] for n in parts.first_outputs] + [_jaxlib.new_var(aval) for aval in parts.residuals]
        inputs = [step.inputs[n] for n in parts.second_inputs] + [outputs[n] for n in parts.handed]
        first = self._part(step, parts.first, [step.inputs[n] for n in parts.first_inputs], outputs)
        second = self._part(step, parts.second, inputs, [step.outputs[n] for n in parts.second_outputs])
        second.label = later
        return _in_chain(first, second)

    def _part(self, step: Step, closed: Any, inputs: list[Any], outputs: list[Any]) -> Step:
        eqn = _jaxlib.jit_of(step.eqn, closed, inputs, outputs)
        calls = _jaxlib.calls_back(eqn, self.calls)
        return dataclasses.replace(step, eqn=eqn, inputs=inputs, outputs=outputs, calls=calls)

    def _check(self, divided: Sequence[Step], asked: Mapping[int, Sequence[bool]]) -> None:
        """Refuses a stage whose weight steps have too little of the work. All microbatches are alike."""
        stages: dict[MeshSpec | None, list[Step]] = {}
        for step in divided:
            assert step.label is not None
            if step.label.microbatch == 0:
                stages.setdefault(step.mesh, []).append(step)
        for steps in stages.values():
            mixed = [step for step in steps if not all(asked[id(step)])]
            early = sum(_cost(step) for step in steps if all(asked[id(step)]))
            late = sum(_cost(step) for step in steps if not any(asked[id(step)]))
            parts = [self._halves(step, asked[id(step)]) for step in mixed if any(asked[id(step)])]
            early += sum(part.costs[0] for part in parts)
            late += sum(part.costs[1] for part in parts)
            if mixed and late < _LEAST * (early + late):
                undivided = next((part.undivided for part in parts if part.undivided), "")
                why = f": one {undivided} makes them together with the gradient of its input" if undivided else ""
                raise Doubt(
                    f"{describe(mixed[0])} cannot be divided so that it helps. The gradients of weights that can wait "
                    f"are {late / max(early + late, 1.0):.1%} of its operations{why}; expected at least {_LEAST:.0%}. "
                    "Give schedule '1F1B'"
                )


def _in_chain(first: Step, second: Step) -> list[Step]:
    """The halves of a step, of which one or both make its callbacks."""
    if first.after is not None:
        if first.calls is _jaxlib.CallsBack.NOTHING:
            first.before = first.after = None
        elif second.calls is _jaxlib.CallsBack.NOTHING:
            second.before = second.after = None
        else:
            first.after = second.before = _jaxlib.order_var()
    return [first, second]


def _cost(step: Step) -> float:
    return cost(_jaxlib.opened(step.eqn.params["jaxpr"])[0].eqns)
