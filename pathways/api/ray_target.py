"""A cluster on the machines of a Ray cluster, as a user asks for it.

cluster = pw.connect(pw.RayCluster(islands=2, devices_per_host=8, resources_per_host={"GPU": 8}))

docs/ray.md is the page for users; `pathways/cluster/ray_cluster.py` does the work.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from pathways.api.field_types import check_types
from pathways.process.client_terms import ClientTerms
from pathways.process.config import ClusterOptions, check_rules

#: The fields that say what Ray is asked for, with their names there.
_PLACEMENT = {
    "resources_per_host": "resources_per_host",
    "ray_address": "address",
    "strategy": "strategy",
    "labels": "labels",
    "runtime_env": "runtime_env",
    "wait_for_resources": "wait_for_resources",
}
_LISTENING = ("listen", "authority", "insecure_plaintext")


@dataclasses.dataclass(frozen=True)
class RayCluster:
    """Host processes on the machines of a Ray cluster; a value, started by `connect`. Equal ones are one cluster.

    This process starts the controller on its own machine. Ray starts one actor for each island, or one for each of its
    nodes, which runs the hosts there. Needs `pip install 'pathways-jax[ray]'`, here and on Ray's nodes.

    Args:
        islands: groups of hosts whose devices share a collective fabric.
        hosts_per_island: host processes in each.
        devices_per_host: devices that each host drives.
        nodes_per_island: over how many nodes of Ray the hosts of an island are spread, as many on each.
        fabric: for islands on several nodes, the network of their collectives, which encrypt nothing: one on which each
            node has one address, as "10.1.0.0/16", or the name of an interface that each node has.
        trusted_fabric: the fabric is private, although its addresses are public ones.
        platform: "cpu", "cuda", "rocm" or "tpu". None: "cuda" if `resources_per_host` has a "GPU", "tpu" if it has a
            "TPU", else "cpu".
        resources_per_host: what Ray sets aside for each host, as {"GPU": 8} or {"CPU": 4, "memory": 2**34}; names of
            your own are allowed. One CPU if "CPU" is not among them. The hosts see the devices that Ray assigned.
        ray_address: "auto" for the running cluster that Ray finds (RAY_ADDRESS, or one on this machine), "HOST:PORT",
            "ray://HOST:PORT", or "local" for a new one on this machine. If this process has called `ray.init` before,
            "auto" is that cluster.
        strategy: "SPREAD" puts islands, or their parts, on different nodes if it can, "PACK" on few; "STRICT_SPREAD"
            and "STRICT_PACK" fail if they cannot.
        labels: only nodes with these labels of Ray are used, as {"accelerator": "h100"}.
        runtime_env: the environment of the actors, as `ray.init(runtime_env=...)` takes it.
        wait_for_resources: whether to wait for resources that the Ray cluster does not have: one that grows by itself
            may get them. Else their lack is an error at once.
        start_timeout_s: seconds until all devices must be there.
        listen: `HOST:PORT` where the agents reach this machine. None: a free port of the address that Ray knows.
        authority: see `pathways up --authority`; None: one that ends with the cluster.
        insecure_plaintext: nothing is encrypted between the machines.
        device_memory, transfer_memory, policy, when_full, checkpoint_root: see `LocalCluster`.
        client_memory, client_runs, max_weight, max_priority: see `LocalCluster`.

    Raises:
        OptionError: a field has a value of another type.
        ValueError: there is no such policy, or no such answer to full memory.
    """

    islands: int = 1
    hosts_per_island: int = 1
    devices_per_host: int = 1
    nodes_per_island: int = 1
    fabric: str | None = None
    trusted_fabric: bool = False
    platform: str | None = None
    resources_per_host: Mapping[str, float] | None = dataclasses.field(default=None, hash=False)
    ray_address: str = "auto"
    strategy: str = "SPREAD"
    labels: Mapping[str, str] | None = dataclasses.field(default=None, hash=False)
    runtime_env: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    wait_for_resources: bool = False
    start_timeout_s: float = ClusterOptions.start_timeout_s
    listen: str | None = None
    authority: str | os.PathLike[str] | None = None
    insecure_plaintext: bool = False
    device_memory: int | None = None
    transfer_memory: int | None = None
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
        """Starts it: what `connect` does first. Returns a `RayClusterHandle`, and raises as `start_ray_cluster`."""
        from pathways.cluster.launcher import Listening
        from pathways.cluster.ray_cluster import start_ray_cluster
        from pathways.cluster.ray_resources import RayPlacement
        from pathways.trust import Address

        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        placement = RayPlacement(**{theirs: sizes.pop(name) for name, theirs in _PLACEMENT.items()})
        address, authority, is_plain = (sizes.pop(name) for name in _LISTENING)
        where = "" if address is None else Address.parse(address, listens=True).endpoint
        folder = "" if authority is None else os.path.abspath(authority)
        listening = Listening(where, folder, is_plain)
        return start_ray_cluster(placement, listening=listening, progress=progress, terms=terms, **sizes)
