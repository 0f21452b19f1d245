"""The programs of all clients, and what each of their hosts has done with them: stored, compiled.

ONCE-1 (once): a program goes to each machine once for all of its hosts there, and again only for successors of lost
hosts. A machine keeps it only until the hosts have taken it, so what is forgotten here and at the hosts is forgotten
everywhere, and whoever is killed meanwhile leaves nothing of it. Large arrays that a function closes over are no part
of its program, but arguments, whose blocks cross to a machine once, too (`pathways/api/programs/snapshots.py`, LINK-3).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.host_requests import HostRequests
from pathways.controller.machines import Machine, ProgramText
from pathways.controller.pending_answers import settle
from pathways.controller.records import ClientRecord, HostRecord, ProgramRecord
from pathways.plan.composite import Composite
from pathways.plan.memory_profile import ProgramMemory
from pathways.process.memory import memory_bytes
from pathways.process.shared_room import SharedRoom
from pathways.protocol import control_pb2 as pb
from pathways.protocol.serialization import load

#: What the programs of one client may be, so that a client that registers programs without end harms only itself.
MOST_PROGRAMS = 1 << 14
MOST_PROGRAM_BYTES = 1 << 30  # with names and bindings; they are kept for the successors of lost hosts
#: What a program takes here beside the serialized request, in bytes, for each device of its bindings and each of its
#: hosts. Measured: 40.0 in the tuples and 8.5 in the message; 410 in the futures.
_DEVICE_BYTES, _HOST_BYTES = 49, 410
#: What a program with loops takes beside its request, for each step and for each value that a step reads or makes. A
#: value of a loop is kept at the end of each loop around it.
_STEP_BYTES, _STEP_VALUE_BYTES = 256, 80
_NO_TEXT = ProgramText(b"")


@dataclasses.dataclass
class _Held:
    """What the controller keeps of one client's programs."""

    programs: int = 0
    bytes: int = 0


class ProgramManager:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager, clients: Mapping[int, ClientRecord], requests: HostRequests) -> None:
        """`clients`: those that there are now, by number; the client manager changes it."""
        self._cluster = cluster
        self._clients = clients
        self._requests = requests
        self._programs: dict[int, ProgramRecord] = {}
        self._held: collections.defaultdict[int, _Held] = collections.defaultdict(_Held)  # by client
        #: Of programs that are forgotten, what machines have not taken, by the names of their clients.
        self._untaken = SharedRoom(max(MOST_PROGRAM_BYTES, memory_bytes() // 4))
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    # -- the requests of clients -------------------------------------------------------------------------------------

    def register(self, client: ClientRecord, request: pb.RegisterProgramRequest) -> int:
        """Sends a client's program to the hosts of its bindings, and returns its number. It waits for no host.

        Raises:
            ResourceExhaustedError: the client has too many programs.
            SliceError: the program is bound to devices that do not exist.
        """
        topology = self._cluster.topology
        devices = tuple(device for binding in request.bindings for device in binding.devices)
        if not devices or not all(map(topology.has_device, set(devices))):
            raise errors.SliceError(
                f"a program is bound to {topology.say_devices()}, got {list(devices[:8]) or 'none'}"
            )
        for binding in request.bindings:
            if len(set(binding.devices)) != len(binding.devices):
                raise errors.SliceError(
                    f"a program binds a mesh to each device once, got {list(binding.devices[:8])}: a device that is "
                    "there twice would hold two shards"
                )
        hosts = topology.hosts_of(devices)
        kept = request.ByteSize() + _DEVICE_BYTES * len(devices) + _HOST_BYTES * len(hosts)
        owner = client.connection.proven_name or ""
        self._check_room(client.number, kept)
        self._check_taken(owner, kept)
        number = next(self._numbers)
        program = ProgramRecord(
            number,
            client.number,
            owner,
            ProgramText(
                pb.StoreProgram(
                    client=client.number,
                    program_id=number,
                    program=request.program,
                    bindings=request.bindings,
                    islands={host: topology.island_of_hosts[host] for host in hosts},
                ).SerializeToString()
            ),
            {host: self._loop.create_future() for host in hosts},
            {host: self._loop.create_future() for host in hosts},
            name=request.name,
            bindings=tuple(tuple(binding.devices) for binding in request.bindings),
            kept_bytes=kept,
        )
        self._cluster.register_plan(program)
        self._programs[number] = program
        held = self._held[client.number]
        held.programs += 1
        held.bytes += kept
        client.programs.add(number)
        # Any other host gets every program when it is ready.
        self._hand_out(program, [host for host in hosts if self._cluster.hosts[host].is_served])
        return program.number

    def _hand_out(self, program: ProgramRecord, hosts: Iterable[int]) -> None:
        """Gives a program to hosts, by their machines (ONCE-1)."""
        of_machine: collections.defaultdict[Machine, list[int]] = collections.defaultdict(list)
        for host in hosts:
            of_machine[self._cluster.placement.of(host)].append(host)
        for machine, its_hosts in of_machine.items():
            machine.hand_program(program.text, its_hosts)

    def register_composite(self, client: ClientRecord, request: pb.RegisterCompositeRequest) -> int:
        """Gives the native controller a client's program with loops. Returns its number.

        Raises:
            PlanError: a plan of it is no program of the client's, or it cannot be run.
            ResourceExhaustedError: the client has too many programs.
        """
        for plan in request.plans:
            if not self._program_of(client, plan).stored:
                raise errors.PlanError(f"program {plan} has loops itself; a program with loops is made of others")
        # What it takes in the native controller: each step, and its values there and in what the controller derives.
        steps = request.composite.steps
        values = sum(len(step.inputs) + len(step.outputs) for step in steps)
        kept = request.ByteSize() + _STEP_BYTES * len(steps) + _STEP_VALUE_BYTES * values
        self._check_room(client.number, kept)
        number = next(self._numbers)
        composite = load(request.composite, Composite)
        self._cluster.numbers.register_composite(
            self._cluster.controller, number, client.number, request.name, composite, request.plans, request.group
        )
        self._programs[number] = ProgramRecord(
            number, client.number, "", _NO_TEXT, {}, {}, name=request.name, kept_bytes=kept
        )
        held = self._held[client.number]
        held.programs += 1
        held.bytes += kept
        client.programs.add(number)
        return number

    async def wait_compiled(self, client: ClientRecord, number: int) -> None:
        """Waits until every host that runs a program of the client's has compiled it.

        END-1: the wait ends with a host that is lost meanwhile, because its successor would compile from the start, and
        end as it did if the compiler ended it. A wait that begins while a host is away lasts until it is back.

        Raises:
            PlanError: the client has no such program, or a host refuses it.
            ComputationError: a host could not compile it; contains XLA's own message.
            HostLostError: a host was lost meanwhile.
        """
        program = self._program_of(client, number)
        lost: asyncio.Future[str] = self._loop.create_future()
        program.waiting.add(lost)
        try:
            for host in program.stored:
                if error := await self._unless_lost(lost, program, program.stored, host):
                    raise errors.PlanError(f"host {host} refused the program: {error}")
                if error := await self._unless_lost(lost, program, program.compiled, host):
                    raise errors.ComputationError(f"host {host} could not compile program {number}: {error}")
        finally:
            program.waiting.discard(lost)
        self._program_of(client, number)  # the client may have gone meanwhile: then nothing more is kept of it
        if not program.is_admitted:
            program.is_admitted = True
            self._cluster.numbers.admit_by(number, client.number, program.name, program.bindings, program.memory)
            program.bindings, program.memory = (), {}

    async def _unless_lost(
        self, lost: asyncio.Future[str], program: ProgramRecord, answers: dict[int, asyncio.Future[str]], host: int
    ) -> str:
        """What a host answers of a program. `lost`: how a host of the program was lost."""
        answer = answers[host]
        if not answer.done():
            either = asyncio.wait([answer, lost], return_when=asyncio.FIRST_COMPLETED)
            await self._cluster.unless_ended(asyncio.ensure_future(either))
        if program.client not in self._clients:
            raise errors.ClusterClosedError("the client has left the cluster: this connection was closed")
        if answer.done():
            return answer.result()
        raise errors.HostLostError(
            f"{lost.result()}\nIt was to compile program {program.name!r} for a call that waited. Call it again: the "
            "call waits until the host's island is back."
        )

    async def analyze(self, client: ClientRecord, number: int) -> Sequence[pb.Analysis]:
        """XLA's analysis of a client's compiled program, from each host that runs it."""
        hosts = [self._cluster.hosts[host] for host in self._program_of(client, number).compiled]
        return await asyncio.gather(*(self._requests.analysis(host, number) for host in hosts))

    def forget(self, client: ClientRecord, numbers: Sequence[int]) -> None:
        """Removes programs from the client's own; the client calls them no more.

        Runs that still wait may use them. So a lost host's successor gets such a program too, until the client's
        command to forget it has been granted in the order (ERR-2).
        """
        client.programs.difference_update(numbers)
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        for number in self._cluster.controller.take_forgotten():
            program = self._programs.pop(number, None)
            if program is None:
                continue
            self._drop_text(program)
            if program.client in self._clients:
                self._clients[program.client].programs.discard(number)
                held = self._held[program.client]
                held.programs -= 1
                held.bytes -= program.kept_bytes

    def _drop_text(self, program: ProgramRecord) -> None:
        """A program is forgotten. Machines that have not taken it take it all the same, as runs may wait for it there;
        until then its text counts for its client's name, also when that client has gone.
        """
        text, program.text = program.text, _NO_TEXT
        nbytes, kept = len(text.data), weakref.ref(text)
        del text
        if (still := kept()) is not None and nbytes:
            self._untaken.add(program.owner, nbytes)
            weakref.finalize(still, self._untaken.add, program.owner, -nbytes).atexit = False

    def _check_taken(self, owner: str, nbytes: int) -> None:
        """FLOW-1: a machine that takes nothing does not fill the memory here."""
        if not self._untaken.has(owner, nbytes):
            mine = self._untaken.taken.get(owner, 0)
            raise errors.ResourceExhaustedError(
                f"machines of this cluster have not taken {mine} bytes of programs that this client has forgotten, and "
                f"it adds one of {nbytes} bytes; the controller keeps {self._untaken.most} bytes of such programs for "
                "all clients. Are these machines stopped, or is their network slow? Try again later, or use others"
            )

    def _check_room(self, client: int, nbytes: int) -> None:
        self._drop_forgotten()
        held = self._held[client]
        if held.programs >= MOST_PROGRAMS or held.bytes + nbytes > MOST_PROGRAM_BYTES:
            raise errors.ResourceExhaustedError(
                f"client {client} has {held.programs} programs of {held.bytes} bytes, and adds one of {nbytes} bytes; "
                f"a client may have {MOST_PROGRAMS} programs of {MOST_PROGRAM_BYTES} bytes: delete functions that you "
                "no longer call, and give large constants as arguments"
            )

    def _program_of(self, client: ClientRecord, number: int) -> ProgramRecord:
        program = self._programs.get(number)
        if program is None or program.client != client.number:
            raise errors.PlanError(f"no program {number} of this client")
        return program

    # -- clients and hosts come and go -------------------------------------------------------------------------------

    def client_gone(self, client: int) -> None:
        """Drops the programs of a client that is gone (OWN-1); whoever waits for them waits no longer."""
        self._held.pop(client, None)
        for program in [program for program in self._programs.values() if program.client == client]:
            del self._programs[program.number]
            self._drop_text(program)
            for answer in (*program.stored.values(), *program.compiled.values()):
                settle(answer, "its client is gone")

    def host_lost(self, host: int, how: str) -> None:
        """A program that a lost host had stored counts as not stored, until the host's successor has stored it. Who
        waits for the host is told `how` it was lost (END-1).
        """
        for program in self._programs.values():
            stored = program.stored.get(host)
            if stored is None:
                continue
            if not (stored.done() and program.compiled[host].done()):
                for waiting in program.waiting:
                    settle(waiting, how)
            if stored.done():
                program.stored[host] = self._loop.create_future()

    def serve(self, hosts: Sequence[HostRecord]) -> list[asyncio.Future[str]]:
        """Gives new hosts every living program that they take part in. Returns their answers to come."""
        self._drop_forgotten()
        for program in self._programs.values():
            self._hand_out(program, [host.number for host in hosts if host.number in program.stored])
        return [
            answer
            for program in self._programs.values()
            for number, answer in program.stored.items()
            if any(host.number == number for host in hosts)
        ]

    # -- what hosts report -------------------------------------------------------------------------------------------

    def stored(self, host: HostRecord, report: pb.Answer) -> None:
        """A host has stored a program, or refused it."""
        if program := self._programs.get(report.number):
            settle(program.stored.get(host.number), report.error.message)

    def compiled(self, host: HostRecord, report: pb.ProgramCompiled) -> None:
        """A host has compiled a program, or could not. Raises ValueError: it speaks for devices of others."""
        program = self._programs.get(report.program_id)
        if program is None or host.number not in program.compiled:
            return
        if report.HasField("memory") and not program.is_admitted:  # else it compiles for a lost host's successor
            memory = load(report.memory, ProgramMemory)
            if not {need.device for need in memory.devices} <= set(host.config.devices):
                raise ValueError("memory of devices of other hosts")
            program.memory[host.number] = memory
        settle(program.compiled[host.number], report.error)

    def is_on(self, host: int, client: int) -> bool:
        """Whether a program of the client runs on the host."""
        newest_first = reversed(self._programs.values())
        return any(program.client == client and host in program.stored for program in newest_first)
