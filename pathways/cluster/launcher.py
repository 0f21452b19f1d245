"""Starts a cluster of real processes on this machine, and ends it.

    started = start_local_cluster(islands=2, hosts_per_island=2, devices_per_host=2)
    started.control      # a RemoteControl; this process is the owner, and the cluster ends when it ends
    started.close()

The launcher starts the supervisor, the supervisor starts the controller, and the controller starts the hosts, with a
fork server. Each monitors the process that started it. All run in a session of their own, so Ctrl-C in the terminal
reaches only the user's own process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.cluster.remote import RemoteControl, StartupEvent, connect_unix
from pathways.cluster.startup_display import shown
from pathways.plan.memory_profile import check_budget
from pathways.plan.topology import Topology
from pathways.process import environment, run_directory, supervisor
from pathways.process.children import Deadline, describe_exit, is_readable, quoted
from pathways.process.client_terms import ClientTerms, check_allowance
from pathways.process.config import BY_CLIENT, ClusterOptions, ControllerConfig, dump
from pathways.process.supervisor import wait_readable

OWNER_GRACE_S = 5.0
CLOSE_GRACE_S = 8.0

Progress = Callable[[StartupEvent], None]


def start_local_cluster(
    islands: int = 1,
    hosts_per_island: int = 1,
    devices_per_host: int = 1,
    *,
    platform: str | None = None,
    progress: Progress | bool | None = None,
    terms: ClientTerms | None = None,
    **sizes: Any,
) -> LocalClusterHandle:
    """Starts a controller and `islands * hosts_per_island` hosts, and connects to them.

    Args:
        islands: number of islands.
        hosts_per_island: number of host processes per island; more than one form a `jax.distributed` group.
        devices_per_host: number of devices per host.
        platform: `cpu`, `cuda`, `rocm` or `tpu`. Default: `JAX_PLATFORMS`, else what the machine has.
        progress: a function that is called with each event of the start. True shows the events on stderr, False does
            not, None does if stderr is a terminal.
        terms: this process's name, weight and priority as a client.
        **sizes: further fields of `ClusterOptions`.

    Raises:
        ConnectError: the cluster could not start; the message has the reason, and the last log lines of the process
            that failed.
        ValueError: a size is not a positive int.
        OptionError: an allowance for clients is out of range, or `checkpoint_root` is no folder.
    """
    check_budget("device_memory", sizes.get("device_memory"))
    check_budget("transfer_memory", sizes.get("transfer_memory"))
    check_allowance(*(sizes.get(name) for name in ("max_weight", "max_priority", "client_memory", "client_runs")))
    if (root := sizes.get("checkpoint_root")) is not None:
        sizes["checkpoint_root"] = _existing_folder(root)
    wanted = ClusterOptions(islands, hosts_per_island, devices_per_host, platform=platform, **sizes)
    Topology.grid(islands, hosts_per_island, devices_per_host, machines=wanted.machine_of_hosts)
    chosen = environment.choose_platform(platform, os.environ)
    environment.check_devices(wanted, chosen, os.environ)
    environment.check_shared_memory(wanted)
    run_directory.sweep()
    with shown(progress, wanted, chosen) as tell:
        handle = LocalClusterHandle(wanted, chosen)
        try:
            handle._connect(tell, terms)
        except BaseException:
            handle.close()
            raise
    return handle


def _existing_folder(path: Any) -> str:
    """The real path. What follows "{client}", which stands for a client's name, need not exist yet."""
    is_path = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)
    before, by_client, _ = os.fspath(path).partition(BY_CLIENT) if is_path else ("", "", "")
    if not os.path.isdir(os.path.dirname(before) if by_client else before):
        raise errors.OptionError(f"checkpoint_root= expects a folder that exists, got {path!r}")
    return os.path.realpath(path)


class LocalClusterHandle:
    """A cluster that this process started and owns. `control` is this process's connection to it."""

    address: str
    control: RemoteControl

    def __init__(self, wanted: ClusterOptions, platform: str) -> None:
        self.options = wanted
        self.platform = platform
        self.directory = run_directory.new_directory()
        self._pid = os.getpid()
        self._controller_pid = 0
        self._report = b""
        self._report_fd, write_fd = os.pipe()
        os.set_blocking(self._report_fd, False)
        owner_fd = os.pidfd_open(self._pid)
        try:
            config = ControllerConfig(wanted, platform, self.directory, self._pid, owner_fd, write_fd)
            command = [sys.executable, "-P", "-m", "pathways.controller.main", dump(config)]
            argument = {
                "directory": self.directory,
                "command": command,
                "owner_fd": owner_fd,
                "report_fd": write_fd,
                "grace_s": OWNER_GRACE_S,
            }
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(argument)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment.child_environment(os.environ),
                cwd="/",
                pass_fds=(owner_fd, write_fd),
                start_new_session=True,
            )
        finally:
            os.close(owner_fd)
            os.close(write_fd)
        atexit.register(self.close)

    @property
    def supervisor_pid(self) -> int:
        """The process id of the supervisor, which ends last of all processes of this cluster."""
        return self._supervisor.pid

    def is_alive(self) -> bool:
        """Whether the cluster still works and this process owns it."""
        control = getattr(self, "control", None)
        return os.getpid() == self._pid and control is not None and control.alive()

    def pids(self) -> dict[str, int]:
        """Every process of the cluster, by name."""
        hosts = {f"host {number}": pid for number, pid in enumerate(self.control.host_pids)}
        return {"supervisor": self._supervisor.pid, "controller": self.control.controller_pid, **hosts}

    def close(self) -> None:
        """Ends the cluster. When this returns, no process and no file of it is left. A second call does nothing."""
        if os.getpid() != self._pid or self._report_fd < 0:
            return
        atexit.unregister(self.close)
        control = getattr(self, "control", None)
        controller_fd, asked = -1, False
        if control is not None:
            controller_fd = os.dup(control.controller_pidfd)
            with contextlib.suppress(errors.PathwaysError, TimeoutError):
                control.check()
                control.shutdown()
                asked = True
            control.close()
        if not asked:
            self._supervisor.terminate()  # it terminates a controller that is still starting, or did not answer
        for last_resort in (self._supervisor.terminate, self._supervisor.kill):
            try:
                self._supervisor.wait(CLOSE_GRACE_S)
                break
            except subprocess.TimeoutExpired:
                last_resort()
        self._supervisor.wait()
        if controller_fd >= 0:  # if the supervisor was killed, the controller ends after it
            wait_readable(controller_fd, CLOSE_GRACE_S)
            os.close(controller_fd)
        os.close(self._report_fd)
        self._report_fd = -1

    # -- start -------------------------------------------------------------------------------------------------------

    def _connect(self, tell: Progress | None, terms: ClientTerms | None) -> None:
        deadline = Deadline(self.options.start_timeout_s)
        self.address = self._wait_listening(deadline)
        try:
            self.control = connect_unix(
                self.address,
                progress=tell,
                # The controller's own limit ends first, because its error names the host that is late.
                timeout_s=self.options.start_timeout_s + CLOSE_GRACE_S,
                native=self.options.native,
                terms=terms,
            )
        except errors.ControllerLostError as error:
            raise errors.ConnectError(
                f"the cluster did not start: the controller is gone. {self._last_words()}"
            ) from error
        self.control.last_words = self._last_words

    def _wait_listening(self, deadline: Deadline) -> str:
        while not deadline.passed:
            for report in self._reports(deadline.left(0.5)):
                if report["event"] == "listening":
                    return str(report["address"])
                if report["event"] == "spawned":
                    self._controller_pid = int(report["pid"])
                if report["event"] == "error":
                    raise errors.ConnectError(f"the cluster did not start: {report['message']}")
                if report["event"] == "ended":
                    raise errors.ConnectError(
                        f"the cluster did not start: the controller is gone. {self._ended(report)}"
                    )
            if self._supervisor.poll() is not None:
                raise errors.ConnectError("the cluster did not start: its supervisor process ended too early")
        raise errors.ConnectError(f"the controller did not listen within {self.options.start_timeout_s:g} s")

    def _reports(self, timeout_s: float) -> list[dict[str, Any]]:
        """The reports of the supervisor and the controller since the last call."""
        if not wait_readable(self._report_fd, timeout_s):
            return []
        try:
            self._report += os.read(self._report_fd, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._report = self._report.split(b"\n")
        if not lines:
            time.sleep(0.01)  # every writer is gone; the caller will see that the supervisor ended
        return [json.loads(line) for line in lines]

    def _last_words(self) -> str:
        """How the controller ended, by the supervisor's report."""
        deadline = Deadline(2.0)
        while self._report_fd >= 0 and not deadline.passed:
            for report in self._reports(deadline.left(0.5)):
                if report["event"] == "ended":
                    return self._ended(report)
            if self._supervisor.poll() is not None and not is_readable(self._report_fd):
                break
        return ""

    def _ended(self, report: dict[str, Any]) -> str:
        end = describe_exit(int(report["returncode"]))
        return f"Process {self._controller_pid} {end}. {quoted(str(report.get('log', '')).splitlines())}"
