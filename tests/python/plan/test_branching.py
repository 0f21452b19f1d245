"""Branches in the plans of hosts: who decides, who is told, which plan each host gets, and what memory a run takes.

The programs are the cases of `control_cases` that have branches; a run plays a sample (`@pytest.mark.sampled`).

Map: GANG-1 one host tells each host (`test_each_host_is_told_once`); PLAN-2, PLAN-5 (`test_hosts_get_valid_plans`);
MEM-2 the peak against every way that a program can go (`test_the_peak_is_never_less_than_what_is_there`,
`test_the_peak_is_that_of_the_larger_case`); MEM-4 (`test_what_is_not_donated`). No devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES, HOMES, Case, Placed
from control_on_slices import BRANCHES
from jax.sharding import PartitionSpec as P

from pathways import _native, errors
from pathways.compiler import specs
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind, Predicate
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction
from pathways.compiler.trace import Argument, as_argument, device_put, trace
from pathways.plan.binding import BoundProgram, host_plan, owners_of, plan_text
from pathways.plan.memory_profile import Profile
from pathways.protocol.serialization import dump_program, load_program

SLICES = {"a": MeshSpec("a", (("x", 2),)), "b": MeshSpec("b", (("y", 2),)), "c": MeshSpec("c", (("z", 1),))}
#: Hosts of one device: 0 and 1 are an island, 2 and 3 another.
DEVICES = {"a": (0, 1), "b": (2, 3), "c": (1,)}
ISLANDS = (0, 0, 1, 1)


def compiled(case: Case, make: str, slices: dict[str, MeshSpec] = SLICES) -> LogicalProgram:
    placed = Placed.by(
        lambda fun, where, name: TaggedFunction(fun, slices[where], name=name),
        lambda x, where: device_put(x, slices[where]),
    )
    arguments = []
    for name, value in zip(case.names, case.values(), strict=True):
        mesh, kind = slices[HOMES[name]], as_argument(value, name)
        cut = P(mesh.axes[0][0]) if np.ndim(value) else None
        spec = specs.normalize(specs.broadcast(cut, value, name)[0] if cut else P(), kind.shape, mesh, name)
        arguments.append(Argument(kind.shape, kind.dtype, kind.weak_type, mesh, spec))
    return compile_traced(trace(getattr(case, make)(placed), arguments))


def bound(program: LogicalProgram, devices: dict[str, tuple[int, ...]] = DEVICES) -> BoundProgram:
    return BoundProgram(program, tuple(devices[mesh.name] for mesh in program.meshes), 1, ISLANDS)


@pytest.fixture(params=itertools.product(BRANCHES, ("forward", "backward")), ids="-".join, scope="module")
def branches(request: Any) -> BoundProgram:
    name, make = request.param
    made = bound(compiled(CASES[name], make))
    assert made.program.predicates and not made.program.loops
    return made


@pytest.mark.sampled(0.15)
def test_hosts_get_valid_plans(branches: BoundProgram) -> None:
    """The plan's own checks look at scopes and order. Each node is on the hosts that have its values."""
    selects = {n for n, node in enumerate(branches.program.nodes) if node.kind is NodeKind.SELECT}
    for host in branches.hosts():
        plan = host_plan(branches, host, True)
        nodes = _native.describe_plan(plan.block)
        here = {n for n in selects if host in branches.hosts_of_node(branches.program.nodes[n])}
        assert {node["node"] for node in nodes if node["kind"] == "select"} == here
        predicates = _native.describe_branches(plan.block)["predicates"]
        for node in nodes[1:-1]:
            says = branches.program.nodes[node["node"]].predicate
            chain = []
            while node["predicate"] != _native.NO_PREDICATE:
                chain.append(predicates[node["predicate"]]["which"])
                node = {"predicate": predicates[node["predicate"]]["parent"]}
            assert chain == [branches.program.predicates[p].case for p in branches.branching().chain(says)]


@pytest.mark.sampled(0.15)
def test_each_host_is_told_once(branches: BoundProgram) -> None:
    """By the owner, or by the first host of its island that is concerned; and all agree."""
    plans = {host: _native.describe_branches(host_plan(branches, host).block) for host in branches.hosts()}
    told: dict[int, list[tuple[int, int]]] = {}
    known: dict[int, set[int]] = {}
    for host, plan in plans.items():
        for choice in plan["choices"]:
            number = choice["number"]
            known.setdefault(number, set()).add(host)
            told.setdefault(number, []).extend((host, other) for other in choice["told"])
            assert (choice["value"] != _native.NO_VALUE) == (choice["owner"] == host)
            assert choice["source"] in branches.hosts()
    for number, choice in enumerate(branches.branching().choices):
        assert known[number] == set(choice.hosts)
        assert sorted(other for _, other in told[number]) == sorted(known[number] - {choice.owner})
        for host, other in told[number]:
            mine = [record for record in plans[other]["choices"] if record["number"] == number]
            assert mine[0]["source"] == host and mine[0]["cases"] == choice.cases
            assert host == choice.owner or ISLANDS[host] == ISLANDS[other]
        for island in {ISLANDS[host] for host in choice.hosts} - {ISLANDS[choice.owner]}:
            from_outside = [other for host, other in told[number] if ISLANDS[other] == island != ISLANDS[host]]
            assert len(from_outside) == 1, "one host of the island hears it from outside"
    bits = [
        {(p["choice"], p["which"], p["parent"]): p["bit"] for p in plan["predicates"] if p["bit"] != _native.NO_BIT}
        for plan in plans.values()
    ]
    assert all(len(set(each.values())) == len(each) for each in bits), "no two predicates share a bit"


@pytest.mark.sampled(0.15)
def test_a_program_with_branches_survives_the_wire(branches: BoundProgram) -> None:
    program = branches.program
    assert load_program(dump_program(program)) == program
    text = plan_text(branches)
    assert " select select." in text and " if %" in text and "decides on host" in text


# What a run takes, for every way that it can go.


def ways(program: LogicalProgram) -> Iterator[dict[int, int]]:
    """Every choice of cases, by the value that decides."""
    counts: dict[int, int] = {}
    for p in program.predicates:
        counts[p.value] = max(counts.get(p.value, 0), p.case + 1)
    for cases in itertools.product(*map(range, counts.values())):
        yield dict(zip(counts, cases, strict=True))


def most(made: BoundProgram, device: int, way: dict[int, int], received: set[int] = frozenset()) -> int:
    """The most bytes on a device at any node, counted buffer by buffer. With `received`, only these count."""
    program, gives = made.program, made.donations

    def holds(number: int) -> bool:
        if number < 0:
            return True
        p = program.predicates[number]
        return holds(p.parent) and way[p.value] == p.case

    def size(value: int) -> int:
        on = device in made.placed(value).devices
        return on * (program.values[value].nbytes // int(np.prod(made.placed(value).parts())))

    left: dict[int, int] = {}  # how often each value will be read, its own life as a result included
    for node in program.nodes:
        for v in node.inputs:
            left[v] = left.get(v, 0) + 1
    for v in program.results:
        left[v] = left.get(v, 0) + 1
    buffer: dict[int, int] = {v: v for v in program.arguments}
    users: dict[int, int] = dict.fromkeys(program.arguments, 1)
    kept = {
        v for v, donated in zip(program.arguments, program.donated_arguments, strict=True) if not donated
    }  # the caller has them
    live = highest = 0

    def drop(value: int) -> int:
        if value not in buffer:
            return 0
        root = buffer.pop(value)
        users[root] -= 1
        return size(root) if users[root] == 0 and root not in kept and (not received or root in received) else 0

    for number, node in enumerate(program.nodes):
        before = 0
        taken = holds(node.predicate)
        if taken and node.kind is NodeKind.SELECT:
            source = node.inputs[1 + way[node.inputs[0]]]
            buffer[node.outputs[0]] = buffer[source]
            users[buffer[source]] += 1
        elif taken:
            for v in node.outputs:
                buffer[v], users[v] = v, 1
                live += size(v) if not received or v in received else 0
            before = sum(
                size(v)
                for v, given in zip(node.inputs, gives[number], strict=False)
                if given and not received and left[v] == 1 and users[buffer[v]] == 1 and buffer[v] not in kept
            )
        highest = max(highest, live - before)
        for v in node.inputs:
            left[v] -= 1
            if left[v] == 0:
                live -= drop(v)
        live -= sum(drop(v) for v in node.outputs if v not in left)
    return highest


@pytest.mark.sampled(0.15)
def test_the_peak_is_never_less_than_what_is_there(branches: BoundProgram) -> None:
    program = branches.program
    for host in branches.hosts():
        plan = host_plan(branches, host)
        without = Profile(branches, host, receives_on_host=False).memory(plan, [0] * len(plan.launches))
        (need,) = without.devices
        found = [most(branches, need.device, way) for way in itertools.islice(ways(program), 64)]
        assert max(found) <= need.peak + need.eager, (host, found, need)
        cpu = Profile(branches, host, receives_on_host=True)
        received = set(cpu._receive_bytes_of)
        if received:
            lies = [most(branches, need.device, way, received) for way in itertools.islice(ways(program), 64)]
            assert max(lies) <= cpu.memory(plan, [0] * len(plan.launches)).receive_peak


KIB = 1024


def diamond(first: int, second: int, donated: bool = False, tail: int = 1) -> LogicalProgram:
    """x -> cond(which, a chain of `first` buffers of 1 KiB alive at once, of `second`) -> a call."""
    kind = ArrayType((KIB,), np.dtype(np.uint8), 0, ((),))
    flag = ArrayType((), np.dtype(np.int32), 0, ())
    values, nodes, computations, cases = [kind, flag], [], [], []

    def call(inputs: tuple[int, ...], predicate: int, gives: tuple[bool, ...]) -> int:
        values.append(kind)
        types = tuple(values[v] for v in inputs)
        computations.append(Computation(f"f{len(nodes)}", b"%d" % len(nodes), 0, types, (kind,), gives))
        nodes.append(
            Node(
                NodeKind.CALL,
                f"f.{len(nodes)}",
                len(computations) - 1,
                inputs,
                (len(values) - 1,),
                "f",
                donates=gives,
                predicate=predicate,
            )
        )
        return len(values) - 1

    for case, width in enumerate((first, second)):
        made = [call((0,), case, (False,)) for _ in range(width)]
        cases.append(call(tuple(made), case, (False,) * width))
    values.append(kind)
    nodes.append(Node(NodeKind.SELECT, "select.", -1, (1, *cases), (len(values) - 1,), "jax.lax.cond"))
    last = len(values) - 1
    for _ in range(tail):
        last = call((last,), -1, (donated,))
    predicates = (Predicate(1, 0), Predicate(1, 1))
    return LogicalProgram(
        "p",
        (MeshSpec("a", (("x", 1),)),),
        tuple(values),
        tuple(computations),
        tuple(nodes),
        (0, 1),
        (last,),
        (False, False),
        predicates=predicates,
    )


@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 1), (3, 3)])
def test_the_peak_is_that_of_the_larger_case(first: int, second: int) -> None:
    made = BoundProgram(diamond(first, second), ((0,),), 1)
    plan = host_plan(made, 0)
    (need,) = Profile(made, 0, True).memory(plan, [0] * len(plan.launches)).devices
    exact = [most(made, 0, {1: case}) for case in (0, 1)]
    assert exact == [(first + 1) * KIB, (second + 1) * KIB]
    assert (need.peak, need.eager) == (max(exact), 0)


def test_branches_one_after_the_other_do_not_add_up() -> None:
    def walk(count: int) -> int:
        def fun(w: Any, x: Any) -> Any:
            f = TaggedFunction(lambda w, x: jnp.tanh(x @ w), SLICES["c"], name="f")
            for _ in range(count):
                x = jax.lax.cond(x[0, 0] > 0, lambda x: f(w, f(w, x)), lambda x: f(w, x), x)
            return x

        a = Argument((16, 16), np.float32, False, SLICES["c"], ((), ()))
        made = bound(compile_traced(trace(fun, [a, a])))
        plan = host_plan(made, 1)
        return Profile(made, 1, True).memory(plan, [0] * len(plan.launches)).devices[0].peak

    assert walk(6) == walk(2)


def test_what_is_not_donated() -> None:
    """MEM-4: a call takes over the result of a select only if it may take over what any case gives."""

    yes = Argument((), np.bool_, False, SLICES["c"], ())
    x = Argument((8,), np.float32, False, SLICES["c"], ((),))
    # Call sites of one function donate alike, so each call is of a function of its own.
    f, g, h, last = (
        TaggedFunction(functools.partial(jnp.add, number), SLICES["c"], name=f"f{number}") for number in range(4)
    )

    def gives(fun: Any, donated: tuple[int, ...] = ()) -> dict[str, bool]:
        made = bound(compile_traced(trace(fun, [yes, x], donate_argnums=donated)))
        return {
            node.origin: any(given)
            for node, given in zip(made.program.nodes, made.donations, strict=True)
            if node.origin in ("f0", "f1", "f2", "f3")
        }

    passing = lambda yes, x: last(jax.lax.cond(yes, f, lambda x: x, x))
    assert gives(passing) == {"f0": False, "f3": False}, "the result may be the caller's own array"
    assert gives(passing, (1,)) == {"f0": False, "f3": True}
    both = lambda yes, x: last(jax.lax.cond(yes, f, lambda x: g(h(x)), x))
    assert gives(both) == {"f0": False, "f2": False, "f1": True, "f3": True}
    assert gives(both, (1,)) == {"f0": True, "f2": False, "f1": True, "f3": True}, "f is last in the program's order"

    def read_later(yes: Any, x: Any) -> Any:
        y = f(x)
        return last(jax.lax.cond(yes, g, lambda y: y, y)), h(y)

    assert gives(read_later) == {"f0": False, "f1": False, "f2": True, "f3": False}, "h reads y after the others"


def test_a_result_that_is_perhaps_an_argument_counts_as_a_buffer_of_its_own() -> None:
    made = bound(compiled(CASES["cond_with_one_empty_branch"], "forward"))
    (value,) = made.program.results
    (owners,) = [of for result, of in owners_of(made.program).items() if result == value]
    assert not owners.isdisjoint(made.program.arguments)
    plan = host_plan(made, 0)
    (result,) = Profile(made, 0, True).memory(plan, [0] * len(plan.launches)).results
    assert result.argument == -1 and result.bytes == 4 * 4 * 4 // 2


def test_too_many_branches_are_refused() -> None:
    f = TaggedFunction(lambda x: x + 1, SLICES["c"], name="f")
    x = Argument((2,), np.float32, False, SLICES["c"], ((),))
    n = Argument((), np.int32, False, SLICES["c"], ())
    branches = [lambda x, k=k: f(x * k) for k in range(257)]
    with pytest.raises(errors.ProgramError, match=r"jax\.lax\.cond has 257 branches.*at most 256"):
        compile_traced(trace(lambda n, x: jax.lax.switch(n, branches, x), [n, x]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"predicates": (Predicate(99, 0), Predicate(1, 1))}, "no value 99"),
        ({"predicates": (Predicate(1, 256), Predicate(1, 1))}, "no case 256"),
        ({"predicates": (Predicate(1, 0, 1), Predicate(1, 1))}, "no predicate 1"),
        ({"predicates": ()}, "no predicate 0"),
    ],
)
def test_malformed_branches_are_named(change: dict[str, Any], words: str) -> None:
    broken = dataclasses.replace(diamond(1, 1), **change)
    with pytest.raises(errors.PlanError, match=words):
        load_program(dump_program(broken))


def test_branches_that_are_nested_too_deep_are_refused_before_a_host_cuts_them() -> None:
    """Also those of a client whose library does not look (TRUST-1)."""

    def nested(count: int) -> LogicalProgram:
        kind = ArrayType((), np.dtype(np.int32), 0, ())
        select = Node(NodeKind.SELECT, "select", -1, (0, 0), (1,), predicate=count - 1)
        predicates = tuple(Predicate(0, 0, n - 1) for n in range(count))
        mesh = MeshSpec("s", (("x", 1),))
        return LogicalProgram("deep", (mesh,), (kind,) * 2, (), (select,), (0,), (1,), (False,), predicates=predicates)

    load_program(dump_program(nested(64)))
    with pytest.raises(errors.PlanError, match="program 'deep' has branches that are nested more than 64 deep"):
        load_program(dump_program(nested(65)))


def test_a_program_whose_branches_are_nested_too_deep_is_refused_by_name() -> None:
    slices = [MeshSpec("s0", (("x", 1),))]
    step = TaggedFunction(lambda x: x + 1, slices[0], name="step")

    def deep(x: Any, flag: Any, count: int = 65) -> Any:
        return step(x) if count == 0 else jax.lax.cond(flag, lambda x: deep(x, flag, count - 1), lambda x: x, x)

    x = Argument((), np.dtype(np.float32), False, slices[0], ())
    flag = Argument((), np.dtype(np.bool_), False, slices[0], ())
    with pytest.raises(
        errors.ProgramError, match=r"'deep': jax\.lax\.cond .* is nested in 64 others; expected at most"
    ):
        compile_traced(trace(deep, [x, flag]))
