"""Binding: one plan per host, whose size follows from the host's own part; malformed plans are refused.

Map: COST-2 sizes and nodes; who takes part; donation once devices are known (MEM-4); exchanges (PLAN-6); the validator
against noise.
Programs here are written by hand: no JAX, no devices.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways import _native
from pathways.compiler.ir import ArrayType, Computation, Exchange, LogicalProgram, MeshSpec, Node, NodeKind
from pathways.plan.binding import BoundProgram, HostPlan, host_plan, pinned, plan_text

MiB = 1 << 20


def array(mesh: int, spec: Any = (("x",),), shape: tuple[int, ...] = (8192,)) -> ArrayType:
    return ArrayType(shape, np.dtype(np.float32), mesh, spec)


def computation(mesh: int, name: str = "f", inputs: int = 1, **kind: Any) -> Computation:
    of = array(mesh, **kind)
    return Computation(name, name.encode(), mesh, (of,) * inputs, (of,), (True,) * inputs)


def call(number: int, inputs: Any, output: int, donates: Any = None) -> Node:
    return Node(
        NodeKind.CALL, f"call.{number}", number, tuple(inputs), (output,), donates=donates or (False,) * len(inputs)
    )


def transfer(source: int, target: int) -> Node:
    return Node(NodeKind.TRANSFER, "transfer", -1, (source,), (target,))


def program(
    meshes: list[int],
    values: list[ArrayType],
    computations: list[Computation],
    nodes: list[Node],
    arguments: list[int],
    results: list[int],
) -> LogicalProgram:
    specs = tuple(MeshSpec(f"m{n}", (("x", size),)) for n, size in enumerate(meshes))
    return LogicalProgram(
        "p",
        specs,
        tuple(values),
        tuple(computations),
        tuple(nodes),
        tuple(arguments),
        tuple(results),
        (False,) * len(arguments),
    )


def chain(shards: int, each: int = 2) -> BoundProgram:
    made = program(
        [shards],
        [array(0)] * 3,
        [computation(0, "a"), computation(0, "b")],
        [call(0, [0], 1), call(1, [1], 2)],
        [0],
        [2],
    )
    return BoundProgram(made, (tuple(range(shards)),), each)


def nodes_of(plan: HostPlan) -> list[dict[str, Any]]:
    return _native.describe_plan(plan.block)  # type: ignore[no-any-return]


def test_whom_each_node_concerns() -> None:
    made = program(
        [2, 2],
        [array(0), array(0), array(1), array(1)],
        [computation(0, "a"), computation(1, "b")],
        [call(0, [0], 1), transfer(1, 2), call(1, [2], 3)],
        [0],
        [3],
    )
    bound = BoundProgram(made, ((0, 1), (4, 6)), 2)
    assert [bound.hosts_of_node(node) for node in made.nodes] == [{0}, {0, 2, 3}, {2, 3}]


def test_a_chain_of_two_has_four_nodes_for_any_number_of_shards() -> None:
    """COST-2."""
    sizes = set()
    for shards in (2, 8, 4096):
        bound = chain(shards)
        for host in {0, shards // 2 - 1}:
            plan = host_plan(bound, host)
            assert [node["kind"] for node in nodes_of(plan)] == ["argument", "call", "call", "result"]
            assert all(node["gang"] == (shards > 2) for node in nodes_of(plan)[1:3])
            sizes.add(len(plan.block))
    assert len(sizes) == 1, sizes
    assert len(plan_text(chain(4096)).splitlines()) == len(plan_text(chain(8)).splitlines()) == 6


def test_a_program_over_two_islands_has_equal_plans_for_any_number_of_shards() -> None:
    sizes: dict[str, set[int]] = {"first": set(), "second": set()}
    for shards in (2, 8, 4096):
        made = program(
            [shards, shards],
            [array(0), array(0), array(1), array(1)],
            [computation(0), computation(1)],
            [call(0, [0], 1), transfer(1, 2), call(1, [2], 3)],
            [0],
            [3],
        )
        bound = BoundProgram(made, (tuple(range(shards)), tuple(range(shards, 2 * shards))), 2)
        first, second = host_plan(bound, 0), host_plan(bound, shards // 2)
        assert [node["kind"] for node in nodes_of(first)] == ["argument", "call", "transfer", "result"]
        assert [node["kind"] for node in nodes_of(second)] == ["argument", "transfer", "call", "result"]
        assert nodes_of(first)[2]["destinations"] == [shards // 2] and nodes_of(second)[1]["sources"] == [0]
        sizes["first"].add(len(first.block))
        sizes["second"].add(len(second.block))
    assert all(len(each) == 1 for each in sizes.values()), sizes


def test_only_hosts_concerned_take_part() -> None:
    made = program(
        [2, 2],
        [array(0), array(0), array(1), array(1)],
        [computation(0), computation(1)],
        [call(0, [0], 1), transfer(1, 2), call(1, [2], 3)],
        [0],
        [3],
    )
    bound = BoundProgram(made, ((0, 1), (6, 7)), 2)
    assert bound.hosts() == (0, 3)
    assert [node["kind"] for node in nodes_of(host_plan(bound, 1))] == ["argument", "result"]


def test_a_host_with_a_part_of_a_mesh_has_its_own_devices_only() -> None:
    bound = BoundProgram(chain(4).program, ((1, 2, 4, 7),), 4)
    assert [nodes_of(host_plan(bound, host))[1]["devices"] for host in (0, 1)] == [0b0110, 0b1001]


def two_readers(donates: bool = True) -> LogicalProgram:
    """%1 = a(%0); %2 = %1 elsewhere; %3 = b(%2); %4 = a(%1), which the compiler lets take %1 over."""
    return program(
        [2, 2],
        [array(0), array(0), array(1), array(1), array(0)],
        [computation(0), computation(1)],
        [call(0, [0], 1), transfer(1, 2), call(1, [2], 3, (True,)), call(0, [1], 4, (donates,))],
        [0],
        [3, 4],
    )


def test_what_a_transfer_reads_is_not_donated() -> None:
    """MEM-4."""
    bound = BoundProgram(two_readers(), ((0, 1), (2, 3)), 2)
    assert pinned(bound) == {1}
    assert bound.donations == [(False,), (), (True,), (False,)]


def test_what_shares_memory_with_its_source_is_not_donated() -> None:
    """MEM-4: two slices with a device in common; a transfer between them may be no copy there."""
    for devices in ((0, 1), (1, 2), (1, 0)):
        bound = BoundProgram(two_readers(), ((0, 1), devices), 2)
        assert pinned(bound) == {1, 2}
        assert bound.donations == [(False,), (), (False,), (False,)]


def test_call_sites_of_one_computation_donate_alike_unless_much_is_lost() -> None:
    for size, kept in ((1024, False), (MiB, True)):
        of = {"shape": (size,)}
        made = program(
            [2, 2],
            [array(0, **of), array(0, **of), array(1, **of), array(0, **of), array(0, **of)],
            [computation(0, **of)],
            [call(0, [0], 1), transfer(1, 2), call(0, [1], 3, (True,)), call(0, [3], 4, (True,))],
            [0],
            [2, 4],
        )
        bound = BoundProgram(made, ((0, 1), (2, 3)), 2)
        assert bound.donations == [(False,), (), (False,), (kept,)]
        assert len(host_plan(bound, 0).launches) == 1 + kept


# ---------------------------------------------------------------------------------------------------- the validator


def blocks() -> list[bytes]:
    bound = BoundProgram(two_readers(), ((0, 1), (2, 3)), 2)
    return [host_plan(chain(8), 0).block, host_plan(bound, 0).block, host_plan(bound, 1).block]


@settings(max_examples=500)
@given(which=st.integers(0, 2), cut=st.integers(0, 1 << 20))
def test_a_cut_or_padded_plan_is_refused(which: int, cut: int) -> None:
    block = blocks()[which]
    with pytest.raises(ValueError, match=r"."):
        _native.check_plan(block[: cut % len(block)])
    with pytest.raises(ValueError, match=r"."):
        _native.check_plan(block + bytes(1 + cut % 16))


@settings(max_examples=300)
@given(noise=st.binary(max_size=512))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        _native.check_plan(noise)


def test_flipped_words_are_refused_or_harmless() -> None:
    """A damaged plan never crashes the validator, and what it lets pass can be read in full."""
    generator = random.Random(0)
    refused = 0
    for block in blocks():
        for at in range(0, len(block), 4):
            for word in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", generator.randbytes(4), b"\x07\x00\x00\x00"):
                damaged = block[:at] + word + block[at + 4 :]
                try:
                    _native.check_plan(damaged)
                except ValueError as error:
                    assert str(error)
                    refused += 1
                else:
                    assert _native.describe_plan(damaged)
    assert refused > 100


def exchanged(of: Exchange, source: tuple[int, ...], target: tuple[int, ...], each: int) -> BoundProgram:
    """Rows to another slice and back. Values 0 to 7: values, destinations, the five results, what came back."""
    rows, shards = 4 * len(source), len(target)
    whole = of.capacity * shards

    def ints(count: int, mesh: int) -> ArrayType:
        return ArrayType((count,), np.dtype(np.int32), mesh, (("x",),))

    made = program(
        [len(source), shards],
        [
            array(0, (("x",), ()), (rows, 3)),
            ints(rows, 0),
            array(1, (("x",), ()), (whole, 3)),
            ints(whole, 1),
            ints(shards, 1),
            ints(shards, 1),
            ints(rows, 0),
            array(0, (("x",), ()), (rows, 3)),
        ],
        [],
        [
            Node(NodeKind.EXCHANGE, "exchange.0", 0, (0, 1), (2, 3, 4, 5, 6)),
            Node(NodeKind.PERMUTE, "permute.1", -1, (2, 3, 6), (7,)),
        ],
        [0, 1],
        [7],
    )
    return BoundProgram(dataclasses.replace(made, exchanges=(of,)), (source, target), each)


@pytest.mark.parametrize(
    "how", [Exchange(5, True, 9), Exchange(5, False, None), Exchange(5, False, 0)], ids=["drop", "error", "unsent"]
)
def test_exchange_parts(how: Exchange) -> None:
    """Host 0 only sends, and so does host 1, with two ranges of shards; host 2 only takes (PLAN-6)."""
    bound = exchanged(how, (2, 0, 3), (4, 5), 2)
    assert [bound.hosts_of_node(node) for node in bound.program.nodes] == [{0, 1, 2}, {0, 1, 2}]
    assert pinned(bound) == {0, 1, 2, 3, 6}  # what it reads is not donated
    # per host: values of the program that each node reads and writes
    expected = {
        0: [([0, 1], [6]), ([6], [7])],
        1: [([0, 1], [6]), ([6], [7])],
        2: [([], [2, 3, 4, 5]), ([2, 3], [])],
    }
    for host, nodes in expected.items():
        plan = host_plan(bound, host)
        described = [node for node in nodes_of(plan) if node["kind"] in ("exchange", "permute")]
        assert [
            ([plan.values[v] for v in node["inputs"]], [plan.values[v] for v in node["outputs"]]) for node in described
        ] == nodes
        assert [node["node"] for node in described] == [0, 1]
        sending, taking = {0: (1, 0), 1: (3, 0), 2: (0, 3)}[host]
        assert [(node["input_devices"], node["devices"]) for node in described] == [
            (sending, taking),
            (taking, sending),
        ]
        there, here = [(0, 1), (1, 0), (2, 1)], [(0, 2)]
        assert _native.describe_exchanges(plan.block) == [
            {
                "source_shards": 3,
                "sources": there,
                "target_shards": 2,
                "targets": here,
                "source_rows": 4,
                "capacity": 5,
                "drops": how.drops,
                "unsent": how.unsent,
                "known": False,
            },
            {
                "source_shards": 2,
                "sources": here,
                "target_shards": 3,
                "targets": there,
                "source_rows": 5,
                "capacity": 4,
                "drops": False,
                "unsent": None,
                "known": True,
            },
        ]
    text = plan_text(bound)
    end = ", dropping more" if how.drops else ", failing with more"
    assert f"of 4 rows per shard to 5, hosts [0, 1] to [2]{end}" in text
    assert "of 5 rows per shard to 4, hosts [2] to [0, 1]" in text


def test_an_exchange_within_one_slice_has_both_parts_on_each_host() -> None:
    bound = exchanged(Exchange(2, False, None), (0, 1, 2), (2, 1, 0), 1)
    for host in range(3):
        plan = host_plan(bound, host)
        node, back = (node for node in nodes_of(plan) if node["kind"] in ("exchange", "permute"))
        assert [plan.values[v] for v in node["inputs"]] == [0, 1]
        assert [plan.values[v] for v in node["outputs"]] == [2, 3, 4, 5, 6]
        assert [plan.values[v] for v in back["inputs"]] == [2, 3, 6]


def test_a_host_without_a_shard_has_no_node_of_an_exchange() -> None:
    bound = exchanged(Exchange(2, False, None), (0,), (2,), 1)
    assert [node["kind"] for node in nodes_of(host_plan(bound, 1))] == ["argument", "result"]
