"""Clients and what they own: connections, segments, slices, programs. `cluster_manager.py` keeps the hosts.

Each client keeps one connection on the descriptor socket open for as long as it lives. The kernel reports the client's
end to the controller in two ways, and the first one counts: the pidfd of the process, and the closing of the socket.
The socket alone is not enough, because a forked child of the client may hold it open. When a client ends, the
controller frees everything that the client owned (OWN-1).

TRUST-1: the controller gives each connection a secret, and finds the caller of a call by the secret alone. It trusts
nothing else that the call contains. A process of the cluster's user that has not joined is an operator: it may inspect
the cluster, suspend and resume clients, and end the cluster.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.records import ClientRecord, Connection, HostRecord, ProgramRecord
from pathways.controller.suspend import Suspension
from pathways.process import fd_passing
from pathways.process.children import resident_bytes
from pathways.process.config import PROTOCOL_VERSION
from pathways.protocol import control_pb2 as pb
from pathways.protocol import wire

ATTACH_TIMEOUT_S = 20.0
STATS_TIMEOUT_S = 2.0


class ClientManager:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager) -> None:
        self.cluster = cluster
        self.connections: dict[int, Connection] = {}
        self._by_token: dict[str, Connection] = {}
        self.clients: dict[int, ClientRecord] = {}
        self.programs: dict[int, ProgramRecord] = {}
        # Requests that hosts have not answered yet. The key: kind of request, host, its incarnation, a number.
        self._asked: dict[tuple[str, int, int, int], asyncio.Future[str]] = {}
        self._suspension = Suspension(cluster, self.clients)
        # Calls of clients' functions that have no answer yet. The key: host, its incarnation, number of the call. The
        # value: the client that must answer.
        self._calls: dict[tuple[int, int, int], int] = {}
        self._last = {"connection": 0, "client": 0, "program": 0, "stats": 0}
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(os.getpid())
        self._listener = fd_passing.listen(os.path.join(cluster.config.directory, "fds.sock"))
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        cluster.on_end.append(self._tell_end)

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the other end has closed the connection already
        pid, uid = fd_passing.peer(connection)
        try:
            if uid != os.getuid():
                raise PermissionError
            pidfd = os.pidfd_open(pid)
        except OSError:
            connection.close()
            return
        connection.setblocking(False)
        token = secrets.token_hex(16)
        record = Connection(self._new("connection"), connection, pid, pidfd, token, self.cluster.native.bell_segment())
        self.connections[record.number] = self._by_token[token] = record
        self._loop.add_reader(pidfd, self._lost, record)
        self._loop.add_reader(connection.fileno(), self._read, record)
        try:
            hello: fd_passing.Message = {"kind": "hello", "token": token, "controller_pid": os.getpid()}
            fd_passing.send(connection, hello, [self.cluster.status_segment.fd, record.bell.fd, self._pidfd])
        except OSError:
            self._lost(record)
            return
        if self.cluster.failure is not None:
            self._tell_end(self.cluster.failure)

    def _read(self, connection: Connection) -> None:
        """Takes the only message that a client may send: its segment. After any other message it is disconnected."""
        fds: list[int] = []
        try:
            message, fds = fd_passing.receive(connection.socket, 0.0)
            if message != {"kind": "segment"} or len(fds) != 1 or connection.segment is not None:
                raise ValueError(f"a client sent {str(message)[:1000]} with {len(fds)} descriptors")
            connection.segment = self.cluster.native.Segment.attach(fds.pop())
        except TimeoutError:
            return
        except Exception as error:
            for fd in fds:
                os.close(fd)
            if not isinstance(error, fd_passing.Closed):
                print(f"process {connection.pid} was disconnected: {error}", file=sys.stderr, flush=True)
            self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        """Closes a connection: its process ended, its socket closed, or it sent something wrong."""
        if self.connections.pop(connection.number, None) is None:
            return
        self._by_token.pop(connection.token, None)
        self._loop.remove_reader(connection.pidfd)
        self._loop.remove_reader(connection.socket.fileno())
        if connection.client is not None:
            self.remove(connection.client.number)
        os.close(connection.pidfd)
        connection.socket.close()

    def _tell_end(self, failure: errors.PathwaysError) -> None:
        for connection in self.connections.values():
            connection.tell({"kind": "failed", "error": type(failure).__name__, "message": str(failure)})

    # -- clients -----------------------------------------------------------------------------------------------------

    def connection(self, token: str) -> Connection:
        """The open connection to which the controller gave this secret.

        Raises:
            PermissionDeniedError: no open connection has this secret.
        """
        try:
            return self._by_token[token]
        except KeyError:
            raise errors.PermissionDeniedError(
                "the call came by no open connection to this cluster: connect first, and again when that was closed"
            ) from None

    def caller(self, token: str) -> ClientRecord:
        """The client whose call came with this secret.

        Raises:
            ClusterClosedError: the connection has not joined, or its client is gone.
            PermissionDeniedError: no open connection has this secret.
        """
        connection = self.connection(token)
        if connection.client is None or connection.client.number not in self.clients:
            raise errors.ClusterClosedError("this connection's client is not, or no longer, part of this cluster")
        return connection.client

    def check_operator(self, token: str, doing: str, number: int | None = None) -> None:
        """Allows the call for client `number` itself, for the client that started the cluster, and for an operator.

        Raises:
            PermissionDeniedError: another client made the call.
        """
        connection = self.connection(token)
        same = (each for each in self.clients.values() if each.connection.pid == connection.pid)
        client = connection.client or next(same, None)
        if client is not None and not client.owner and client.number != number:
            raise errors.PermissionDeniedError(
                f"client {client.number} may not {doing}: who started the cluster may, and `pathways` on a command line"
            )

    async def join(self, token: str, request: pb.JoinRequest) -> ClientRecord:
        """Makes a client of an open connection that has sent its segment. Every host maps the segment.

        Raises:
            UnsupportedVersionError: the client runs another jax or jaxlib than the hosts.
            ConnectError: the connection sent no segment or an invalid one, or has joined before.
            PermissionDeniedError: no open connection has this secret.
        """
        self._check_versions(request)
        connection = self.connection(token)
        if connection.segment is None:
            self._read(connection)
        if connection.segment is None or connection.client is not None or connection.number not in self.connections:
            raise errors.ConnectError("this connection has brought no memory to share, or has joined before")
        client = ClientRecord(self._new("client"), connection, connection.pid == self.cluster.config.owner_pid)
        connection.client = client
        self.clients[client.number] = client
        try:
            # A host that is still starting gets every client when it is ready: see `serve`.
            served = [host for host in self.cluster.hosts if host.is_served]
            await asyncio.gather(*(self._attach(host, client) for host in served))
            if client.number not in self.clients:
                raise errors.ClusterClosedError("the client left while it joined")
            self.cluster.controller.add_client(client.number, connection.segment, connection.bell)
        except (RuntimeError, ValueError) as error:  # the native controller refused the segment
            self.remove(client.number)
            raise errors.ConnectError(f"the memory that the client shares makes no sense: {error}") from error
        except BaseException:
            self.remove(client.number)
            raise
        return client

    async def _attach(self, host: HostRecord, client: ClientRecord) -> None:
        request = pb.HostRequest(attach_client=pb.AttachClient(client=client.number))
        message: fd_passing.Message = {"kind": "client", "client": client.number}
        if (segment := client.connection.segment) is None:
            return  # the client has left meanwhile
        if error := await self._hand_over(host, "attach", client.number, request, message, segment, ATTACH_TIMEOUT_S):
            raise errors.ConnectError(f"{host.name} could not take the client: {error}")

    async def _hand_over(
        self,
        host: HostRecord,
        what: str,
        number: int,
        request: pb.HostRequest,
        message: fd_passing.Message,
        segment: Any,
        timeout_s: float,
    ) -> str:
        """Gives a host a segment. Returns the host's error text; empty for success, and for a host that is lost."""
        try:
            if not host.is_lost:
                fd_passing.send(host.socket, message, [segment.fd])
        except fd_passing.Closed:  # the process has ended; the controller is about to notice
            return ""
        try:
            return await self._ask(host, what, number, request, timeout_s)
        except TimeoutError:
            return f"no answer in {timeout_s:g} s"

    async def _ask(self, host: HostRecord, what: str, number: int, request: pb.HostRequest, timeout_s: float) -> str:
        """Sends a host a request and returns its answer; empty when the host is lost.

        Raises:
            TimeoutError: the host did not answer in time.
            PathwaysError: the cluster ended.
        """
        if host.is_lost:
            return ""
        key = (what, host.number, host.incarnation, number)
        answer = self._asked[key] = self._loop.create_future()
        host.requests.put_nowait(request)
        try:
            return await self.cluster.unless_ended(answer, timeout_s)
        finally:
            del self._asked[key]

    def _answered(self, host: HostRecord, what: str, number: int, answer: str) -> None:
        _settle(self._asked.get((what, host.number, host.incarnation, number)), answer)

    def remove(self, number: int) -> None:
        """Frees everything that a client owned (OWN-1). A second call does nothing."""
        client = self.clients.pop(number, None)
        if client is None:
            return
        for slice_id in client.slices:
            self.cluster.resources.release(slice_id)
        for program in [program for program in self.programs.values() if program.client == number]:
            del self.programs[program.number]
            for answer in (*program.stored.values(), *program.compiled.values()):
                _settle(answer, "its client is gone")
        self._suspension.client_gone(number)
        self.stop_answering(client)
        if not self.cluster.done.done():
            self.cluster.controller.remove_client(number)  # it notifies the hosts, in the order
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

    # -- programs ----------------------------------------------------------------------------------------------------

    async def register(self, client: ClientRecord, request: pb.RegisterProgramRequest) -> int:
        """Sends a client's program to the hosts of its bindings. Returns its number when all of them have stored it."""
        topology = self.cluster.topology
        devices = tuple(device for binding in request.bindings for device in binding.devices)
        if not devices or min(devices) < 0 or max(devices) >= topology.devices:
            raise errors.SliceError(
                f"a program is bound to devices 0..{topology.devices - 1}, got {list(devices[:8]) or 'none'}"
            )
        hosts = topology.hosts_of(devices)
        number = self._new("program")
        program = ProgramRecord(
            number,
            client.number,
            pb.HostRequest(
                store_program=pb.StoreProgram(
                    client=client.number, program_id=number, program=request.program, bindings=request.bindings
                )
            ),
            {host: self._loop.create_future() for host in hosts},
            {host: self._loop.create_future() for host in hosts},
            name=request.name,
            bindings=tuple(tuple(binding.devices) for binding in request.bindings),
        )
        self.cluster.register_plan(number, request.program, program.bindings)
        self.cluster.own_plan(program)
        self.programs[number] = program
        client.programs.add(number)
        for host in hosts:
            if self.cluster.hosts[host].is_served:  # any other host gets every program when it is ready
                self.cluster.hosts[host].requests.put_nowait(program.request)
        for host, stored in program.stored.items():
            if error := await self.cluster.unless_ended(stored):
                raise errors.PlanError(f"host {host} refused the program: {error}")
        return program.number

    def forget_programs(self, client: ClientRecord, numbers: Sequence[int]) -> None:
        """Removes programs from the client's own; the client calls them no more.

        Runs that still wait may use them. So a lost host's successor gets such a program too, until the client's
        command to forget it has been granted in the order (ERR-2).
        """
        client.programs.difference_update(numbers)
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        for number in self.cluster.controller.take_forgotten():
            program = self.programs.pop(number, None)
            if program is not None and program.client in self.clients:
                self.clients[program.client].programs.discard(number)

    # -- callbacks, see pathways/host/callbacks.py and pathways/cluster/callbacks.py ---------------------------------

    def _ask_client(self, host: HostRecord, part: pb.CallbackPart) -> None:
        """Passes a host's call of a client's function to that client."""
        client = self.clients.get(part.client)
        if client is None or client.questions is None:
            if part.last:
                self._refuse_call(host, part.call, f"client {part.client}, which would have to answer, is gone")
            return
        part.host, part.incarnation = host.number, host.incarnation
        self._calls[host.number, host.incarnation, part.call] = client.number
        client.questions.put_nowait(part)

    def answer_host(self, client: ClientRecord, part: pb.CallbackPart) -> None:
        """Passes a client's answer to the host that asked. An answer to a call of another client is ignored."""
        key = (part.host, part.incarnation, part.call)
        if self._calls.get(key) != client.number:
            return
        if part.last or part.error:
            del self._calls[key]
        host = self.cluster.hosts[part.host]
        if not host.is_lost and host.incarnation == part.incarnation:
            host.requests.put_nowait(pb.HostRequest(callback=part))

    def stop_answering(self, client: ClientRecord) -> None:
        """Fails every call that a client has not answered, and every call that hosts make to it from now on."""
        if client.questions is not None:
            client.questions.put_nowait(None)
            client.questions = None
        for key in [key for key, whose in self._calls.items() if whose == client.number]:
            del self._calls[key]
            host = self.cluster.hosts[key[0]]
            if not host.is_lost and host.incarnation == key[1]:
                self._refuse_call(host, key[2], f"client {client.number}, which was to answer, is gone")

    @staticmethod
    def _refuse_call(host: HostRecord, call: int, why: str) -> None:
        host.requests.put_nowait(pb.HostRequest(callback=pb.CallbackPart(call=call, last=True, error=why)))

    # -- suspension, see suspend.py ----------------------------------------------------------------------------------

    async def suspend(self, client: int, to_disk: bool) -> int:
        """Takes a client off the devices. Returns the bytes that left the devices."""
        return await self._suspension.suspend(self.client(client), to_disk)

    async def resume(self, client: int) -> int:
        """Brings a suspended client back. Returns the bytes that came back to the devices."""
        return await self._suspension.resume(self.client(client))

    async def wait_compiled(self, client: ClientRecord, number: int) -> None:
        """Waits until every host that runs a program of the client's has compiled it.

        Raises:
            PlanError: the client has no such program.
            ComputationError: a host could not compile it; contains XLA's own message.
        """
        program = self.programs.get(number)
        if program is None or program.client != client.number:
            raise errors.PlanError(f"no program {number} of this client")
        for host, compiled in program.compiled.items():
            if error := await self.cluster.unless_ended(compiled):
                raise errors.ComputationError(f"host {host} could not compile program {number}: {error}")
        if not program.is_admitted:
            program.is_admitted = True
            self.cluster.admit_by(program)

    # -- hosts come and go (ERR-2) -----------------------------------------------------------------------------------

    @property
    def youngest_client(self) -> int:
        """The number of the client that joined last."""
        return self._last["client"]

    def hosts_lost(self, hosts: Sequence[HostRecord]) -> None:
        """Completes every open request to these hosts, so that nothing waits for a lost host.

        A program that they had stored counts as not stored, until their successors have stored it.
        """
        for host in hosts:
            self._suspension.host_lost(host.number)
            self._calls = {key: whose for key, whose in self._calls.items() if key[0] != host.number}
            for (_, number, incarnation, _), answer in list(self._asked.items()):
                if (number, incarnation) == (host.number, host.incarnation):
                    _settle(answer, "")
            for program in self.programs.values():
                stored = program.stored.get(host.number)
                if stored is not None and stored.done():
                    program.stored[host.number] = self._loop.create_future()

    async def replace_peers(
        self, host: HostRecord, segments: Mapping[int, Any], streams: Mapping[int, str], loss: int
    ) -> None:
        """Gives a host the segments of lost hosts' successors. For a successor on another machine it also gives the
        address where the successor receives network transfers. Returns when the host uses no memory of the
        predecessors any more, or is lost too.

        Raises:
            HostLostError: the host does not answer, or refuses.
        """
        limit = self.cluster.config.options.start_timeout_s  # the host itself may still be starting
        for peer, segment in segments.items():
            replace = pb.ReplacePeer(host=peer, loss=loss, stream=streams.get(peer, ""))
            request = pb.HostRequest(replace_peer=replace)
            message: fd_passing.Message = {"kind": "peer", "peer": peer}
            if error := await self._hand_over(host, "peer", peer, request, message, segment, limit):
                raise errors.HostLostError(f"{host.name} could not take the successor of host {peer}: {error}")

    async def serve(self, hosts: Sequence[HostRecord]) -> None:
        """Gives new hosts every client, and every living program that they take part in."""
        self._drop_forgotten()
        for host in hosts:
            host.is_served = True  # from now on it gets new clients and programs at once
        for program in self.programs.values():
            for host in hosts:
                if host.number in program.stored:
                    host.requests.put_nowait(program.request)
        stored = [
            answer
            for program in self.programs.values()
            for number, answer in program.stored.items()
            if any(host.number == number for host in hosts)
        ]
        await asyncio.gather(*(self._attach(host, client) for host in hosts for client in self.clients.values()))
        for answer in stored:
            if error := await self.cluster.unless_ended(answer):
                print(f"a program that was stored before is not now: {error}", file=sys.stderr, flush=True)

    # -- what hosts report -------------------------------------------------------------------------------------------

    def report(self, host: HostRecord, report: pb.HostReport) -> None:
        """Takes in one report of a host's session."""
        if self.cluster.hosts[host.number] is not host:
            return  # a report of a lost host, which has a successor
        what = report.WhichOneof("report")
        if what == "stage":
            self.cluster.host_stage(host, report.stage)
        elif what == "client_attached":
            self._answered(host, "attach", report.client_attached.client, report.client_attached.error.message)
        elif what == "peer_replaced":
            self._answered(host, "peer", report.peer_replaced.host, report.peer_replaced.error.message)
        elif what == "program_stored":
            if program := self.programs.get(report.program_stored.program_id):
                _settle(program.stored.get(host.number), report.program_stored.error.message)
        elif what == "program_compiled":
            if program := self.programs.get(report.program_compiled.program_id):
                if report.program_compiled.HasField("memory"):
                    program.memory[host.number] = wire.load_memory(report.program_compiled.memory)
                _settle(program.compiled.get(host.number), report.program_compiled.error)
        elif what == "stats":
            self._answered(host, "stats", report.stats.request, report.stats.driver_json)
        elif what == "callback":
            self._ask_client(host, report.callback)
        elif what == "client_offloaded":
            self._suspension.report(host.number, report.client_offloaded)
        elif what == "error":
            host.error = report.error.error.message

    # -- statistics --------------------------------------------------------------------------------------------------

    async def host_stats(self) -> Sequence[str]:
        """The driver statistics of every host as JSON; `{}` for a host that does not answer in time."""
        return await asyncio.gather(*(self._ask_stats(host) for host in self.cluster.hosts))

    async def analyze(self, client: ClientRecord, number: int) -> Sequence[str]:
        """XLA's analysis of a client's compiled program, from each host that runs it, as JSON."""
        program = self.programs.get(number)
        if program is None or program.client != client.number:
            raise errors.PlanError(f"no program {number} of this client")
        return await asyncio.gather(*(self._ask_stats(self.cluster.hosts[host], number) for host in program.compiled))

    async def _ask_stats(self, host: HostRecord, program: int = 0) -> str:
        if not host.ready.is_set():
            return "{}"
        number = self._new("stats")
        request = pb.HostRequest(report_stats=pb.ReportStats(request=number, program_id=program))
        try:
            return await self._ask(host, "stats", number, request, STATS_TIMEOUT_S) or "{}"
        except TimeoutError:
            return "{}"

    def client_stats(self) -> list[pb.ClientStats]:
        """Every client, with its memory and the number of its slices and programs."""
        return [
            pb.ClientStats(
                client=client.number,
                pid=client.connection.pid,
                owner=client.owner,
                resident_bytes=resident_bytes(client.connection.pid),
                slices=len(client.slices),
                programs=len(client.programs),
                suspended=client.suspended,
            )
            for client in self.clients.values()
        ]

    def _new(self, kind: str) -> int:
        self._last[kind] += 1
        return self._last[kind]


def _settle(future: asyncio.Future[str] | None, value: str) -> None:
    if future is not None and not future.done():
        future.set_result(value)
