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
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.cluster.remote import RemoteControl, StartupEvent, connect_unix
from pathways.cluster.startup_display import shown
from pathways.plan.memory_profile import check_budget
from pathways.plan.topology import Topology
from pathways.process import environment, run_directory
from pathways.process.children import Deadline
from pathways.process.client_terms import ClientTerms, check_allowance
from pathways.process.config import BY_CLIENT, MOST_DEVICES, MOST_HOSTS, ClusterOptions, ControllerConfig, dump
from pathways.process.supervised import CLOSE_GRACE_S, Supervised
from pathways.process.supervisor import wait_readable

Progress = Callable[[StartupEvent], None]


def start_local_cluster(
    islands: int = 1,
    hosts_per_island: int = 1,
    devices_per_host: int = 1,
    *,
    max_machines: int = 0,
    platform: str | None = None,
    progress: Progress | bool | None = None,
    terms: ClientTerms | None = None,
    listen: Listening | None = None,
    **sizes: Any,
) -> LocalClusterHandle:
    """Starts a controller and `islands * hosts_per_island` hosts, and connects to them.

    Args:
        islands: number of islands.
        hosts_per_island: number of host processes per island; more than one form a `jax.distributed` group.
        devices_per_host: number of devices per host.
        max_machines: instead of a shape: the cluster begins with no islands, and so many machines may join and open
            some, with `devices_per_host` devices for each host at most. It needs `listen`. 0: the shape is fixed.
        platform: `cpu`, `cuda`, `rocm` or `tpu`. Default: `JAX_PLATFORMS`, else what the machine has.
        progress: a function that is called with each event of the start. True shows the events on stderr, False does
            not, None does if stderr is a terminal.
        terms: this process's name, weight and priority as a client.
        listen: where agents of other machines may join. Then all hosts are theirs: each brings an island.
        **sizes: further fields of `ClusterOptions`.

    Raises:
        ConnectError: the cluster could not start; the message has the reason, and the last log lines of the process
            that failed.
        ValueError: a size is not a positive int, or a shape is given beside `max_machines`.
        OptionError: an allowance for clients is out of range, or `checkpoint_root` is no folder.
    """
    check_budget("device_memory", sizes.get("device_memory"))
    check_budget("transfer_memory", sizes.get("transfer_memory"))
    check_allowance(*(sizes.get(name) for name in ("max_weight", "max_priority", "client_memory", "client_runs")))
    if (root := sizes.get("checkpoint_root")) is not None:
        sizes["checkpoint_root"] = _existing_folder(root)
    if max_machines:
        _check_growing(max_machines, devices_per_host, islands, hosts_per_island, listen)
        islands = 0
    wanted = ClusterOptions(
        islands, hosts_per_island, devices_per_host, platform=platform, max_machines=max_machines, **sizes
    )
    if not max_machines:
        Topology.grid(islands, hosts_per_island, devices_per_host, machines=wanted.machine_of_hosts)
    chosen = environment.choose_platform(platform, os.environ)
    if listen is None:
        environment.check_devices(wanted, chosen, os.environ)
        environment.check_shared_memory(wanted)
    run_directory.sweep()
    with shown(progress, wanted, chosen, listen is None) as tell:
        handle = LocalClusterHandle(wanted, chosen, listen)
        try:
            handle._connect(tell, terms)
        except BaseException:
            handle.close()
            raise
    return handle


def _check_growing(machines: int, devices: int, islands: int, hosts: int, listen: Listening | None) -> None:
    for name, value, most in (
        ("max_machines", machines, MOST_HOSTS),
        ("devices_per_host", devices, MOST_DEVICES),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ValueError(f"{name} must be an int from 1 to {most}, got {value!r}")
    if (islands, hosts) != (1, 1):
        raise ValueError("a cluster with max_machines= has no islands= nor hosts_per_island=: machines bring them")
    if listen is None:
        raise ValueError("a cluster with max_machines= listens: machines bring its hosts")


def _existing_folder(path: Any) -> str:
    """The real path. What follows "{client}", which stands for a client's name, need not exist yet."""
    is_path = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)
    before, by_client, _ = os.fspath(path).partition(BY_CLIENT) if is_path else ("", "", "")
    if not os.path.isdir(os.path.dirname(before) if by_client else before):
        raise errors.OptionError(f"checkpoint_root= expects a folder that exists, got {path!r}")
    return os.path.realpath(path)


@dataclasses.dataclass(frozen=True)
class Listening:
    """Where a cluster lets other machines join: `address`, `HOST:PORT`. `authority`: the folder of the cluster's
    authority, which is made if it is not there; empty: one that ends with the cluster. `insecure_plaintext`: nothing is
    encrypted between machines.
    """

    address: str
    authority: str = ""
    insecure_plaintext: bool = False


class LocalClusterHandle:
    """A cluster that this process started and owns. `control` is this process's connection to it."""

    address: str
    control: RemoteControl

    def __init__(self, wanted: ClusterOptions, platform: str, listen: Listening | None = None) -> None:
        self.options = wanted
        self.port = ""  # where other machines join: `pathways://HOST:PORT`; empty: nowhere
        self.platform = platform
        self.insecure_plaintext = listen is not None and listen.insecure_plaintext
        self.directory = run_directory.new_directory()
        self._pid = os.getpid()
        self._is_closed = False

        def command(owner_fd: int, report_fd: int) -> list[str]:
            config = ControllerConfig(
                wanted,
                platform,
                self.directory,
                self._pid,
                owner_fd,
                report_fd,
                listen=listen.address if listen else "",
                authority=listen.authority if listen else "",
                insecure_plaintext=self.insecure_plaintext,
            )
            return [sys.executable, "-P", "-m", "pathways.controller.main", dump(config)]

        self._supervised = Supervised(self.directory, command)
        atexit.register(self.close)

    @property
    def supervisor_pid(self) -> int:
        """The process id of the supervisor, which ends last of all processes of this cluster."""
        return self._supervised.supervisor_pid

    def is_alive(self) -> bool:
        """Whether the cluster still works and this process owns it."""
        control = getattr(self, "control", None)
        return os.getpid() == self._pid and control is not None and control.alive()

    def pids(self) -> dict[str, int]:
        """Every process of the cluster, by name."""
        hosts = {f"host {number}": pid for number, pid in enumerate(self.control.host_pids)}
        return {"supervisor": self.supervisor_pid, "controller": self.control.controller_pid, **hosts}

    def close(self) -> None:
        """Ends the cluster. When this returns, no process and no file of it is left. A second call does nothing."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
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
            self._supervised.terminate()  # it terminates a controller that is still starting, or did not answer
        self._supervised.close()
        if controller_fd >= 0:  # if the supervisor was killed, the controller ends after it
            wait_readable(controller_fd, CLOSE_GRACE_S)
            os.close(controller_fd)
        self._supervised.forget()

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
                f"the cluster did not start: the controller is gone. {self._supervised.last_words()}"
            ) from error
        self.control.last_words = self._supervised.last_words

    def _wait_listening(self, deadline: Deadline) -> str:
        while not deadline.passed:
            for report in self._supervised.reports(deadline.left(0.5)):
                if report["event"] == "listening":
                    self.port = str(report["port"])
                    return str(report["address"])
                if report["event"] == "error":
                    raise errors.ConnectError(f"the cluster did not start: {report['message']}")
                if report["event"] == "ended":
                    raise errors.ConnectError(
                        f"the cluster did not start: the controller is gone. {self._supervised.described(report)}"
                    )
            if self._supervised.is_over:
                raise errors.ConnectError("the cluster did not start: its supervisor process ended too early")
        raise errors.ConnectError(f"the controller did not listen within {self.options.start_timeout_s:g} s")
