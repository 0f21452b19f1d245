"""Views: which shards a host shows of which inputs, and what a view must not show."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways import errors
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind, Tiling, View
from pathways.plan.binding import BoundProgram, host_plan, pinned
from pathways.plan.viewing import viewed_here
from pathways.protocol.serialization import dump_program, load_program

F32 = np.dtype(np.float32)


def program(sources: list[tuple[int, ...]], devices: tuple[int, ...], shown: list[tuple[int, int]]) -> BoundProgram:
    """A program that shows on each of `devices` a shard, (source, number), of arrays that lie on `sources`."""
    lists = (*sources, devices)
    types = [
        ArrayType((len(each),), F32, n, ((),), tiling=Tiling((len(each),), tuple(range(len(each)))))
        for n, each in enumerate(lists)
    ]
    inputs, shards = zip(*shown, strict=True)
    made = len(sources)
    view = Computation(
        "v", b"", made, tuple(types[:made]), (types[made],), (False,) * made, views=(View(inputs, shards),)
    )
    node = Node(NodeKind.CALL, "v", 0, tuple(range(made)), (made,), donates=(False,) * made)
    meshes = tuple(MeshSpec(f"m{n}", (("d", len(each)),)) for n, each in enumerate(lists))
    logical = LogicalProgram("p", meshes, tuple(types), (view,), (node,), tuple(range(made)), (made,), (False,) * made)
    return BoundProgram(logical, lists, 2)


@given(st.data())
def test_each_host_shows_its_own(data: st.DataObject) -> None:
    devices = tuple(data.draw(st.permutations(range(8))))[: data.draw(st.integers(1, 8))]
    sources = [tuple(data.draw(st.permutations(range(8)))) for _ in range(data.draw(st.integers(1, 3)))]
    shown = []
    for device in devices:
        source = data.draw(st.integers(0, len(sources) - 1))
        shown.append((source, sources[source].index(device)))
    bound = program(sources, devices, shown)
    (view,) = bound.program.computations
    for host in range(4):
        here = viewed_here(view, bound.bindings, 2, host)
        mine = [device for device in devices if device // 2 == host]
        (row,) = here.shown
        assert len(row) == len(mine)
        for device, (place, shard) in zip(mine, row, strict=True):  # the shard that it shows lies on its device
            local = [each for each in sources[here.inputs[place]] if each // 2 == host]
            assert local[shard] == device
        assert sorted({place for place, _ in row}) == list(range(len(here.inputs)))
        if mine:
            plan = host_plan(bound, host)
            assert set(here.inputs) <= set(plan.values)
    assert pinned(bound) == set(range(len(bound.program.values)))  # who shows memory does not give it away


def test_a_shard_of_another_device() -> None:
    bound = program([(0, 1)], (1,), [(0, 0)])
    with pytest.raises(errors.PlanError, match="shows on device 1 a shard that lies on 0"):
        viewed_here(bound.program.computations[0], bound.bindings, 2, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"views": (View((0, 1), (0, 0)),)}, "no input 1"),
        ({"views": (View((0, 0), (0, 2)),)}, "no shard 2"),
        ({"views": (View((0,), (0,)),)}, "another number of devices"),
        ({"views": ()}, None),
        ({"module": b"module"}, "or does more"),
        ({"donated": (True,)}, "or does more"),
        ({"callbacks": (1,)}, "callbacks or a move"),
    ],
)
def test_views_that_make_no_sense(changes: dict[str, Any], words: str | None) -> None:
    good = program([(0, 1)], (0, 1), [(0, 0), (0, 1)]).program
    assert load_program(dump_program(good)) == good
    bad = dataclasses.replace(good, computations=(dataclasses.replace(good.computations[0], **changes),))
    if words is None:
        load_program(dump_program(bad))
    else:
        with pytest.raises(errors.PlanError, match=words):
            load_program(dump_program(bad))


def test_a_node_that_shows_other_arrays_than_it_says() -> None:
    good = program([(0, 1), (0, 1)], (0, 1), [(0, 0), (1, 1)]).program
    for inputs in ((0,), (0, 2), (0, 1, 1)):
        bad = dataclasses.replace(good, nodes=(dataclasses.replace(good.nodes[0], inputs=inputs),))
        with pytest.raises(errors.PlanError, match="other types than its computation"):
            load_program(dump_program(bad))


def test_a_module_and_its_options_are_told_apart() -> None:
    (view,) = program([(0,)], (0,), [(0, 0)]).program.computations
    one, two = (
        dataclasses.replace(view, module=module, options=options) for module, options in ((b"ab", b"c"), (b"a", b"bc"))
    )
    assert one.fingerprint != two.fingerprint
