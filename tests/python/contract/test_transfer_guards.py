"""`jax.transfer_guard`: what the user did not transfer is never refused, on an embedded cluster either, and an implicit
transfer of the user's is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw

pytestmark = pytest.mark.one_island

X = np.arange(8, dtype=np.float32)


@pytest.fixture(params=["disallow", "disallow_explicit", "global"])
def strict(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """A guard that allows the least, for a block of this thread or for the process."""
    if request.param == "global":
        jax.config.update("jax_transfer_guard", "disallow_explicit")
        yield lambda: jax.transfer_guard_host_to_device("disallow_explicit")
        jax.config.update("jax_transfer_guard", "allow")
    else:
        yield lambda: jax.transfer_guard(request.param)


def test_what_runs_on_slices_is_not_refused(add: Callable[..., Any], strict: Callable[[], Any]) -> None:
    one, two = add(2), add(2)
    with jax.transfer_guard("allow"):
        x, key = pw.device_put(X, one, P("x")), pw.device_put(jax.random.key(0), one)
    double = pw.jit(lambda v: v * 2, devices=one)
    total = pw.jit(lambda v: jnp.sum(v), devices=two)

    def called(v: Any) -> Any:
        return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((8,), np.float32), v)

    def loop(v: Any) -> Any:
        v, sums = jax.lax.scan(lambda c, _: (double(c) * 0.5, total(c)), v, None, length=20)
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 200, double, v), sums

    works: dict[str, Callable[[], Any]] = {
        "a program over two slices": lambda: pw.program(lambda v: total(double(v)))(x),
        "an array of another slice": lambda: total(x),
        "constants": lambda: pw.jit(lambda v: v + np.ones(8, np.float32), devices=one)(x),
        "loops": lambda: pw.program(loop)(x),
        "a callback": lambda: pw.jit(called, devices=one)(x),
        "operations": lambda: (x * 3.5 + x, x[1], x[1:3], jnp.sin(x), jnp.zeros_like(x), jax.random.normal(key, (3,))),
        "a maker": lambda: jnp.ones((8,), device=one.sharding(P("x"))),
        "another sharding": lambda: jax.device_put(x, one.sharding()),
        "keys": lambda: jax.device_get(jax.random.split(key)),
        "reads": lambda: (np.asarray(double(x)), float(total(x)), jax.device_get(x), repr(x)),
        "shards": lambda: [np.asarray(shard.data) for shard in x.addressable_shards],
    }
    for name, work in works.items():
        with strict():
            try:
                jax.block_until_ready(work())
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


def test_implicit_transfers_are_refused(add: Callable[..., Any]) -> None:
    slice_ = add(2)
    x = pw.device_put(X, slice_)
    double = pw.jit(lambda v: v * 2, devices=slice_)
    double(X)
    works: tuple[Callable[[], Any], ...] = (
        lambda: double(X),
        lambda: double(2.5),
        lambda: x + X,
        lambda: pw.program(lambda v: double(v))(X),
        lambda: x[np.array([1, 2])],
    )
    for work in works:
        with (
            jax.transfer_guard("disallow"),
            pytest.raises(pw.errors.TransferGuardError, match=r"Disallowed host-to-device transfer: .*device_put"),
        ):
            work()
    with jax.transfer_guard_device_to_device("disallow_explicit"), jax.transfer_guard_device_to_host("disallow"):
        np.testing.assert_array_equal(double(X), 2 * X)


def test_explicit_transfers(add: Callable[..., Any]) -> None:
    one, two = add(2), add(2)
    x = pw.device_put(X, one)
    works: tuple[Callable[[], Any], ...] = (
        lambda: pw.device_put(X, one, P("x")),
        lambda: jax.device_put(X, one.sharding(P("x"))),
        lambda: pw.device_put(x, two),
        lambda: jax.device_put(x, two.sharding()),
    )
    for work in works:
        with jax.transfer_guard("disallow"):
            np.testing.assert_array_equal(work(), X)
        with jax.transfer_guard("disallow_explicit"), pytest.raises(pw.errors.TransferGuardError):
            work()


def test_a_logged_transfer(add: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    double = pw.jit(lambda v: v * 2, devices=add(2))
    with jax.transfer_guard("log"), caplog.at_level(logging.WARNING, "pathways"):
        np.testing.assert_array_equal(double(X), 2 * X)
    assert "host-to-device transfer: argument v, a numpy.ndarray" in caplog.text
