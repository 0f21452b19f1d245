"""Clusters as a user sees them: connect to one, see what is there, leave it.

cluster = pw.connect()                                              # this process's own devices
cluster = pw.connect(pw.LocalCluster(islands=2, devices_per_host=4))  # host processes on this machine
cluster = pw.connect(pw.RayCluster(islands=2, devices_per_host=8, resources_per_host={"GPU": 8}))  # on Ray's machines
cluster = pw.connect("unix:/run/user/1000/pathways-…/control.sock")   # a running one
cluster = pw.connect("pathways://login-node:7070")                    # a running one whose controller is elsewhere
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pathways import _jaxlib, errors
from pathways.api import session
from pathways.api.arrays import jax_interop
from pathways.api.checkpoints import checkpoint
from pathways.api.hosts_in_use import HostsInUse
from pathways.api.local_target import LocalCluster
from pathways.api.programs.tracing import Interop
from pathways.api.ray_target import RayCluster
from pathways.api.slices import remap
from pathways.api.slices.virtual_devices import Device, Slice
from pathways.process.client_terms import ClientTerms
from pathways.protocol import wire

_live: dict[Any, Cluster] = {}  # by target; guarded by `session.registry`
_terms_of: weakref.WeakKeyDictionary[Cluster, ClientTerms] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[Cluster] = weakref.WeakSet()
_child_of: int | None = None  # the process that forked this one when JAX was up there


def connect(
    target: LocalCluster | RayCluster | str | None = None,
    *,
    name: str | None = None,
    weight: float | None = None,
    priority: int | None = None,
    memory: int | None = None,
    runs: int | None = None,
    bytes: int | None = None,
    at_limit: str | None = None,
    progress: Any = None,
    max_in_flight: int | None = None,
) -> Cluster:
    """A `Cluster`, which is also a context manager. Connecting again to an equal target gives the same one.

    Args:
        target: a `LocalCluster` to start host processes here, a `RayCluster` to start them on the machines of a Ray
            cluster; or the address of a running cluster: "unix:/…", or "pathways://HOST:PORT" if its controller is on
            another machine. To the latter, the variable PATHWAYS_TOKEN_FILE names a file with a token of the role
            client, which is traded for a certificate that later calls of this user use. None: the address in the
            variable PATHWAYS_ADDRESS if that is set, else this process's own devices.
        name: what `pathways status` calls this client.
        weight: how this client shares devices with others: over any second in which both have work, a client of weight
            2 gets twice the device time of one of weight 1, which is the default. From 0.001 to 1000. The policy "fifo"
            knows no weights.
        priority: a cluster of policy "priority" runs clients of a higher priority first; 0 when not given.
        memory: a quota: the most bytes of each device that this client's arrays and runs may take; what the operator
            allows when not given.
        runs: the most runs that this client may have under way on the hosts; what the operator allows when not given.
        bytes: the most bytes of records of runs and commands that this client may have under way, 2 MiB or more;
            4 MiB when not given.
        at_limit: what becomes of a run or put for which `memory` has no room because of this client's own live arrays.
            "error", the default: it fails after a quarter of a second, in which arrays may still be deleted. "wait": it
            waits, and what comes behind it too, until arrays are deleted or donated. What can never fit always fails.
        progress: see `pathways.cluster.launcher.start_local_cluster`.
        max_in_flight: how many runs this client may be ahead of the hosts: a call beyond it waits until an earlier run
            is over. Few, and what is not a run (a save, a read) finds little to wait for; 1,024 when not given. To a
            cluster that is connected already it applies from now on.

    Raises:
        OptionError: `max_in_flight` is no number from 1 on; a weight, a priority or a quota is out of range, or more
            than the operator allows; the cluster's policy knows no weight or priority; or they are not those with which
            this process is connected to the target already.
        ConnectError: nobody listens there, or a process did not start; with its log's last lines. Or this process was
            forked from one that uses JAX.
        PermissionDeniedError: another machine's cluster knows no token or certificate of this client's, or its role
            may not run programs.
        UnsupportedVersionError: the cluster runs another jax or jaxlib.
    """
    if target is None:
        target = os.environ.get(ADDRESS_VARIABLE) or None
    if not (target is None or isinstance(target, LocalCluster | RayCluster | str)):
        raise errors.ConnectError(
            "connect expects None (this process's devices), a LocalCluster, a RayCluster, or an address "
            f"like unix:/path, got {target!r} of type {type(target).__name__}"
        )
    if _child_of is not None or _jaxlib.is_forked():
        raise errors.ConnectError(
            f"process {os.getpid()} was forked from process {_child_of or os.getppid()}, where JAX was up: JAX's "
            f"threads are not in this one, and whoever waited for them would wait for ever. {_IN_CHILDREN}"
        )
    most = None if max_in_flight is None else _checked_bound(max_in_flight)
    asked = {"name": name, "weight": weight, "priority": priority, "memory": memory, "runs": runs, "bytes": bytes,
             "at_limit": at_limit}  # fmt: skip
    terms = ClientTerms.checked(**asked)
    with session.registry:
        known = _live.get(target)
        if known is not None and known.is_alive():
            _check_same_terms(known, asked)
            session.make_current(known)
            if most is not None:
                known.native.max_in_flight = most
            return known
        if target is None:
            from pathways.cluster.embedded import EmbeddedControl

            cluster = Cluster(EmbeddedControl(terms), target)
        elif isinstance(target, LocalCluster | RayCluster):
            handle = target.start(progress, terms)
            try:
                cluster = Cluster(handle.control, target, handle)
            except BaseException:
                handle.close()
                raise
        else:
            from pathways.cluster.connecting import connect_to

            cluster = Cluster(connect_to(target, terms), target)
        _terms_of[cluster] = terms
        if most is not None:
            cluster.native.max_in_flight = most
        _live[target] = cluster
        session.make_current(cluster)
        return cluster


def connect_apart(address: str, terms: ClientTerms) -> Cluster:
    """A client of its own of the cluster at an address, whatever else this process is connected to: `connect` does not
    find it, and nothing takes it as the current one. Its slices do not move when somebody drains hosts, who hears it.

    Raises:
        ConnectError, PermissionDeniedError, UnsupportedVersionError: see `connect`.
    """
    from pathways.cluster.connecting import connect_to

    cluster = Cluster(connect_to(address, terms), object(), is_fixed=True)
    _terms_of[cluster] = terms
    return cluster


def _checked_bound(most: Any) -> int:
    is_integer = isinstance(most, numbers.Integral) and not isinstance(most, bool)
    if not (is_integer and 1 <= most < 1 << 31):
        raise errors.OptionError(f"connect expects max_in_flight= a number of runs, 1 or more, got {most!r}")
    return int(most)


def _check_same_terms(cluster: Cluster, asked: dict[str, Any]) -> None:
    for what, given in asked.items():
        is_now = getattr(_terms_of[cluster], what)
        is_none = is_now == 0 and what in ("memory", "runs", "bytes")
        if given is not None and given != is_now:
            raise errors.OptionError(
                f"this process is connected to that cluster {'without' if is_none else 'with'} {what}="
                f"{'' if is_none else repr(is_now)}, got {what}={given!r}: close() the cluster before you connect with "
                "other terms"
            )


#: The address that `connect` takes when it is given no target.
ADDRESS_VARIABLE = "PATHWAYS_ADDRESS"

_IN_CHILDREN = (
    "Compute in the process that connected, and give forked workers NumPy arrays; workers that compute themselves are "
    "started by multiprocessing's 'spawn' or 'forkserver', or forked before JAX is used"
)


def _abandon_in_child() -> None:
    """After a fork, FORK-1: what the parent connected cannot be used here, and nothing here may end it."""
    global _child_of
    session.registry = threading.RLock()  # perhaps a thread of the parent's held it
    parent = os.getppid()
    _jaxlib.keep_threads_of_parent()
    clusters = list(_all)
    if clusters or _jaxlib.initialized_backends():
        _child_of = parent
    for cluster in clusters:
        cluster.abandon(
            f"this array, program or cluster belongs to process {parent}, which forked this one ({os.getpid()}): its "
            f"cluster cannot be used here. {_IN_CHILDREN}"
        )
    _live.clear()
    session.make_current(None)


os.register_at_fork(after_in_child=_abandon_in_child)


class Cluster(HostsInUse):
    """A connection to a cluster. Made by `connect`; `close` it, or use it in a `with` statement."""

    def __init__(self, control: Any, target: Any, handle: Any = None, is_fixed: bool = False) -> None:
        jax_interop.install()
        checkpoint.register_when_imported()
        super().__init__(control, target is None)
        self._handle = handle
        self._target = target
        _all.add(self)
        if not is_fixed:
            control.serve_moves(functools.partial(remap.move_as_asked, self))

    # ---- what is there

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Host numbers, island by island."""
        return tuple(self._control.present_topology().islands)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Host numbers."""
        return tuple(range(self._control.present_topology().hosts))

    @property
    def address(self) -> str | None:
        """Where other clients reach it; None when embedded."""
        return getattr(self._control, "address", None)

    def stats(self) -> dict[str, Any]:
        """Counters of this client and of the cluster.

        `dispatches`: runs this client submitted. `launches`: XLA launches, summed over hosts. `bytes_moved`: bytes that
        transfers brought from slice to slice. `compiles`: XLA compilations, by host. Hosts count from their last
        start; `restarts` under `hosts` says how many of those there were after losses. `first_calls`: the seconds that
        the newest 64 first calls of this client took to trace, partition and compile. `variables`: the name, type,
        slice and bytes on each device of this client's variables, the biggest first. The rest under `controller`,
        `hosts`, `clients`.
        """
        if self.native.orphaned is not None:
            self.native.check_alive()
        if self.is_open:
            self.sweep()
        variables = self.variables.now()
        if variables:
            self.variables.tell()
        stats = self._control.cluster_stats()
        hosts = stats["hosts"]
        return {
            "dispatches": self.native.dispatches,
            "in_flight": self.native.in_flight,
            "futures": self.native.futures_in_use,
            "launches": sum(host.get("launches", 0) for host in hosts),
            "gangs": [host.get("gangs", 0) for host in hosts],
            "bytes_moved": sum(host.get("bytes_moved", 0) for host in hosts),
            "compiles": [host.get("compiles", 0) for host in hosts],
            "first_calls": self.first_calls.now(),
            "variables": wire.plain(variables),
            **stats,
        }

    def on_failure(self, hook: Callable[[errors.PathwaysError], object]) -> Callable[[errors.PathwaysError], object]:
        """Calls `hook(error)` once for each failure that nobody has read. Also a decorator.

        A run may fail whose results nobody waits for: they were dropped, or the run was made for its callbacks. Such a
        failure is told when the last of the arrays that have it is dropped, as asyncio tells of exceptions that nobody
        retrieved: through `logging` (logger "pathways"), and so on stderr, and to each hook. A failure that several
        arrays have, the results of a run and what depends on them, is told once; one that was read from any of them,
        and a run that was cancelled, is not. `close` and the end of the process tell what is left.

        Args:
            hook: called on a thread of its own, about half a second later. What it raises is logged.

        Returns:
            The hook.
        """
        if not callable(hook):
            raise errors.OptionError(f"on_failure expects a function of one error, got {hook!r}")
        self.failures.add_hook(hook)
        return hook

    # ---- moving

    def remap(self, slice: Slice, devices: Sequence[Device | int]) -> None:
        """Moves a slice, with every array on it, to other devices. Between runs: returns when everything is there.

        Arrays stay valid and keep their values bit by bit; they go from host to host, never through this process.
        Programs that use the slice are bound again at their next call: nothing is traced or partitioned, and a host
        compiles only what it has not compiled for those devices before. Calls of other threads wait meanwhile.

        Args:
            slice: of this cluster.
            devices: as many as the slice has, all of one island, in C order of its shape; `Device`s or their numbers.

        Raises:
            SliceError: other devices than such, or a slice of another cluster.
            ResourceExhaustedError, ComputationError: something found no room there; nothing has moved.
        """
        remap.remap(self, slice, devices)

    def resize(self, slice: Slice, shape: Sequence[int]) -> None:
        """See `Slice.resize`."""
        remap.resize(self, slice, shape)

    def suspend(self, client: int | None = None, *, to: str = "memory") -> int:
        """Takes a client off the devices: its runs end, its buffers leave device memory, and its later work waits.

        The client notices nothing but that what it waits for comes after `resume`. When it dies meanwhile, all it owned
        is freed, as ever.

        Args:
            client: its number, see `stats()["clients"]`; this one when not given.
            to: "memory" of each host, or a file on its "disk", which is gone with the host or the client.

        Returns:
            The bytes that left the devices.

        Raises:
            ResourceExhaustedError: no room there; the client goes on and has lost nothing.
            ClusterClosedError: no such client.
        """
        if to not in ("memory", "disk"):
            raise errors.OptionError(f'suspend moves buffers to="memory" or to="disk", got {to!r}')
        number = self.client_id if client is None else client
        return int(self.control().suspend(number, to == "disk", self.native.pause))

    def resume(self, client: int | None = None) -> int:
        """Brings a suspended client's buffers back, then takes its work again. Of one that is not suspended: nothing.

        Returns:
            The bytes that came back to the devices.

        Raises:
            ComputationError, ResourceExhaustedError: no room on the devices; it stays suspended and has lost nothing.
        """
        number = self.client_id if client is None else client
        return int(self.control().resume(number, self.native.pause))

    def limit(
        self,
        client: int | None = None,
        *,
        weight: float | None = None,
        priority: int | None = None,
        memory: int | str | None = None,
        runs: int | str | None = None,
        bytes: int | str | None = None,
    ) -> dict[str, Any]:
        """Changes what a client may have, while it runs; what is not given stays. Only who started the cluster may.

        A weight or priority acts on the next run. A quota below what the client has takes nothing away: its next runs
        and puts wait, or fail, as it has asked by `at_limit=`, until it has less. "none" takes a quota away. What the
        operator allows at `connect` does not bound this.

        Args:
            client: its number, see `stats()["clients"]`; this one when not given.
            weight: from 0.001 to 1000.
            priority: for a cluster of policy "priority".
            memory: bytes of each device that its arrays and runs may take.
            runs: runs that it may have under way.
            bytes: bytes of records that it may have under way, 2 MiB or more.

        Returns:
            All its limits now; 0 for a quota that it does not have.

        Raises:
            OptionError: a limit is out of range, the cluster's policy does not know it, or none is given.
            PermissionDeniedError: another process started the cluster.
            ClusterClosedError: no such client.
        """
        given = {"weight": weight, "priority": priority, "memory": memory, "runs": runs, "bytes": bytes}
        changes: dict[str, Any] = {what: value for what, value in given.items() if value is not None}
        takes_away = {
            what for what in ("memory", "runs", "bytes") if isinstance(given[what], str) and given[what] == "none"
        }
        ClientTerms.checked(**{what: value for what, value in changes.items() if what not in takes_away})
        changes |= dict.fromkeys(takes_away, 0)
        number = self.client_id if client is None else client
        limits: dict[str, Any] = self.control().limit(number, changes)
        if number == self.client_id:
            same = {what: limits[what] for what in given}
            _terms_of[self] = dataclasses.replace(_terms_of[self], **same)
        return limits

    # ---- the end

    def close(self) -> None:
        """Leaves the cluster: what this client owns there is freed. A LocalCluster started here ends. Idempotent."""
        with session.registry:
            if self.native.closed:
                return
            try:
                self.failures.end()
                if not self.is_embedded and self._control.alive():
                    self.native.flush()
            except errors.PathwaysError:
                pass
            self.variables.stop()
            self.native.close()
            if _live.get(self._target) is self:
                del _live[self._target]
            session.forget_current(self)
        (self._handle or self._control).close()

    def __copy__(self) -> Cluster:
        return self

    def __deepcopy__(self, memo: Any) -> Cluster:
        return self

    def __reduce__(self) -> NoReturn:
        way = (
            "its devices are this process's own" if self.is_embedded else f"connect there: pw.connect({self.address!r})"
        )
        raise TypeError(f"{self!r} cannot be pickled: it is a connection of this process. In another process, {way}")

    def abandon(self, reason: str) -> None:
        """In a forked child: every use is refused with `reason`; nothing of it is ever closed or freed here."""
        self._lock = threading.RLock()  # perhaps threads of the parent's held them
        self.steady = threading.RLock()
        if not self.native.closed:
            self.native.abandon(reason, self)
            self._control.abandon(reason)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self.is_open else " (closed)"
        where = "embedded" if self.is_embedded else self.address
        return f"Cluster({where}, {self._control.topology.describe()}){state}"


Interop.install = jax_interop.install
session.Default.connect = connect
