"""Which threads trace a program, and the slices that programs can name."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from pathways.compiler.ir import MeshSpec

tracing: dict[int, list[Any]] = {}  # by thread that traces a program: the slices that it has used
_slices: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by mesh name, never reused


def is_tracing() -> bool:
    """Whether this thread is inside the trace of a program."""
    return bool(tracing) and threading.get_ident() in tracing


def remember(slice_: Any) -> None:
    """Lets programs find a slice by its mesh's name."""
    _slices.setdefault(slice_.mesh_spec.name, slice_)
    if is_tracing():
        tracing[threading.get_ident()].append(slice_)


def find_slice(mesh: MeshSpec) -> Any:
    """The slice of a mesh, if a program has named it; else None."""
    return _slices.get(mesh.name)


class Interop:
    """What JAX is taught before it meets a `pw.Array`. `pathways.api.connect` sets `install`."""

    install: Callable[[], None] = staticmethod(lambda: None)
