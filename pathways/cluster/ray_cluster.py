"""Starts a cluster whose hosts run on the machines of a Ray cluster, and ends it.

    started = start_ray_cluster(RayPlacement({"GPU": 8}), islands=2, devices_per_host=8)
    started.control      # a RemoteControl; this process is the owner
    started.close()

The controller runs on this machine and listens. Ray gets one placement group, with one bundle for each part of an
island: the hosts that are on one node, mostly all of them. In each bundle is one actor that runs their agent
(`ray_agent.py`). The controller, the agents and the hosts talk to each other over their own links. Ray only places and
starts.

RAY-1 (one use): each start of an agent gets a token of its own, as an argument of the call that starts it. So a token
that somebody sees later, in Ray's memory or on its network, is worth nothing. A token for any number of uses would be
simpler, because Ray could restart the agent alone; but Ray keeps the arguments of an actor as long as the actor lives,
and the token would have to stay good as long. The controller ends with this process anyway. So nothing is lost when a
restart needs this process.

RAY-2 (healing): Ray restarts an actor that dies, on another node if its own is gone. A thread of this process sees
that, and calls the actor again. An actor that was killed for good gets a successor in its bundle. An agent that leaves
because its machine was drained is not started again, and its actor ends.

RAY-3 (free): after `close`, Ray has neither the actors nor the placement group. If this process ends without `close`,
Ray removes both, because they belong to this process's job.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.cluster import ray_resources
from pathways.cluster.launcher import Listening, Progress, start_local_cluster
from pathways.cluster.ray_agent import END_TIMEOUT_S, RayAgent
from pathways.cluster.ray_resources import RayConnection, RayPlacement
from pathways.process.children import Deadline
from pathways.process.client_terms import ClientTerms
from pathways.process.config import ClusterOptions
from pathways.process.run_directory import authority_folder
from pathways.trust import Role, Tokens

#: A token is good for so long, in seconds. If Ray needs longer for an actor, the agent is refused, and gets another.
TOKEN_S = 600.0
#: Seconds between two starts of an agent that ended by itself: the first pause, and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
#: How long `close` waits until Ray has removed the placement group, in seconds.
REMOVAL_TIMEOUT_S = 10.0
_LOOK_S = 0.2
_log = logging.getLogger(__name__)


def start_ray_cluster(
    placement: RayPlacement,
    islands: int = 1,
    hosts_per_island: int = 1,
    devices_per_host: int = 1,
    *,
    nodes_per_island: int = 1,
    fabric: str | None = None,
    trusted_fabric: bool = False,
    platform: str | None = None,
    start_timeout_s: float = ClusterOptions.start_timeout_s,
    listening: Listening | None = None,
    progress: Progress | bool | None = None,
    terms: ClientTerms | None = None,
    **sizes: Any,
) -> RayClusterHandle:
    """Starts a controller here and agents in Ray, and waits until all devices are there.

    Args:
        placement: what Ray is asked for.
        islands: number of islands.
        hosts_per_island: number of host processes per island.
        devices_per_host: number of devices per host.
        nodes_per_island: over how many actors, and so nodes, the hosts of an island are spread, as many on each.
        fabric: see `AgentHandle`; needed for islands on several nodes.
        trusted_fabric: see `AgentHandle`.
        platform: `cpu`, `cuda`, `rocm` or `tpu`. None: what the resources of a host say, see `RayPlacement.platform`.
        start_timeout_s: seconds until everything must be there.
        listening: where the controller listens. Its address is empty, or it is None: at any free port of the address by
            which Ray's nodes reach this machine.
        progress: see `start_local_cluster`.
        terms: see `start_local_cluster`.
        **sizes: further fields of `ClusterOptions`.

    Raises:
        ConnectError: Ray is not installed or not there, lacks the resources, or an agent could not join.
        OptionError: an option is out of range.
    """
    ClusterOptions(islands, hosts_per_island, devices_per_host).machine_of_hosts  # noqa: B018 it checks the numbers
    chosen = platform or placement.platform
    placement.check(devices_per_host, chosen)
    parts = _Parts(islands, hosts_per_island, nodes_per_island, fabric, trusted_fabric)
    ray = ray_resources.imported_ray()
    deadline = Deadline(start_timeout_s)
    handle = RayClusterHandle(ray, ray_resources.connect_ray(ray, placement.address, start_timeout_s), parts)
    try:
        handle.reserve(placement, deadline)
        asked = listening or Listening("")
        where = asked.address or f"{_bracketed(ray.util.get_node_ip_address())}:0"
        handle.start(
            lambda: start_local_cluster(
                islands,
                hosts_per_island,
                devices_per_host,
                platform=chosen,
                progress=progress,
                terms=terms,
                listen=dataclasses.replace(asked, address=where),
                start_timeout_s=start_timeout_s,
                **sizes,
            ),
            deadline,
        )
    except ray.exceptions.RayError as error:
        handle.close()
        raise errors.ConnectError(f"Ray failed while the cluster started: {_short(error)}") from error
    except BaseException:
        handle.close()
        raise
    return handle


class _Parts:
    """The parts of islands that are on one node each: `nodes` of them for each island, numbered island by island."""

    def __init__(self, islands: int, hosts_per_island: int, nodes: int, fabric: str | None, is_trusted: bool) -> None:
        """Raises:
        OptionError: the hosts of an island do not divide among so many nodes, or there is no fabric for that.
        """
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1 or hosts_per_island % nodes:
            raise errors.OptionError(
                f"the {hosts_per_island} hosts of an island cannot be spread over nodes_per_island={nodes!r} nodes, as "
                "many on each"
            )
        if nodes > 1 and fabric is None:
            raise errors.OptionError(
                f"nodes_per_island={nodes} needs fabric=, the network of the islands' collectives, such as 10.1.0.0/16"
            )
        self.count = islands * nodes
        self.hosts = hosts_per_island // nodes  # of each
        self.fabric: dict[str, Any] = {} if nodes == 1 else {"fabric": fabric, "trusted_fabric": is_trusted}
        self._nodes = nodes

    def island_of(self, part: int) -> int:
        """The island of a part."""
        return part // self._nodes

    def name_of(self, part: int) -> str:
        """For people."""
        island, node = divmod(part, self._nodes)
        return f"island {island}" if self._nodes == 1 else f"part {node} of island {island}"


class RayClusterHandle:
    """A cluster with its agents in Ray, which this process started and owns. `close` from one thread at a time."""

    def __init__(self, ray: Any, connection: RayConnection, parts: _Parts) -> None:
        """Starts nothing yet."""
        self._ray = ray
        self._connection = connection
        self._parts = parts
        self._pid = os.getpid()
        self._is_closed = False
        self._group: Any = None
        self._bundle: dict[str, float] = {}
        self._options: dict[str, Any] = {}
        self._local: Any = None
        self._actors: dict[int, Any] = {}  # by part
        # The parts of the calls of `RayAgent.run` under way.
        self._runs: dict[concurrent.futures.Future[str], int] = {}
        self._starts_at: dict[int, float] = {}  # parts whose agent starts again at that moment
        self._pauses: dict[int, float] = {}
        #: Why the agent of a part ended last.
        self.failures: dict[int, str] = {}
        self._is_ending = threading.Event()
        self._watcher: threading.Thread | None = None
        atexit.register(self.close)

    # ---- as of `LocalClusterHandle`

    @property
    def control(self) -> Any:
        """This process's connection to the cluster."""
        return self._local.control

    @property
    def address(self) -> str:
        """Where clients on this machine reach it."""
        return str(self._local.address)

    @property
    def port(self) -> str:
        """Where the agents reach it, `pathways://HOST:PORT`."""
        return str(self._local.port)

    def is_alive(self) -> bool:
        """Whether the cluster still works and this process owns it."""
        return self._local is not None and self._local.is_alive()

    # ---- start

    def reserve(self, placement: RayPlacement, deadline: Deadline) -> None:
        """Gets a bundle for each part from Ray.

        Raises:
            ConnectError: the Ray cluster does not have them, or others have them.
        """
        parts = self._parts
        self._bundle = placement.bundle(parts.hosts)
        self._options = placement.actor_options(parts.hosts)
        self._group = ray_resources.reserve(self._ray, placement, parts.count, parts.hosts, deadline)

    def start(self, start_controller: Callable[[], Any], deadline: Deadline) -> None:
        """Starts the controller, then the agents; waits until all their devices are there."""
        self._local = start_controller()
        topology = self.control.topology
        for part in range(self._parts.count):
            self._actors[part] = self._new_actor(part)
            self._start_agent(part)
        while True:
            self._wait_ended(_LOOK_S)
            for part, why, is_final in self._ended():
                if is_final:
                    raise errors.from_text(why, errors.ConnectError)
                self._start_later(part, why)
            self._start_due()
            there = len(self.control.hosts_there())
            if there == topology.hosts:
                break
            if (failure := self.control.failure()) is not None:
                raise failure
            if deadline.passed:
                reasons = "".join(
                    f" {self._parts.name_of(part).capitalize()}: {why}" for part, why in sorted(self.failures.items())
                )
                raise errors.ConnectError(
                    f"{there} of {topology.hosts} hosts were there after {self._local.options.start_timeout_s:g} s. "
                    f"The agents dial {self.port}: can Ray's nodes reach it?{reasons}"
                )
        self.failures.clear()
        self._watcher = threading.Thread(target=self._watch, name="pathways-ray", daemon=True)
        self._watcher.start()

    def _new_actor(self, part: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=part)
        options = {**self._options, "scheduling_strategy": strategy}
        return self._ray.remote(RayAgent).options(max_restarts=-1, max_concurrency=2, **options).remote()

    def _start_agent(self, part: int) -> None:
        local = self._local
        options = local.options
        token = Tokens(authority_folder(local.directory)).make(Role.HOST, TOKEN_S)
        shape = {
            "hosts": self._parts.hosts,
            "devices_per_host": options.devices_per_host,
            "platform": local.platform,
            **self._parts.fabric,
        }
        is_encrypted = not local.insecure_plaintext
        run = self._actors[part].run.remote(local.port, token, is_encrypted, self._parts.island_of(part), shape)
        self._runs[run.future()] = part

    # ---- healing (RAY-2)

    def _watch(self) -> None:
        while not self._is_ending.is_set() and self._local.is_alive():
            # A thread that waits inside Ray may crash when the program calls `ray.shutdown`. So this one waits outside,
            # and asks Ray only when there is something to do. Ray starts anew by itself when it is asked afterwards.
            if not self._wait_ended(_LOOK_S) and not self._due():
                continue
            try:
                if not self._connection.is_there():
                    return
                for part, why, _ in self._ended():
                    if isinstance(errors.from_text(why, errors.ConnectError), errors.ClusterClosedError):
                        self._let_go(part, why)
                        continue
                    _log.warning("the agent of %s ended and is started again: %s", self._parts.name_of(part), why)
                    self._start_later(part, why)
                self._start_due()
            except Exception as error:
                _log.warning("Ray does not answer; agents that end are not started again until it does: %s", error)
                self._is_ending.wait(LONGEST_PAUSE_S)

    def _wait_ended(self, timeout_s: float) -> bool:
        """Waits so long, or until an agent has ended. Returns whether one has. Asks nothing of Ray."""
        if not self._runs:
            self._is_ending.wait(timeout_s)
            return False
        return bool(concurrent.futures.wait(self._runs, timeout_s, concurrent.futures.FIRST_COMPLETED).done)

    def _ended(self) -> list[tuple[int, str, bool]]:
        """Parts whose agent ended since the last call, why, and whether another start would end in the same way."""
        ray, found = self._ray, []
        for run in [run for run in self._runs if run.done()]:
            part, is_final = self._runs.pop(run), False
            try:
                why = run.result() or "ConnectError: somebody told it to end"
                is_final = isinstance(errors.from_text(why, errors.ConnectError), _FINAL)
            except ray.exceptions.ActorDiedError as error:
                why = f"ConnectError: Ray gave its actor up: {_short(error)}"
                is_final = "pathways" in str(error) and "ModuleNotFoundError" in str(error)
                if not self._is_ending.is_set():
                    self._actors[part] = self._new_actor(part)
            except ray_resources.failures_of(ray) as error:
                why = f"ConnectError: its actor failed: {_short(error)}"
            found.append((part, why, is_final))
        return found

    def _let_go(self, part: int, why: str) -> None:
        """Ends the actor of a part whose machine was drained."""
        _log.info("%s has left: %s", self._parts.name_of(part), why)
        self.failures[part] = why
        self._starts_at.pop(part, None)
        self._ray.kill(self._actors.pop(part))

    def _start_later(self, part: int, why: str) -> None:
        """An agent that ends soon after its start waits longer each time."""
        now = time.monotonic()
        last = self._starts_at.get(part, 0.0)
        pause = self._pauses.get(part, 0.0)
        is_soon = now - last < 4 * LONGEST_PAUSE_S
        self._pauses[part] = min(2 * pause, LONGEST_PAUSE_S) if pause and is_soon else FIRST_PAUSE_S
        self._starts_at[part] = now + self._pauses[part]
        self.failures[part] = why

    def _due(self) -> list[int]:
        """Parts whose agent is to start again now."""
        now, running = time.monotonic(), set(self._runs.values())
        return [part for part, moment in self._starts_at.items() if moment <= now and part not in running]

    def _start_due(self) -> None:
        for part in self._due():
            if not self._is_ending.is_set():
                self._start_agent(part)

    # ---- the end

    def close(self) -> None:
        """Ends the cluster, and frees all that it had in Ray (RAY-3). A second call does nothing."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._is_ending.set()
        if self._watcher is not None:
            self._watcher.join()
        try:
            with contextlib.suppress(*ray_resources.failures_of(self._ray)):
                self._end_agents()
        finally:
            if self._local is not None:
                self._local.close()
            self._connection.close()

    def _end_agents(self) -> None:
        ray = self._ray
        if not self._connection.is_there():
            return
        if not self._connection.is_reachable():
            _log.warning("Ray does not answer: what the cluster had in Ray is free when this process is disconnected")
            return
        started = list(self._actors.values())
        if ends := [actor.end.remote() for actor in started]:
            ray.wait(ends, num_returns=len(ends), timeout=END_TIMEOUT_S)
        for actor in started:
            ray.kill(actor)
        if self._group is not None:
            ray_resources.release(ray, self._group, REMOVAL_TIMEOUT_S)


#: Another start would end in the same way.
_FINAL = (errors.PermissionDeniedError, errors.UnsupportedVersionError, errors.OptionError)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:800]
