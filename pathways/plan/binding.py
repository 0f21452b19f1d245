"""Binding: puts a logical program on physical devices, and cuts it into one plan per host.

The map from virtual to physical devices is data: when it changes, only the binding runs again. Each host binds its own
part, from the same program and the same map, so the client sends only the program, once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from pathways import _native
from pathways.compiler.donation import agree
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, Node, NodeKind
from pathways.compiler.printing import when_text
from pathways.plan.branching import Branching, write
from pathways.plan.exchange_shape import EXCHANGES, ExchangeShape, shard_ranges
from pathways.plan.resharding import Placement, ReshardPlan, reshard_plan
from pathways.plan.viewing import viewed_here

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
    to the value of the program. `calls` are the call nodes of this host, in the order of the program; `exchanges` those
    that exchange rows, with the numbers `exchange_numbers` in the program.
    """

    block: bytes
    launches: tuple[Launch, ...]
    routes: tuple[ReshardPlan, ...]
    transfers: tuple[Node, ...]
    numbers: tuple[int, ...]
    values: tuple[int, ...]
    calls: tuple[Node, ...]
    exchanges: tuple[Node, ...]
    exchange_numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BoundProgram:
    """A logical program and its map to physical devices. `islands`: by host, its island; empty: all are in one."""

    program: LogicalProgram
    bindings: Bindings
    devices_per_host: int
    islands: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def placement(self, type: ArrayType) -> Placement:
        """A type of the program on physical devices."""
        return Placement(type, self.program.meshes[type.mesh], self.bindings[type.mesh])

    def placed(self, value: int) -> Placement:
        """The placement of a value."""
        return self.placement(self.program.values[value])

    def moved(self, move: Computation) -> Placement:
        """Where a move puts its array."""
        (type,) = move.outputs
        return self.placement(type)

    def hosts_of_mesh(self, mesh: int) -> tuple[int, ...]:
        """Hosts with devices in a mesh, ascending."""
        return self._hosts_of_meshes[mesh]

    @functools.cached_property
    def _hosts_of_meshes(self) -> tuple[tuple[int, ...], ...]:
        return tuple([hosts_of(devices, self.devices_per_host) for devices in self.bindings])

    def hosts_of_value(self, value: int) -> tuple[int, ...]:
        """Hosts that hold shards of a value."""
        return self.hosts_of_mesh(self.program.values[value].mesh)

    def hosts_of_node(self, node: Node) -> set[int]:
        """Hosts with devices of a node: of a call, those of its computation; else those of its inputs and outputs."""
        if node.kind is NodeKind.CALL:
            return set(self.hosts_of_mesh(self.program.computations[node.computation].mesh))
        values = node.outputs if node.kind is NodeKind.SELECT else (*node.inputs, *node.outputs)
        return {host for value in values for host in self.hosts_of_value(value)}

    def branching(self) -> Branching | None:
        """The choices and predicates; None: the program has none."""
        program = self.program
        if not program.has_choices:
            return None
        return Branching(program, self.hosts_of_value, self.hosts_of_node, self.islands)

    @functools.cached_property
    def donations(self) -> list[tuple[bool, ...]]:
        """Per node, which inputs it may donate to its outputs: what the compiler allows, less the pinned values."""
        program, kept = self.program, pinned(self)
        allowed = [
            tuple([given and value not in kept for value, given in zip(node.inputs, node.donates, strict=False)])
            for node in program.nodes
        ]
        return agree(program.nodes, allowed, program.computations)

    def hosts(self) -> tuple[int, ...]:
        """All hosts that take part in the program."""
        return hosts_of([device for devices in self.bindings for device in devices], self.devices_per_host)


def hosts_of(devices: Sequence[int], devices_per_host: int) -> tuple[int, ...]:
    """The hosts of these devices, ascending."""
    return tuple(sorted({device // devices_per_host for device in devices}))


def pinned(bound: BoundProgram) -> frozenset[int]:
    """The values that must not be donated (MEM-4), for one of two reasons. A transfer or an exchange may read its
    inputs after the launches that follow it. The source and target of a transfer may share memory, when their slices
    share a device; a view shares that of its inputs. The result of a select is the buffer of one of the values that it
    selects from, so it is pinned as they are. The scalar of a choice is pinned because its owner may read it late.
    """
    out = {predicate.value for predicate in bound.program.predicates}
    if bound.program.decides >= 0:
        out.add(bound.program.decides)
    for node in bound.program.nodes:
        if node.kind is NodeKind.SELECT:
            out.add(node.inputs[0])
        elif node.kind in EXCHANGES:
            out.update(node.inputs)
        elif node.kind is NodeKind.CALL and bound.program.computations[node.computation].views:
            out.update(node.inputs, node.outputs)
        elif node.kind is NodeKind.TRANSFER:
            source, target = node.inputs[0], node.outputs[0]
            out.add(source)
            if not set(bound.placed(source).devices).isdisjoint(bound.placed(target).devices):
                out.add(target)
    owners = owners_of(bound.program)
    held = {owner for value in out for owner in owners.get(value, (value,))}
    out.update(held, (value for value, of in owners.items() if not held.isdisjoint(of)))
    return frozenset(out)


def owners_of(program: LogicalProgram) -> dict[int, frozenset[int]]:
    """Of each result of a select: the values one of whose buffers it is. None of them is the result of a select."""
    owners: dict[int, frozenset[int]] = {}
    for node in program.nodes:
        if node.kind is NodeKind.SELECT:
            owners[node.outputs[0]] = frozenset().union(*(owners.get(v, {v}) for v in node.inputs[1:]))
    return owners


def host_plan(bound: BoundProgram, host: int, assembles: bool = False, devices: int | None = None) -> HostPlan:
    """The plan of one host. The plan's size, and the work to make it, depend only on the host's own part (COST-2).
    `devices`: how many the host has; None: `devices_per_host`, the most that it may have.

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
    exchanges: list[Node] = []
    exchange_numbers: list[int] = []
    steps: list[tuple[Node, Callable[..., None]]] = []  # each writes a node with the builder
    donates = bound.donations
    write_node: Callable[..., None]
    for index, node in enumerate(program.nodes):
        if node.kind is NodeKind.CALL:
            called = program.computations[node.computation]
            mesh = called.mesh
            if host not in holders[mesh]:
                continue
            needed: Sequence[int] = node.inputs
            if called.views:
                needed = [needed[i] for i in viewed_here(called, bound.bindings, bound.devices_per_host, host).inputs]
            launch = launches.setdefault(Launch(node.computation, donates[index]), len(launches))
            write_node = functools.partial(
                _native.PlanBuilder.call,
                computation=launch,
                node=index,
                inputs=[number(v) for v in needed],
                outputs=[number(v) for v in node.outputs],
                devices=masks[mesh],
                gang=len(holders[mesh]) > 1 and not (called.is_move or called.views),
            )
            calls.append(node)
        elif node.kind is NodeKind.SELECT:
            (result,) = node.outputs
            if not is_here(result):
                continue
            write_node = functools.partial(
                _native.PlanBuilder.select,
                node=index,
                inputs=[number(v) for v in node.inputs[1:]],
                output=number(result),
                devices=masks[program.values[result].mesh],
            )
        elif node.kind in EXCHANGES:
            shape = exchange_shape(bound, node)
            if not (shape.has_source(host) or shape.has_target(host)):
                continue
            exchanges.append(node)
            exchange_numbers.append(index)
            sent, made = shape.part(node, host)
            write_node = functools.partial(
                _native.PlanBuilder.exchange,
                node=index,
                inputs=[number(v) for v in sent],
                outputs=[number(v) for v in made],
                input_devices=masks[shape.source],
                devices=masks[shape.target],
                **shape.fields(),
            )
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
            write_node = functools.partial(
                _native.PlanBuilder.transfer,
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
            routes.append(resharding)
            transfers.append(node)
            numbers.append(index)
        steps.append((node, write_node))

    builder = _native.PlanBuilder(host, devices or bound.devices_per_host, len(local))
    # The controller sends a host only the handles of what lies there.
    given = [
        (v, donated) for v, donated in zip(program.arguments, program.donated_arguments, strict=True) if is_here(v)
    ]
    builder.set_arguments([local[v] for v, _ in given])
    builder.set_results([local[v] for v in program.results if is_here(v)])
    builder.set_donated([position for position, (_, donated) in enumerate(given) if donated])
    branching = bound.branching()
    if branching is None:
        for _, write_node in steps:
            write_node(builder)
    else:
        here = write(branching, host, builder, local)
        for node, write_node in steps:
            predicate = here.of(branching, node)
            if node.kind is NodeKind.SELECT:
                choice = here.choices[branching.number[node.inputs[0]]]
                write_node(builder, choice=choice, predicate=predicate)
            else:
                write_node(builder, predicate=predicate)
    return HostPlan(
        builder.finish(),
        tuple(launches),
        tuple(routes),
        tuple(transfers),
        tuple(numbers),
        tuple(local),
        tuple(calls),
        tuple(exchanges),
        tuple(exchange_numbers),
    )


def exchange_shape(bound: BoundProgram, node: Node) -> ExchangeShape:
    """Where the shards of an exchange or a permute are, and how many rows they have."""
    program, is_known = bound.program, node.kind is NodeKind.PERMUTE
    # `to` of a permute lives beside its source rows; `origins` beside the result
    source, target = (program.values[v] for v in (node.inputs[0], node.outputs[0]))
    from_, to = bound.bindings[source.mesh], bound.bindings[target.mesh]
    how = None if is_known else program.exchanges[node.computation]
    return ExchangeShape(
        source=source.mesh,
        target=target.mesh,
        source_shards=len(from_),
        target_shards=len(to),
        sources=shard_ranges(from_, bound.devices_per_host),
        targets=shard_ranges(to, bound.devices_per_host),
        source_rows=source.shape[0] // len(from_),
        capacity=target.shape[0] // len(to),
        how=how,
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
    donates = bound.donations
    lines = [f"program {program.name}: {len(program.nodes) + 2} nodes on hosts {list(bound.hosts())}"]
    for index, mesh in enumerate(program.meshes):
        devices = bound.bindings[index]
        span = f"{devices[0]}..{devices[-1]}" if len(devices) > 8 else ", ".join(map(str, devices))
        lines.append(
            f"  slice {mesh.name} {dict(mesh.axes)}: devices {span} on hosts {list(bound.hosts_of_mesh(index))}"
        )
    branching = bound.branching()
    for index, choice in enumerate(branching.choices if branching is not None else ()):
        told = f", told to {list(choice.hosts)}" if len(choice.hosts) > 1 else ""
        lines.append(
            f"  choice {index}: {_values(program, [choice.value])}, of {choice.cases} cases, decides on host "
            f"{choice.owner}{told}"
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
        elif node.kind is NodeKind.SELECT:
            what, tail = f"select {node.name}", f" of {node.origin}" if node.origin else ""
        elif node.kind in EXCHANGES:
            what, tail = node.kind.value, f" {exchange_shape(bound, node).text()}"
        else:
            resharding = reshard_plan(
                bound.placed(node.inputs[0]), bound.placed(node.outputs[0]), bound.devices_per_host
            )
            what = "transfer"
            tail = f" {_route_text(resharding, program.values[node.inputs[0]].dtype.itemsize, machines)}"
        lines.append(
            f"  {number} {what} on {slice_name}: {_values(program, node.inputs)} -> "
            f"{_values(program, node.outputs)}{tail}{when_text(program, node)}"
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
