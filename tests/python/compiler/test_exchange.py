"""Exchanges of rows: values and derivatives are plain JAX's, in the reference interpreter; bad input is refused.

Map: `CASES`, each with its value and gradient, and the nodes that they make; second derivatives; trees; loops and
branches; what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import run

from pathways import errors
from pathways.compiler.added_primitives.exchange import Exchanged, exchange
from pathways.compiler.ir import LogicalProgram, MeshSpec, NodeKind
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction
from pathways.compiler.printing import logical_text
from pathways.compiler.trace import Argument, trace

ROWS, WIDTH = 8, 3
SOURCE, TARGET = MeshSpec("tokens", (("x", 2),)), MeshSpec("experts", (("e", 2), ("f", 2)))
SHARDS = TARGET.size

Send = Callable[..., Any]


class Pathways:
    """The functions of a case, placed."""

    @staticmethod
    def send(values: Any, destinations: Any, **how: Any) -> Exchanged:
        return exchange(values, destinations, TARGET, **how)

    @staticmethod
    def at(mesh: MeshSpec, fun: Callable[..., Any]) -> Callable[..., Any]:
        return TaggedFunction(fun, mesh, name=fun.__name__)


class Plain:
    """The same in plain JAX: a dense exchange by sums of one-hot rows."""

    class Sent(Exchanged):
        def back(self, results: Any) -> Any:
            return jax.tree.map(
                lambda x: jnp.where(_wide(self.slots >= 0, x), x[jnp.maximum(self.slots, 0)], jnp.zeros((), x.dtype)),
                results,
            )

    @staticmethod
    def send(values: Any, destinations: Any, capacity: int, overflow: str = "error", unsent: int | None = None) -> Any:
        chosen = jax.nn.one_hot(destinations, SHARDS, dtype=jnp.int32)
        place = jnp.sum((jnp.cumsum(chosen, 0) - 1) * chosen, 1)
        goes = (jnp.sum(chosen, 1) > 0) & (place < capacity)
        slots = jnp.where(goes, destinations * capacity + place, -1)
        into = jnp.where(goes, slots, SHARDS * capacity)  # out of range: dropped

        def move(x: Any, empty: Any = 0) -> Any:
            return jnp.full((SHARDS * capacity, *x.shape[1:]), empty, x.dtype).at[into].set(x, mode="drop")

        offered = jnp.sum(chosen, 0, dtype=jnp.int32)
        numbers = move(jnp.arange(len(destinations), dtype=jnp.int32), -1)
        return Plain.Sent(jax.tree.map(move, values), numbers, jnp.minimum(offered, capacity), offered, slots)

    @staticmethod
    def at(mesh: MeshSpec, fun: Callable[..., Any]) -> Callable[..., Any]:
        return fun


def _wide(mask: Any, like: Any) -> Any:
    return mask.reshape(mask.shape + (1,) * (like.ndim - 1))


def mixture(on: Any, destinations: Any, **how: Any) -> Callable[..., Any]:
    """Rows to experts and back, as a mixture of experts does; the loss is not linear in anything."""

    def encode(x: Any) -> Any:
        return jnp.tanh(x)

    def expert(x: Any, w: Any) -> Any:
        return jnp.sin(x) * w

    def combine(x: Any, y: Any) -> Any:
        return jnp.sum(x * y + y**3)

    def program(x: Any, w: Any) -> Any:
        h = on.at(SOURCE, encode)(x)
        sent = on.send(h, destinations, **how)
        y = sent.back(on.at(TARGET, expert)(sent.rows, w))
        return on.at(SOURCE, combine)(h, y), (sent, y)

    return program


DRAWN = np.asarray([2, 0, 3, 2, 2, 1, 0, 2], np.int32)
CASES = {
    "fits": (DRAWN, {"capacity": 4}),
    "dropped": (DRAWN, {"capacity": 2, "overflow": "drop"}),
    "one shard": (np.full(ROWS, 1, np.int32), {"capacity": ROWS}),
    "unsent": (np.asarray([9, 0, 9, 3, 9, 9, 3, 9], np.int32), {"capacity": 3, "unsent": 9}),
    "nothing": (np.full(ROWS, -1, np.int32), {"capacity": 1, "unsent": -1}),
}


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def check(make: Callable[[Any], Callable[..., Any]], *args: Any, at: Any = None) -> LogicalProgram:
    """Compares a program with plain JAX; returns the program."""
    at = at or [(SOURCE, P("x")), (TARGET, P())]
    got, program = run(make(Pathways), *args, at=at)
    expected = make(Plain)(*map(jnp.asarray, args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    return program


def kinds(program: LogicalProgram) -> list[NodeKind]:
    return [node.kind for node in program.nodes if node.kind in (NodeKind.EXCHANGE, NodeKind.PERMUTE)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_plain_jax(name: str) -> None:
    destinations, how = CASES[name]
    args = _random(ROWS, WIDTH), _random(WIDTH)

    def forward(on: Any) -> Callable[..., Any]:
        return mixture(on, destinations, **how)

    def gradient(on: Any) -> Callable[..., Any]:
        return jax.grad(lambda x, w: forward(on)(x, w)[0], (0, 1))

    program = check(forward, *args)
    assert kinds(program) == [NodeKind.EXCHANGE, NodeKind.PERMUTE]
    assert kinds(check(gradient, *args)) == [NodeKind.EXCHANGE, *[NodeKind.PERMUTE] * 3]


@pytest.mark.parametrize("mode", ["forward over reverse", "reverse over reverse"])
def test_second_derivatives_are_plain_jax(mode: str) -> None:
    def make(on: Any) -> Callable[..., Any]:
        gradient = jax.grad(lambda x, w: mixture(on, DRAWN, capacity=2, overflow="drop")(x, w)[0], (0, 1))
        if mode == "forward over reverse":  # a product with the Hessian
            return lambda x, w: jax.jvp(gradient, (x, w), (x + 1, w - 1))[1]
        return jax.grad(lambda x, w: sum(jnp.sum(g**2) for g in gradient(x, w)), (0, 1))

    check(make, _random(ROWS, WIDTH), _random(WIDTH))


def test_a_tree_goes_along_one_route() -> None:
    def make(on: Any) -> Callable[..., Any]:
        def program(x: Any, w: Any) -> Any:
            sent = on.send({"a": x, "b": (x[:, 0].astype(jnp.int32), x[:, :2])}, DRAWN, capacity=4)
            return sent.rows, sent.back((sent.rows["a"], sent.rows["b"][1])), w

        return program

    program = check(make, _random(ROWS, WIDTH), _random(WIDTH))
    assert kinds(program).count(NodeKind.EXCHANGE) == 1


def test_destinations_are_computed_on_another_slice_and_cut_otherwise() -> None:
    def make(on: Any) -> Callable[..., Any]:
        def choose(x: Any) -> Any:
            return (jnp.argsort(x[:, 0]) % SHARDS).astype(jnp.int32)

        def program(x: Any, w: Any) -> Any:
            sent = on.send(x, on.at(TARGET, choose)(w), capacity=5)
            return sent, sent.back(sent.rows)

        return program

    check(make, _random(ROWS, WIDTH), _random(ROWS, 2), at=[(SOURCE, P(None)), (TARGET, P("e"))])


def test_in_loops_and_branches() -> None:
    def make(on: Any) -> Callable[..., Any]:
        def half(x: Any) -> Any:
            return x / 2

        def program(x: Any, flag: Any) -> Any:
            def round(n: Any, x: Any) -> Any:
                sent = on.send(x, DRAWN, capacity=4)
                return sent.back(on.at(TARGET, half)(sent.rows))

            x = jax.lax.fori_loop(0, 40, round, x)
            return jax.lax.cond(flag, lambda x: round(0, x), lambda x: x, x)

        return program

    for flag in (True, False):
        program = check(make, _random(ROWS, WIDTH), np.asarray(flag), at=[(SOURCE, P("x")), (SOURCE, P())])
        assert [loop.count for loop in program.loops] == [40, None, None]  # a case with an exchange is a loop


def _compiled(fun: Callable[..., Any], rows: int = ROWS, **options: Any) -> LogicalProgram:
    x = Argument((rows, WIDTH), np.dtype(np.float32), False, SOURCE, ((), ()))
    return compile_traced(trace(fun, [x], {}), options or None)


def test_the_program_says_what_it_is() -> None:
    program = _compiled(lambda x: exchange(x, DRAWN, TARGET, capacity=4, overflow="drop").rows)
    assert "from tokens to experts, 4 rows per shard, dropping more" in logical_text(program)


def test_a_bad_destination_names_shard_and_row() -> None:
    wrong = np.asarray([0, 1, 2, 3, 0, 7, 0, -1], np.int32)
    with pytest.raises(ValueError, match="row 1 of source shard 1 has destination 7"):
        run(lambda x: exchange(x, wrong, TARGET, 4).rows, _random(ROWS, WIDTH), at=[(SOURCE, P("x"))])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: exchange(x, DRAWN, TARGET, 0), "capacity of pw.exchange is 0; expected an int of at least 1"),
        (lambda x: exchange(x, DRAWN, TARGET, 1 << 30), "4 shards with a capacity of 1073741824 rows has more than"),
        (lambda x: exchange(x, DRAWN, TARGET, 1, overflow="wait"), "overflow of pw.exchange is 'wait'; expected"),
        (lambda x: exchange(x, DRAWN, TARGET, 1, unsent=0.5), "unsent of pw.exchange is 0.5; expected an int"),
        (lambda x: exchange(x, DRAWN.astype(np.float32), TARGET, 1), r"are float32\[8\]; expected int32\[rows\]"),
        (
            lambda x: exchange(x, DRAWN[:4], TARGET, 1),
            r"has shape \(8, 3\); expected 4 rows, as there are 4 destinations",
        ),
        (lambda x: exchange({"a": "b"}, DRAWN, TARGET, 1), r"values\['a'\] of pw.exchange is 'b' of type str"),
        (lambda x: exchange((), DRAWN, TARGET, 1), "values of pw.exchange have no array"),
        (
            lambda x: exchange(x, DRAWN, TARGET, 4).back(x),
            r"results of pw.exchange has shape \(8, 3\); expected 16 .* slots",
        ),
        (
            lambda x: exchange(jax.random.split(jax.random.key(0), 8), DRAWN, TARGET, 4),
            "expected numbers: send jax.random",
        ),
        (
            lambda x: exchange(x, [*range(10_000)], TARGET, 4),
            r"destinations of pw.exchange is \[0, 1,.{94} of type list; exp",
        ),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(errors.ProgramError, match=text):
        _compiled(lambda x: call(x).rows)


def test_where_it_cannot_stand() -> None:
    def send(x: Any) -> Any:
        return exchange(x, DRAWN, TARGET, capacity=4).rows

    with pytest.raises(errors.ProgramError, match=r"calls pw.exchange; call it from the program"):
        _compiled(TaggedFunction(send, SOURCE, name="send"))
    with pytest.raises(errors.TraceError, match="outside of a program"):
        send(jnp.zeros((ROWS, WIDTH)))
    with pytest.raises(errors.TraceError, match="outside of a program"):
        jax.jit(send)(jnp.zeros((ROWS, WIDTH)))
    with pytest.raises(errors.TraceError, match=r"jax.vmap batches a pw.exchange"):
        _compiled(lambda x: jax.vmap(send, 2)(jnp.stack([x, x], 2)))
    with pytest.raises(
        errors.ProgramError, match="7 rows on the 2 devices of slice 'tokens'; expected a multiple of 2"
    ):
        _compiled(lambda x: exchange(x, DRAWN[:7], TARGET, capacity=4).rows, rows=7)
    with pytest.raises(errors.ScheduleError, match="there is no pipeline in it"):
        _compiled(send, schedule="1F1B")
