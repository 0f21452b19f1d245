"""The programs of `python -m benchmarks.mpmd`: pipelines, loops over slices, mixtures of experts.

A step takes float32 arrays and adds one, or multiplies by a matrix; `pad` says what makes it last. With "sleep" it
takes its time and no core (`pathways.testing.stand_in`), with "compute" it multiplies matrices for about as long, with
"none" there is nothing beside the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathways as pw
from pathways.testing import stand_in

SIZE = 32  # 32 x 32 float32 are 4 KiB; and enough for XLA not to compute within the call that enqueues
WIDTH = 128

#: Returns its float32 argument, some time later.
Pad = Callable[[Any], Any]


def pad(kind: str, amount: int) -> Pad:
    """`amount`: microseconds of sleep, or turns of a loop of products (`Client.calibrate`)."""

    def compute(x: Any) -> Any:
        same = jnp.eye(WIDTH, dtype=jnp.float32)
        some = jnp.broadcast_to(x.reshape(-1)[0], (8, WIDTH))
        turned = jax.lax.fori_loop(0, amount, lambda _, value: value @ same, some)
        return x + (turned[0, 0] - some[0, 0])

    if kind == "none" or amount == 0:
        return lambda x: x
    return {"sleep": lambda x: stand_in.step(x, amount), "compute": compute}[kind]


# ------------------------------------------------------------------------------------------------------- pipelines


def _stage(forward: Pad, backward: Pad, weights: Pad) -> Callable[[Any, Any], Any]:
    """A stage whose steps take their time: forward, gradient of the input, gradient of the weights."""

    def stage(w: Any, x: Any) -> Any:
        return forward(x @ w)

    def there(w: Any, x: Any) -> Any:
        return stage(w, x), (w, x)

    def back(kept: Any, y: Any) -> Any:
        w, x = kept
        dx = backward(y @ w.T)
        # The small term makes the second step wait for the first one where both are in one computation.
        return weights(x.T @ y + dx[0, 0] * 1e-30), dx

    made: Any = jax.custom_vjp(stage)
    made.defvjp(there, back)
    return lambda w, x: made(w, x)


def training(
    slices: Sequence[Any], schedule: str, microbatches: int, chunks: int, steps: tuple[Pad, Pad, Pad]
) -> tuple[Any, list[Any], tuple[Any, Any]]:
    """A training step of a pipeline: the program `step(params, batch, targets)`, its first parameters, and its data.

    It donates the parameters and returns (params, loss). Each of the slices has `chunks` stages.
    """
    where = [*slices] * chunks
    stages = [pw.jit(_stage(*steps), devices=at, name=f"stage{n}") for n, at in enumerate(where)]
    model = pw.pipeline(
        stages, microbatches=microbatches, schedule=schedule, loss=lambda y, t: jnp.mean((y - t) ** 2), name="model"
    )

    def step(params: Any, batch: Any, targets: Any) -> Any:
        loss, gradients = jax.value_and_grad(model)(params, batch, targets)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss

    draw = np.random.default_rng(1)
    weights = [(np.eye(SIZE) + draw.normal(size=(SIZE, SIZE)) / 64).astype(np.float32) for _ in where]
    params = [pw.device_put(w, at) for w, at in zip(weights, where, strict=True)]
    rows = microbatches * SIZE
    data = tuple(draw.normal(size=(rows, SIZE)).astype(np.float32) for _ in range(2))
    batch, targets = pw.device_put(data[0], slices[0]), pw.device_put(data[1], slices[-1])
    return pw.program(step, donate_argnums=0, name="step"), params, (batch, targets)


# ------------------------------------------------------------------------------------------------------------ loops


def zeros(where: Any) -> Any:
    """The first value of a loop."""
    return pw.device_put(np.zeros((SIZE, SIZE), np.float32), where)


def two_hosts(here: Any, there: Any, how: Pad, iterations: int) -> dict[str, Any]:
    """One iteration is a call on each of two hosts, and the value goes there and back. By name:

    while, fori, scan: the loop, `program(x) -> x`. chain: as many calls and transfers in one plan. body: one iteration,
    and whether there is another one, for a client that asks. calls: the calls of a chain without a transfer.
    """
    end = 2.0 * iterations - 0.5
    f = pw.jit(lambda x: how(x + 1), devices=here, name="f")

    def add(x: Any) -> Any:
        y = how(x + 1)
        return y, y[0, 0] < end

    g = pw.jit(add, devices=there, name="g")
    near = pw.jit(add, devices=here, name="near")
    start = pw.jit(lambda: jnp.bool_(True), devices=there, name="start")

    def chain(x: Any, g: Any) -> Any:
        more = None
        for _ in range(iterations):
            x, more = g(f(x))
        return x, more

    def ended(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[1], lambda c: g(f(c[0])), (x, start()))[0]

    return {
        "while": pw.program(ended, name="while"),
        "fori": pw.program(
            lambda x: jax.lax.fori_loop(0, iterations, lambda _, c: g(f(c))[0], x), name="fori", unroll=0
        ),
        "scan": pw.program(
            lambda x: jax.lax.scan(lambda c, _: (g(f(c))[0], None), x, None, iterations)[0], name="scan", unroll=0
        ),
        "chain": pw.program(lambda x: chain(x, g)[0], name="chain"),
        "calls": pw.program(lambda x: chain(x, near)[0], name="calls"),
        "body": pw.program(lambda x: g(f(pw.device_put(x, here))), name="body"),
    }


def one_slice(here: Any, how: Pad, iterations: int, chained: int, parallel: Sequence[int]) -> dict[str, Any]:
    """A loop whose body is one call, and the same calls chained: `program(x) -> x`.

    loop: of so many iterations; "loop, n in flight": with another number of iterations in flight. chain: of `chained`
    calls.
    """
    f = pw.jit(lambda x: how(x + 1), devices=here, name="f")

    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, iterations, lambda _, c: f(c), x)

    def chain(x: Any) -> Any:
        for _ in range(chained):
            x = f(x)
        return x

    others = {
        f"loop, {n} in flight": pw.program(loop, name=f"loop{n}", unroll=0, parallel_iterations=n) for n in parallel
    }
    return {"loop": pw.program(loop, name="loop", unroll=0), **others, "chain": pw.program(chain, name="chain")}


def alternating(here: Any, there: Any, how: Pad, iterations: int, parallel: Sequence[int]) -> dict[str, Any]:
    """A loop over two slices, by how many iterations are in flight: the second slice reads what the first one makes.

    The first slice needs nothing of the second. So with several in flight both work, with one they take turns.
    `program((x, total)) -> (x, total)`.
    """
    f = pw.jit(lambda x: how(x + 1), devices=here, name="f")
    g = pw.jit(lambda total, x: how(total + x * 0 + 1), devices=there, name="g")

    def loop(carry: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            x = f(carry[0])
            return x, g(carry[1], x)

        return jax.lax.fori_loop(0, iterations, body, carry)

    return {
        f"loop, {n} in flight": pw.program(loop, name=f"loop{n}", unroll=0, parallel_iterations=n) for n in parallel
    }


# ---------------------------------------------------------------------------------------------------------- mixture

EXPERTS, VISITS, BLOCK = 16, 2, 32


def mixture(
    home: Any, slices: Sequence[Any], how: Pad, rows: int, width: int, hidden: int
) -> tuple[dict[str, Any], Any, Any]:
    """A mixture of 16 experts, `program(params, x) -> (results, dropped)`; its parameters, and its rows. By name:

    k: `pw.nn.MixtureOfExperts`, each row visits 2 experts. all, by exchange: in the same way each row visits all.
    all: every slice gets all rows, and each of its experts computes all of them.
    gradients of k, gradients of all: with the gradients of the parameters, `program(params, x) -> gradients`.

    An expert computes blocks of 32 rows; `how` is the time of a block.
    """

    def expert(params: Any, rows: Any) -> Any:
        return how(jax.nn.relu(rows @ params["in"]) @ params["out"])

    def init(key: Any) -> Any:
        one, two = jax.random.split(key)
        normal = jax.random.normal
        return {"in": normal(one, (width, hidden)) / width**0.5, "out": normal(two, (hidden, width)) / hidden**0.5}

    def sparse(visits: int) -> Any:
        gate = pw.nn.TopKGate(EXPERTS, visits, width)
        most = rows * min(2 * visits, EXPERTS) // len(slices)  # twice what comes if all experts are chosen alike
        return pw.nn.MixtureOfExperts(expert, gate, home=home, slices=slices, capacity=most, block=BLOCK)

    each = EXPERTS // len(slices)
    gate = pw.nn.TopKGate(EXPERTS, VISITS, width)
    weigh = pw.jit(lambda params, x: gate(params, x).weights, devices=home, name="weigh")

    def of_all(params: Any, x: Any, weights: Any) -> Any:
        def one(total: Any, item: Any) -> Any:
            mine, weight = item
            parts = jax.lax.map(lambda part: expert(mine, part), x.reshape(rows // BLOCK, BLOCK, width))
            return total + weight[:, None] * parts.reshape(rows, width), None

        return jax.lax.scan(one, jnp.zeros((rows, width)), (params, weights.T))[0]

    experts = [pw.jit(of_all, devices=at, name="experts") for at in slices]
    total = pw.jit(lambda parts: sum(parts[1:], parts[0]), devices=home, name="total")

    def dense(params: Any, x: Any) -> Any:
        weights = weigh(params["gate"], x)
        parts = [
            run(mine, pw.device_put(x, at), pw.device_put(weights[:, n * each : (n + 1) * each], at))
            for n, (run, mine, at) in enumerate(zip(experts, params["experts"], slices, strict=True))
        ]
        return total([pw.device_put(part, home) for part in parts])

    def results_of(some: Any) -> Callable[[Any, Any], Any]:
        return lambda params, x: (lambda mixed: (mixed.results, mixed.dropped))(some(params, x))

    square = pw.jit(lambda y: jnp.mean(y**2), devices=home, name="square")
    few = sparse(VISITS)
    made = {
        "k": pw.program(results_of(few), name="k"),
        "all, by exchange": pw.program(results_of(sparse(EXPERTS)), name="visits_all"),
        "all": pw.program(dense, name="all"),
        "gradients of k": pw.program(jax.grad(lambda p, x: square(few(p, x).results)), name="gradients_of_k"),
        "gradients of all": pw.program(jax.grad(lambda p, x: square(dense(p, x))), name="gradients_of_all"),
    }
    params = few.init(jax.random.key(0), init)
    x = np.random.default_rng(2).normal(size=(rows, width)).astype(np.float32)
    there = {
        "gate": pw.device_put(params["gate"], home),
        "experts": [pw.device_put(p, at) for p, at in zip(params["experts"], slices, strict=True)],
    }
    return made, there, pw.device_put(x, home)
