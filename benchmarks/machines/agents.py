"""A cluster whose hosts are brought by machine agents, all on this machine: what a bench between machines measures.

The controller listens at a loopback address. Each agent joins with a token of its own and brings one island, or one
host of an island of all of them. So the bytes take the ways that they take between machines; only the wire between the
machines is missing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from pathways.cluster.agent_launcher import AgentHandle
from pathways.cluster.launcher import Listening, start_local_cluster
from pathways.process.run_directory import authority_folder
from pathways.trust import Role, Tokens

_PATIENCE_S = 120.0


class AgentsCluster:
    """Starts a controller and an agent per machine, each with one host. A context manager; its value is the client's
    connection, when all devices are there.
    """

    def __init__(
        self, machines: int, devices: int = 1, *, is_encrypted: bool = True, is_one_island: bool = False
    ) -> None:
        self._machines = machines
        self._is_one_island = is_one_island
        self._devices = devices
        self._is_encrypted = is_encrypted
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            cluster = self._start(stack)
            self._stack = stack.pop_all()
        return cluster

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> Any:
        import pathways as pw

        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pathways-bench-"))
        listening = Listening("127.0.0.1:0", os.path.join(folder, "authority"), not self._is_encrypted)
        shape = (1, self._machines) if self._is_one_island else (self._machines, 1)
        handle = start_local_cluster(*shape, self._devices, platform="cpu", listen=listening)
        stack.callback(handle.close)
        tokens = Tokens(authority_folder(handle.directory))
        agents = []
        for number in range(self._machines):
            agent = AgentHandle(
                handle.port,
                tokens.make(Role.HOST, 600.0),
                os.path.join(folder, f"machine{number}.pem") if self._is_encrypted else None,
                name=f"machine{number}",
                devices_per_host=self._devices,
                platform="cpu",
                island="all" if self._is_one_island else None,
                fabric="127.0.0.1" if self._is_one_island else None,
            )
            stack.callback(agent.close)
            agents.append(agent)
        for agent in agents:
            agent.wait_joined(_PATIENCE_S)
        cluster = stack.enter_context(pw.connect(handle.address))
        cluster.wait_for(self._machines * self._devices, _PATIENCE_S)
        return cluster
