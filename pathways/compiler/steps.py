"""The flat program of a traced program, and its steps: what `flatten` makes and all later parts of the compiler read.

Pure: data only.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from pathways import _jaxlib
from pathways.compiler import placed
from pathways.compiler.ir import Calls, Label, MeshSpec, Spec
from pathways.compiler.partition import meshes


class StepKind(enum.Enum):
    """What a step is."""

    PLACED = "placed"  # one call of a placed function
    TRANSFER = "transfer"  # one device_put
    PLAIN = "plain"  # an operation outside placed functions; the compiler chooses its mesh
    CONTROL = "control"  # a loop or a branch with placed calls inside
    EXCHANGE = "exchange"  # sends rows to shards chosen at run time, or along the routes of such an exchange


class ControlKind(enum.Enum):
    """What a control step is, and what it reads and gives."""

    BRANCH = "branch"  # reads the number of the branch, then what the bodies take; a body gives the results
    WHILE = "while"  # reads whether to begin, the constants, the carry; the body gives whether to go on, the new carry
    FOR = "for"  # reads the constants, the carry, the arrays; the body takes a row of each, gives the carry and rows


@dataclasses.dataclass
class Control:
    """The loop or branch of a control step.

    `construct` is JAX's name for it. `bodies` are one per branch, or a loop's one body; their invars are variables of
    their own. `constants` and `carry` are counts of a loop's inputs; `length` and `reverse` are of a FOR.
    """

    kind: ControlKind
    construct: str
    bodies: list[FlatProgram]
    constants: int = 0
    carry: int = 0
    length: int = 0
    reverse: bool = False


@dataclasses.dataclass
class Step:
    """One step of a flat program. Inputs are variables or literals; outputs are variables, each written once."""

    kind: StepKind
    eqn: Any
    inputs: list[Any]
    outputs: list[Any]
    slice_tag: placed.SliceTag | None = None
    transposes: int = 0
    derivatives: int = 0  # how often reverse-mode differentiation was applied to make it, the calls around it included
    mesh: MeshSpec | None = None
    spec: Spec | None = None
    calls: _jaxlib.CallsBack = _jaxlib.CallsBack.NOTHING
    demands: tuple[meshes.Demand, ...] = ()  # what the operation needs of the slice that it runs on
    scope: _jaxlib.Scope | None = None  # the microbatch that the program's text gives it
    label: Label | None = None  # its place in a pipeline
    control: Control | None = None  # of a control step
    #: The order of callbacks, of a step that has some: what it reads and makes (`callback_chains`).
    before: Any = None
    after: Any = None

    @property
    def beyond(self) -> str:
        """Why jaxlib's compiler does not know the step, for messages; "" if it does."""
        if self.control is not None:
            return f"{self.control.construct} has placed functions inside"
        return "pw.exchange sends rows where the data says" if self.kind is StepKind.EXCHANGE else ""

    @property
    def reads(self) -> list[Any]:
        """The variables among the inputs."""
        return [v for v in self.inputs if not isinstance(v, _jaxlib.Literal)]

    @property
    def needs(self) -> list[Any]:
        """What it reads, the order of callbacks included."""
        ordered = self.before is not None and not isinstance(self.before, _jaxlib.Literal)
        return [*self.reads, self.before] if ordered else self.reads

    @property
    def gives(self) -> list[Any]:
        """What it makes, the order of callbacks included."""
        return self.outputs if self.after is None else [*self.outputs, self.after]


@dataclasses.dataclass
class FlatProgram:
    """A flat program.

    `constants` maps variables to the values that the program closes over. `declared` maps variables to the shardings
    that the user wrote for them. `before` is one more argument, of a program with ordered callbacks only: its first
    ordered callback comes after it. `calls` says which results are those of its callbacks.
    """

    invars: list[Any]
    constants: dict[Any, Any]
    steps: list[Step]
    outvars: list[Any]
    declared: dict[Any, Spec] = dataclasses.field(default_factory=dict)
    before: Any = None
    calls: Calls = dataclasses.field(default_factory=Calls)
