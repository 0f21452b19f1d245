"""A cluster whose hosts are brought by machine agents, all of them on this machine: for tests.

The controller listens at a loopback address, and each agent joins with a token of its own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

import pathways as pw
from pathways.cluster.agent_launcher import AgentHandle
from pathways.cluster.launcher import Listening, start_local_cluster
from pathways.process.run_directory import authority_folder
from pathways.trust import Role, Tokens

START_S = 120.0


class MachineCluster:
    """A controller that listens, and its agents. A context manager; `close` ends everything."""

    def __init__(
        self,
        islands: int = 2,
        hosts_per_island: int = 1,
        devices_per_host: int = 2,
        *,
        insecure_plaintext: bool = False,
        machines_per_island: int = 1,
        agents: int | None = None,
        **sizes: Any,
    ) -> None:
        """`machines_per_island`: how many agents bring the hosts of an island. `agents`: how many join at once; all
        when not given.
        """
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pw", dir="/tmp"))
        hosts = hosts_per_island // machines_per_island
        self._shape = {"hosts": hosts, "devices_per_host": devices_per_host, "platform": "cpu"}
        self._insecure = insecure_plaintext
        listening = Listening("127.0.0.1:0", os.path.join(self.folder, "authority"), insecure_plaintext)
        self.handle = start_local_cluster(
            islands, hosts_per_island, devices_per_host, platform="cpu", listen=listening, **sizes
        )
        self._stack.callback(self.handle.close)
        # Another way to write it, so that a test may connect to `cluster.address` for another client of its process.
        self.address = self.handle.address.removesuffix("/control.sock")
        self.agents: dict[str, AgentHandle] = {}
        try:
            names = [f"m{number}" for number in range(islands * machines_per_island if agents is None else agents)]
            for number, name in enumerate(names):
                place: dict[str, Any] = {}
                if machines_per_island > 1:
                    place = {"island": f"pod{number // machines_per_island}", "fabric": "127.0.0.1"}
                self.start_agent(name, **place)
            for name in names:
                self.agents[name].wait_joined(START_S)
        except BaseException:
            self.close()
            raise

    def is_alive(self) -> bool:
        """Whether the controller still runs."""
        return self.handle.is_alive()

    def start_agent(self, name: str, port: str | None = None, **what: Any) -> AgentHandle:
        """Starts an agent of this name, which dials `port`, or the cluster's; it may not have joined yet."""
        token = Tokens(authority_folder(self.handle.directory)).make(Role.HOST, 600.0)
        kept = None if self._insecure else os.path.join(self.folder, f"{name}.pem")
        agent = AgentHandle(port or self.handle.port, token, kept, name=name, **{**self._shape, **what})
        self.agents[name] = agent
        return agent

    def connect(self, **terms: Any) -> pw.Cluster:
        """A client of it, when all its devices are there."""
        cluster = pw.connect(self.address, **terms)
        self._wait(cluster)
        return cluster

    def connect_far(self, **terms: Any) -> pw.Cluster:
        """The same, as a client on another machine: it comes in at the port, with a token."""
        with self.way_in(Role.CLIENT):
            cluster = pw.connect(self.port, **terms)
        self._wait(cluster)
        return cluster

    @property
    def port(self) -> str:
        """The address for clients on other machines."""
        if self._insecure:
            return self.handle.port.replace("pathways://", "pathways+plaintext://")
        return self.handle.port

    @contextlib.contextmanager
    def way_in(self, role: Role) -> Iterator[None]:
        """While it is open, this process has a token of a role, and a folder of its own for certificates."""
        token = Tokens(authority_folder(self.handle.directory)).make(role, 600.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATHWAYS_TOKEN", token)
            patch.setenv("XDG_STATE_HOME", os.path.join(self.folder, f"state-{role}"))
            yield

    def _wait(self, cluster: pw.Cluster) -> None:
        cluster.wait_for(len(self.agents) * self._shape["hosts"] * self._shape["devices_per_host"], START_S)

    def close(self) -> None:
        """Ends the agents and the controller."""
        for agent in self.agents.values():
            agent.close()
        self._stack.close()

    def __enter__(self) -> MachineCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
