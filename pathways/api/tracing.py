"""Which threads trace a program, what these programs have named, and the slices that programs can name."""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pathways.compiler import pipeline_spec
from pathways.compiler.ir import MeshSpec


@dataclasses.dataclass
class Named:
    """What a program that is traced has named so far: its slices, and how often it has called each pipeline."""

    slices: list[Any] = dataclasses.field(default_factory=list)
    pipelines: collections.Counter[pipeline_spec.PipelineSpec] = dataclasses.field(default_factory=collections.Counter)


tracing: dict[int, Named] = {}  # by thread that traces a program
_slices: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by mesh name, never reused


def is_tracing() -> bool:
    """Whether this thread is inside the trace of a program."""
    return bool(tracing) and threading.get_ident() in tracing


def remember(slice_: Any) -> None:
    """Lets programs find a slice by its mesh's name."""
    _slices.setdefault(slice_.mesh_spec.name, slice_)
    if is_tracing():
        tracing[threading.get_ident()].slices.append(slice_)


def call_pipeline(spec: pipeline_spec.PipelineSpec) -> str:
    """The name for the scopes of one call of a pipeline. A program may call equal pipelines; each has its own name."""
    named = tracing.get(threading.get_ident(), Named())
    earlier = named.pipelines[spec]
    named.pipelines[spec] += 1
    return pipeline_spec.register(spec, earlier)


def find_slice(mesh: MeshSpec) -> Any:
    """The slice of a mesh, if a program has named it; else None."""
    return _slices.get(mesh.name)


class Interop:
    """What JAX is taught before it meets a `pw.Array`. `pathways.api.connect` sets `install`."""

    install: Callable[[], None] = staticmethod(lambda: None)
