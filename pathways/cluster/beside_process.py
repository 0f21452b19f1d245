"""A command of `pathways` in a process beside another one: a proxy, metrics, the dashboard. It ends with that one."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from pathways import errors
from pathways.process.children import describe_exit

CLOSE_S = 10.0
_LAST_LINES = 15


class BesideProcess:
    """`pathways NAME ...`, which has said in `lines` where it is. A context manager, which ends it."""

    def __init__(self, name: str, arguments: Sequence[str], line_count: int) -> None:
        """Waits until it has said so many lines on its standard output.

        Raises:
            ConnectError: it did not start; with what it said.
        """
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pathways", name, "--until-input-ends", *arguments],
            stdin=subprocess.PIPE,  # it ends with this pipe, so with this process
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # it is a client of the cluster, whatever its programs are
            start_new_session=True,  # Ctrl-C is for the program
        )
        self._said: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._passing_on = threading.Thread(target=self._pass_on, name=f"pathways-{name}-said", daemon=True)
        self._passing_on.start()
        try:
            self.lines = self._started(line_count)
        except BaseException:
            self.close()
            raise

    def _started(self, line_count: int) -> list[str]:
        assert self._process.stdout is not None
        lines = [self._process.stdout.readline().strip() for _ in range(line_count)]
        if any(lines):
            return lines
        how = describe_exit(self._process.wait())
        self._passing_on.join(CLOSE_S)
        said = "".join(self._said).strip().removeprefix("Error: ")
        raise errors.ConnectError(f"`pathways {self.name}` {how} when it started: {said or 'it said nothing'}")

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def failure(self) -> str | None:
        """How it ended; None while it is there."""
        code = self._process.poll()
        return None if code is None else f"`pathways {self.name}` {describe_exit(code)}"

    def close(self) -> None:
        """Ends it, and waits. Idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._passing_on.join(CLOSE_S)
        self._process.stdout.close()

    def _pass_on(self) -> None:
        """What it says of its work is said here, too."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._said.append(line)
                if hasattr(self, "lines"):
                    print(line, end="", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
