"""Functions that are not compiled, as bytes: a client writes them, the processes that call them read them.

A function goes from process to process by cloudpickle: by name if it is in a module that can be imported there, else
with its code and what it closes over. An object that a function keeps (`pw.HostObject`) goes as its number and its
factory. Each process makes it once, from the first function that brings it, and keeps it.

Trees of arguments and results are of dicts, lists and tuples; a tree without its arrays has their numbers instead.

Pure, but for what factories do. It imports neither JAX nor an extension module of the project's.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

#: The most characters of an error text.
MAX_ERROR_CHARS = 1 << 14
#: Lines of these files are not the user's.
_OWN = ("/pathways/process/", "/pathways/proxy/", "/jax/_src/", "/jax/experimental/colocated_python/")
_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}

Kind = tuple[tuple[int, ...], np.dtype]


class Kept:
    """The marker of an object that functions keep: its number, and the bytes of the factory that makes it."""

    def __init__(self, number: str, factory: bytes) -> None:
        self.number = number
        self.factory = factory


class _Writer(cloudpickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        if type(item).__name__ == "Ref" and type(item).__module__.startswith("jax."):  # EFF-1: its writes would be lost
            raise pickle.PicklingError(
                "it has a reference (jax.new_ref) inside, of which a host would get a copy: give ref[...] as an "
                "argument, and write the result to the reference"
            )
        kept = item.kept if getattr(type(item), "is_host_object", False) else None
        return (kept.number, kept.factory) if isinstance(kept, Kept) else None


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, objects: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        number, factory = pid
        if number not in self._objects:
            make, args, kwargs = _Reader(factory, self._objects).load()
            self._objects[number] = make(*args, **kwargs)
        return self._objects[number]


def dump(item: Any) -> bytes:
    """Anything that cloudpickle can write, as bytes.

    Raises:
        Whatever cloudpickle, or an object in it, raises.
    """
    out = io.BytesIO()
    _Writer(out).dump(item)
    return out.getvalue()


class HostFunction:
    """A function as a process that calls it has it."""

    def __init__(self, data: bytes, objects: dict[str, Any]) -> None:
        """`data` is from `write`. `objects` are those that functions keep here, by number; it may grow.

        Raises:
            Whatever reading it, or a factory, raises.
        """
        self._function, self._arguments, self._results, self._x64 = _Reader(data, objects).load()

    def __call__(self, arrays: Sequence[np.ndarray], kinds: Sequence[Kind]) -> list[np.ndarray]:
        """Calls it, and checks its results against the promised shapes and dtypes.

        Raises:
            Whatever it raises.
            TypeError, ValueError: the results are not what was promised.
        """
        args, kwargs = filled(self._arguments, arrays)
        found: list[np.ndarray] = []
        self._take("", self._function(*args, **kwargs), self._results, kinds, found)
        return found

    def _take(self, path: str, given: Any, promised: Any, kinds: Sequence[Kind], found: list[np.ndarray]) -> None:
        where = f"result{path}"
        if isinstance(promised, int):
            found.append(self._array(where, given, kinds[promised]))
        elif isinstance(promised, dict):
            if not isinstance(given, dict) or set(given) != set(promised):
                got = f"a dict with {sorted(map(str, given))}" if isinstance(given, dict) else f"{type(given).__name__}"
                raise TypeError(f"{where} is {got}, but a dict with {sorted(map(str, promised))} was promised")
            for key in promised:
                self._take(f"{path}[{key!r}]", given[key], promised[key], kinds, found)
        elif promised is None:
            if given is not None:
                raise TypeError(f"{where} is of type {type(given).__name__}, but None was promised")
        else:
            if not isinstance(given, list | tuple) or len(given) != len(promised):
                got = f"{len(given)} items" if isinstance(given, list | tuple) else f"a {type(given).__name__}"
                raise TypeError(f"{where} has {got}, but {len(promised)} items were promised")
            for number, (each, item) in enumerate(zip(given, promised, strict=True)):
                self._take(f"{path}[{number}]", each, item, kinds, found)

    def _array(self, where: str, given: Any, kind: Kind) -> np.ndarray:
        shape, dtype = kind
        array = np.asarray(given)
        if array.shape != shape:
            raise ValueError(f"{where} has shape {array.shape}, but {shape} was promised")
        if type(given) is int and np.issubdtype(dtype, np.integer):  # a number of Python has no dtype of its own
            array = np.array(given, dtype)  # raises OverflowError if it does not fit
        elif type(given) in (bool, int, float, complex) and np.can_cast(array.dtype, dtype, "same_kind"):
            array = array.astype(dtype)
        if not self._x64 and array.dtype != dtype and _NARROW.get(array.dtype.name) == dtype.name:
            array = array.astype(dtype)  # as JAX does it while 64-bit types are off
        if array.dtype != dtype:
            raise TypeError(f"{where} has dtype {array.dtype}, but {dtype} was promised")
        return array


def write(function: Callable[..., Any], arguments: Any, results: Any, x64: bool) -> bytes:
    """A function with the trees of its arguments, (args, kwargs), and of its results.

    Raises:
        Whatever cloudpickle raises.
    """
    return dump((function, arguments, results, x64))


def filled(tree: Any, arrays: Sequence[Any]) -> Any:
    """A tree with its arrays."""
    if isinstance(tree, int):
        return arrays[tree]
    if isinstance(tree, dict):
        return {key: filled(each, arrays) for key, each in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(filled(each, arrays) for each in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(filled(each, arrays) for each in tree)
    return tree


def describe(problem: BaseException) -> str:
    """An exception's type and text, what was added to it, and the lines of the user's code that it came through."""
    try:
        text = "\n".join((str(problem), *getattr(problem, "__notes__", ())))
    except Exception:
        text = "(its text cannot be made)"
    lines = traceback.extract_tb(problem.__traceback__)
    theirs = [line for line in lines if not any(room in line.filename for room in _OWN)]
    places = "".join(f"\n    {line.filename}:{line.lineno} in {line.name}: {line.line or ''}" for line in theirs[-8:])
    return f"{type(problem).__name__}: {text}{places}"[:MAX_ERROR_CHARS]
