"""Programs on lists of devices, made node by node: what the door does becomes runs in the cluster's order."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pathways import _core, errors
from pathways.api.programs.registration import Registration
from pathways.compiler.ir import ArrayType, Computation, HostFunction, LogicalProgram, Node, NodeKind, View
from pathways.plan.binding import BoundProgram
from pathways.protocol import control_pb2 as pb
from pathways.proxy.cluster_kinds import DeviceList, Kind, Places

#: How long it waits for hosts before it looks whether they are there.
_LOOK_S = 1.0


class ShardProgram:
    """A program that its hosts know and have compiled."""

    def __init__(self, places: Places, program: LogicalProgram, bound: BoundProgram, call: Callable[..., Any]) -> None:
        """`call(number, group)` makes the native call of the program of this number.

        Raises:
            PathwaysError: its hosts refuse it, or cannot compile it.
        """
        self._control = places.session.control()
        self._islands, self._devices = places.islands, bound.bindings
        places.session.sweep()  # of those that it replaces
        self._registration = Registration(places.session, program, bound)
        self._settle()
        self._call = call(self._registration.number, self._registration.group)

    def __call__(self, arguments: list[Any]) -> Any:
        """Submits a run. Returns the results as a list, or a `_core.Refusal`: then nothing was submitted.

        Raises:
            DeletedArrayError: an argument was deleted.
            HostLostError: an island of it is down.
        """
        self._check()
        return self._call(arguments)

    def _check(self) -> None:
        for devices in self._devices:
            self._islands.check(devices)

    def _settle(self) -> None:
        """Waits until the hosts have compiled it, but not for an island that is lost just now."""
        while True:
            self._check()
            with contextlib.suppress(TimeoutError):
                return self._control.wait_compiled(self._registration.number, _LOOK_S)

    def analyze(self) -> pb.ComputationAnalysis:
        """What XLA says of its only computation, on the first of its hosts."""
        found: dict[int, pb.ComputationAnalysis] = self._control.analyze(self._registration.number)
        if not found:  # its host does not answer
            raise errors.HostLostError("a host was lost when the program was compiled; compile it again")
        (one,) = found.values()
        return one


class KeptPrograms:
    """Programs by what they are for: the `most` that ran last are kept. One thread at a time calls it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._programs: collections.OrderedDict[Any, ShardProgram] = collections.OrderedDict()
        self._last: tuple[Any, ShardProgram] | None = None  # what ran last: a loop asks for it again

    @property
    def last(self) -> ShardProgram:
        """What ran last; something has run."""
        assert self._last is not None
        return self._last[1]

    def run(self, key: Any, build: Callable[[], ShardProgram], arguments: list[Any]) -> Any:
        """Runs the program of this key, see `ShardProgram.__call__`; `build` makes it when it is not here. When devices
        were drained, what was bound to them is made anew.
        """
        made = self._program(key, build)(arguments)
        if made is _core.Refusal.STALE:
            self._programs.clear()
            self._last = None
            made = self._program(key, build)(arguments)
        return made

    def _program(self, key: Any, build: Callable[[], ShardProgram]) -> ShardProgram:
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        known = self._programs.get(key)
        if known is None:
            known = self._programs[key] = build()
            if len(self._programs) > self._most:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        self._last = key, known
        return known


class Builder:
    """Makes one `ShardProgram`."""

    def __init__(self, places: Places, name: str) -> None:
        self._places, self._name = places, name
        self._meshes: dict[DeviceList, int] = {}
        self._kinds: list[Kind] = []
        self._values: list[ArrayType] = []
        self._computations: list[Computation] = []
        self._nodes: list[Node] = []
        self._arguments: list[int] = []
        self._functions: list[HostFunction] = []

    def argument(self, kind: Kind) -> int:
        """The next argument: its value."""
        self._arguments.append(self._value(kind))
        return self._arguments[-1]

    def call(
        self,
        devices: DeviceList,
        inputs: Sequence[int],
        outputs: Sequence[Kind],
        *,
        module: bytes = b"",
        options: bytes = b"",
        views: tuple[View, ...] = (),
        donates: Sequence[bool] = (),
        function: HostFunction | None = None,
        name: str = "",
    ) -> list[int]:
        """Calls a module, or a function on each host, or shows views, on these devices; returns the values that it
        makes. `name`: of what is called, if not the program's.
        """
        name = name or self._name
        made = [self._value(kind) for kind in outputs]
        gives = tuple(donates) or (False,) * len(inputs)
        takes, makes = (tuple(self._values[value] for value in values) for values in (inputs, made))
        number, mesh = len(self._computations), self._mesh(devices)
        callbacks = () if function is None else (function.number,)
        self._functions += [] if function is None else [function]
        self._computations.append(Computation(name, module, mesh, takes, makes, gives, callbacks, options, views))
        self._nodes.append(Node(NodeKind.CALL, name, number, tuple(inputs), tuple(made), name, donates=gives))
        return made

    def move(self, value: int, kind: Kind) -> int:
        """The same array, cut otherwise or on other devices."""
        made = self._value(kind)
        self._nodes.append(Node(NodeKind.TRANSFER, f"move.{len(self._nodes)}", -1, (value,), (made,)))
        return made

    def build(self, results: Sequence[int], donated: Collection[int] = (), is_view: bool = False) -> ShardProgram:
        """The program. Waits until its hosts have compiled it.

        Args:
            results: values.
            donated: positions of the arguments that it takes over.
            is_view: its results may show memory of its arguments (MEM-4).

        Raises:
            PathwaysError: hosts refuse it, or cannot compile it.
        """
        session = self._places.session
        for devices in self._meshes:
            self._places.check(devices)
        slices = [self._places.slice_of(devices) for devices in self._meshes]
        program = LogicalProgram(
            self._name,
            tuple(each.mesh_spec for each in slices),
            tuple(self._values),
            tuple(self._computations),
            tuple(self._nodes),
            tuple(self._arguments),
            tuple(results),
            tuple(position in donated for position in range(len(self._arguments))),
            host_functions=tuple(self._functions),
        )
        bindings = tuple(each.binding.devices for each in slices)
        bound = BoundProgram(program, bindings, session.control().topology.devices_per_host)

        def call(number: int, group: int) -> Any:
            inputs, outputs = (self._layouts(values) for values in (self._arguments, results))
            shared = (tuple(range(len(inputs))), tuple(range(len(outputs)))) if is_view else ((), ())
            gives = tuple(sorted(donated))
            return _core.Call(session.native, number, group, inputs, outputs, gives, *shared, name=self._name)

        return ShardProgram(self._places, program, bound, call)

    def _layouts(self, values: Sequence[int]) -> tuple[_core.Layout, ...]:
        return tuple(self._places.layout(self._kinds[value]) for value in values)

    def _mesh(self, devices: DeviceList) -> int:
        return self._meshes.setdefault(devices, len(self._meshes))

    def _value(self, kind: Kind) -> int:
        self._kinds.append(kind)
        self._values.append(kind.type(self._mesh(kind.devices)))
        return len(self._values) - 1
