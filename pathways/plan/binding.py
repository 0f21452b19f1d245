"""Binding: puts a logical program on physical devices, and cuts it into one plan per host.

The map from virtual to physical devices is data: when it changes, only the binding runs again. Each host binds its own
part, from the same program and the same map, so the client sends only the program, once.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence

from pathways import _native
from pathways.compiler.donation import agree
from pathways.compiler.ir import LogicalProgram, Node, NodeKind
from pathways.plan.resharding import Placement, ReshardPlan, reshard_plan

#: The most pairs of hosts that the text of one transfer names.
_PAIRS_SHOWN = 8

Bindings = tuple[tuple[int, ...], ...]  # per mesh of the program: global device numbers, row-major


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launchable of a plan: a computation, and for each of its inputs whether the launch donates it (MEM-4)."""

    computation: int
    donates: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """One host's part of a bound program: the encoded plan, and the meaning of the numbers in it.

    A call n launches `launches[n.computation]`; a transfer n follows the reshard plan `routes[n.computation]`. The node
    of `routes[i]` is `transfers[i]`, and its number in the program is `numbers[i]`. `values` maps a value of the plan
    to the value of the program. `calls` are the call nodes of this host, in the order of the program.
    """

    block: bytes
    launches: tuple[Launch, ...]
    routes: tuple[ReshardPlan, ...]
    transfers: tuple[Node, ...]
    numbers: tuple[int, ...]
    values: tuple[int, ...]
    calls: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class BoundProgram:
    """A logical program and its map to physical devices."""

    program: LogicalProgram
    bindings: Bindings
    devices_per_host: int

    def placed(self, value: int) -> Placement:
        """The placement of a value: its type on physical devices."""
        kind = self.program.values[value]
        return Placement(kind, self.program.meshes[kind.mesh], self.bindings[kind.mesh])

    def hosts_of_mesh(self, mesh: int) -> tuple[int, ...]:
        """Hosts with devices in a mesh, ascending."""
        return hosts_of(self.bindings[mesh], self.devices_per_host)

    def hosts_of_value(self, value: int) -> tuple[int, ...]:
        """Hosts that hold shards of a value."""
        return self.hosts_of_mesh(self.program.values[value].mesh)

    def hosts(self) -> tuple[int, ...]:
        """All hosts that take part in the program."""
        return hosts_of([device for devices in self.bindings for device in devices], self.devices_per_host)


def hosts_of(devices: Sequence[int], devices_per_host: int) -> tuple[int, ...]:
    """The hosts of these devices, ascending."""
    return tuple(sorted({device // devices_per_host for device in devices}))


def concerned(bound: BoundProgram) -> list[tuple[bool, list[int]]]:
    """Per node of the program: whether it is a call, and the hosts with devices of its inputs or outputs."""
    out = []
    for node in bound.program.nodes:
        is_call = node.kind is NodeKind.CALL
        if is_call:
            hosts = set(bound.hosts_of_mesh(bound.program.computations[node.computation].mesh))
        else:
            hosts = {host for value in (*node.inputs, *node.outputs) for host in bound.hosts_of_value(value)}
        out.append((is_call, sorted(hosts)))
    return out


def pinned(bound: BoundProgram) -> frozenset[int]:
    """The values that must not be donated (MEM-4), for one of two reasons. A transfer may read its source after the
    launches that follow the transfer. The source and target of a transfer may share memory, when their slices share a
    device.
    """
    out: set[int] = set()
    for node in bound.program.nodes:
        if node.kind is NodeKind.TRANSFER:
            source, target = node.inputs[0], node.outputs[0]
            out.add(source)
            if not set(bound.placed(source).devices).isdisjoint(bound.placed(target).devices):
                out.add(target)
    return frozenset(out)


def donations(bound: BoundProgram) -> list[tuple[bool, ...]]:
    """Per node, which inputs it may donate to its outputs: those that the compiler allows, less the pinned values."""
    program, kept = bound.program, pinned(bound)
    nodes = [
        dataclasses.replace(
            node,
            donates=tuple(given and value not in kept for value, given in zip(node.inputs, node.donates, strict=False)),
        )
        for node in program.nodes
    ]
    return [node.donates for node in agree(nodes, [node.donates for node in nodes], program.computations)]


def host_plan(bound: BoundProgram, host: int, assembles: bool = False) -> HostPlan:
    """The plan of one host. The plan's size, and the work to make it, depend only on the host's own part (COST-2).

    JAX does a transfer within one host, from device to device. If the host `assembles` arrays in its own memory, this
    holds only when each target shard is a whole source shard; otherwise the host copies shard by shard, as it does
    between hosts.
    """
    program = bound.program
    holders = [frozenset(bound.hosts_of_mesh(mesh)) for mesh in range(len(program.meshes))]
    masks = [local_mask(devices, host, bound.devices_per_host) for devices in bound.bindings]
    local: dict[int, int] = {}

    def number(value: int) -> int:
        return local.setdefault(value, len(local))

    def is_here(value: int) -> bool:
        return host in holders[program.values[value].mesh]

    # First find out which values are on this host. They are numbered in the order in which they are made.
    for value in program.arguments:
        if is_here(value):
            number(value)
    launches: dict[Launch, int] = {}
    routes: list[ReshardPlan] = []
    transfers: list[Node] = []
    numbers: list[int] = []
    calls: list[Node] = []
    steps: list[Callable[[_native.PlanBuilder], None]] = []  # each writes a node
    donates = donations(bound)
    for index, node in enumerate(program.nodes):
        if node.kind is NodeKind.CALL:
            mesh = program.computations[node.computation].mesh
            if host not in holders[mesh]:
                continue
            launch = launches.setdefault(Launch(node.computation, donates[index]), len(launches))
            steps.append(
                operator.methodcaller(
                    "call",
                    computation=launch,
                    node=index,
                    inputs=[number(v) for v in node.inputs],
                    outputs=[number(v) for v in node.outputs],
                    devices=masks[mesh],
                    gang=len(holders[mesh]) > 1,
                )
            )
            calls.append(node)
        else:
            source, target = node.inputs[0], node.outputs[0]
            if not (is_here(source) or is_here(target)):
                continue
            resharding = reshard_plan(bound.placed(source), bound.placed(target), bound.devices_per_host, host)
            sends, receives = resharding.destinations(host), resharding.sources(host) if is_here(target) else ()
            if not sends and not is_here(target):
                continue  # this host has only a replica of the source, which no host reads
            inputs = [number(source)] if sends else []
            outputs = [number(target)] if is_here(target) else []
            steps.append(
                operator.methodcaller(
                    "transfer",
                    route=len(routes),
                    node=index,
                    inputs=inputs,
                    outputs=outputs,
                    input_devices=masks[program.values[source].mesh],
                    devices=masks[program.values[target].mesh],
                    sources=list(receives),
                    destinations=list(sends),
                    spread=holders[program.values[source].mesh] | holders[program.values[target].mesh] != {host}
                    or (assembles and not resharding.is_direct(host)),
                )
            )
            routes.append(resharding)
            transfers.append(node)
            numbers.append(index)

    builder = _native.PlanBuilder(host, bound.devices_per_host, len(local))
    absent = _native.NO_VALUE
    builder.set_arguments([local[v] if is_here(v) else absent for v in program.arguments])
    builder.set_results([local[v] if is_here(v) else absent for v in program.results])
    builder.set_donated([position for position, given in enumerate(program.donated_arguments) if given])
    for step in steps:
        step(builder)
    return HostPlan(
        builder.finish(), tuple(launches), tuple(routes), tuple(transfers), tuple(numbers), tuple(local), tuple(calls)
    )


def local_mask(devices: Sequence[int], host: int, devices_per_host: int) -> int:
    """The devices of a host among these devices, as a bit mask."""
    mask = 0
    for device in devices:
        if device // devices_per_host == host:
            mask |= 1 << (device % devices_per_host)
    return mask


def plan_text(bound: BoundProgram, machines: Sequence[int] = ()) -> str:
    """The physical plan as text: where each node runs, and how each transfer moves its bytes; see `as_text("plan")`.

    `machines`: the machine of each host; empty: all hosts are on one machine.
    """
    program = bound.program
    donates = donations(bound)
    lines = [f"program {program.name}: {len(program.nodes) + 2} nodes on hosts {list(bound.hosts())}"]
    for index, mesh in enumerate(program.meshes):
        devices = bound.bindings[index]
        span = f"{devices[0]}..{devices[-1]}" if len(devices) > 8 else ", ".join(map(str, devices))
        lines.append(
            f"  slice {mesh.name} {dict(mesh.axes)}: devices {span} on hosts {list(bound.hosts_of_mesh(index))}"
        )
    lines.append(f"  0 argument -> {_values(program, program.arguments)}")
    for number, node in enumerate(program.nodes, 1):
        where = program.values[node.outputs[0]].mesh if node.outputs else program.computations[node.computation].mesh
        slice_name = program.meshes[where].name
        if node.kind is NodeKind.CALL:
            what = f"call {node.name}"
            if node.label is not None:
                what += f" ({node.label})"
            elif node.transposes:
                what += " (backward)"
            donated = [v for v, gives in zip(node.inputs, donates[number - 1], strict=False) if gives]
            tail = f" donating {_values(program, donated)}" if donated else ""
        else:
            resharding = reshard_plan(
                bound.placed(node.inputs[0]), bound.placed(node.outputs[0]), bound.devices_per_host
            )
            what = "transfer"
            tail = f" {_route_text(resharding, program.values[node.inputs[0]].dtype.itemsize, machines)}"
        lines.append(
            f"  {number} {what} on {slice_name}: {_values(program, node.inputs)} -> "
            f"{_values(program, node.outputs)}{tail}"
        )
    lines.append(f"  {len(program.nodes) + 1} result <- {_values(program, program.results)}")
    return "\n".join(lines)


def _route_text(resharding: ReshardPlan, itemsize: int, machines: Sequence[int]) -> str:
    """How the bytes of a transfer move: for each kind of transport, the bytes, and the pairs of hosts or devices."""
    kept = moved = pairs = 0
    for block in (block for blocks in resharding.blocks.values() for block in blocks):
        for device, shard in zip(block.devices, block.shards, strict=False):
            nbytes = math.prod(block.shape) * itemsize
            kept += nbytes if device == shard else 0
            moved += nbytes if device != shard else 0
            pairs += device != shard
    parts = []
    if kept:
        parts.append(f"within one device, no copy: {kept} bytes")
    if moved:
        parts.append(f"between devices of a host: {moved} bytes, {pairs} pairs")

    def distance(one: int, other: int) -> str:
        if one == other:
            return "within a host"
        return "shared memory" if not machines or machines[one] == machines[other] else "stream between machines"

    for title in ("within a host", "shared memory", "stream between machines"):
        hops = sorted(
            (pair, copies) for pair, copies in resharding.copies.items() if distance(*pair) == title and copies
        )
        if hops:
            elements = sum(copy.elements for _, copies in hops for copy in copies)
            shown = ", ".join(f"{a}->{b} x{len(copies)}" for (a, b), copies in hops[:_PAIRS_SHOWN])
            more = f", and {len(hops) - _PAIRS_SHOWN} more" if len(hops) > _PAIRS_SHOWN else ""
            parts.append(f"{title}: {elements * itemsize} bytes, hosts {shown}{more}")
    return "by " + ("; ".join(parts) or "no bytes")


def _values(program: LogicalProgram, values: Sequence[int]) -> str:
    shown = []
    for value in values:
        kind = program.values[value]
        shown.append(f"%{value}:{kind.dtype}{list(kind.shape)}")
    return "(" + ", ".join(shown) + ")"
