"""The body of a loop that the data ends, as one run that looks itself whether it is to do anything.

The body becomes the taken case of a branch of a plan (csrc/plan/branches.h). Its scalar is one more argument: what the
run before has found. If it is false, nothing is launched, and the carry is handed on as it was, by selects, without a
copy. So the controller can order such runs ahead (WALK-4), and no host waits for it to hear that there is another
iteration.

A carry that is taken over by a call is handed on only where that call is not run. So its select is no further reader.

Pure.
"""

from __future__ import annotations

import dataclasses

from pathways.compiler.control.segments import Run, segments
from pathways.compiler.ir import MOST_NESTED, LogicalProgram, Loop, Node, NodeKind, Predicate
from pathways.plan.exchange_shape import EXCHANGES


def guarded(program: LogicalProgram, scalar: int, loop: Loop) -> LogicalProgram | None:
    """The guarded body of a loop of `program` whose first scalar is the value `scalar`; None: it cannot be one.

    It takes and gives the scalar before all that the body takes, and the body's carry: for each result of the body, its
    carried argument is what is handed on. Its first predicate is that of the branch. Its values are the body's, then
    the scalar, then the results.
    """
    body = loop.body
    chain = segments(body)
    if len(chain) != 1 or not isinstance(chain[0], Run) or any(node.kind in EXCHANGES for node in body.nodes):
        return None
    if not _is_alike(program, scalar, body, body.results[0]) or _depth(body) >= MOST_NESTED:
        return None
    go = len(body.values)
    values = [*body.values, body.values[body.results[0]]]
    nodes = [dataclasses.replace(node, predicate=node.predicate + 1) for node in body.nodes]
    results = []
    for before, after in zip((go, *body.arguments[loop.constants :]), body.results, strict=True):
        if before == after:
            results.append(before)
            continue
        results.append(len(values))
        nodes.append(Node(NodeKind.SELECT, "select.", -1, (go, before, after), (len(values),), "jax.lax.while_loop"))
        values.append(body.values[after])
    return dataclasses.replace(
        body,
        values=tuple(values),
        nodes=tuple(nodes),
        arguments=(go, *body.arguments),
        donated_arguments=(True, *body.donated_arguments),
        results=tuple(results),
        predicates=(Predicate(go, 1), *(Predicate(p.value, p.case, p.parent + 1) for p in body.predicates)),
    )


def _is_alike(program: LogicalProgram, value: int, other: LogicalProgram, value_there: int) -> bool:
    """Whether two values of two programs have one type and lie on one slice, so that a select can give either."""
    one, two = program.values[value], other.values[value_there]
    return (
        dataclasses.replace(one, mesh=two.mesh) == two and program.meshes[one.mesh].name == other.meshes[two.mesh].name
    )


def _depth(program: LogicalProgram) -> int:
    """How deep the branches of a program nest."""
    depth: list[int] = []
    for predicate in program.predicates:
        depth.append(1 + (depth[predicate.parent] if predicate.parent >= 0 else 0))
    return max(depth, default=0)
