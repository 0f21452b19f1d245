"""References to mutable arrays (`jax.new_ref`) that programs of a cluster read and write.

A program takes a reference's value as one more argument, and gives the new value as one more result, as it does for a
`pw.Variable` (`api.state`). From then on the value is a `pw.Array` and stays on its slice, and the reference has a
`Holder` where JAX had a `jax.Array`. When this process reads the whole reference (`ref[...]`), it gets that `pw.Array`;
nothing waits. For all else that this process does with it, JAX asks the holder for a `jax.Array`: the value is fetched,
and is in this process until a program uses the reference again.

Runs that use a reference are in the order in which they were submitted (ORD-1). If a run fails, the reference has no
value but that failure, which whoever reads it gets, until the whole of it is written (ERR-1).

Threading: any thread may read and write a reference. Each attribute of a holder is set at once, and `_local` says to
which `_array` it belongs; so nobody sees one's value with the other's, and no lock is held while somebody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways import _core, _jaxlib, errors
from pathways.api.arrays.array import Array
from pathways.api.arrays.host_values import put_leaf


class Holder:
    """Where a reference has its value: on a slice, or in this process."""

    _aval: Any  # JAX reads it

    def __init__(self, value: Any) -> None:
        """`value`: what JAX had there, which nobody else has."""
        #: What the last run gave that wrote it, or what this process has put.
        self._array: Array | None = value if type(value) is Array else None
        #: A `jax.Array` of this process, which JAX may write in place, and the `_array` that was its value before. It
        #: is the reference's value as long as `_array` is that one.
        self._local: tuple[Array | None, Any] = (None, None if type(value) is Array else value)

    @property
    def _buf(self) -> Any:
        """A `jax.Array` for JAX, which may write it in place: from here on the value is in this process."""
        while True:
            array = self._array
            owner, value = self._local
            if owner is array:
                return value
            assert array is not None
            array._pin()  # a run that writes the reference copies it first
            if array.is_deleted() and array is not self._array:
                continue  # a run has taken it over meanwhile
            local = array, _jaxlib.own_copy(array._value())
            if self._array is array:
                self._local = local

    def __reduce__(self) -> Any:
        """A copy of the reference has a value of its own, in the process that makes it."""
        array = self.array_now()
        return _jaxlib.plain_holder, (self._aval, self._local[1] if array is None else array._value())

    def array_now(self) -> Array | None:
        """Its value on a slice, which no run takes over from now on; None: it is in this process."""
        while True:
            array = self._array
            if array is None or self._local[0] is array:
                return None
            array._pin()
            if not array.is_deleted() or array is self._array:
                return array

    def write(self, value: Any) -> None:
        """The whole of it is this value from now on: a `pw.Array` that nobody else has, or a value of this process."""
        is_there = type(value) is Array
        self._local = None, None if is_there else _jaxlib.own_copy(value)
        self._array = value if is_there else None

    def present(self, array: Array | None, layout: _core.Layout) -> Array:
        """The value for a run that takes it as `layout`. `array` was the holder's `_array` when the run began.

        Raises:
            DeletedArrayError: it was deleted.
            PlacementError: it is on a slice of another cluster.
        """
        owner, value = self._local
        if owner is array:
            fresh = put_leaf(value, layout, "the value of a reference")
            self._array = fresh
            self._local = None, None
            return fresh
        assert array is not None
        if array.is_deleted():
            raise errors.DeletedArrayError(f"the value of a reference was deleted: {array!r}. Write the whole of it")
        if array.layout.slice.cluster is not layout.slice.cluster:
            raise errors.PlacementError(
                f"the value of a reference is {array!r} of another cluster, {array.layout.slice.cluster!r}. Read it "
                "and write it again: ref[...] = np.asarray(ref[...])"
            )
        return array


def holder_of(reference: Any) -> Holder:
    """The holder of a reference, which has one from now on."""
    found = _jaxlib.holder_of(reference)
    if not isinstance(found, Holder):
        _jaxlib.hold(reference, Holder(found._buf))
        found = _jaxlib.holder_of(reference)
    return found


def array_of(reference: Any) -> Array | None:
    """The value of a reference, if it is on a slice."""
    found = _jaxlib.holder_of(reference)
    if not isinstance(found, Holder) or found._local[0] is found._array:
        return None
    return found._array


def made(reference: Any) -> None:
    """For `_jaxlib.accept_references`: a reference that is made of an array on a slice has its value there."""
    if type(_jaxlib.holder_of(reference)._buf) is Array:
        holder_of(reference)


def read(reference: Any, is_whole: bool) -> Any:
    """For `_jaxlib.accept_references`: the value; if a part of it is wanted, as a value of this process."""
    holder = _jaxlib.holder_of(reference)
    array = holder.array_now() if isinstance(holder, Holder) else None
    if array is None:
        return NotImplemented
    return array if is_whole else array._value()


def write(copy: Callable[[Array], Array], reference: Any, value: Any) -> Any:
    """For `_jaxlib.accept_references`: writes the whole value, returns the old one. `copy` is `compiled.copy`."""
    if type(value) is Array:
        old = reference[...]
        holder_of(reference).write(copy(value))
        return old
    old = NotImplemented if _jaxlib.is_tracer(value) else read(reference, is_whole=True)
    if old is not NotImplemented:
        holder_of(reference).write(value)
    return old


def refuse_twice(references: list[Any], name: str) -> None:
    """Refuses a call that would use one reference under two names, as JAX does.

    Raises:
        EffectError: it would.
    """
    if len({id(each) for each in references}) < len(references):
        raise errors.EffectError(
            f"{name!r} gets one reference (jax.new_ref) twice: as two arguments, or as an argument that it closes over "
            "as well. What it writes to one must be what it reads from the other, so give it once"
        )
