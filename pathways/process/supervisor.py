"""The supervisor: starts the controller, lives longer than it, and removes everything. Uses only the standard library.

The supervisor is the parent of the controller. When the controller ends, the kernel makes the supervisor the parent of
every process that the controller leaves. So when any other process is killed, at any moment, the supervisor knows every
process and the directory of the cluster, and removes them:

    owner ended        the controller, which monitors the owner too, gets some seconds to end in order, then SIGKILL
    SIGTERM            the controller gets it, and the same
    controller ended   the supervisor kills and reaps every remaining descendant, and removes the directory
    supervisor killed  the controller ends in order and removes the directory; the next start of a cluster removes what
                       is left

The supervisor makes the directory itself, when it has seen that its owner is alive. So the directory never exists
without a process that will remove it. While the cluster lives, the supervisor and the controller hold the lock file
(flock); a directory with a free lock is stale.

Called with one JSON argument: `directory`, `command` (the controller's; the supervisor appends the lock's descriptor),
`owner_fd` (pidfd of the owner), `report_fd` (pipe to the launcher, one JSON object per line), `grace_s`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection

_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 5.0


def main(argument: str) -> int:
    """Runs a cluster from start to end; returns the controller's exit status."""
    config = json.loads(argument)
    directory, owner_fd, report_fd = config["directory"], config["owner_fd"], config["report_fd"]
    if wait_readable(owner_fd, 0.0):
        return 0
    adopt_orphans()
    # Handlers, not SIG_IGN: children would inherit SIG_IGN.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    status = 1
    try:
        os.mkdir(directory, 0o700)
        lock_fd = os.open(os.path.join(directory, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        os.mkdir(os.path.join(directory, "logs"), 0o700)
        log_path = os.path.join(directory, "logs", "controller.log")
        with open(log_path, "ab") as log:  # to append: it may begin anew (LOG-1)
            controller = subprocess.Popen(
                [*config["command"], str(lock_fd)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(owner_fd, report_fd, lock_fd),
            )

        def terminate(*_: object) -> None:
            controller.terminate()
            signal.setitimer(signal.ITIMER_REAL, config["grace_s"])

        signal.signal(signal.SIGALRM, lambda *_: controller.kill())
        signal.signal(signal.SIGTERM, terminate)
        if told:
            terminate()
        report(report_fd, "spawned", pid=controller.pid)
        status = _watch(controller, owner_fd, config["grace_s"])
        lines: list[str] = []
        with contextlib.suppress(OSError):  # the folder is gone: how the controller ended still counts
            lines = last_lines(log_path)
        report(report_fd, "ended", returncode=status, log="\n".join(lines))
    except OSError as error:
        report(report_fd, "error", message=f"cannot start a cluster in {directory}: {error}")
    finally:
        _end_descendants()
        shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


def adopt_orphans() -> None:
    """Asks the kernel to make this process the parent of every descendant that loses its own parent."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _watch(controller: subprocess.Popen[bytes], owner_fd: int, grace_s: float) -> int:
    """Waits until the controller ends. Kills it when the owner ends and the controller does not end in `grace_s`."""
    controller_fd = os.pidfd_open(controller.pid)
    poller = select.poll()
    poller.register(controller_fd, select.POLLIN)
    poller.register(owner_fd, select.POLLIN)
    ready = [fd for fd, _ in poller.poll()]
    if controller_fd not in ready and not wait_readable(controller_fd, grace_s):
        controller.kill()
    return controller.wait()


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Waits until `fd` is readable; False when `timeout_s` passed first."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1e3))


def _end_descendants() -> None:
    """Kills and reaps every child. The children of a killed child become ours, so repeat until there is no child."""
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        for pid in _children():
            _signal(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def reap_orphans(own: Collection[int]) -> int:
    """Reaps the ended children of this process that it has adopted: all but its `own`, for which it waits itself.
    Returns their number. When no child has ended, it costs one system call.
    """
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return 0
    except ChildProcessError:
        return 0
    count = 0
    for pid in _children():
        if pid not in own:
            with contextlib.suppress(ChildProcessError):
                count += os.waitpid(pid, os.WNOHANG)[0] != 0
    return count


def _children() -> list[int]:
    """The direct children of this process, zombies too."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    # The name, in parentheses, may contain any character. State and parent follow the last ")".
                    if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                        found.append(int(entry))
            except (OSError, ValueError, IndexError):
                continue
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def report(fd: int, event: str, **fields: object) -> None:
    """Tells the launcher of an event; `Supervised.reports` reads it."""
    with contextlib.suppress(OSError):  # the launcher is gone or has stopped listening
        os.write(fd, json.dumps({"event": event, **fields}).encode() + b"\n")


def last_lines(path: str, lines: int = 15) -> list[str]:
    """The last lines of a log that are not empty. Raises OSError when it cannot be read."""
    with open(path, "rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 64 * 1024))
        text = log.read().decode(errors="replace")
    return [line[:400] for line in text.splitlines() if line.strip()][-lines:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
