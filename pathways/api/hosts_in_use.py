"""Which hosts of a cluster are in use: waiting for those that join, and draining those that are to go."""

from __future__ import annotations

from pathways import errors
from pathways.api.session import Session
from pathways.cluster.drain_target import DrainTarget
from pathways.process.children import Deadline

#: Seconds between two looks of `wait_for`.
WAIT_FOR_LOOK_S = 0.05


class HostsInUse(Session):
    """What a `Cluster` can do about its hosts."""

    def wait_for(self, devices: int, timeout: float | None = None) -> None:
        """Waits until at least so many devices are there: machines join a cluster that listens when they are ready.

        Args:
            devices: how many.
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: so many were not there in time; the message says how many were.
            OptionError: the whole cluster has fewer places, and takes no more machines.
        """
        topology = self._control.topology
        if devices > topology.devices and not topology.may_grow:
            raise errors.OptionError(
                f"wait_for(devices={devices}): the cluster has places for {topology.devices} devices"
            )
        deadline = Deadline(timeout)
        while True:
            hosts = self._control.hosts_there()
            there = sum(map(self._control.topology.count_of, hosts))
            if there >= devices:
                return
            if deadline.passed:
                raise TimeoutError(f"{there} of {devices} devices were there after {timeout:g} s")
            self.native.pause(deadline.left(WAIT_FOR_LOOK_S))

    def drain(
        self,
        machine: str | None = None,
        timeout: float = 60.0,
        force: bool = False,
        *,
        host: int | None = None,
        island: int | None = None,
    ) -> int:
        """Takes a machine, a host or an island out of use without a lost array: it takes no new slices, and each
        client's library moves the slices that lie there to other hosts, as `remap` does. Only who started the cluster,
        or an operator, may (`pathways drain`).

        A machine then leaves the cluster. A host or an island stays, and takes no slices until `undrain`.

        Args:
            machine: its name, see `stats()["machines"]`.
            timeout: seconds until everything has moved and nothing runs there any more.
            force: drained then, whatever lies there; what lies on a machine that leaves is lost.
            host: the number of a host, instead of a machine.
            island: the number of an island, instead of a machine.

        Returns:
            The number of the island that it is part of.

        Raises:
            ConnectError: there is no such machine, host or island.
            SliceError: slices still lie there after the time, and nothing is drained. The message names the slices,
                their clients, and why each has not moved: no other host has enough devices or memory, or the client is
                suspended or does not answer.
            PermissionDeniedError: another process started the cluster.
        """
        return int(self.control().drain(DrainTarget.of(machine, host, island), timeout, force))

    def undrain(self, machine: str | None = None, *, host: int | None = None, island: int | None = None) -> int:
        """Lets slices lie on drained hosts again; arguments, result and errors as of `drain`."""
        return int(self.control().undrain(DrainTarget.of(machine, host, island)))
