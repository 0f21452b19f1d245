"""Starts a process under a supervisor (`supervisor.py`), and reads what both report."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from pathways.process import environment, log_lines, supervisor
from pathways.process.children import Deadline, describe_exit, is_readable, quoted
from pathways.process.supervisor import wait_readable

OWNER_GRACE_S = 5.0
CLOSE_GRACE_S = 8.0


class Supervised:
    """A process that this process owns: it ends with this process, and leaves nothing behind."""

    def __init__(self, directory: str, command: Callable[[int, int], list[str]], token: str | None = None) -> None:
        """Starts it.

        Args:
            directory: made for it, and removed at its end.
            command: for the descriptors (pidfd of this process, where it reports): its command line, to which the
                supervisor appends the descriptor of the directory's lock.
            token: the only one that it gets, in its environment; None: what this process has.
        """
        log_lines.check(os.environ)
        inherited = environment.child_environment(os.environ)
        if token is not None:
            inherited = {name: text for name, text in inherited.items() if name not in environment.SECRETS}
            inherited |= {"PATHWAYS_TOKEN": token} if token else {}
        self._pid = 0
        self._report = b""
        self._report_fd, write_fd = os.pipe()
        os.set_blocking(self._report_fd, False)
        owner_fd = os.pidfd_open(os.getpid())
        argument = {
            "directory": directory,
            "command": command(owner_fd, write_fd),
            "owner_fd": owner_fd,
            "report_fd": write_fd,
            "grace_s": OWNER_GRACE_S,
        }
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(argument)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=inherited,
                cwd="/",
                pass_fds=(owner_fd, write_fd),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._report_fd)
            raise
        finally:
            os.close(owner_fd)
            os.close(write_fd)

    @property
    def supervisor_pid(self) -> int:
        """The process id of the supervisor, which ends last."""
        return self._supervisor.pid

    @property
    def is_over(self) -> bool:
        """Whether the supervisor has ended, or `close` was called."""
        return self._report_fd < 0 or self._supervisor.poll() is not None

    def reports(self, timeout_s: float) -> list[dict[str, Any]]:
        """The reports of the supervisor and the process since the last call."""
        if not wait_readable(self._report_fd, timeout_s):
            return []
        try:
            self._report += os.read(self._report_fd, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._report = self._report.split(b"\n")
        if not lines:
            time.sleep(0.01)  # every writer is gone; the caller will see that the supervisor ended
        found = [json.loads(line) for line in lines]
        for report in found:
            if report["event"] == "spawned":
                self._pid = int(report["pid"])
        return found

    def last_words(self) -> str:
        """How the process ended, by the supervisor's report."""
        deadline = Deadline(2.0)
        while self._report_fd >= 0 and not deadline.passed:
            for report in self.reports(deadline.left(0.5)):
                if report["event"] == "ended":
                    return self.described(report)
            if self._supervisor.poll() is not None and not is_readable(self._report_fd):
                break
        return ""

    def described(self, report: dict[str, Any]) -> str:
        """For people: a report of the process's end."""
        end = describe_exit(int(report["returncode"]))
        return f"Process {self._pid} {end}. {quoted(str(report.get('log', '')).splitlines())}"

    def terminate(self) -> None:
        """Lets the supervisor end the process in order."""
        with contextlib.suppress(ProcessLookupError):
            self._supervisor.terminate()

    def close(self) -> None:
        """Waits for the end, and hurries it. When this returns, no process and no file is left."""
        for last_resort in (self._supervisor.terminate, self._supervisor.kill):
            try:
                self._supervisor.wait(CLOSE_GRACE_S)
                break
            except subprocess.TimeoutExpired:
                last_resort()
        self._supervisor.wait()

    def forget(self) -> None:
        """Reads no more reports."""
        os.close(self._report_fd)
        self._report_fd = -1
