"""Views: which shards a host shows of which inputs, and what a view must not show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways import errors
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind, Tiling, View
from pathways.plan.binding import BoundProgram, host_plan, pinned
from pathways.plan.viewing import viewed_here

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
