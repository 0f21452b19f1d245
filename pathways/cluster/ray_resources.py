"""What a cluster asks of Ray: a connection, and a placement group with a bundle for each part of an island.

Ray is imported only when a cluster on Ray is started: see `imported_ray`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from pathways import errors
from pathways.process.children import Deadline

STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
#: The resources of Ray that stand for devices, with the platform that uses them.
PLATFORM_OF = {"GPU": "cuda", "TPU": "tpu"}
_DEVICES_OF = {"cuda": "GPU", "rocm": "GPU", "tpu": "TPU"}
_REACH_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class RayPlacement:
    """What Ray is asked for.

    Args:
        resources_per_host: of Ray, by name, as {"GPU": 8}; a CPU for each host, unless "CPU" is among them.
        address: of the Ray cluster: "auto", "HOST:PORT", "ray://HOST:PORT", or "local" for a new one on this machine.
        strategy: how the islands, or their parts, are placed, one of `STRATEGIES`.
        labels: only nodes with these labels are used.
        runtime_env: of the actors, as Ray understands it.
        wait_for_resources: what the Ray cluster does not have may still come, because it grows by itself.
    """

    resources_per_host: Mapping[str, float] | None = None
    address: str = "auto"
    strategy: str = "SPREAD"
    labels: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    wait_for_resources: bool = False

    def __post_init__(self) -> None:
        """Refuses what makes no sense.

        Raises:
            OptionError: the message says what is wrong.
        """
        if self.strategy not in STRATEGIES:
            raise errors.OptionError(f"strategy is one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if not isinstance(self.address, str) or not self.address:
            raise errors.OptionError(f'ray_address is "auto", HOST:PORT or ray://HOST:PORT, got {self.address!r}')
        for name, amount in (self.resources_per_host or {}).items():
            is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
            if not isinstance(name, str) or not name or not is_number or not 0 <= amount < 2**63:
                raise errors.OptionError(
                    f'resources_per_host has amounts by name, as {{"GPU": 8}}, got {name!r:.50}: {amount!r:.50}'
                )
        if not self.bundle(1):
            raise errors.OptionError("resources_per_host asks Ray for nothing: leave it out for one CPU for each host")

    @property
    def platform(self) -> str:
        """The platform that the resources of a host are for: "cuda" for GPUs, "tpu" for TPUs, else "cpu"."""
        asked = self.resources_per_host or {}
        return next((platform for name, platform in PLATFORM_OF.items() if asked.get(name, 0) > 0), "cpu")

    def check(self, devices_per_host: int, platform: str) -> None:
        """Refuses hosts that need more devices than they ask Ray for.

        Raises:
            OptionError: the message says how many.
        """
        device = _DEVICES_OF.get(platform.replace("gpu", "cuda"), "")
        if device and (amount := self.bundle(1).get(device, 0)) < devices_per_host:
            raise errors.OptionError(
                f"each host has devices_per_host={devices_per_host} {platform} devices, but resources_per_host asks "
                f"Ray for {device}: {amount:g}; ask for {device}: {devices_per_host}"
            )

    def bundle(self, hosts: int) -> dict[str, float]:
        """The resources of so many hosts."""
        each = {"CPU": 1.0, **(self.resources_per_host or {})}
        return {name: amount * hosts for name, amount in each.items() if amount > 0}

    def actor_options(self, hosts: int) -> dict[str, Any]:
        """The options of an actor that has a whole bundle."""
        others = self.bundle(hosts)
        options: dict[str, Any] = {"num_cpus": others.pop("CPU", 0), "num_gpus": others.pop("GPU", 0)}
        if "memory" in others:
            options["memory"] = others.pop("memory")
        options["resources"] = others
        if self.runtime_env is not None:
            options["runtime_env"] = dict(self.runtime_env)
        return options


def imported_ray() -> Any:
    """Raises:
    ConnectError: Ray is not installed.
    """
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise errors.ConnectError(
            f"a cluster on Ray needs the package ray ({error}): pip install 'pathways-jax[ray]'"
        ) from None
    return ray


def failures_of(ray: Any) -> tuple[type[BaseException], ...]:
    """What Ray raises when it is not there any more."""
    return (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError)


class RayConnection:
    """This process's connection to Ray, as one cluster uses it.

    A process has one connection at a time. If a cluster made it, the last cluster that uses it ends it. If the program
    made it, it stays. After `ray.shutdown` the program may make another one, which is not this one.
    """

    #: How many clusters use a connection that one of them made, by `_identity`. Guarded by `changing`.
    _clusters: ClassVar[dict[tuple[str, str], int]] = {}
    #: Held while the connection of this process is made or ended.
    changing: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, ray: Any, is_new: bool) -> None:
        """`is_new`: it was made for this cluster. The caller holds `changing`."""
        self._ray = ray
        self._which = self._identity()
        self._is_ours = is_new or self._which in self._clusters
        if self._is_ours:
            self._clusters[self._which] = self._clusters.get(self._which, 0) + 1

    def is_there(self) -> bool:
        """Whether this process still has this connection. Raises one of `failures_of` when Ray does not say."""
        return self._ray.is_initialized() and self._identity() == self._which

    def is_reachable(self) -> bool:
        """Whether somebody listens at Ray's address. If not, a question to Ray ends this process after a minute."""
        from ray.util.client import ray as client

        if client.is_connected():  # the address may be good only inside of the Ray cluster
            return True
        with contextlib.suppress(errors.ConnectError):
            _check_reachable(self._which[0], _REACH_TIMEOUT_S)
            return True
        return False

    def _identity(self) -> tuple[str, str]:
        """What tells the connections of this process apart: the Ray cluster, and the number that it gave this one."""
        context = self._ray.get_runtime_context()
        return str(context.gcs_address), str(context.get_job_id())

    def close(self) -> None:
        """This cluster needs it no more. Called once."""
        if not self._is_ours:
            return
        with self.changing:
            self._clusters[self._which] -= 1
            if self._clusters[self._which] == 0:
                del self._clusters[self._which]
                with contextlib.suppress(*failures_of(self._ray)):
                    if self.is_there():
                        self._ray.shutdown()


def connect_ray(ray: Any, address: str, timeout_s: float) -> RayConnection:
    """Connects this process to Ray, unless it is connected.

    Raises:
        ConnectError: there is no Ray cluster at the address, or this process is connected to another one.
    """
    with RayConnection.changing:
        return RayConnection(ray, _made_connection(ray, address, timeout_s))


def _made_connection(ray: Any, address: str, timeout_s: float) -> bool:
    """Returns whether it made a connection: this process had none."""
    if ray.is_initialized():
        now = ray.get_runtime_context().gcs_address
        if address not in ("auto", "local", now) and not address.startswith("ray://"):
            raise errors.ConnectError(
                f"this process is connected to the Ray cluster at {now}, not to {address}: call ray.shutdown() before"
            )
        return False
    _check_reachable(address, timeout_s)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # No log of the workers on this terminal: the agents' and hosts' logs are files of their own.
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise errors.ConnectError(
            f"there is no Ray cluster at ray_address={address!r}: {error}. Start one with `ray start --head`, or give "
            "the address of one"
        ) from error
    finally:
        # Ray puts its own handler in the place of the program's.
        if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    return True


def _check_reachable(address: str, timeout_s: float) -> None:
    """Ray itself tries for minutes, and may end the process, when nobody listens at an address."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), min(timeout_s, _REACH_TIMEOUT_S)).close()
    except (OSError, OverflowError) as error:
        raise errors.ConnectError(
            f"there is no Ray cluster at ray_address={address!r}: {error}. Start one with `ray start --head`, or give "
            "the address of one"
        ) from None


def reserve(ray: Any, placement: RayPlacement, parts: int, hosts: int, deadline: Deadline) -> Any:
    """A placement group with one bundle for each part of an island, of so many hosts, when Ray has given it.

    Raises:
        ConnectError: the cluster does not have the resources; or it has, and they were not free in time.
    """
    bundle = placement.bundle(hosts)
    if not placement.wait_for_resources and (missing := missing_resources(ray, placement, parts, bundle)):
        raise errors.ConnectError(
            f"the Ray cluster does not have what {parts} actors of {hosts} hosts each need: {missing}. Ask for less, "
            "or add nodes. If this Ray cluster grows by itself, ask with wait_for_resources=True"
        )
    from ray.util.placement_group import placement_group

    more: dict[str, Any] = {}
    if placement.labels:
        if "bundle_label_selector" not in inspect.signature(placement_group).parameters:
            raise errors.OptionError(f"labels= needs a newer ray than {ray.__version__}")
        more["bundle_label_selector"] = [dict(placement.labels)] * parts
    name = f"pathways-{secrets.token_hex(4)}"  # for `ray list placement-groups`; Ray refuses a name that is taken
    group = placement_group([bundle] * parts, strategy=placement.strategy, name=name, **more)
    try:
        while not group.wait(deadline.left(1.0)):
            if deadline.passed:
                free = _shown(ray.available_resources(), bundle)
                missing = missing_resources(ray, placement, parts, bundle)
                raise errors.ConnectError(
                    f"Ray did not place {parts} actors ({placement.strategy}) of {_shown(bundle, bundle)} each in "
                    f"time; free in all is {free}"
                    + (f"; the cluster does not have {missing}" if missing else "; others use the rest")
                    + (f"; only nodes with the labels {dict(placement.labels)} will do" if placement.labels else "")
                )
    except BaseException:
        release(ray, group, 0.0)
        raise
    return group


def release(ray: Any, group: Any, timeout_s: float) -> None:
    """Gives a placement group back. Waits until Ray has removed it, at most so long."""
    from ray.util.placement_group import placement_group_table, remove_placement_group

    with contextlib.suppress(*failures_of(ray)):
        remove_placement_group(group)
        deadline = Deadline(timeout_s)
        while placement_group_table(group).get("state") != "REMOVED" and not deadline.passed:
            time.sleep(0.05)


def missing_resources(ray: Any, placement: RayPlacement, islands: int, bundle: Mapping[str, float]) -> str:
    """What the whole Ray cluster, with all that others use, does not have for so many bundles. Empty: nothing."""
    there = ray.cluster_resources()
    lacks = [
        f"{name}: {amount * islands:g} are needed, {there.get(name, 0):g} are there"
        for name, amount in sorted(bundle.items())
        if amount * islands > there.get(name, 0)
    ]
    if lacks:
        return "; ".join(lacks)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = [min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes]
    if sum(places) < islands:
        return (
            f"an island needs {_shown(bundle, bundle)} on one node; the {len(nodes)} nodes together have room for "
            f"{sum(places)} such islands"
        )
    if placement.strategy == "STRICT_SPREAD" and (fit := sum(place > 0 for place in places)) < islands:
        return f"strategy STRICT_SPREAD needs {islands} nodes, and {fit} of {len(nodes)} have room for an island"
    if placement.strategy == "STRICT_PACK" and max(places) < islands:
        return (
            f"strategy STRICT_PACK needs one node with room for {islands} islands; the best has room for {max(places)}"
        )
    return ""


def _shown(amounts: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {amounts.get(name, 0):g}" for name in sorted(names))
