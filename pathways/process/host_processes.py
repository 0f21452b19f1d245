"""Starts the processes of hosts, by a fork server that has imported JAX already (`pathways/process/fork_server.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways import errors
from pathways.process import fd_passing, log_files
from pathways.process.children import describe_exit, log_tail, resident_bytes
from pathways.process.config import HostConfig, dump
from pathways.process.outgoing import Outgoing
from pathways.process.supervisor import adopt_orphans, reap_orphans

#: A fork takes some milliseconds. The controller does not wait longer, in seconds, for a fork server that was stopped.
FORK_TIMEOUT_S = 5.0
#: A process that ends closes its socket first. Its end follows within this time, in seconds.
END_TIMEOUT_S = 1.0
#: Seconds between two looks for adopted processes that have ended.
REAP_S = 1.0


class ForkedProcess:
    """A child that the fork server made. Like `subprocess.Popen`, which can only watch what it started itself."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative: the signal that killed it

    def poll(self) -> int | None:
        """How the process ended, None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Waits for the end of the process; returns how it ended."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Kills the process, unless its end was seen already: another process may have its pid then."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class HostProcess:
    """One host process of this machine, and what its starter holds of it."""

    def __init__(
        self, process: ForkedProcess, pidfd: int, connection: socket.socket, programs: socket.socket, log_path: str
    ) -> None:
        self.pid = process.pid
        self._pidfd = pidfd
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches it
        self._process = process
        self._connection = connection
        self._programs = Outgoing(programs)
        self._log_path = log_path

    @property
    def returncode(self) -> int | None:
        """How the process ended, at the last look; see `ForkedProcess`."""
        return self._process.returncode

    def poll(self) -> int | None:
        """How the process ended, None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kills the process, if it still runs."""
        self._process.kill()

    def watch(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """Calls `on_end` once, when the process has ended, unless `end` was called before."""

        def ended() -> None:
            loop.remove_reader(self._pidfd)
            on_end()

        self._loop = loop
        loop.add_reader(self._pidfd, ended)

    def end(self) -> None:
        """Kills the process, waits for its end, and closes what this process holds of it."""
        if self._loop is not None:
            self._loop.remove_reader(self._pidfd)
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        self._connection.close()
        self._programs.close()

    def hand_over(self, message: fd_passing.Message, segment: Any) -> None:
        """Sends the host a segment, with a message that says what it is.

        Raises:
            Closed: the host has ended.
        """
        fd_passing.send(self._connection, message, [segment.fd])

    def send_program(self, program: bytes) -> None:
        """Sends the host a `StoreProgram`, as soon as the host takes it."""
        self._programs.send(program)

    def log_tail(self) -> str:
        """The last lines of its log."""
        return log_tail(self._log_path)

    def resident_bytes(self) -> int:
        """See `children.resident_bytes`."""
        return resident_bytes(self.pid)


class HostProcesses:
    """The fork server of a cluster, and what it forks. Belongs to the event loop's thread. This must be the main
    thread, because the kernel kills the fork server and every host when it ends.
    """

    def __init__(self, entry: str, modules: Sequence[str], environment: Mapping[str, str], log_path: str) -> None:
        """Starts nothing yet.

        Args:
            entry: `module:function`, see `fork_server.py`.
            modules: what the fork server imports before it forks.
            environment: of the fork server. Modules that read a variable at their import read it here.
            log_path: where the fork server's output goes.
        """
        self._entry = entry
        self._modules = list(modules)
        self._environment = dict(environment)
        self._log_path = log_path
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket
        self._is_ready = False
        self._forked: list[ForkedProcess] = []  # that had not been seen to end, at the last look
        self._next_look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the fork server, which begins its imports.

        Raises:
            OSError: the machine has no room for a process.
        """
        adopt_orphans()
        if self._next_look is None:
            self.reap()
        self._connection, theirs = fd_passing.pair()
        python = [sys.executable, "-P", "-m", "pathways.process.fork_server"]
        with open(self._log_path, "ab") as log, theirs:
            self._server = subprocess.Popen(
                [*python, str(theirs.fileno()), str(os.getpid()), self._entry, *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )
        self._is_ready = False

    async def ready(self, timeout_s: float | None = None) -> None:
        """Waits until the fork server forks at once. Starts a new one if the last one has ended.

        Raises:
            ConnectError: it ended before it was ready, or was not ready in time. Then it is ended.
            OSError: see `start`.
        """
        if self._server is None or self._server.poll() is not None:
            self.close()
            self.start()
        if self._is_ready:
            return
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection, readable.set)
        is_late = False
        try:
            await asyncio.wait_for(readable.wait(), timeout_s)
        except TimeoutError:
            is_late = True
        finally:
            with contextlib.suppress(ValueError):  # the cluster has ended and closed it
                loop.remove_reader(self._connection)
        if is_late:
            self.close()
            raise errors.ConnectError(
                f"the fork server, which starts hosts, was not ready in {timeout_s:g} s. {self.log_tail()}"
            )
        self._receive()
        self._is_ready = True

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> ForkedProcess:
        """Starts a process. Call it only after `ready`.

        Args:
            arguments: of the entry.
            environment: the whole environment of the process.
            fds: its log, then the descriptors that it gets. They stay open here.

        Raises:
            ConnectError: the fork server has ended, or does not answer.
        """
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        file = os.memfd_create("pathways-fork", os.MFD_CLOEXEC)
        try:
            with open(file, "wb", closefd=False) as writer:
                writer.write(request)
            with contextlib.suppress(fd_passing.Closed):  # `_receive` says why
                fd_passing.send(self._connection, {"size": len(request), "descriptors": len(fds)}, [file])
                for first in range(0, len(fds), fd_passing.MAX_FDS):
                    fd_passing.send(self._connection, {}, list(fds[first : first + fd_passing.MAX_FDS]))
        except BaseException:
            self.close()  # it has a part of the request, and would take the next one for the rest
            raise
        finally:
            os.close(file)
        self._forked.append(ForkedProcess(int(self._receive()["pid"])))
        return self._forked[-1]

    def start_host(self, config: HostConfig, environment: Mapping[str, str], log_path: str, token: str) -> HostProcess:
        """Starts a host. Call it only after `ready`.

        Args:
            config: `socket_fd` is set here; the other descriptors stay open here.
            environment: the whole environment of the process.
            log_path: where its output goes.
            token: the secret by which its session identifies itself.

        Raises:
            ConnectError: it could not be started.
        """
        ours, theirs = fd_passing.pair()
        programs, its_programs = socket.socketpair()
        config = dataclasses.replace(config, socket_fd=theirs.fileno())
        with log_files.create(log_path) as log, theirs:
            process = self.fork([dump(config)], environment, [log.fileno(), *config.fds])
        ours.setblocking(False)
        try:
            with its_programs:
                fd_passing.send(ours, {"kind": "token", "token": token}, [its_programs.fileno()])
            return HostProcess(process, os.pidfd_open(process.pid), ours, programs, log_path)
        except OSError as error:  # it has ended already, or this process has too many descriptors
            process.kill()
            process.wait()
            ours.close()
            programs.close()
            raise errors.ConnectError(
                f"host {config.host} (pid {process.pid}) could not be started: {error}. {log_tail(log_path)}"
            ) from error

    def _receive(self) -> fd_passing.Message:
        """The next message of the fork server. When there is none, ends the fork server and raises ConnectError."""
        assert self._server is not None
        failure = ""
        try:
            return fd_passing.receive(self._connection, FORK_TIMEOUT_S)[0]
        except TimeoutError:
            failure = f"did not start a host in {FORK_TIMEOUT_S:g} s"
        except fd_passing.Closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(END_TIMEOUT_S)
        name = f"the fork server (pid {self._server.pid}), which starts hosts,"
        end = describe_exit(self.close())
        raise errors.ConnectError(f"{name} {failure or end}. {self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of the fork server's log."""
        return log_tail(self._log_path)

    def reap(self) -> None:
        """Reaps what processes of hosts and clients' callbacks have left behind, now and from then on. It takes no end
        from those that wait for the fork server and for hosts: nothing else runs between a fork and its entry here.
        """
        self._forked = [process for process in self._forked if process.returncode is None]
        own = {process.pid for process in self._forked}
        if self._server is not None:
            own.add(self._server.pid)
        reap_orphans(own)
        self._next_look = asyncio.get_running_loop().call_later(REAP_S, self.reap)

    def end(self) -> None:
        """Ends the fork server, and looks for no ended processes any more. The hosts run on."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self.close()

    def close(self) -> int:
        """Ends the fork server; returns how it ended. The hosts run on."""
        if self._server is None:
            return 0
        self._connection.close()
        self._server.kill()
        status = self._server.wait()
        self._server = None
        return status
