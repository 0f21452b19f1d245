"""Errors that a user of stock JAX reads: the line of their program, who holds memory, what is refused and what can.

Each program runs through a proxy alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from doors import Door

pytestmark = pytest.mark.slow  # each case starts a program of a client

ROOM = 100_000


@pytest.fixture(scope="module")
def small() -> Iterator[Door]:
    """A proxy of which a put may have so many bytes."""
    made = Door(room=ROOM)
    yield made
    made.close()


def test_exhausted_memory_names_the_line_and_the_holders(small: Door) -> None:
    ended = small.run(
        """
        def fill_a_cache():
            return jax.device_put(np.ones(20_000, np.float32))
        def load_weights():
            return jax.device_put(np.ones(40_000, np.float32))
        cache = fill_a_cache()
        doubled = jax.jit(lambda v: v * 2)(cache)
        results["text"] = error_of(lambda: load_weights().block_until_ready())
        results["after"] = doubled.sum()
        """
    )
    assert ended.returncode == 0, ended.printed
    text = str(ended.results["text"])
    assert "RESOURCE_EXHAUSTED: a put of 160000 bytes; room is 100000" in text
    assert "load_weights" in text  # the user's own line
    assert "Pathways object-store summary for device 0" in text
    assert "fill_a_cache" in text and "80000" in text.replace(",", "")  # who holds what
    assert ended.results["after"] == 40_000


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "work = lambda: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), 1.0)",
            "UNIMPLEMENTED: Unsupported host callback type",  # the stock client's own
        ),
        (
            """
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
cut = jax.device_put(np.ones(8), NamedSharding(mesh, P("x")))
work = lambda: jax.jit(lambda v: jax.debug.inspect_array_sharding(v, callback=print))(cut)
""",
            "calls a Python function as it is compiled or runs (InspectSharding;",
        ),
        ("work = lambda: jnp.zeros(3).unsafe_buffer_pointer()", "PjRt-compatible backend only"),
        (
            "work = lambda: jax.jit(lambda v: v, compiler_options={'xla_no_such_option': True})(1.0)",
            "xla_no_such_option",
        ),
    ],
)
def test_what_is_refused_is_named(door: Door, program: str, said: str) -> None:
    ended = door.run(program + "\nresults['text'] = error_of(work)\nresults['after'] = jnp.arange(3).sum()\n")
    assert ended.returncode == 0, ended.printed
    assert said in str(ended.results["text"])
    assert ended.results["after"] == 3


def test_what_depends_on_an_error_fails_with_it_and_the_rest_goes_on(small: Door) -> None:
    ended = small.run(
        """
        good = jax.device_put(np.ones(4, np.float32))
        bad = jax.device_put(np.ones(30_000, np.float32))
        f = jax.jit(lambda v: v[:4] * 2)
        results["good"] = f(good)
        results["bad"] = error_of(lambda: f(bad).block_until_ready())
        results["of_bad"] = error_of(lambda: np.asarray(f(bad) + good))
        results["read"] = error_of(lambda: np.asarray(bad))
        results["again"] = f(good)
        """
    )
    assert ended.returncode == 0, ended.printed
    for name in ("bad", "of_bad", "read"):
        assert "RESOURCE_EXHAUSTED: a put of 120000 bytes" in str(ended.results[name]), name
    for name in ("good", "again"):
        assert ended.results[name].tolist() == [2] * 4
