"""What each thread traces: the slices, the variables and the pipelines that its program uses."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pathways import _jaxlib, errors
from pathways.compiler import pipeline_spec
from pathways.compiler.ir import MeshSpec
from pathways.compiler.pipeline_spec import PipelineSpec


class Trace:
    """The trace of one program by one thread."""

    def __init__(self, donates: bool) -> None:
        """`donates`: the old values of variables and references that it sets are donated."""
        self.slices: list[Any] = []  # that it has used
        self.pipelines: collections.Counter[PipelineSpec] = collections.Counter()  # how often it has called each
        self.written: dict[Any, Any] = {}  # by variable: the traced value that it has from there on
        self.donates = donates
        self._level: Any = None  # JAX's trace of the program's own body

    def begin(self) -> None:
        """JAX now traces the program's own body."""
        self.written.clear()
        self._level = _jaxlib.staging_level()

    def is_in_body(self) -> bool:
        """Whether a value made now can be a result: it is made by the program's own body, in no transformation."""
        return bool(_jaxlib.current_level() is self._level)

    def is_staged_in_body(self) -> bool:
        """Whether what is computed now is staged in the program's own body: in no loop, branch or placed function."""
        return bool(_jaxlib.staging_level() is self._level)

    def results(self) -> list[tuple[Any, str, Any]]:
        """The variables that the program sets, with their names in messages and their new values."""
        return [
            (variable, f"variable {variable.name!r}", variable.at_home(value))
            for variable, value in self.written.items()
        ]

    def name_of(self, value: Any) -> str | None:
        """What an argument is called that stands for a closed-over value; None: there is nothing to say."""
        variable = variable_of(value)
        return None if variable is None else f"variable {variable.name!r}"

    def is_set(self, value: Any) -> bool:
        """Whether a closed-over value stands for a variable that the program sets."""
        return variable_of(value) in self.written


tracing: dict[int, Trace] = {}  # by thread that traces a program
_slices: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by mesh name, never reused
_variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id() of what stands for it


def is_tracing() -> bool:
    """Whether this thread is inside the trace of a program."""
    return bool(tracing) and threading.get_ident() in tracing


def current_trace() -> Trace | None:
    """What this thread traces now."""
    return tracing.get(threading.get_ident()) if tracing else None


def remember(slice_: Any) -> None:
    """Lets programs find a slice by its mesh's name."""
    _slices.setdefault(slice_.mesh_spec.name, slice_)
    if is_tracing():
        tracing[threading.get_ident()].slices.append(slice_)


def call_pipeline(spec: PipelineSpec) -> str:
    """The name for the scopes of one call of a pipeline. A program may call equal pipelines; each has its own name."""
    trace = current_trace()
    earlier = 0
    if trace is not None:
        earlier = trace.pipelines[spec]
        trace.pipelines[spec] += 1
    return pipeline_spec.register(spec, earlier)


def find_slice(mesh: MeshSpec) -> Any:
    """The slice of a mesh, if a program has named it; else None."""
    return _slices.get(mesh.name)


def find_named(name: str) -> Any:
    """The slice that has or had a mesh of that name; None: it is no more."""
    return _slices.get(name)


def stands_for(array: Any, variable: Any) -> None:
    """From now on `array`, which the variable owns, stands for it in programs."""
    _variables[id(array)] = variable


def living(array: Any) -> Any:
    """The variable that a closed-over array without a buffer stands for.

    Raises:
        ProgramError: it is no more.
    """
    variable = variable_of(array)
    if variable is None:
        raise errors.ProgramError(
            "the program calls a function that JAX traced when it read a variable which is no more. Keep the variable"
        )
    return variable


def refuse_stand_in(value: Any) -> None:
    """Refuses what stands for a variable, where no program takes the variable's array instead.

    Raises:
        ProgramError: it is that.
    """
    if (variable := _variables.get(id(value))) is not None:
        raise errors.ProgramError(
            f"{variable!r} is read by a function that is in no pw.program (jax.grad or jax.vmap of a placed function, "
            "jax.jit, jax.eval_shape). Put it into a pw.program, or read the value before and pass it as an argument"
        )


def variable_of(array: Any) -> Any:
    """The variable that a closed-over array stands for; else None."""
    return _variables.get(id(array))


class Interop:
    """What JAX is taught before it meets a `pw.Array`. `pathways.api.connect` sets `install`."""

    install: Callable[[], None] = staticmethod(lambda: None)
