"""A `pathways proxy` of a cluster, and stock JAX as its client: a process that one talks to, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

#: Reads lines of JSON, each with a piece of Python, and answers each: what the piece left in `out`, or its error.
_CLIENT = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what jaxlib prints is no answer
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def on(devices):
    return NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))

for line in sys.stdin:
    out = None
    try:
        exec(json.loads(line), globals())
        said = {"out": out}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), file=answers, flush=True)
"""


@contextlib.contextmanager
def serving(address: str, *options: str) -> Iterator[dict[str, str]]:
    """A proxy; gives the variables that it prints."""
    with proxy_process(address, *options) as (process, variables):
        yield variables
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@contextlib.contextmanager
def proxy_process(address: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A proxy's process, which the test may end, and the variables that it prints."""
    command = [sys.executable, "-m", "pathways", "proxy", address, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split() + process.stdout.readline().split()
            yield process, dict(word.split("=", 1) for word in words)
        finally:
            process.kill()


def environment(more: dict[str, str]) -> dict[str, str]:
    """What a client's process gets."""
    return {**{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}, **more}


class StockClient:
    """A client's process. A context manager, which kills it."""

    def __init__(self, variables: dict[str, str]) -> None:
        """`variables`: those that the proxy prints."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT],
            env=environment(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> StockClient:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def send(self, code: str) -> None:
        """Begins a piece of Python."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What has come of the oldest piece that has no answer yet: {"out": ...} or {"error": text}."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client has ended with {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def out(self, code: str) -> Any:
        """What a piece leaves in `out`."""
        self.send(code)
        return self.answer_out()

    def answer_out(self) -> Any:
        """See `answer`; there is no error."""
        said = self.answer()
        assert "error" not in said, said["error"]
        return said["out"]

    def error(self, code: str) -> str:
        """The error of a piece."""
        self.send(code)
        return self.answer_error()

    def answer_error(self) -> str:
        """See `answer`; there is an error."""
        said = self.answer()
        assert "error" in said, said
        return str(said["error"])

    def ends(self) -> int:
        """Lets the program end; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()
