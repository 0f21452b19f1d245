"""Guarded bodies (pathways/plan/guarding.py): which loops have one, and what it takes in memory.

WALK-4: the run itself decides whether it does something. MEM-2: a carry that is overwritten in place counts once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways._native import StepKind
from pathways.compiler.ir import NodeKind
from pathways.plan.binding import BoundProgram, host_plan
from pathways.plan.composite import Composite, composite_of
from pathways.plan.memory_profile import Profile

X = np.ones((64, 4), np.float32)


@pytest.fixture
def add() -> Any:
    devices = pw.make_virtual_device_set(pw.connect())
    return lambda: devices.add_slice(shape=(1,), axis_names=("x",))


def lowered(fun: Any, *args: Any, **options: Any) -> tuple[Composite, list[BoundProgram]]:
    """The composite, and its plans on their devices."""
    bound = pw.program(fun, **options).lower(*args).bound
    composite = composite_of(bound)
    devices = dict(zip((mesh.name for mesh in bound.program.meshes), bound.bindings, strict=True))
    return composite, [
        BoundProgram(plan, tuple(devices[mesh.name] for mesh in plan.meshes), bound.devices_per_host)
        for plan in composite.plans
    ]


def body_of(composite: Composite) -> int:
    """The number of the plan that the loop which runs ahead runs."""
    (at,) = [n for n, step in enumerate(composite.steps) if step.kind == StepKind.AHEAD]
    assert composite.steps[at + 1].kind == StepKind.RUN
    return composite.steps[at + 1].number


def test_nothing_is_launched_and_the_carry_is_handed_on(add: Any) -> None:
    here, there = add(), add()
    f = pw.jit(lambda x: x * 2, devices=here, name="f")
    less = pw.jit(lambda n, m: n < m, devices=there, name="less")

    def fun(x: Any, m: Any) -> Any:
        return jax.lax.while_loop(lambda c: less(c[1], m), lambda c: (f(c[0]), c[1] + 1), (x, 0))

    composite, plans = lowered(fun, X, 5)
    part = plans[body_of(composite)].program
    guard = part.predicates[0]
    assert part.decides == guard.value and guard.case == 1 and guard.value in part.arguments
    taken = {v for v, given in zip(part.arguments, part.donated_arguments, strict=True) if given}
    for node in part.nodes:
        assert node.predicate == 0 or (node.kind is NodeKind.SELECT and node.inputs[0] == guard.value)
        if node.kind is NodeKind.SELECT:
            assert node.inputs[1] in taken


def test_a_carry_that_is_overwritten_counts_once(add: Any) -> None:
    f = pw.jit(lambda x, n: (x * 2, n + 1), devices=add(), name="f")

    def fun(x: Any, m: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[1] < m, lambda c: f(*c), (x, 0))

    composite, plans = lowered(fun, X, 5, donate_argnums=0)
    bound = plans[body_of(composite)]
    plan = host_plan(bound, 0)
    assert any(any(launch.donates) for launch in plan.launches)
    (need,) = [
        need
        for need in Profile(bound, 0, receives_on_host=True).memory(plan, [0] * len(plan.launches)).devices
        if need.device in bound.bindings[0]
    ]
    assert need.peak < X.nbytes  # small scalars only; twice the carry would be too much


def test_a_body_with_a_loop_inside_has_none(add: Any) -> None:
    f = pw.jit(lambda x: jnp.sin(x), devices=add(), name="f")

    def body(c: Any) -> Any:
        x = jax.lax.scan(lambda y, _: (f(y), None), c[0], None, length=40)[0]
        return x, c[1] + 1

    composite, _ = lowered(lambda x, m: jax.lax.while_loop(lambda c: c[1] < m, body, (x, 0)), X, 5)
    assert all(step.kind != StepKind.AHEAD for step in composite.steps)
