"""Random programs of the soak, and what NumPy says of them. See `soak_crew.py`, whose threads call them.

A program is a chain or a diamond of placed functions over slices, with collectives, donation and several results. All
values are small integers, whatever their type, so that equal means equal. What is drawn comes from the generator that
the caller gives.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways as pw

MODULUS = 113
SHAPES = ((), (8,), (0, 4), (4, 4), (12, 24), (16, 8), (64, 64), (256, 128), (256, 256), (512, 512))
DTYPES = (np.float32, np.int32, np.uint8)
SPECS = (P(), P("x"), P("y"), P("x", "y"), P(None, "x"), P(("x", "y")))
SLICES = 4


# ---- operations: (jnp or numpy, operands..., constants) -> results


def scale(xp: Any, x: Any, k: int, c: int) -> Any:
    return ((x * k + c) % MODULUS,)


def add(xp: Any, x: Any, y: Any, k: int, c: int) -> Any:
    return ((x + y) % MODULUS,)


def total(xp: Any, x: Any, k: int, c: int) -> Any:
    """A collective where `x` is in parts."""
    return ((x + xp.sum(x, dtype=x.dtype)) % MODULUS,)


def roll(xp: Any, x: Any, k: int, c: int) -> Any:
    return (xp.roll(x, c),)


def turn(xp: Any, x: Any, k: int, c: int) -> Any:
    return (x.T,)


def two(xp: Any, x: Any, k: int, c: int) -> Any:
    return xp.flip(x), (x + c) % MODULUS


def square(xp: Any, x: Any, k: int, c: int) -> Any:
    return ((x @ x.T) % MODULUS,)


OPERATIONS: tuple[Callable[..., Any], ...] = (scale, scale, add, add, total, total, roll, turn, two, square)


@dataclasses.dataclass(frozen=True)
class Step:
    """One placed function of a program: which values it takes, where, and in which shardings."""

    operation: Callable[..., Any]
    slice: int
    inputs: tuple[int, ...]
    specs: tuple[Any, ...]
    results: int
    constants: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A random program: the arguments' shapes, its steps, and which values it returns."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: Any
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    donated: tuple[int, ...]

    def oracle(self, *arguments: np.ndarray) -> list[np.ndarray]:
        """What NumPy says."""
        values = list(arguments)
        for step in self.steps:
            values += [
                np.asarray(value, self.dtype)
                for value in step.operation(np, *(values[n] for n in step.inputs), *step.constants)
            ]
        return [values[n] for n in self.results]

    def build(self, slices: list[Any]) -> Any:
        """The program on slices."""
        placed = [
            pw.jit(
                functools.partial(_call, step.operation, step.constants),
                devices=slices[step.slice],
                in_shardings=step.specs[: len(step.inputs)],
                out_shardings=step.specs[len(step.inputs) :],
                name=step.operation.__name__,
            )
            for step in self.steps
        ]

        def run(*arguments: Any) -> Any:
            values = list(arguments)
            for step, function in zip(self.steps, placed, strict=True):
                values += function(*(values[n] for n in step.inputs))
            return [values[n] for n in self.results]

        return pw.program(run, donate_argnums=self.donated)


def _call(operation: Callable[..., Any], constants: tuple[int, int], *operands: Any) -> Any:
    return operation(jnp, *operands, *constants)


def spec_for(draw: random.Random, shape: tuple[int, ...], mesh: tuple[int, int]) -> Any:
    """A sharding that cuts `shape` into equal parts over a mesh with axes "x" and "y"."""
    sizes = dict(zip("xy", mesh, strict=True))

    def cuts(spec: P) -> bool:
        if len(spec) > len(shape):
            return False
        parts = [np.prod([sizes[name] for name in (axes if isinstance(axes, tuple) else (axes,))]) if axes else 1
                 for axes in spec]  # fmt: skip
        return all(size % count == 0 for size, count in zip(shape, parts, strict=False))

    return draw.choice([spec for spec in SPECS if cuts(spec)])


def random_plan(draw: random.Random, meshes: list[tuple[int, int]]) -> Plan:
    dtype, first = draw.choice(DTYPES), draw.choice(SHAPES)
    if dtype is np.float32 and np.prod(first) > 1 << 16:
        first = (64, 64)  # sums stay below 2**24
    arguments = draw.choice((1, 1, 2))
    shapes: list[tuple[int, ...]] = [first] * arguments
    steps: list[Step] = []
    for _ in range(draw.randint(1, 5)):
        operation = draw.choice(OPERATIONS)
        x = draw.randrange(max(0, len(shapes) - 3), len(shapes))
        inputs, made = (x,), [shapes[x]]
        if operation is square and (len(shapes[x]) != 2 or not 0 < shapes[x][1] <= 64):
            operation = total
        if operation is add:
            inputs = (x, draw.choice([n for n, shape in enumerate(shapes) if shape == shapes[x]]))
        elif operation is turn:
            made = [shapes[x][::-1]]
        elif operation is square:
            made = [(shapes[x][0], shapes[x][0])]
        elif operation is two:
            made = made * 2
        place = draw.randrange(SLICES)
        specs = tuple(spec_for(draw, shape, meshes[place]) for shape in [*(shapes[n] for n in inputs), *made])
        constants = draw.randint(1, 2), draw.randint(0, 30)
        steps.append(Step(operation, place, inputs, specs, len(made), constants))
        shapes += made
    calculated = range(arguments, len(shapes))
    results = sorted({len(shapes) - 1, *draw.choices(calculated, k=draw.randint(0, 2))})
    donated = tuple(n for n in range(arguments) if draw.random() < 0.3)
    return Plan(tuple(shapes[:arguments]), dtype, tuple(steps), tuple(results), donated)
