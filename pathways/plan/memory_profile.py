"""The memory that a bound program takes on each device and host, computed from its nodes in their order.

Each host computes its own part when its compiler has reported the temporary memory of each launch. The controller
admits runs by these numbers (MEM-2), and the host's executor counts by them (MEM-1). Pure; sizes are in bytes.

On CPU, a value received from other hosts stays in its receive buffer, in the host's memory for transfers, and takes no
device memory. On other platforms the value passes through the memory for transfers on its way to the device.

An offloaded value counts as if it were in its hosts' memory for transfers, on every platform, although it has memory of
its own there: that is the only memory of hosts that is counted, so it bounds what a client may offload.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pathways.compiler.ir import Memory, Node, NodeKind
from pathways.plan.binding import BoundProgram, HostPlan, Launch, owners_of
from pathways.plan.device_walk import Walk
from pathways.plan.exchange_shape import EXCHANGES
from pathways.plan.resharding import reshard_plan
from pathways.plan.topology import Topology

#: A budget that no reservation reaches; `kUnlimited` of csrc/sequencer/admission.h.
UNLIMITED = 1 << 62
_ALIGNMENT = 64  # of receive buffers
_BLOCK = 128  # the header of such a block, and the rest that may be lost of the free block from which it was cut
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class DeviceNeed:
    """The memory that a run needs on one device beside its arguments.

    `peak` is the most bytes at any point in the order of the nodes, less the bytes of donated arguments that are free
    by then. `eager` adds to this at any time: these are outputs of transfers on the device that may be made before the
    device's first call of the run. A transfer starts as soon as its source exists, see `Profile._launched_before`.
    """

    device: int
    peak: int
    eager: int


@dataclasses.dataclass(frozen=True)
class ResultMemory:
    """The memory that a result keeps: `bytes` on each device of its mesh; or, with `on_host`, on each of its hosts,
    because the result stays in its receive buffers. With `is_either`, the result of a branch, it may be here or there,
    and counts in both places.

    `argument` is the argument whose buffer the result is, else -1. `same_as` is the earlier result that is the same
    value, else -1.
    """

    mesh: int
    bytes: int
    on_host: bool = False
    argument: int = -1
    same_as: int = -1
    is_either: bool = False


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """The memory that a run takes, computed by one host.

    `receive_peak` is the most that the host's memory for transfers holds of the run. The rest is of the whole program,
    so only its first host tells it: the results, the positions of donated arguments, the biggest buffers as text, and
    the mesh of each argument. All hosts together would tell it as often as the program has hosts.
    """

    devices: tuple[DeviceNeed, ...]
    receive_peak: int
    results: tuple[ResultMemory, ...] = ()
    donated: tuple[int, ...] = ()
    biggest: str = ""
    arguments: tuple[int, ...] = ()


class Profile:
    """The sizes of one host's part of a program."""

    def __init__(self, bound: BoundProgram, host: int, receives_on_host: bool) -> None:
        self._bound = bound
        self._host = host
        self._receives_on_host = receives_on_host
        self._shares: dict[int, int] = {}  # by the id of a type, because many values share one
        program = bound.program
        self._last_use = {value: number for number, node in enumerate(program.nodes) for value in node.inputs}
        #: Values that lie in the memory for transfers of their hosts, this host or others.
        self._received = {value for node in program.nodes for value in self._received_of(node)}
        self._receive_bytes_of = {  # those of them on this host: the bytes they take there
            value: self._receive_bytes(value) for value in self._received if host in self._hosts(value)
        }
        self._same = {  # outputs of transfers that move no bytes, and of views
            node.outputs[0]
            for node in program.nodes
            if node.kind is NodeKind.TRANSFER
            and node.outputs[0] not in self._receive_bytes_of
            and self._lies_alike(node.inputs[0], node.outputs[0])
        }
        results = set(program.results)
        for node in program.nodes:  # a view takes no memory; but one that is a result outlives what it shows
            if node.kind is NodeKind.CALL and program.computations[node.computation].views:
                self._same.update(set(node.outputs) - results)
        #: Values that stay in the memory of this host.
        self._on_no_device = {value for value, type in enumerate(program.values) if type.memory is Memory.HOST}
        if receives_on_host:
            selected = {value for value, of in owners_of(program).items() if of <= self._receive_bytes_of.keys()}
            self._on_no_device |= selected.union(self._receive_bytes_of)

    def device_bytes(self, value: int) -> int:
        """The bytes that a value takes on each device that holds a part of it."""
        if value in self._same or value in self._on_no_device:
            return 0
        return self._share(value)

    def is_move(self, computation: int) -> bool:
        """Whether a computation of the program moves its input to another memory."""
        return self._bound.program.computations[computation].is_move

    def memory(self, plan: HostPlan, temporaries: Sequence[int]) -> ProgramMemory:
        """The memory that a run takes here. `temporaries[i]`: bytes per device that launch i of the plan needs while it
        runs.
        """
        program, first = self._bound.program, self._host * self._bound.devices_per_host
        number_of = {launch: number for number, launch in enumerate(plan.launches)}
        donates = self._bound.donations

        def temporary(node: int) -> int:
            return temporaries[number_of[Launch(program.nodes[node].computation, donates[node])]]

        known: dict[frozenset[int], tuple[int, int]] = {}
        needs = []
        for device in range(first, first + self._bound.devices_per_host):
            meshes = frozenset(mesh for mesh, devices in enumerate(self._bound.bindings) if device in devices)
            if not meshes:
                continue
            if meshes not in known:  # devices in the same meshes need the same
                known[meshes] = self._device_walk(meshes, temporary)
            needs.append(DeviceNeed(device, *known[meshes]))
        if self._host != self._bound.hosts()[0]:
            return ProgramMemory(tuple(needs), self._receive_walk())
        return ProgramMemory(
            tuple(needs),
            self._receive_walk(),
            tuple(self._results()),
            tuple(position for position, given in enumerate(program.donated_arguments) if given),
            self._biggest(),
            tuple(program.values[value].mesh for value in program.arguments),
        )

    def arrivals(self, meshes: frozenset[int]) -> tuple[dict[int, list[int]], set[int]]:
        """The transferred values that take memory of a device of `meshes`: by a call of the device, those that may
        exist from then on; and those that may exist at any time.
        """
        program = self._bound.program
        transferred = {
            value
            for node in program.nodes
            if node.kind is NodeKind.TRANSFER or node.kind in EXCHANGES
            for value in node.outputs
            if not (value in self._receive_bytes_of and self._receives_on_host)  # that is on no device
        }
        arriving: dict[int, list[int]] = {}
        launched = self._launched_before(meshes)
        for value in sorted(transferred & self._read_on(meshes)):
            if launched[value] >= 0:
                arriving.setdefault(launched[value], []).append(value)
        return arriving, transferred.difference(*arriving.values())

    def _device_walk(self, meshes: frozenset[int], temporary: Callable[[int], int]) -> tuple[int, int]:
        program, donates = self._bound.program, self._bound.donations

        def size(value: int) -> int:
            return self.device_bytes(value) if program.values[value].mesh in meshes else 0

        def taken(number: int) -> int:
            return temporary(number) if program.computations[program.nodes[number].computation].mesh in meshes else 0

        arriving, early = self.arrivals(meshes)
        transferred = early.union(*arriving.values())
        nodes = [number for number, node in enumerate(program.nodes) if self._touches(node, meshes)]
        walk = Walk(program, size, taken, donates, self._last_use, transferred, arriving, nodes)
        return walk.peak(), sum(map(size, early))

    def _touches(self, node: Node, meshes: frozenset[int]) -> bool:
        """Whether a node is launched on these meshes, or reads or makes a value there."""
        program = self._bound.program
        if node.kind is NodeKind.CALL:
            return program.computations[node.computation].mesh in meshes
        return any(program.values[value].mesh in meshes for value in (*node.inputs, *node.outputs))

    def _launched_before(self, meshes: frozenset[int]) -> dict[int, int]:
        """For each value, the last call on a device of `meshes` that is launched before any part of the value can
        exist, by its number; -1: none is.

        A call is launched when its inputs exist, and when the calls before it on each of its devices are launched
        (ORD-1). These may be devices of other hosts. A call of several hosts is launched on one of them before it is
        launched on another, so it holds nothing up but what reads its outputs.
        """
        program = self._bound.program
        holders = [frozenset(devices) for devices in self._bound.bindings]
        sharing = [[n for n, other in enumerate(holders) if other & each] for each in holders]
        newest = [-1] * len(holders)  # by mesh: the same for the calls on it so far
        found: dict[int, int] = {}
        for number, node in enumerate(program.nodes):
            if node.kind is NodeKind.SELECT:  # it needs the one that is taken
                which, *cases = (found.get(value, -1) for value in node.inputs)
                last = max(which, min(cases))
            else:
                last = max((found.get(value, -1) for value in node.inputs), default=-1)
            if node.kind is NodeKind.CALL:
                mesh = program.computations[node.computation].mesh
                if len(self._bound.hosts_of_mesh(mesh)) == 1:
                    last = number if mesh in meshes else max(last, *(newest[other] for other in sharing[mesh]))
                    newest[mesh] = last
            found.update(dict.fromkeys(node.outputs, last))
        return found

    def _read_on(self, meshes: frozenset[int]) -> set[int]:
        """The values that a call on these devices reads. So no later run comes to the device before they exist."""
        program = self._bound.program
        return {
            value
            for node in program.nodes
            if node.kind is NodeKind.CALL and program.computations[node.computation].mesh in meshes
            for value in node.inputs
        }

    def _receive_walk(self) -> int:
        """The most that this host's memory for transfers holds of one run.

        Room is announced for what each case of a branch receives, so the cases count together. The result of a select
        may be what a case has received, which so lives as long as the result.
        """
        program, kept = self._bound.program, set(self._bound.program.results)
        last_use = dict(self._last_use)
        for node in reversed(program.nodes):
            if node.kind is NodeKind.SELECT:
                (result,) = node.outputs
                kept.update(node.inputs[1:] if result in kept else ())
                for value in node.inputs[1:]:
                    last_use[value] = max(last_use[value], last_use.get(result, -1))
        offloaded = {value: self._offloaded_bytes(value) for value in self._on_no_device}
        dying: dict[int, list[int]] = {}
        for value in {*self._receive_bytes_of, *offloaded}.intersection(last_use):
            if value not in kept:
                dying.setdefault(last_use[value], []).append(value)
        live = peak = 0
        for number, node in enumerate(program.nodes):
            taken = {value: self._receive_bytes_of.get(value, 0) for value in self._received_of(node)}
            numbers = self._numbers_bytes(node)  # that a permute writes, and keeps until its end
            live += sum(taken.values()) + sum(offloaded[value] for value in offloaded.keys() & {*node.outputs})
            peak = max(peak, live + numbers)
            live -= sum(offloaded.get(value, 0) for value in dying.get(number, ()))
            if not self._receives_on_host:
                live -= sum(taken.values())
                continue
            live -= sum(size for value, size in taken.items() if value not in last_use and value not in kept)
            live -= sum(self._receive_bytes_of.get(value, 0) for value in dying.get(number, ()))
        return peak

    def _results(self) -> list[ResultMemory]:
        program = self._bound.program
        arguments = {value: position for position, value in enumerate(program.arguments)}
        first: dict[int, int] = {}
        owners = owners_of(program)
        out = []
        for position, value in enumerate(program.results):
            mesh = program.values[value].mesh
            received = {self._receives_on_host and v in self._received for v in owners.get(value, (value,))}
            if program.values[value].memory is Memory.HOST:
                received = {True}
            sizes = [self._widest_receive(value) if on_host else self.device_bytes(value) for on_host in received]
            same = arguments.get(value, -1), first.get(value, -1)
            out.append(ResultMemory(mesh, max(sizes), True in received, *same, len(received) > 1))
            first.setdefault(value, position)
        return out

    def _biggest(self) -> str:
        """The program's biggest buffers as text: type, shape, the node that makes each, and bytes."""
        program = self._bound.program
        maker = {value: f"made by {node.name or node.kind.value!r}" for node in program.nodes for value in node.outputs}
        sizes = sorted(((self._share(value), -value) for value in range(len(program.values))), reverse=True)
        words = []
        for size, value in sizes[:_NAMED]:
            kind = program.values[-value]
            shape = ",".join(map(str, kind.shape))
            words.append(f"{kind.dtype}[{shape}] {maker.get(-value, 'an argument')} ({size} bytes on each device)")
        return ", ".join(words)

    # -- sizes -------------------------------------------------------------------------------------------------------

    def _share(self, value: int) -> int:
        type = self._bound.program.values[value]
        known = self._shares.get(id(type))
        if known is None:
            known = self._shares[id(type)] = type.nbytes // math.prod(self._bound.placed(value).parts())
        return known

    def _hosts(self, value: int) -> frozenset[int]:
        return frozenset(self._bound.hosts_of_value(value))

    def _takes_a_receive(self, source: int, target: int) -> bool:
        """Whether a transfer takes receive buffers on its hosts: it is between hosts, or one host assembles the array
        in its own memory.
        """
        concerned = self._hosts(source) | self._hosts(target)
        if len(concerned) > 1:
            return True
        bound, host = self._bound, min(concerned)
        resharding = reshard_plan(bound.placed(source), bound.placed(target), bound.devices_per_host, host)
        return self._receives_on_host and not resharding.is_direct(host)

    def _received_of(self, node: Node) -> tuple[int, ...]:
        """The outputs of a node that are received in the memory for transfers of their hosts."""
        if node.kind in EXCHANGES:
            return node.outputs[:2]  # rows, and of an exchange their numbers
        if node.kind is NodeKind.TRANSFER and self._takes_a_receive(node.inputs[0], node.outputs[0]):
            return node.outputs
        return ()

    def _offloaded_bytes(self, value: int) -> int:
        """What a value takes in the memory of this host if it is offloaded."""
        is_offloaded = self._bound.program.values[value].memory is Memory.HOST
        return self._receive_bytes(value) if is_offloaded and self._host in self._hosts(value) else 0

    def _numbers_bytes(self, node: Node) -> int:
        """What a permute takes on this host for the numbers of rows, which nobody reads."""
        if node.kind is not NodeKind.PERMUTE or self._host not in self._hosts(node.outputs[0]):
            return 0
        origins = self._bound.program.values[node.inputs[2]]
        return block_bytes(origins.nbytes) + self._bound.devices_per_host * block_bytes(0)

    def _receive_bytes(self, value: int, host: int | None = None) -> int:
        placed, each = self._bound.placed(value), self._bound.devices_per_host
        host = self._host if host is None else host
        cells = {cell for device, cell in zip(placed.devices, placed.cells, strict=True) if device // each == host}
        return len(cells) * block_bytes(self._share(value))

    def _widest_receive(self, value: int) -> int:
        return max(self._receive_bytes(value, host) for host in self._hosts(value))

    def _lies_alike(self, source: int, target: int) -> bool:
        here, there = self._bound.placed(source), self._bound.placed(target)
        return here.devices == there.devices and here.cells == there.cells


def ledger_entries(
    parts: Sequence[ProgramMemory],
    bindings: Sequence[Sequence[int]],
    hosts: Sequence[int],
    topology: Topology,
    space_set: Callable[[Sequence[int]], int],
    group: Callable[[Sequence[int]], int],
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int, int]], list[int]]:
    """The numbers by which the native controller admits a run, from the parts that the `hosts` computed.

    Memory spaces are numbered: first the devices by their numbers, then each host's memory for transfers. `space_set`
    and `group` give the controller's number of a set of memory spaces and of a set of hosts. Returns (space, peak,
    eager) for each space of the run, (group, space set, bytes, argument, same as) for each result, and the group of
    each argument.
    """
    needs = [(need.device, need.peak, need.eager) for part in parts for need in part.devices]
    needs += [
        (topology.transfer_space(host), part.receive_peak, 0)
        for host, part in zip(sorted(hosts), parts, strict=True)
        if part.receive_peak
    ]
    places: dict[tuple[int, bool, bool], tuple[int, int]] = {}  # results lie in few places, and a program has many

    def holders_of(mesh: int) -> Sequence[int]:
        return topology.hosts_of(tuple(bindings[mesh]))

    def place(result: ResultMemory) -> tuple[int, int]:
        key = result.mesh, result.on_host, result.is_either
        if key not in places:
            devices, holders = bindings[result.mesh], holders_of(result.mesh)
            spaces = [topology.transfer_space(host) for host in holders] if result.on_host else []
            spaces += devices if result.is_either or not result.on_host else ()
            places[key] = group(holders), space_set(spaces)
        return places[key]

    results = [(*place(result), result.bytes, result.argument, result.same_as) for result in parts[0].results]
    groups = {mesh: group(holders_of(mesh)) for mesh in set(parts[0].arguments)}
    return needs, results, [groups[mesh] for mesh in parts[0].arguments]


def block_bytes(nbytes: int) -> int:
    """The most that a block of so many bytes takes in a host's memory for transfers."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _BLOCK


def check_budget(what: str, value: int | None) -> None:
    """Raises ValueError unless a budget is None or a positive number of bytes."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{what} must be a positive number of bytes, or None, got {value!r}")


def sizes_of(
    plan: HostPlan, profile: Profile, temporaries: Sequence[int]
) -> tuple[list[int], list[tuple[int, list[int], bool]]]:
    """The sizes by which the executor counts: of the plan's values; of its launches, temporaries, donated inputs, and
    whether it is a move.
    """
    launches = [
        (
            temporary,
            [position for position, given in enumerate(launch.donates) if given],
            profile.is_move(launch.computation),
        )
        for launch, temporary in zip(plan.launches, temporaries, strict=True)
    ]
    return [profile.device_bytes(value) for value in plan.values], launches
