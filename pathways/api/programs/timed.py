"""A program whose runs have a deadline (DEAD-1)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from pathways import _core, errors
from pathways.api.pipelines.schedule_plot import SchedulePlot
from pathways.api.programs.lowered import Lowered, Tracing
from pathways.api.programs.stages import Handle

P = ParamSpec("P")
R = TypeVar("R")
_Instance = TypeVar("_Instance")
_Rest = ParamSpec("_Rest")


class TimedProgram(Handle, Generic[P, R]):
    """A program whose runs have a deadline. Made by `Program.with_timeout`."""

    def __init__(self, program: Any, seconds: float) -> None:
        """`program`: a `Program`."""
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise errors.ProgramError(f"with_timeout expects a number of seconds above 0, got {seconds!r}")
        functools.update_wrapper(self, program, updated=())
        self._program = program
        self._seconds = seconds
        self._deadline = _core.Deadline(
            seconds,
            f"DeadlineExceededError: program {program._name!r} was not over {seconds:g} s after its call, its deadline",
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Submits one run, which has `seconds` from now, whatever it waits for: its compilation, too."""
        with self._deadline.begin() as deadline:
            out: R = self._program._submit(args, kwargs, deadline)
        return out

    def with_timeout(self, seconds: float) -> TimedProgram[P, R]:
        """The same program with another deadline."""
        return TimedProgram(self._program, seconds)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> TimedProgram[P, R]: ...
    @overload
    def __get__(
        self: TimedProgram[Concatenate[_Instance, _Rest], R], instance: _Instance, owner: type | None = None
    ) -> Callable[_Rest, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As `Program.__get__`."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Tracing:
        """As `Program.trace`; what it compiles has no deadline."""
        traced: Tracing = self._program.trace(*args, **kwargs)
        return traced

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `Program.lower`; what it compiles has no deadline."""
        lowered: Lowered = self._program.lower(*args, **kwargs)
        return lowered

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `Program.eval_shape`."""
        return self._program.eval_shape(*args, **kwargs)

    def schedule_plot(self, *args: Any, **kwargs: Any) -> SchedulePlot:
        """As `Program.schedule_plot`."""
        plot: SchedulePlot = self._program.schedule_plot(*args, **kwargs)
        return plot

    def clear_cache(self) -> None:
        """As `Program.clear_cache`."""
        self._program.clear_cache()

    def __repr__(self) -> str:
        return f"<{self._program!r} with a timeout of {self._seconds:g} s>"
