"""What tests of hostile machines share: an innocent client that trains all the time, counts of what was refused, and
callers that are no agents.
"""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from trust_cases import read_all

import pathways as pw
from pathways import errors
from pathways.cluster import operator
from pathways.trust import Address, Credentials, dial
from pathways.trust.first_line import hello

ROWS, WIDTH = 8, 4


def _first(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def _second(w: Any, h: Any, y: Any) -> Any:
    return jnp.mean((h @ w - y) ** 2)


def _batch(step: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(step)
    return tuple(generator.standard_normal((ROWS, WIDTH), np.float32) for _ in range(2))  # type: ignore[return-value]


def _initial() -> tuple[Any, Any]:
    return tuple(np.random.default_rng(999 + n).standard_normal((WIDTH, WIDTH), np.float32) for n in range(2))  # type: ignore[return-value]


def _step_with(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    def step(a: Any, b: Any, x: Any, y: Any) -> Any:
        loss, (da, db) = jax.value_and_grad(lambda a, b: second(b, first(a, x), y), (0, 1))(a, b)
        return loss, a - 0.05 * da, b - 0.05 * db

    return step


class Innocent:
    """A client that trains two layers on two machines, step by step, in a thread. `check` compares with plain JAX."""

    def __init__(self, cluster: pw.Cluster) -> None:
        devices = pw.make_virtual_device_set(cluster)
        one, two = (devices.add_slice(devices=1, island=island) for island in (0, 1))
        self._step = pw.program(_step_with(pw.jit(_first, devices=one), pw.jit(_second, devices=two)))
        self._losses: list[float] = []
        self._parameters = _initial()
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            a, b = self._parameters
            while not self._is_over.is_set():
                loss, a, b = self._step(a, b, *_batch(len(self._losses)))
                self._losses.append(float(loss))
            self._parameters = np.asarray(a), np.asarray(b)
        except BaseException as error:
            self._failure = error

    @property
    def steps(self) -> int:
        """How many steps it has finished."""
        return len(self._losses)

    def goes_on(self, count: int = 2) -> None:
        """Waits for its next steps."""
        wanted, end = self.steps + count, time.monotonic() + 30
        while self.steps < wanted:
            assert self._failure is None, self._failure
            assert time.monotonic() < end, "the innocent client has stopped"
            time.sleep(0.005)

    def check(self) -> int:
        """Ends it, and compares all that it computed; returns the number of its steps."""
        self._is_over.set()
        self._thread.join(60)
        assert self._failure is None and not self._thread.is_alive(), self._failure
        plain = jax.jit(_step_with(_first, _second))
        a, b = _initial()
        expected = []
        for number in range(self.steps):
            loss, a, b = plain(a, b, *_batch(number))
            expected.append(float(loss))
        np.testing.assert_allclose(self._losses, expected, rtol=1e-4)
        for mine, theirs in zip(self._parameters, (a, b), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
        return self.steps


class Log:
    """A log of the cluster, as an operator reads it."""

    def __init__(self, address: str, what: int | str | None = None) -> None:
        self._address, self._what = address, what

    def text(self) -> str:
        """All of it."""
        parts = operator.logs(self._address, self._what, lines=1 << 20)
        with contextlib.closing(parts):  # type: ignore[type-var]
            return b"".join(part.text for part in parts).decode(errors="replace")

    @contextlib.contextmanager
    def says(self, words: str, count: int = 1) -> Iterator[None]:
        """In the block, or soon after it, so many more lines with these words are written."""
        time.sleep(0.06 if count == 1 else 1.1)  # a port writes at most 20 lines in a second: see `RefusalLog`
        before = self.text().count(words)
        yield
        end = time.monotonic() + 15
        while (found := self.text().count(words) - before) < count:
            assert time.monotonic() < end, f"{found} lines, expected {count}, with {words!r} in:\n{self.text()[-3000:]}"
            time.sleep(0.05)


class Counts:
    """A table: who tried what how often, and how often that was refused with the right words."""

    def __init__(self) -> None:
        self._rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def add(self, kind: str, tried: int = 1, told: int = 0, logged: int = 0) -> None:
        """Counts attempts; refusals that told the caller why; those with a line in the log of the one who refused."""
        self._rows[kind].update(tried=tried, told=told, logged=logged)

    def table(self, steps: int) -> str:
        """For people."""
        lines = [f"{'bad input':58} {'tried':>6} {'told':>6} {'logged':>6}"]
        lines += [f"{kind:58} {row['tried']:6} {row['told']:6} {row['logged']:6}" for kind, row in self._rows.items()]
        total = sum(self._rows.values(), collections.Counter())
        lines.append(f"{'in all':58} {total['tried']:6} {total['told']:6} {total['logged']:6}")
        return "\n".join([*lines, f"the innocent client: {steps} steps, all as plain JAX has them"])


def refusal(call: Callable[[], Any]) -> str:
    """The error of a call that must fail, as text."""
    try:
        made = call()
    except errors.PathwaysError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(made, socket.socket):
        made.close()
    raise AssertionError(f"it was let in: {made!r}")


def says_hello(address: str, credentials: Credentials | None, purpose: str, **fields: Any) -> str:
    """What the port answers to a first line of a caller that does not look at the port's certificate."""
    with raw_tls(address, credentials) as sock:
        try:
            sock.sendall(hello(purpose, fields))
        except OSError as error:
            return f"no answer: {error}"
        try:
            answer = json.loads(read_all(sock) or b"{}")
        except ValueError as error:
            return f"no answer: {error}"
    return f"{answer.get('error')}: {answer.get('message')}"


def plain(address: str, timeout_s: float = 30.0) -> socket.socket:
    """A TCP connection that has said nothing yet."""
    where = Address.parse(address)
    return socket.create_connection((where.host, where.port), timeout_s)


def raw_tls(address: str, credentials: Credentials | None, protocols: tuple[str, ...] = ()) -> ssl.SSLSocket:
    """A TLS connection that has said nothing yet; it does not look at the port's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if credentials is None else credentials.client_context()
    context.set_alpn_protocols(list(protocols))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain(address))


class FalseAgent:
    """A machine with a good certificate that takes a place, and then does as it likes."""

    def __init__(self, address: str, credentials: Credentials, **changes: Any) -> None:
        import importlib.metadata

        brought = {
            "hosts": 1,
            "devices_per_host": 1,
            "platform": "cpu",
            "jax": importlib.metadata.version("jax"),
            "jaxlib": importlib.metadata.version("jaxlib"),
            "ports": [9],
            "island": None,
        }
        from pathways.trust import dial_answered

        self._address, self._credentials = address, credentials
        self.sending, self.welcome = dial_answered(address, credentials, "link-up", **{**brought, **changes})
        self.receiving: socket.socket | None = None
        self._reader: threading.Thread | None = None

    def complete(self) -> FalseAgent:
        """Opens the second connection: then it has joined."""
        self.receiving = dial(self._address, self._credentials, "link-down", session=self.welcome["session"])
        return self

    def read(self) -> None:
        """Takes from now on what the controller sends, and forgets it."""
        self._reader = threading.Thread(target=read_all, args=(self.receiving,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends both."""
        there = [each for each in (self.sending, self.receiving) if each is not None]
        for each in there:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()  # before its descriptor may become another connection's
        for each in there:
            each.close()
