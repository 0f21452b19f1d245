"""Programs that call a host function without a module, as hosts read them: what makes no sense is refused (TRUST-1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pathways import errors
from pathways.compiler.ir import ArrayType, Computation, HostFunction, LogicalProgram, MeshSpec, Node, NodeKind, Tiling
from pathways.protocol.serialization import dump_program, load_program


def program() -> LogicalProgram:
    """One that calls a function of an array, on two devices; a second slice does nothing."""
    kind = ArrayType((4,), np.dtype(np.float32), 0, ((),), tiling=Tiling((2,), (0, 1)))
    call = Computation("f", b"", 0, (kind,), (kind,), (False,), callbacks=(3,))
    node = Node(NodeKind.CALL, "f", 0, (0,), (1,), donates=(False,))
    meshes = tuple(MeshSpec(name, (("d", 2),)) for name in "ab")
    functions = (HostFunction(3, "f", b"f", 1.0, ()),)
    return LogicalProgram("p", meshes, (kind, kind), (call,), (node,), (0,), (1,), (False,), host_functions=functions)


def test_a_call_of_a_host_function() -> None:
    assert load_program(dump_program(program())) == program()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"callbacks": (3, 3)}, "calls 2 host functions"),
        ({"callbacks": (4,)}, "that its program does not have"),
        ({"donated": (True,)}, "or donates"),
        ({"options": b"options"}, "callbacks or a move"),
        ({"mesh": 1}, "other devices than its own"),
        ({"inputs": ()}, "other types than its computation"),
    ],
)
def test_calls_that_make_no_sense(changes: dict[str, Any], words: str) -> None:
    good = program()
    bad = dataclasses.replace(good, computations=(dataclasses.replace(good.computations[0], **changes),))
    with pytest.raises(errors.PlanError, match=words):
        load_program(dump_program(bad))


def test_a_node_with_other_arrays_than_its_function() -> None:
    good = program()
    other = dataclasses.replace(good.values[0], shape=(8,))
    for values in ((other, good.values[1]), (good.values[0], other)):
        with pytest.raises(errors.PlanError, match="other types than its computation"):
            load_program(dump_program(dataclasses.replace(good, values=values)))
