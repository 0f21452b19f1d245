"""Traces a user's Python with JAX, partitions it with jaxlib's MPMD compiler, lowers it to a logical program.

The steps, in order: `placed` tags functions, `trace` runs the user's Python once, `flatten` reads the jaxpr, `emit`
writes StableHLO + `mpmd`, `pipeline` sends it through jaxlib's compiler, `lower` reads the result into a
`LogicalProgram`, `donation` decides which inputs each node may overwrite. No step needs a device or initialises a
backend.
"""

from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind, Spec
from pathways.compiler.options import SCHEDULES, Options
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import SliceTag, TaggedFunction, placed
from pathways.compiler.printing import logical_text
from pathways.compiler.specs import abstract_mesh, normalize, to_partition_spec
from pathways.compiler.trace import Argument, Traced, as_argument, device_put, trace

__all__ = [
    "SCHEDULES",
    "Argument",
    "ArrayType",
    "Computation",
    "LogicalProgram",
    "MeshSpec",
    "Node",
    "NodeKind",
    "Options",
    "TaggedFunction",
    "SliceTag",
    "Spec",
    "Traced",
    "abstract_mesh",
    "as_argument",
    "compile_traced",
    "device_put",
    "logical_text",
    "normalize",
    "placed",
    "to_partition_spec",
    "trace",
]
