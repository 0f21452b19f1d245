"""The process of a proxy beside another one: a controller's, or the program's that uses it. It ends with that one."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
from types import TracebackType

from pathways import errors
from pathways.process.children import describe_exit

CLOSE_S = 10.0
_LAST_LINES = 15


class ProxyProcess:
    """A `pathways proxy` for programs of this machine. `variables` are those that a program of JAX is started with."""

    def __init__(self, address: str | None, listen: str | None = None, shared_directory: str | None = None) -> None:
        """Waits until it listens.

        Args:
            address: of the cluster; this user's cluster on this machine when None.
            listen: HOST:PORT, or unix:PATH; a socket that only this user can reach when None.
            shared_directory: for the large arrays of one program.

        Raises:
            ConnectError: it did not start; with what it said.
        """
        command = [sys.executable, "-m", "pathways", "proxy", "--until-input-ends"]
        command += [address] if address else []
        command += ["--listen", listen] if listen else []
        command += ["--shared-directory", shared_directory] if shared_directory else []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # it ends with this pipe, so with this process
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # it is a client of the cluster, whatever its programs are
            start_new_session=True,  # Ctrl-C is for the program
        )
        self._said: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._passing_on = threading.Thread(target=self._pass_on, name="pathways-proxy-said", daemon=True)
        self._passing_on.start()
        try:
            self.variables = self._started()
        except BaseException:
            self.close()
            raise

    def _started(self) -> dict[str, str]:
        assert self._process.stdout is not None
        words = (self._process.stdout.readline() + self._process.stdout.readline()).split()
        if words:
            return dict(word.split("=", 1) for word in words)
        how = describe_exit(self._process.wait())
        self._passing_on.join(CLOSE_S)
        said = "".join(self._said).strip().removeprefix("Error: ")
        raise errors.ConnectError(f"the proxy {how} when it started: {said or 'it said nothing'}")

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def failure(self) -> str | None:
        """How it ended; None while it is there."""
        code = self._process.poll()
        return None if code is None else f"the proxy {describe_exit(code)}"

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
                if hasattr(self, "variables"):
                    print(line, end="", file=sys.stderr)

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
