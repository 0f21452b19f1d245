"""Clients: how they join, what they may ask for, and how they end. `cluster_manager.py` keeps the hosts.

A client is a connection that has joined (`connections.py`). Programs, requests to hosts, calls of clients' functions
and suspensions have managers of their own. This one tells them which clients and hosts come and go. When a client ends,
the controller frees everything that the client owned (OWN-1).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pathways import errors
from pathways.controller import client_limits
from pathways.controller.callback_router import CallbackRouter
from pathways.controller.cluster_manager import MOST_SAID, ClusterManager
from pathways.controller.connections import Connections
from pathways.controller.draining import Draining
from pathways.controller.host_requests import HostRequests
from pathways.controller.profiles import Profiles
from pathways.controller.program_manager import ProgramManager
from pathways.controller.recording import Recordings
from pathways.controller.records import ClientRecord, Connection, HostRecord, NearConnection
from pathways.controller.slice_moves import SliceMoves
from pathways.controller.suspend import Suspension
from pathways.process import fd_passing
from pathways.process.children import resident_bytes
from pathways.process.client_terms import ClientTerms
from pathways.process.config import PROTOCOL_VERSION
from pathways.protocol import control_pb2 as pb

_log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 20.0
#: For a host on another machine: its network may be slow. Its link tells whether it lives.
FAR_ATTACH_TIMEOUT_S = 120.0
#: A client that joins waits so long, in seconds, for hosts on other machines. Then its slices there wait (`attached`).
JOIN_WAIT_S = 3.0


class ClientManager:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager) -> None:
        self.cluster = cluster
        self.clients: dict[int, ClientRecord] = {}
        self.youngest_client = 0  # the number of the client that joined last
        self.connections = Connections(cluster, self._connection_lost)
        self.requests = HostRequests(cluster)
        self.programs = ProgramManager(cluster, self.clients, self.requests)
        self.callbacks = CallbackRouter(cluster, self.clients)
        self.suspension = Suspension(cluster, self.clients, self.requests)
        self.recordings = Recordings(cluster, self.clients, self.requests)
        self.profiles = Profiles(cluster, self.requests)
        self.slice_moves = SliceMoves(cluster)
        self.draining = Draining(cluster, self.clients, self.requests, self.slice_moves)

    # -- clients -----------------------------------------------------------------------------------------------------

    def caller(self, token: str) -> ClientRecord:
        """The client whose call came with this secret.

        Raises:
            ClusterClosedError: the connection has not joined, or its client is gone.
            PermissionDeniedError: no open connection has this secret.
        """
        connection = self.connections.of(token)
        if connection.client is None or connection.client.number not in self.clients:
            raise errors.ClusterClosedError("this connection's client is not, or no longer, part of this cluster")
        return connection.client

    def check_operator(self, token: str, doing: str, number: int | None = None) -> None:
        """Allows the call for client `number` itself, for the client that started the cluster, and for an operator.

        Raises:
            PermissionDeniedError: another client made the call, or another machine's process that is no operator.
        """
        connection = self.connections.of(token)
        clients = [connection.client] if connection.client is not None else self._of_process(connection)
        is_of_cluster = not connection.is_far and not clients  # another process of the cluster's user
        if connection.is_operator or is_of_cluster or any(each.owner or each.number == number for each in clients):
            return
        who = f"client {clients[0].number}" if clients else f"a caller ({connection.who})"
        raise errors.PermissionDeniedError(
            f"{who} may not {doing}: who started the cluster may, and `pathways` on a command line; on another machine "
            "with a token of the role operator"
        )

    def _of_process(self, connection: Connection) -> list[ClientRecord]:
        """The clients that are in the process of a connection."""
        if connection.is_far:
            return [] if connection.client is None else [connection.client]
        return [each for each in self.clients.values() if each.connection.pid == connection.pid]

    def names_seen_by(self, token: str) -> tuple[str, set[int] | None]:
        """The caller, for people, and the clients whose names it may see; None: of all (see `check_operator`).

        Raises:
            PermissionDeniedError: no open connection has this secret.
        """
        connection = self.connections.of(token)
        own = {each.number for each in self._of_process(connection)}
        who = f"client {min(own)}" if own else f"an operator ({connection.who})"
        try:
            self.check_operator(token, "see other clients' names")
        except errors.PermissionDeniedError:
            return who, own
        return who, None

    async def join(self, token: str, request: pb.JoinRequest) -> ClientRecord:
        """Makes a client of an open connection that has sent its segment. Every host maps the segment.

        Raises:
            UnsupportedVersionError: the client runs another jax or jaxlib than the hosts.
            OptionError: the client asks for terms that the policy does not have, or the operator does not allow.
            ConnectError: the connection sent no segment or an invalid one, or has joined before.
            PermissionDeniedError: no open connection has this secret.
        """
        self._check_versions(request)
        await self.cluster.hosts_started()
        terms = client_limits.granted(request, self.cluster.config.options)
        connection = self.connections.of(token)
        name = terms.name if connection.proven_name is None else connection.proven_name
        root = client_limits.checkpoint_root(name, self.cluster.config.options)
        if isinstance(connection, NearConnection):
            if connection.segment is None:
                self.connections.read(connection)
        else:  # its link is about to open
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.has_segment.wait(), ATTACH_TIMEOUT_S)
        is_open = connection.number in self.connections.open
        if connection.segment is None or connection.client is not None or not is_open:
            raise errors.ConnectError("this connection has brought no memory to share, or has joined before")
        futures = self._futures_of(connection)
        self.youngest_client += 1
        owner = not connection.is_far and connection.pid == self.cluster.config.owner_pid
        client = ClientRecord(self.youngest_client, connection, owner, terms, root, futures)
        connection.client = client
        self.clients[client.number] = client
        self.cluster.agents.add_client(client.number, connection.segment, connection.link)
        try:
            # A host that is still starting gets every client when it is ready: see `serve`.
            await self._attach_to_all(client)
            if client.number not in self.clients:
                raise errors.ClusterClosedError("the client left while it joined")
            limits = client_limits.native(self.cluster.native, terms)
            self.cluster.controller.add_client(
                client.number, connection.segment, connection.bell, limits, connection.is_far
            )
        except (RuntimeError, ValueError) as error:  # the native controller refused the segment
            self.remove(client.number)
            raise _no_sense(error) from error
        except BaseException:
            self.remove(client.number)
            raise
        where = connection.who if connection.is_far else f"process {connection.pid}"
        _log.info("has joined: %r, %s", name, where, extra=about(client))
        return client

    def _futures_of(self, connection: Connection) -> int:
        try:
            futures: int = self.cluster.native.futures_of(connection.segment)
        except (RuntimeError, ValueError) as error:
            raise _no_sense(error) from error
        return futures

    async def _attach_to_all(self, client: ClientRecord) -> None:
        """Gives a client to all hosts. Hosts of other machines that do not answer soon keep only the client's slices
        there waiting, not the client (FAULT-1).
        """
        near, far = [], []
        for host in (host for host in self.cluster.hosts if host.is_served):
            if self.cluster.placement.of(host.number).shares_memory:
                near.append(self._attach(host, client))
            else:
                task = asyncio.ensure_future(self._attach(host, client))
                client.attaching[host.number] = task
                task.add_done_callback(functools.partial(self._attached, client, host.number))
                far.append(task)
        await asyncio.gather(*near)
        if far:
            await asyncio.wait(far, timeout=JOIN_WAIT_S)

    def _attached(self, client: ClientRecord, host: int, task: asyncio.Task[None]) -> None:
        if client.attaching.get(host) is task:
            del client.attaching[host]
        if not task.cancelled() and (error := task.exception()) is not None and not self.cluster.done.done():
            _log.error("host %d does not take the client", host, exc_info=error, extra=about(client))
            self.remove(client.number)

    async def attached(self, client: ClientRecord, hosts: Iterable[int]) -> None:
        """Waits until these hosts have the client, or are lost."""
        if waiting := [client.attaching[host] for host in hosts if host in client.attaching]:
            await asyncio.wait(waiting)

    async def _attach(self, host: HostRecord, client: ClientRecord) -> None:
        number = client.number
        attach = pb.AttachClient(
            client=number,
            checkpoint_root=client.checkpoint_root,
            futures=client.futures,
        )
        request = pb.HostRequest(attach_client=attach)
        message: fd_passing.Message = {"kind": "client", "client": number}
        if (segment := client.connection.segment) is None:
            return  # the client has left meanwhile
        is_near = self.cluster.placement.of(host.number).shares_memory
        limit_s = ATTACH_TIMEOUT_S if is_near else FAR_ATTACH_TIMEOUT_S
        try:
            error = await self.requests.hand_over(host, request, message, segment, limit_s)
        except errors.HostLostError as late:
            error = str(late)
        if error and is_near:
            raise errors.ConnectError(f"{host.name} could not take the client: {error}")
        if error and not host.is_lost:  # it has nothing of the client, so nothing can be wrong
            self.cluster.evict(host, f"it does not take client {number}: {error}")

    def _connection_lost(self, connection: Connection) -> None:
        if connection.client is not None:
            self.remove(connection.client.number)

    def remove(self, number: int) -> None:
        """Frees everything that a client owned (OWN-1). A second call does nothing."""
        client = self.clients.pop(number, None)
        if client is None:
            return
        if not self.cluster.done.done():
            _log.info("has left", extra=about(client))
        self.cluster.agents.remove_client(number)
        for slice_id in client.slices:
            self.cluster.resources.release(slice_id)
        self.programs.client_gone(number)
        self.suspension.client_gone(number)
        self.callbacks.stop_answering(client)
        self.slice_moves.close(client)
        for attaching in client.attaching.values():
            attaching.cancel()
        for host in self.cluster.hosts:
            if host.is_served and host.opened_at < 0:
                host.gone.append(number)
        if not self.cluster.done.done():
            self.cluster.controller.remove_client(number)  # it notifies the hosts, behind the client's runs
        # Unmap and close the segments now. Client and connection refer to each other, so without this the memory would
        # stay until Python's garbage collector runs.
        client.connection.segment = client.connection.bell = None

    def client(self, number: int) -> ClientRecord:
        """The client of this number.

        Raises:
            ClusterClosedError: the cluster has no such client.
        """
        try:
            return self.clients[number]
        except KeyError:
            raise errors.ClusterClosedError(f"client {number} is not, or no longer, part of this cluster") from None

    def limit(self, request: pb.LimitRequest) -> ClientTerms:
        """Changes what a client may have, and returns all its terms.

        Raises:
            ClusterClosedError: there is no such client.
            OptionError: a term is out of range, or unknown to the cluster's policy.
        """
        client = self.client(request.client)
        terms = client_limits.changed(client.terms, request, self.cluster.config.options)
        self.cluster.controller.limit(client.number, client_limits.native(self.cluster.native, terms))
        client.terms = terms
        return terms

    def _check_versions(self, request: pb.JoinRequest) -> None:
        topology = self.cluster.topology
        if request.protocol != PROTOCOL_VERSION:
            raise errors.UnsupportedVersionError(
                f"the client speaks version {request.protocol} of the control protocol, the cluster "
                f"{PROTOCOL_VERSION}: "
                "use the same release of pathways on both sides"
            )
        for name, ours, theirs in (
            ("jax", topology.jax_version, request.jax_version),
            ("jaxlib", topology.jaxlib_version, request.jaxlib_version),
        ):
            if ours != theirs:
                raise errors.UnsupportedVersionError(
                    f"the client runs {name} {theirs or '(unknown)'}, the cluster's hosts {name} {ours}: "
                    "use the same on both sides"
                )

    # -- hosts come and go (ERR-2) -----------------------------------------------------------------------------------

    def hosts_lost(self, hosts: Sequence[HostRecord], how: str) -> None:
        """Completes every open request to these hosts, so that nothing waits for a lost host (END-1). `how`: they were
        lost.

        A program that they had stored counts as not stored, until their successors have stored it.
        """
        for host in hosts:
            self.callbacks.host_lost(host.number)
            self.requests.host_lost(host)
            self.programs.host_lost(host.number, how)

    async def serve(self, hosts: Sequence[HostRecord]) -> None:
        """Gives new hosts every client, and every living program that they take part in."""
        for host in hosts:
            host.is_served = True  # from now on it gets new clients and programs at once
        stored = self.programs.serve(hosts)
        await asyncio.gather(*(self._keep(host, client) for host in hosts for client in list(self.clients.values())))
        for answer in stored:
            if error := await self.cluster.unless_ended(answer):
                _log.warning("a program that was stored before is not now: %s", error)

    async def _keep(self, host: HostRecord, client: ClientRecord) -> None:
        """Gives a new host a client. It evicts a client whose memory the host refuses: the host serves the others."""
        try:
            await self._attach(host, client)
        except errors.ConnectError as error:
            _log.warning("the client is evicted: %s", error, extra=about(client))
            self.remove(client.number)

    # -- what hosts report -------------------------------------------------------------------------------------------

    def report(self, host: HostRecord, report: pb.HostReport) -> None:
        """Takes in one report of a host's session. One that makes no sense ends its host alone (FAULT-1)."""
        if self.cluster.hosts[host.number] is not host or host.is_lost:
            return
        try:
            self._take(host, report)
        except Exception as error:
            self.cluster.evict(host, f"a report of kind {report.WhichOneof('report')}: {error}")

    def _take(self, host: HostRecord, report: pb.HostReport) -> None:
        match report.WhichOneof("report"):
            case "stage":
                self.cluster.host_stage(host, report.stage)
            case "program_stored":
                self.programs.stored(host, report.program_stored)
            case "program_compiled":
                self.programs.compiled(host, report.program_compiled)
            case "callback":
                if self.programs.is_on(host.number, report.callback.client):
                    self.callbacks.ask_client(host, report.callback)
            case "error":
                host.error = report.error.error.message[:MOST_SAID]
            case _:
                self.requests.answered(host, report)

    # -- statistics --------------------------------------------------------------------------------------------------

    async def host_counts(self) -> Sequence[pb.HostCounts | None]:
        """Of every host; None for a host that does not answer in time."""
        return await asyncio.gather(*(self.requests.counts(host) for host in self.cluster.hosts))

    def client_stats(self) -> list[pb.ClientStats]:
        """Every client, with its memory, its limits, and what it does now."""
        uses = {use["client"]: use for use in self.cluster.controller.clients()}
        return [self._stats_of(client, uses.get(client.number, {})) for client in self.clients.values()]

    @staticmethod
    def _stats_of(client: ClientRecord, use: dict[str, Any]) -> pb.ClientStats:
        return pb.ClientStats(
            client=client.number,
            pid=client.connection.pid,
            owner=client.owner,
            resident_bytes=resident_bytes(client.connection.pid),
            slices=len(client.slices),
            programs=len(client.programs),
            suspended=client.suspended,
            name=client.terms.name,
            weight=client.terms.weight,
            priority=client.terms.priority,
            limits=client_limits.message(client.terms),
            device_ns=use.get("device_ns", 0),
            runs=use.get("in_flight", 0),
            held=use.get("held", 0),
            has_unread=use.get("has_unread", False),
            memory=use.get("memory", 0),
            is_waiting=use.get("is_waiting", False),
            most_kept=client.connection.most_kept,
            variables=client.variables,
        )


def about(client: ClientRecord) -> dict[str, int]:
    """What a line of the log about a client says of it (pathways/process/log_lines.py)."""
    return {"client": client.number}


def _no_sense(error: Exception) -> errors.ConnectError:
    return errors.ConnectError(f"the memory that the client shares makes no sense: {error}")
