"""The controller process: `python -m pathways.controller.main CONFIG LOCK_FD`, started by the supervisor.

The resource manager and the control plane's server run on one event loop. The native controller, with the sequencer,
runs on a native thread of its own. The process does not import JAX. It ends with status 0 when the cluster was closed
in order, with status 1 when the cluster failed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import importlib
import logging
import os
import signal
import sys

from pathways import errors
from pathways.controller.agents import open_port
from pathways.controller.auto_suspend import AutoSuspension
from pathways.controller.client_manager import ClientManager
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.control_server import ControlServer
from pathways.controller.far_clients import FarClients
from pathways.controller.recovery import Islands
from pathways.controller.service import AgentsService, ControllerService, HostsService
from pathways.process import installation, log_lines
from pathways.process.children import take_descriptors
from pathways.process.config import ControllerConfig, load_controller
from pathways.process.log_files import keep_short
from pathways.process.supervisor import report
from pathways.protocol import agent_pb2_grpc as agent_rpc
from pathways.protocol import control_pb2_grpc as rpc
from pathways.protocol import wire
from pathways.trust.port import Port

_log = logging.getLogger("pathways.controller")

# At the end, calls that are under way have this long, in seconds, to receive their error.
LAST_WORDS_S = 0.5


async def run(config: ControllerConfig) -> int:
    """Runs a cluster from start to end; returns the exit status."""
    cluster = ClusterManager(config, importlib.import_module(config.options.native))
    servers: list[ControlServer] = []
    background = [asyncio.create_task(keep_short(config.directory))]
    port: Port | None = None
    try:
        cluster.start()
        client_manager = ClientManager(cluster)
        Islands(cluster, client_manager)
        if config.options.when_full == "suspend":
            room = AutoSuspension(cluster.controller, client_manager.suspension, client_manager.clients)
            background.append(asyncio.create_task(room.run()))
        servers = _servers(cluster, client_manager)
        for each in servers:
            await each.start()
        try:
            port = _port(config, cluster, client_manager)
        except errors.PathwaysError as error:  # such as an address that is taken: its message says all
            report(config.report_fd, "error", message=str(error))
            return 1
        report(config.report_fd, "listening", address=cluster.address, port=str(port.address) if port else "")
        os.close(config.report_fd)
        await cluster.start_hosts()
        await cluster.done
    finally:
        for task in background:
            task.cancel()
        await cluster.tear_down()
        await asyncio.gather(*(each.stop(LAST_WORDS_S) for each in servers))
        if port is not None:  # only now: other machines hear the last words through it
            port.close()
    return 0 if isinstance(cluster.failure, errors.ClusterClosedError) else 1


def _port(config: ControllerConfig, cluster: ClusterManager, client_manager: ClientManager) -> Port | None:
    """Where other machines come in; None: nowhere."""
    if not config.listen:
        return None
    clients = FarClients(
        cluster.native,
        cluster.agents.hub,
        cluster.agents.links,
        cluster.status_segment,
        client_manager.connections,
        cluster.near_path,
        cluster.agents.call_room,
    )
    port, _ = open_port(config, cluster.agents, clients)
    return port


def _servers(cluster: ClusterManager, client_manager: ClientManager) -> list[ControlServer]:
    """The server for this machine, and the one for hosts and agents on others."""
    add_controller = functools.partial(rpc.add_ControllerServicer_to_server, ControllerService(client_manager))
    add_hosts = functools.partial(rpc.add_HostsServicer_to_server, HostsService(client_manager))
    connections, agents = client_manager.connections, cluster.agents

    def is_near(token: str) -> bool:
        return connections.knows(token) or cluster.host_with(token) is not None

    def is_of_a_machine(token: str) -> bool:
        return agents.knows(token) or cluster.host_with(token) is not None

    near = ControlServer(cluster.near_path, wire.CHANNEL_OPTIONS, [add_controller, add_hosts], is_near)
    if not cluster.topology.is_spread:
        return [near]
    add_agents = functools.partial(agent_rpc.add_AgentsServicer_to_server, AgentsService(agents))
    options = [*(wire.LINKED_OPTIONS if cluster.config.listen else wire.FAR_OPTIONS), *wire.BOUNDS]
    return [near, ControlServer(cluster.far_path, options, [add_agents, add_hosts], is_of_a_machine)]


def main() -> None:
    """Entry of the process."""
    log_lines.begin("controller")
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 writes every thread's stack to the log
    config = load_controller(sys.argv[1])
    take_descriptors()  # every client and machine takes some
    for fd in (config.owner_fd, config.report_fd, int(sys.argv[2])):
        os.set_inheritable(fd, False)
    shape = f"{config.options.hosts} hosts" if not config.options.max_machines else "hosts of machines that join"
    _log.info("begins: pathways %s, process %d, %s on %s", installation.version(), os.getpid(), shape, config.platform)
    status = asyncio.run(run(config))
    _log.info("ends with status %d", status)
    sys.stderr.flush()
    # Run no destructors: the coordination services would wait for members that are gone.
    os._exit(status)


if __name__ == "__main__":
    main()
