"""`pw.LocalCluster`: host processes on this machine, as a target of `pw.connect`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from pathways.api.field_types import check_types
from pathways.process.client_terms import ClientTerms
from pathways.process.config import check_rules


@dataclasses.dataclass(frozen=True)
class LocalCluster:
    """Real host processes on this machine; a value, started by `connect`. Equal ones are one cluster.

    Args:
        islands: groups of hosts whose devices share a collective fabric.
        hosts_per_island: host processes in each.
        devices_per_host: devices that each host drives.
        platform: "cpu", "cuda", "rocm" or "tpu"; what JAX_PLATFORMS or the machine says when None.
        device_memory: budget of each device in bytes, by which runs are admitted; None: what the device says that it
            has, on CPU its share of the machine's memory.
        transfer_memory: budget in bytes of each host's shared memory, into which transfers land; None: 1 GiB.
        distance_us: microseconds that each message between the cluster's processes is on its way, as if they were far
            apart. For measurement; messages to and from clients, and the data itself, take no longer.
        machines: how many machines the hosts behave as if they were on, in their order and as many on each; the
            controller and the clients are on the first. Data between hosts of different ones goes over the network, and
            a host that is not on the first is lost when it does not answer for 5 s. For tests and measurement; messages
            of the control path, and what clients put and read, are in shared memory still.
        policy: which client's run is next when several use a device. "share": clients share device time by weight.
            "priority": a higher priority goes first, and a waiting run rises by one priority per second; clients of
            equal priority share by weight. "fifo": what comes first runs first. What runs is never interrupted.
        when_full: what becomes of a run or put that only other clients' arrays leave no device memory for. "refuse": it
            fails. "suspend": those clients are suspended, their arrays go to the hosts' memory, and they are brought
            back when they have work: idle clients first; clients that all work take turns of a second.
        checkpoint_root: a folder; the hosts read and write checkpoints only there. None: anywhere. "{client}" in it
            stands for the client's name: "/data/{client}" is a folder for each, and clients without a name are refused.
            On another machine, the name is that of the client's certificate.
        client_memory: the most bytes of each device that one client's arrays and runs may take; None: no such bound.
            What one client may have of this and the next three, each client may; `Cluster.limit` changes it for one.
        client_runs: the most runs that one client may have under way, up to 16,384; None: 16,384.
        max_weight: the greatest weight that a client may ask for; None: 1000.
        max_priority: the greatest priority that a client may ask for; None: 1,000,000.

    Raises:
        OptionError: a field has a value of another type.
        ValueError: there is no such policy, or no such answer to full memory.
    """

    islands: int = 1
    hosts_per_island: int = 1
    devices_per_host: int = 1
    platform: str | None = None
    device_memory: int | None = None
    transfer_memory: int | None = None
    distance_us: int = 0
    machines: int = 1
    policy: str = "share"
    when_full: str = "refuse"
    checkpoint_root: str | os.PathLike[str] | None = None
    client_memory: int | None = None
    client_runs: int | None = None
    max_weight: float | None = None
    max_priority: int | None = None

    def __post_init__(self) -> None:
        """Refuses a policy that there is not, and values of other types than the fields say."""
        check_rules(self.policy, self.when_full)
        check_types(self)

    def start(self, progress: Any, terms: ClientTerms | None) -> Any:
        """Starts it: what `connect` does first. Returns a `LocalClusterHandle`."""
        from pathways.cluster.launcher import start_local_cluster

        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return start_local_cluster(progress=progress, terms=terms, **sizes)
