"""Runs a module in a process with which everything ends that it has started; on some machines, confined.

    python -P confinement.py PARENT BOUNDS MODULE ARGUMENT...

OWN-1: this process only forks the one that runs the module, and becomes the parent of whatever that one leaves behind,
also of a daemon. It kills all of them when the module ends, and on SIGTERM, which the kernel sends when PARENT ends.
Then it ends as the module did. The module's last argument is this process's number.

BOUNDS is {"hide": [FOLDER, ...], "memory": BYTES, "processes": N}, or {}. GUEST-1: on a machine that serves clients
from elsewhere, their functions (`pw.host_callback`) reach neither its secrets nor processes that are not their own.

It imports nothing of ours, because what it does must be done before the process has a second thread. It uses what the
kernel has, and says on stderr what it lacks:

* a user and a mount namespace, in which an empty folder lies over each folder of `hide`, for good: the process has none
  of root's powers from then on, not even over its own namespace. Namespaces are refused in many containers;
* Landlock (Linux 5.13): no look into a process outside, so at no environment, memory or descriptor of it. From Linux
  6.12 on also no signal to one, and no socket without a path;
* limits: of the memory of each process, in bytes, and of the number of processes and threads, from which root is
  exempt. When the machine has no memory left, this process ends first.

A folder is hidden and not a file: who replaces a file puts another one there, which is not hidden.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import runpy
import signal
import struct
import sys
from collections.abc import Sequence

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _ALL_BELOW, _PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
_SET_DUMPABLE, _DROP_BOUND, _SET_SECURE_BITS, _NO_NEW_PRIVILEGES = 4, 24, 28, 38
_NO_ROOT_FOR_GOOD = 0b11
_CAPABILITIES_3 = 0x20080522
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_MAKE_BLOCK_DEVICE = 1 << 11
_NO_ABSTRACT_SOCKETS, _NO_SIGNALS = 1, 2
_SCOPES_SINCE = 6

_libc = ctypes.CDLL(None, use_errno=True)


def keep(parent: int) -> int:
    """Returns in a child, with the number of this process, which ends with all that the child has started."""
    _control(_SET_SUBREAPER, 1)
    _control(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    heard, own = {signal.SIGTERM, signal.SIGCHLD}, os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return own
    _control(_SET_DUMPABLE, 0)  # nobody looks into it, and it leaves no second core file
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    ends: dict[int, int] = {}
    while child not in ends and signal.sigwait(heard) == signal.SIGCHLD:
        while child not in ends and (found := os.waitpid(-1, os.WNOHANG))[0]:
            ends = dict([found])
    with contextlib.suppress(ChildProcessError):
        while True:  # until none is left: the children of one that ends become this process's
            with open(f"/proc/self/task/{own}/children") as file:
                for pid in map(int, file.read().split()):
                    os.kill(pid, signal.SIGKILL)
            pid, how = os.waitpid(-1, 0)
            ends.setdefault(pid, how)
    if os.WIFSIGNALED(ends[child]):
        number = os.WTERMSIG(ends[child])
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(own, number)
    os._exit(os.WEXITSTATUS(ends[child]))


def confine(hide: Sequence[str], memory: int, processes: int) -> list[str]:
    """Confines this process, which has one thread, and what it will start. Returns what could not be done, and why."""
    lacking, bounds = [], [(resource.RLIMIT_DATA, memory)]
    _control(_NO_NEW_PRIVILEGES, 1)
    try:
        _hide(hide)
        bounds.append((resource.RLIMIT_NPROC, processes))  # else the user's other processes would count as well
    except OSError as error:
        lacking.append(f"secrets are not hidden, and the number of processes has no bound ({error})")
    try:
        _leave_others()
    except OSError as error:
        lacking.append(f"other processes can be seen ({error})")
    _control(_SET_DUMPABLE, 1)  # else its own /proc/self is root's
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for kind, most in bounds:
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    return lacking


def _hide(folders: Sequence[str]) -> None:
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEW_USER | _NEW_MOUNTS), "no namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _mount("none", "/", None, _ALL_BELOW | _PRIVATE, None)
    flags = _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_EXEC
    for folder in folders:
        if os.path.isdir(folder):
            _mount("none", folder, "tmpfs", flags, "mode=0700,size=4096")
    try:
        os.chdir(os.getcwd())  # where it was may be hidden by now, and would be seen from within
    except OSError:
        os.chdir("/")
    _drop_powers()


def _drop_powers() -> None:
    """Those over the new namespaces. With them, what hides the folders could be taken away."""
    _control(_SET_SECURE_BITS, _NO_ROOT_FOR_GOOD)
    for capability in range(64):
        if _libc.prctl(_DROP_BOUND, capability, 0, 0, 0):
            break  # the kernel knows no more
    header, none = struct.pack("<Ii", _CAPABILITIES_3, 0), struct.pack("<6I", 0, 0, 0, 0, 0, 0)
    _check(_libc.capset(header, none), "capabilities are kept")


def _leave_others() -> None:
    """A domain of Landlock's: what is not in it, or below it, is out of reach."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    _check(version, "no Landlock")
    if version >= _SCOPES_SINCE:
        rules = struct.pack("<QQQ", 0, 0, _NO_ABSTRACT_SOCKETS | _NO_SIGNALS)
    else:
        rules = struct.pack("<Q", _MAKE_BLOCK_DEVICE)  # something must be ruled
    domain = _libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    _check(domain, "no Landlock")
    try:
        _check(_libc.syscall(_RESTRICT_SELF, domain, 0), "no Landlock")
    finally:
        os.close(domain)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"no mount at {target}")


def _control(what: int, value: int) -> None:
    _check(_libc.prctl(what, ctypes.c_ulong(value), 0, 0, 0), f"prctl {what}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main(arguments: Sequence[str]) -> None:
    """Runs the module in a process that is kept, and confined if there are bounds."""
    parent, bounds, module, *rest = arguments
    keeper = keep(int(parent))
    for problem in confine(**json.loads(bounds)) if bounds != "{}" else ():
        print(f"functions of clients are not fully confined on this host: {problem}", file=sys.stderr, flush=True)
    sys.argv = [module, *rest, str(keeper)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
