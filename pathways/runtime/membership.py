"""Clients and what they own: connections, segments, slices, programs; the controller's second half beside `cluster.py`.

A connection on the descriptor socket is a client's lifeline. The controller learns of a client's end from the kernel:
by the process's pidfd, or by the socket's closing, whichever comes first (a forked child of the client may hold the
socket open). Everything the client owned goes with it (OWN-1).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from pathways import errors
from pathways.runtime import fdpass, wire
from pathways.runtime.cluster import Cluster
from pathways.runtime.members import Client, Connection, Host, Program
from pathways.runtime.options import PROTOCOL_VERSION
from pathways.runtime.processes import resident_bytes
from pathways.runtime.proto import control_pb2 as pb
from pathways.runtime.suspension import Suspension

ATTACH_TIMEOUT_S = 20.0
STATS_TIMEOUT_S = 2.0


class Membership:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.connections: dict[int, Connection] = {}
        self.clients: dict[int, Client] = {}
        self.programs: dict[int, Program] = {}
        self._attached: dict[tuple[int, int], asyncio.Future[str]] = {}
        self._stats: dict[tuple[int, int], asyncio.Future[str]] = {}
        self._suspension = Suspension(self)
        self._last = {"connection": 0, "client": 0, "program": 0, "stats": 0}
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(os.getpid())
        self._listener = fdpass.listen(os.path.join(cluster.config.directory, "fds.sock"))
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        cluster.on_end.append(self._tell_end)

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it went away again
        pid, uid = fdpass.peer(connection)
        try:
            if uid != os.getuid():
                raise PermissionError
            pidfd = os.pidfd_open(pid)
        except OSError:
            connection.close()
            return
        connection.setblocking(False)
        record = Connection(self._new("connection"), connection, pid, pidfd)
        self.connections[record.number] = record
        self._loop.add_reader(pidfd, self._lost, record)
        self._loop.add_reader(connection.fileno(), self._read, record)
        try:
            hello: fdpass.Message = {"kind": "hello", "connection": record.number, "controller_pid": os.getpid()}
            fdpass.send(connection, hello, [self.cluster.segment.fd, self._pidfd])
        except OSError:
            self._lost(record)
            return
        if self.cluster.failure is not None:
            self._tell_end(self.cluster.failure)

    def _read(self, connection: Connection) -> None:
        """Takes the one message that a client sends, its segment; anything else is its end."""
        try:
            message, fds = fdpass.receive(connection.socket, 0.0)
            if message.get("kind") != "segment" or len(fds) != 1 or connection.segment is not None:
                raise ValueError(f"a client sent {message}")
            connection.segment = self.cluster.native.Segment.attach(fds[0])
        except TimeoutError:
            return
        except Exception as error:
            if not isinstance(error, fdpass.Closed):
                print(f"process {connection.pid} was disconnected: {error}", file=sys.stderr, flush=True)
            self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        """Its process or its socket ended, or it is not to be trusted."""
        if self.connections.pop(connection.number, None) is None:
            return
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

    async def join(self, request: pb.JoinRequest) -> Client:
        """Makes a client of an open connection on which its segment has come: every host maps that.

        Raises:
            UnsupportedVersionError: the client runs another jax or jaxlib than the hosts. ConnectError: no connection.
        """
        self._check_versions(request)
        connection = self.connections.get(request.connection)
        if connection is not None and connection.segment is None:
            self._read(connection)
        if connection is None or connection.segment is None or connection.client is not None:
            raise errors.ConnectError(f"connection {request.connection} is not open, or has joined before")
        client = Client(self._new("client"), connection, connection.pid == self.cluster.config.owner_pid)
        connection.client = client
        self.clients[client.number] = client
        try:
            await asyncio.gather(*(self._attach(host, client) for host in self.cluster.hosts))
            if client.number not in self.clients:
                raise errors.ClusterClosedError("the client left while it joined")
            self.cluster.controller.add_client(client.number, connection.segment)
        except BaseException:
            self.remove(client.number)
            raise
        return client

    async def _attach(self, host: Host, client: Client) -> None:
        key = (host.number, client.number)
        answer = self._attached[key] = self._loop.create_future()
        try:
            fdpass.send(host.socket, {"kind": "client", "client": client.number}, [client.connection.segment.fd])
            host.commands.put_nowait(pb.HostCommand(attach_client=pb.AttachClient(client=client.number)))
            error = await self.cluster.unless_ended(answer, ATTACH_TIMEOUT_S)
        except TimeoutError:
            error = f"no answer in {ATTACH_TIMEOUT_S:g} s"
        finally:
            del self._attached[key]
        if error:
            raise errors.ConnectError(f"{host.name} could not take the client: {error}")

    def remove(self, number: int) -> None:
        """Frees everything a client owned (OWN-1); again is nothing."""
        client = self.clients.pop(number, None)
        if client is None:
            return
        for slice_id in client.slices:
            self.cluster.resources.release(slice_id)
        for program in client.programs:
            self.programs.pop(program, None)
        self._suspension.client_gone(number)
        if not self.cluster.done.done():
            self.cluster.controller.remove_client(number)
            for host in self.cluster.hosts:
                host.commands.put_nowait(pb.HostCommand(detach_client=pb.DetachClient(client=number)))

    def client(self, number: int) -> Client:
        """The client of this number.

        Raises:
            ClusterClosedError: there is none.
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

    async def register(self, request: pb.RegisterProgramRequest) -> int:
        """Sends a program to the hosts of its bindings; returns its number once all have stored it."""
        client = self.client(request.client)
        topology = self.cluster.topology
        devices = tuple(device for binding in request.bindings for device in binding.devices)
        if not devices or min(devices) < 0 or max(devices) >= topology.devices:
            raise errors.SliceError(
                f"a program is bound to devices 0..{topology.devices - 1}, got {list(devices[:8]) or 'none'}"
            )
        hosts = topology.hosts_of(devices)
        program = Program(
            self._new("program"),
            client.number,
            {host: self._loop.create_future() for host in hosts},
            {host: self._loop.create_future() for host in hosts},
            name=request.name,
            bindings=tuple(tuple(binding.devices) for binding in request.bindings),
        )
        bindings = tuple(tuple(binding.devices) for binding in request.bindings)
        self.cluster.register_plan(program.number, request.program, bindings)
        self.programs[program.number] = program
        client.programs.add(program.number)
        command = pb.HostCommand(
            store_program=pb.StoreProgram(
                client=client.number,
                program_id=program.number,
                program=request.program,
                bindings=request.bindings,
            )
        )
        for host in hosts:
            self.cluster.hosts[host].commands.put_nowait(command)
        for host, stored in program.stored.items():
            if error := await self.cluster.unless_ended(stored):
                raise errors.PlanError(f"host {host} refused the program: {error}")
        return program.number

    def forget_programs(self, client: int, numbers: Sequence[int]) -> None:
        """The client cannot call them any more."""
        owned = self.client(client).programs
        for number in owned.intersection(numbers):
            owned.remove(number)
            self.programs.pop(number, None)

    # -- suspension, see suspension.py -------------------------------------------------------------------------------

    async def suspend(self, client: int, to_disk: bool) -> int:
        """Takes a client off the devices; the bytes that left them."""
        return await self._suspension.suspend(self.client(client), to_disk)

    async def resume(self, client: int) -> int:
        """Brings it back; the bytes that came back."""
        return await self._suspension.resume(self.client(client))

    async def wait_compiled(self, client: int, number: int) -> None:
        """Waits until every host concerned has compiled a program.

        Raises:
            ComputationError: one could not; with XLA's own message.
        """
        self.client(client)
        program = self.programs.get(number)
        if program is None:
            raise errors.PlanError(f"no program {number} in this cluster")
        for host, compiled in program.compiled.items():
            if error := await self.cluster.unless_ended(compiled):
                raise errors.ComputationError(f"host {host} could not compile program {number}: {error}")
        if not program.is_admitted:
            program.is_admitted = True
            self.cluster.admit_by(program)

    # -- what hosts report -------------------------------------------------------------------------------------------

    def report(self, host: Host, report: pb.HostReport) -> None:
        """Takes in one report of a host's session."""
        what = report.WhichOneof("report")
        if what == "stage":
            self.cluster.host_stage(host, report.stage)
        elif what == "client_attached":
            _settle(
                self._attached.get((host.number, report.client_attached.client)), report.client_attached.error.message
            )
        elif what == "program_stored":
            if program := self.programs.get(report.program_stored.program_id):
                _settle(program.stored.get(host.number), report.program_stored.error.message)
        elif what == "program_compiled":
            if program := self.programs.get(report.program_compiled.program_id):
                if report.program_compiled.HasField("memory"):
                    program.memory[host.number] = wire.load_memory(report.program_compiled.memory)
                _settle(program.compiled.get(host.number), report.program_compiled.error)
        elif what == "stats":
            _settle(self._stats.get((host.number, report.stats.request)), report.stats.driver_json)
        elif what == "client_parked":
            self._suspension.report(host.number, report.client_parked)
        elif what == "error":
            host.error = report.error.error.message

    # -- statistics --------------------------------------------------------------------------------------------------

    async def host_stats(self) -> Sequence[str]:
        """Every host's driver statistics as JSON; of a host that does not answer in time, `{}`."""
        return await asyncio.gather(*(self._ask_stats(host) for host in self.cluster.hosts))

    async def _ask_stats(self, host: Host) -> str:
        request = self._new("stats")
        key = (host.number, request)
        answer = self._stats[key] = self._loop.create_future()
        host.commands.put_nowait(pb.HostCommand(report_stats=pb.ReportStats(request=request)))
        try:
            return await self.cluster.unless_ended(answer, STATS_TIMEOUT_S)
        except TimeoutError:
            return "{}"
        finally:
            del self._stats[key]

    def client_stats(self) -> list[pb.ClientStats]:
        """Who is connected, and with what."""
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
