"""Why a program does not follow its schedule: what is doubtful in it is refused (SCHED-1). Pure."""

from __future__ import annotations

from pathways.compiler.flatten import Step, StepKind


class Doubt(Exception):
    """Why a program cannot follow its schedule, without whose schedule it is."""


def describe(step: Step) -> str:
    """A step for an error's text."""
    if step.control is not None:
        return step.control.construct
    if step.kind is not StepKind.PLACED:
        return f"a device_put to slice {step.mesh.name!r}" if step.mesh is not None else f"{step.eqn.primitive.name}"
    assert step.slice_tag is not None
    phase = "backward" if step.derivatives else "forward"
    label = f" {step.label.microbatch}" if step.label is not None else ""
    return f"{phase}{label} of {step.slice_tag.name!r} on slice {step.slice_tag.mesh.name!r}"
