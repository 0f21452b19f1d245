"""Connects a client to a cluster whose controller is on another machine.

A process beside the client's has the link (`pathways/agent/client_end.py`). To `RemoteControl` it looks like a
controller of this machine, so nothing else of a client knows where the controller is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable

from pathways import errors
from pathways.agent.client_end import ClientEndConfig
from pathways.agent.controller_session import Endpoint
from pathways.cluster.remote import RemoteControl, StartupEvent, connect_unix
from pathways.process import run_directory
from pathways.process.children import Deadline
from pathways.process.client_terms import ClientTerms
from pathways.process.config import ClientSizes
from pathways.process.supervised import Supervised

START_TIMEOUT_S = 30.0


def connect_far(
    address: str,
    *,
    progress: Callable[[StartupEvent], None] | None = None,
    terms: ClientTerms | None = None,
) -> RemoteControl:
    """Becomes a client of the cluster whose port is at `address`, `pathways://HOST:PORT`.

    Args:
        address: of the port. `pathways+plaintext://HOST:PORT` if the cluster was started with --insecure-plaintext.
        progress: see `connect_unix`.
        terms: see `connect_unix`.

    Raises:
        ConnectError: nothing answers there, or it is no cluster.
        PermissionDeniedError: there is no token and no certificate, or they are no good.
    """
    run_directory.sweep()
    sizes = ClientSizes()
    endpoint = Endpoint.find(address, os.environ, "client")
    link = _LinkProcess(endpoint, sizes)
    try:
        link.wait_listening()
        control = connect_unix(f"unix:{link.directory}/control.sock", progress=progress, sizes=sizes, terms=terms)
    except BaseException:
        link.close()
        raise
    control.address = address
    control.last_words = link.last_words
    control.is_far = True
    control.on_released = link.close
    return control


class _LinkProcess:
    """The process that has the link, which this process owns."""

    def __init__(self, endpoint: Endpoint, sizes: ClientSizes) -> None:
        self.directory = run_directory.new_directory(of_agent=True)
        self._pid = os.getpid()

        def command(owner_fd: int, report_fd: int) -> list[str]:
            config = ClientEndConfig(
                endpoint.without_token(), dataclasses.asdict(sizes), self.directory, owner_fd, report_fd
            )
            return [sys.executable, "-P", "-m", "pathways.agent.client_end", json.dumps(vars(config))]

        self._supervised = Supervised(self.directory, command)

    def wait_listening(self) -> None:
        """Waits until the session is open. Raises what kept it from opening."""
        deadline = Deadline(START_TIMEOUT_S)
        while not deadline.passed:
            for report in self._supervised.reports(deadline.left(0.5)):
                if report["event"] == "listening":
                    return
                if report["event"] == "error":
                    raise errors.from_text(str(report["message"]), errors.ConnectError)
                if report["event"] == "ended":
                    raise errors.ConnectError(f"the link did not open. {self._supervised.described(report)}")
            if self._supervised.is_over:
                raise errors.ConnectError("the link did not open: its process ended too early")
        raise errors.ConnectError(f"the link did not open within {START_TIMEOUT_S:g} s")

    def last_words(self) -> str:
        """How the process ended."""
        return self._supervised.last_words()

    def close(self) -> None:
        """Ends the process, unless a forked child calls."""
        if os.getpid() != self._pid:
            return
        self._supervised.terminate()
        self._supervised.close()
        with contextlib.suppress(OSError):
            self._supervised.forget()


__all__ = ["connect_far"]
