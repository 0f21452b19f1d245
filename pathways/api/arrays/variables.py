"""`pw.Variable`: an array on a slice that outlives programs, and that programs read and set.

A program that reads a variable takes the variable's array as one more argument, and a program that sets it has the new
array as one more result. The old array is donated, so the variable is updated in place. Runs that use a variable are in
the order in which they were submitted, as all runs of a client are (ORD-1).

While a program is traced, two arrays without buffers stand for the variable. One is read by the program's own body, the
other within loops, branches and placed functions. JAX may trace these only once for many programs, so they cannot know
what a program has set before. That is why a program that sets a variable must not read it there.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp

from pathways import _jaxlib, errors
from pathways.api.arrays.array import Array
from pathways.api.arrays.put import device_put
from pathways.api.programs.compiled import copy
from pathways.api.programs.tracing import current_trace, living, refuse_stand_in, stands_for, variable_of
from pathways.api.session import Session
from pathways.api.slices.virtual_devices import Slice, SliceSharding
from pathways.compiler import specs
from pathways.compiler.trace import Traced

_numbers = itertools.count(1)


class Variable:
    """An array on a slice that outlives programs. Programs read and set `value`; the client can as well.

    Its shape, dtype, slice and sharding stay what they are. Compared by identity.

    Example:
        ```
        count = pw.Variable(0, slice, name="count")

        @pw.program
        def step(x):
            count.value += 1
            return work(x, count.value)
        ```
    """

    def __init__(self, value: Any, devices: Any = None, spec: Any = None, *, name: str | None = None) -> None:
        """
        Args:
            value: the first value: an array of any kind, or a number. It is copied.
            devices: the slice, or a sharding over one (`slice.sharding(spec)`). None: where `value`, a `pw.Array`, is.
            spec: for a slice, the `PartitionSpec`; None replicates.
            name: for messages, and for those who look at the cluster.

        Raises:
            SliceError: nothing says on which slice it is.
            ShardingError: a dimension does not divide.
        """
        self.name = f"variable{next(_numbers)}" if name is None else str(name)
        if current_trace() is not None or _jaxlib.is_tracer(value):
            raise errors.ProgramError(
                f"variable {self.name!r} is made while a program is traced: make it before, outside of the program"
            )
        if devices is None and not isinstance(value, Array):
            raise errors.SliceError(
                f"variable {self.name!r}: say on which slice it is: pw.Variable(value, slice), or give a pw.Array"
            )
        array: Array
        if isinstance(value, Array):
            array = copy(value if devices is None else device_put(value, devices, spec))
        else:
            array = device_put(jnp.asarray(value) if isinstance(value, bool | int | float) else value, devices, spec)
        if not isinstance(array, Array):
            raise errors.ProgramError(
                f"variable {self.name!r} has one array, got a {type(value).__name__}: make one per leaf, "
                "jax.tree.map(lambda leaf: pw.Variable(leaf, slice), tree)"
            )
        self._array = strong(array)
        self._stand_ins = [array.client.stand_in(self._array.layout) for _ in range(2)]
        for stand_in in self._stand_ins:
            stands_for(stand_in, self)
        self.slice.cluster.variables.add(self)

    # ---- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self._array.layout.shape)

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self._array.layout.dtype

    @property
    def slice(self) -> Slice:
        """Where it is."""
        found: Slice = self._array.layout.slice
        return found

    @property
    def sharding(self) -> SliceSharding:
        """How it lies there."""
        found: SliceSharding = self._array.sharding
        return found

    @property
    def device_bytes(self) -> int:
        """Bytes on each device of its slice."""
        return int(self._array.layout.space_bytes)

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"pw.Variable({self.name!r}, {self.dtype}[{dims}] on {self.slice.mesh_spec.name})"

    # ---- its value

    @property
    def value(self) -> Any:
        """Its value now. In a program: a traced value. Else a `pw.Array`, which later changes do not change.

        Raises:
            ProgramError: read in a loop, branch or placed function of a program that sets it; or while JAX traces a
                function that is in no program.
        """
        trace = current_trace()
        if trace is None:
            if _jaxlib.is_staging():
                refuse_stand_in(self._stand_ins[1])
            return self._array_now()
        if _jaxlib.staging_level() is None:
            raise errors.ProgramError(f"{self!r} is read under jax.ensure_compile_time_eval: it has no value yet")
        if trace.is_staged_in_body():
            if self in trace.written:
                return trace.written[self]
            return _jaxlib.staged_constant(self._stand_ins[0])
        if self in trace.written:
            raise self._read_inside()
        return _jaxlib.staged_constant(self._stand_ins[1])

    @value.setter
    def value(self, new: Any) -> None:
        self.set(new)

    def set(self, new: Any) -> None:
        """Sets its value.

        Args:
            new: an array of any kind of the variable's shape and dtype; or a number, for a variable of shape ().

        Raises:
            ProgramError: another shape or dtype, or set in a loop, branch, derivative or placed function of a program.
        """
        if not (_jaxlib.is_tracer(new) or _jaxlib.valid_jaxtype(new) or isinstance(new, Array)):
            raise errors.ProgramError(f"{self!r} was set to {new!r} of type {type(new).__name__}: expected an array")
        is_typed = _jaxlib.is_tracer(new) or isinstance(new, Array)
        aval = jax.typeof(new) if is_typed else jax.api_util.shaped_abstractify(new)
        fits = aval.dtype == self.dtype or (aval.weak_type and jnp.promote_types(aval.dtype, self.dtype) == self.dtype)
        if tuple(aval.shape) != self.shape or not fits:
            dims = ",".join(map(str, aval.shape))
            raise errors.ProgramError(
                f"{self!r} was set to {aval.dtype}[{dims}]: expected {self.dtype}[{','.join(map(str, self.shape))}]; a "
                "variable keeps its shape and dtype"
            )
        trace = current_trace()
        if trace is not None and trace.is_in_body():
            staged = _jaxlib.staged_constant(new) if isinstance(new, Array) else new
            trace.written[self] = jax.lax.convert_element_type(staged, self.dtype)
        elif trace is not None or _jaxlib.is_tracer(new) or _jaxlib.is_staging():
            raise errors.ProgramError(
                f"{self!r} was set inside a loop, a branch, a derivative (jax.grad), jax.vmap or a placed function. "
                "Set it in the body of a pw.program: return the new value from there, and set the variable to it"
            )
        else:
            self._put(new)

    def _put(self, new: Any) -> None:
        spec = specs.to_partition_spec(self._array.layout.spec[: len(self.shape)])
        if not isinstance(new, Array):
            new = jnp.asarray(new, self.dtype)
        array: Array = device_put(new, self.slice, spec)
        self._array = strong(copy(array) if isinstance(new, Array) else array)

    def delete(self) -> None:
        """Frees its array. Programs that use it fail until it is set again."""
        self._array.delete()

    # ---- for programs

    def at_home(self, new: Any) -> Any:
        """Traced: a new value where the variable is."""
        layout = self._array.layout
        return device_put(new, self.slice, specs.to_partition_spec(layout.spec[: len(layout.shape)]))

    def present(self, array: Array, layout: Any) -> Array:
        """The array for a run that takes it as `layout`. `array` was the variable's when the run began.

        Raises:
            DeletedArrayError: it was deleted.
        """
        del layout
        if array.is_deleted():
            raise errors.DeletedArrayError(f"{self!r} was deleted: set it before a program reads it")
        return array

    def lie_again(self) -> None:
        """Its slice has got another shape: what has a layout of the old one gets that of now (MOVE-1)."""
        for array in (self._array, *self._stand_ins):
            old = array.layout
            if old.is_retired:
                array._lie_as(
                    self.slice.cluster.layout(
                        old.cache, self.slice, dtype=old.dtype, shape=old.shape, weak_type=old.weak_type
                    )
                )

    def _array_now(self) -> Array:
        """Its array, which no run takes over from now on. It takes no lock, so that callbacks of runs may read."""
        while True:
            array = self._array
            array._pin()  # a run that sets the variable copies it first
            if not array.is_deleted() or array is self._array:  # else a run has taken it over meanwhile
                return array

    def _read_inside(self) -> errors.ProgramError:
        return errors.ProgramError(
            f"{self!r} is read inside a loop, a branch or a placed function, and set by the same program. Read it in "
            "the program's own body, and pass it on as an argument"
        )

    def is_read_inside(self, array: Any) -> bool:
        """Whether the closed-over `array` says that a loop, branch or placed function reads it."""
        return array is self._stand_ins[1]


def strong(array: Array) -> Array:
    """The array, without JAX's weak type."""
    found: Any = array.astype(array.dtype) if array.layout.weak_type else array
    return cast(Array, found)


def check(traced: Traced) -> None:
    """Refuses a program that sets a variable and reads it where it cannot know what is set.

    Raises:
        ProgramError: it does.
    """
    for array in traced.closed_over:
        variable = variable_of(array)
        if variable is not None and variable in traced.updates and variable.is_read_inside(array):
            raise variable._read_inside()


def check_lives(array: Any, cluster: Session | None) -> None:
    """Refuses an array that stands for a variable which the program cannot use.

    Raises:
        ProgramError: the variable is no more.
        PlacementError: it is another cluster's.
    """
    variable = living(array)
    if cluster is not None and variable.slice.cluster is not cluster:
        raise errors.PlacementError(f"{variable!r} belongs to another cluster: {variable.slice.cluster!r}")
