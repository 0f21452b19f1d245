"""The client's end of a link to a controller on another machine: `python -m pathways.agent.client_end CONFIG LOCK_FD`.

`pw.connect("pathways://…")` starts this process beside the client's. To the client it looks like a controller of its
own machine: it has the two sockets of one, `control.sock` and `fds.sock`, gives the client its segments, and takes the
client's. What is in them crosses to the real controller over the link. Why a process of its own: the link's threads
then never wait for the Python lock of a client that computes.

It ends when the client's process ends or closes the connection, or when the link breaks; then the client is told why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import queue
import select
import signal
import socket
import sys
from typing import Any

from pathways import errors
from pathways.agent.controller_session import ControllerSession, Endpoint
from pathways.process import fd_passing, log_lines
from pathways.process.children import ParentLost, die_with_parent
from pathways.process.config import ClientSizes
from pathways.transport.links import Link, Links

NATIVE = "pathways._native"
#: How often it looks whether the cluster has ended, in seconds. The client's native waits see that at once.
_LOOK_S = 0.25


@dataclasses.dataclass(frozen=True)
class ClientEndConfig:
    """What the client tells its process."""

    endpoint: dict[str, str]  # an Endpoint
    sizes: dict[str, int]  # a ClientSizes, of the client's segment
    directory: str
    owner_fd: int
    report_fd: int


class ClientEnd:
    """Serves one client. `run` on the main thread."""

    def __init__(self, config: ClientEndConfig, session: ControllerSession) -> None:
        self._config = config
        self._session = session
        self._native: Any = importlib.import_module(NATIVE)
        self._status = self._native.status_segment()
        self._bell = self._native.bell_segment()
        self._link: Any = None
        self._links = Links(session.loop, self._native)
        self._carried: Link | None = None
        self._broken: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self, listener: socket.socket) -> None:
        """Serves the client that connects at `listener`, until either end is over."""
        with listener:
            client = self._accept(listener)
        if client is None:
            return
        with client:
            pidfd = os.pidfd_open(os.getpid())
            hello = {"kind": "hello", "token": self._session.token, "controller_pid": os.getpid()}
            fd_passing.send(client, hello, [self._status.fd, self._bell.fd, pidfd])
            os.close(pidfd)
            try:
                message, fds = fd_passing.receive(client)
                if message != {"kind": "segment"} or len(fds) != 1:
                    raise errors.ConnectError(f"a client sent {str(message)[:200]} with {len(fds)} descriptors")
                self._open_link(self._native.Segment.attach(fds[0]))
                failure = self._watch(client)
            except fd_passing.Closed:
                failure = None
            except (errors.PathwaysError, OSError) as error:
                failure = error if isinstance(error, errors.PathwaysError) else errors.ConnectError(str(error))
            if failure is not None:
                self._tell(client, failure)
            if self._carried is not None:
                self._carried.close()

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        """The client's connection; None: its process has ended."""
        ready, _, _ = select.select([self._config.owner_fd, listener.fileno()], [], [])
        if self._config.owner_fd in ready:
            return None
        client, _ = listener.accept()
        if fd_passing.peer(client)[1] != os.getuid():
            raise PermissionError("another user connected")
        return client

    def _open_link(self, segment: Any) -> None:
        up, welcome = self._session.dial("client-up", session=self._session.token, **self._config.sizes)
        try:
            down, _ = self._session.dial("client-down", session=welcome["session"])
        except BaseException:
            up.close()
            raise
        try:
            self._link = self._native.ClientLinkAtClient(segment, self._bell, self._status, self._links.native)
        except (RuntimeError, ValueError) as error:
            raise errors.ConnectError(f"the client's memory makes no sense: {error}") from error
        self._carried = self._links.add(self._link, up, down, self._broken.put)

    def _watch(self, client: socket.socket) -> errors.PathwaysError | None:
        """Waits for the end of either side. Returns why the cluster is gone; None: the client is."""
        while not select.select([self._config.owner_fd, client.fileno()], [], [], _LOOK_S)[0]:
            why = None
            with contextlib.suppress(queue.Empty):
                why = self._broken.get_nowait()
            # After that: a cluster that ends says so before its link breaks.
            status, text = self._native.cluster_status(self._status)
            if status != "up":
                return errors.from_text(text, errors.ClusterClosedError)
            if why is not None:
                return self._lost(why)
        return None

    def _lost(self, why: str) -> errors.PathwaysError:
        return errors.ControllerLostError(
            f"the cluster at {self._config.endpoint['address']} cannot be reached any more: {why}. What this client "
            "had there is freed; connect again"
        )

    def _tell(self, client: socket.socket, failure: errors.PathwaysError) -> None:
        if self._link is not None:
            self._link.fail(f"{type(failure).__name__}: {failure}")
        message: fd_passing.Message = {"kind": "failed", "error": type(failure).__name__, "message": str(failure)}
        with contextlib.suppress(OSError):
            fd_passing.send(client, message)  # it lies in the socket until the client looks, even when this end is over


def main() -> None:
    """Entry of the process."""
    log_lines.begin("client end")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's Ctrl-C is the client's matter
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ParentLost):
        die_with_parent(os.getppid(), signal.SIGTERM)  # the supervisor
    config = ClientEndConfig(**json.loads(sys.argv[1]))
    for fd in (config.owner_fd, config.report_fd, int(sys.argv[2])):
        os.set_inheritable(fd, False)
    ClientSizes(**config.sizes)

    def report(event: str, **fields: Any) -> None:
        os.write(config.report_fd, json.dumps({"event": event, **fields}).encode() + b"\n")

    try:
        session = ControllerSession(Endpoint(**config.endpoint), config.directory)
    except (errors.PathwaysError, OSError) as error:
        report("error", message=f"{type(error).__name__}: {error}")
        os._exit(1)
    listener = fd_passing.listen(os.path.join(config.directory, "fds.sock"))
    report("listening")
    ClientEnd(config, session).run(listener)
    session.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
