"""The fork server: imports once what every host of a cluster needs, then forks a process for each host.

    python -P -m pathways.process.fork_server SOCKET_FD PARENT ENTRY MODULE...

To import JAX takes most of a second of CPU time, a fork some milliseconds. So a cluster of many hosts starts sooner,
and a lost island is back sooner. A process may fork safely only while it has one thread and JAX has no backend:
therefore this process does nothing but import and fork.

For each request it forks twice. The first child ends at once, and the kernel makes its child a child of the controller,
which is the nearest ancestor that asked for that (PR_SET_CHILD_SUBREAPER). So the controller is the parent of every
host, as if it had started the host itself: it sees how the host ends, and the host dies with it.

    controller -> fork server    {"size": bytes of the request, "descriptors": number} with a memory file that has the
                                 request, {"arguments", "environment"} as JSON. Then the descriptors, in each message
                                 `fd_passing.MAX_FDS`. The first is the log, which becomes stdout and stderr.
    fork server -> controller    {"ready": true} after the imports; then {"pid": number} for each request

In the new process ENTRY (`module:function`) is called with the list of the other descriptors and the arguments.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pathways.process import fd_passing, log_lines
from pathways.process.children import ParentLost, die_with_parent

_log = logging.getLogger("pathways.process.fork_server")


def main() -> None:
    """Entry of the fork server."""
    log_lines.begin("fork server")
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    try:
        die_with_parent(int(sys.argv[2]))
    except ParentLost:
        os._exit(1)
    entry, modules = sys.argv[3], sys.argv[4:]
    inherited = dict(os.environ)
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # the host that needs the module fails with the same error, and reports it
            _log.exception("%s cannot be imported", name)
    # A collection of garbage writes into every object that it looks at, and the kernel copies a page that is written.
    gc.collect()
    gc.freeze()
    # Libraries of linear algebra have threads, and end them before a fork; Python counts them all the same.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    with connection:
        serve(connection, entry, inherited)


def serve(connection: socket.socket, entry: str, inherited: Mapping[str, str]) -> None:
    """Forks a process for each request, until the controller closes the connection.

    `inherited`: the environment before the imports. Imports set variables that a request does not have.
    """
    fd_passing.send(connection, {"ready": True})
    while True:
        try:
            request, descriptors = _receive(connection)
        except fd_passing.Closed:
            return

        def run(request: dict[str, Any] = request, descriptors: list[int] = descriptors) -> NoReturn:
            connection.close()
            _become(entry, request, descriptors, inherited)

        pid = _fork_twice(run)
        for fd in descriptors:
            os.close(fd)
        fd_passing.send(connection, {"pid": pid})


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, files = fd_passing.receive(connection)
    with open(files[0], "rb") as file:
        request: dict[str, Any] = json.loads(os.pread(file.fileno(), header["size"], 0))
    descriptors: list[int] = []
    while len(descriptors) < header["descriptors"]:
        descriptors += fd_passing.receive(connection)[1]
    return request, descriptors


def _fork_twice(run: Callable[[], NoReturn]) -> int:
    """Calls `run` in a new process, whose parent is the controller. Returns its pid."""
    pid_reader, pid_writer = os.pipe()
    start_reader, start_writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            pid = os.fork()
            if pid == 0:
                os.close(start_writer)
                # The parent is the controller only when the first child has ended. No byte comes if the server is gone.
                if not os.read(start_reader, 1):
                    os._exit(1)
                for fd in (start_reader, pid_reader, pid_writer):
                    os.close(fd)
                run()
            os.write(pid_writer, str(pid).encode())
        except BaseException:
            _log.critical("no process could be forked", exc_info=True)
        finally:
            os._exit(0)
    os.close(pid_writer)
    os.close(start_reader)
    text = os.read(pid_reader, 32)
    os.close(pid_reader)
    os.waitpid(child, 0)
    if text:
        os.write(start_writer, b"1")
    os.close(start_writer)
    if not text:
        raise OSError("the second fork failed: see the log of the fork server")
    return int(text)


def _become(entry: str, request: dict[str, Any], descriptors: list[int], inherited: Mapping[str, str]) -> NoReturn:
    """Turns this process into what was asked for. Does not return."""
    try:
        log, *rest = descriptors
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _change_environment(inherited, request["environment"])
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(rest, *request["arguments"])
    except BaseException:
        _log.critical("this process ends", exc_info=True)
        os._exit(1)
    os._exit(0)


def _change_environment(inherited: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Makes the environment what it would be if the imports had begun with `wanted` and not with `inherited`."""
    for name in inherited.keys() - wanted.keys():
        os.environ.pop(name, None)
    for name, value in wanted.items():
        if inherited.get(name) != value:
            os.environ[name] = value


if __name__ == "__main__":
    main()
