"""One signature of a program, from its lowered form to a run: bound to devices, known to the hosts, called."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.tree_util import tree_flatten, tree_structure, tree_unflatten

from pathways import _core, _jaxlib, errors
from pathways._core import Refusal
from pathways.api.arrays.array import Array
from pathways.api.programs import value_checks
from pathways.api.programs.constants import Constants, kind_of
from pathways.api.programs.registration import CompositeRegistration, Registration, in_time
from pathways.api.programs.signature import abstractify
from pathways.api.programs.snapshots import Sent, SentSnapshots, Snapshot
from pathways.api.programs.stages import Handle, MemoryAnalysis, cost_of, memory_of
from pathways.api.programs.state import State
from pathways.api.programs.tracing import find_slice, remember, variable_of
from pathways.api.session import Session, current
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler import specs
from pathways.compiler.ir import LogicalProgram
from pathways.compiler.options import Options
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import ORDER, Traced, as_argument, device_put, trace
from pathways.plan.binding import BoundProgram, owners_of
from pathways.plan.composite import shared_values
from pathways.process.collection import collection_is_rare
from pathways.protocol.control_pb2 import ComputationAnalysis

_Result = TypeVar("_Result")
#: How often a call is made again whose slices get another shape meanwhile.
_ATTEMPTS = 8


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A traced and lowered program, on no devices yet. It keeps the slices in `used` alive."""

    traced: Traced
    program: LogicalProgram
    cluster: Session
    used: list[Slice]
    #: What the hosts were still compiling when a deadline passed: the next `register` goes on there.
    begun: list[tuple[Registration, BoundProgram]] = dataclasses.field(default_factory=list)

    def slices(self) -> list[Slice]:
        """Those of its meshes, in their order."""
        return [find_slice(mesh) for mesh in self.program.meshes]

    def bind(self) -> BoundProgram:
        """On the devices where its slices lie now."""
        with self.cluster.steady:  # no slice moves or gets another shape between the look at it and its devices
            slices = self.slices()
            for slice_, mesh in zip(slices, self.program.meshes, strict=True):
                if slice_.mesh_spec != mesh:
                    raise errors.SliceResizedError(
                        f"program {self.program.name!r} was made for a slice of shape {dict(mesh.axes)}, which is "
                        f"{slice_!r} now: lower and compile it again"
                    )
                if slice_.cluster is not self.cluster:
                    raise errors.PlacementError(
                        f"program {self.program.name!r} uses {slice_!r}, which belongs to another "
                        f"cluster than its arguments or its other slices ({self.cluster!r})"
                    )
            topology = self.cluster.control().topology
            return BoundProgram(
                self.program,
                tuple(slice_.binding.devices for slice_ in slices),
                topology.devices_per_host,
                dict(enumerate(topology.island_of_hosts)) if self.program.has_choices else {},
            )

    def register(self) -> tuple[Registration, BoundProgram]:
        """Makes the program known to the hosts where its slices lie now; returns when they have compiled it.

        END-1: the wait ends with the call's deadline, the cluster, a host that is lost meanwhile, and Ctrl-C.
        """
        self.cluster.sweep()
        bound = self.bind()
        begun, self.begun[:] = list(self.begun), []
        registration = next((each for each, on in begun if on.bindings == bound.bindings), None)
        del begun
        if registration is None:
            kind = CompositeRegistration if self.program.loops else Registration
            with collection_is_rare():
                registration = kind(self.cluster, self.program, bound)
        try:
            registration.settle()
        except errors.DeadlineExceededError:
            self.begun.append((registration, bound))
            raise
        except errors.HostLostError:  # no successor of a host is to compile what may have ended the host
            registration.drop()
            self.cluster.sweep()
            raise
        return registration, bound

    def compile(self, in_tree: Any) -> Compiled:
        """Registers it with the hosts, waits until they have compiled it. `in_tree`: of its arguments."""
        cluster = self.cluster
        registration, bound = self.register()
        slices = self.slices()

        def layout(value: int, struct: Any) -> _core.Layout:
            kind = self.program.values[value]
            slice_ = slices[kind.mesh]
            return cluster.layout(
                specs.as_typed(kind, slice_.mesh_spec, struct),
                slice_,
                dtype=_jaxlib.logical_dtype(struct.dtype, kind.dtype),
                shape=tuple(struct.shape),
                weak_type=bool(struct.weak_type) and not getattr(struct, "is_reference", False),
            )

        calls = self.program.calls
        traced = self.traced.in_order() if calls.last >= 0 else self.traced
        results = (*self.traced.results, *(ORDER for _ in range(calls.count)))
        inputs = tuple(
            layout(value, argument) for value, argument in zip(self.program.arguments, traced.arguments, strict=True)
        )
        outputs = tuple(layout(value, result) for value, result in zip(self.program.results, results, strict=True))
        donated = tuple(position for position, given in enumerate(self.program.donated_arguments) if given)
        shared, shared_results = _shared(bound)
        closed_over = list(traced.closed_over)
        sent: dict[int, tuple[Snapshot, Sent]] = {}
        for at, (value, there) in enumerate(zip(traced.closed_over, inputs[traced.given :], strict=True)):
            if isinstance(value, Snapshot):
                sent[at] = value, value.on(there)
                closed_over[at] = sent[at][1].array
            # state has another array in each run
            elif not _jaxlib.is_reference(value) and value.layout is not there and variable_of(value) is None:
                closed_over[at] = move(value, there.slice, there.spec[: len(there.shape)])
        call = _core.Call(
            cluster.native,
            registration.number,
            registration.group,
            inputs,
            outputs,
            donated,
            shared,
            shared_results,
            closed_over,
            traced.name,
            traced.argument_names,
        )
        return Compiled(call, in_tree, self, bound, registration, SentSnapshots(call, sent))


def _shared(bound: BoundProgram) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the arguments, and of the results, that no later run may take over as they are (MEM-4): read by a
    transfer, or the same value under two names, or perhaps so: the result of a select has the buffer of one of the
    values that it selects from. The name of a donated argument is gone after the run, so a result that is this argument
    has the value for itself."""
    program, kept, owners = bound.program, shared_values(bound), owners_of(bound.program)

    def buffers(value: int) -> frozenset[int]:
        return owners.get(value, frozenset((value,)))

    left = [v for v, donated in zip(program.arguments, program.donated_arguments, strict=True) if not donated]
    times = collections.Counter(each for value in (*left, *program.results) for each in buffers(value))

    def positions(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            position
            for position, value in enumerate(values)
            if value in kept or any(times[each] > 1 for each in buffers(value))
        )

    return positions(program.arguments), positions(program.results)


class Compiled(Handle):
    """One signature of a program, ready to run."""

    def __init__(
        self,
        call: _core.Call,
        in_tree: Any,
        lowering: Lowering,
        bound: BoundProgram,
        registration: Registration,
        sent: SentSnapshots,
    ) -> None:
        self.call = call
        self._snapshots = sent if len(sent) else None
        self.state = State.of(call, lowering.traced, lowering.cluster, copy, move)
        #: Submits one run, or refuses: the way of most calls. No cycle, so that what it closes over goes at once.
        self.enter: Callable[..., Any] = call
        if self.state is not None or self._snapshots is not None:
            self.enter = functools.partial(Compiled._enter, cast(Compiled, weakref.proxy(self)))
        self.in_tree = in_tree
        self.out_tree = lowering.traced.out_tree
        self.given, self.returned = _core.Tree(in_tree, Array), _core.Tree(self.out_tree, Array)
        self.calls_back = lowering.program.calls.count != 0
        self.is_flat = (
            not self.calls_back
            and in_tree == tree_structure(((0,) * len(call.inputs), {}))
            and self.out_tree == tree_structure(0)
        )
        traced = lowering.traced
        self.names = (*traced.argument_names[: traced.given], "the order of callbacks")[: len(call.inputs)]
        self.modes = _jaxlib.trace_modes()
        self.bound = bound
        self.constants = Constants(call, self.names)
        self.is_outdated = False  # a slice of it has got another shape: it cannot be called any more
        self.asked: Session | None = None  # the cluster that the arguments or the user named when it was found
        self._lowering = lowering
        self._registration: Registration | None = registration  # who holds `call` to call it holds us as well
        self._lock = threading.Lock()
        with lowering.cluster.steady:
            call.stale = bound.bindings != lowering.bind().bindings  # a slice moved meanwhile
            lowering.cluster.compiled.add(self)
        lowering.cluster.failures.watch()

    def resolve_if_fitting(
        self, refusal: Refusal, leaves: list[Any], has_home: bool, deadline: _core.Deadline | None
    ) -> list[Array] | None:
        """What `call` refused for these leaves, when only host values of kinds seen before or something that `_resolve`
        removes is in its way; None: the long way must look at them.

        Only a call under `modes` may come here. `has_home`: the program's cluster does not depend on its arguments.
        """
        if (
            self.state is not None
            or self.is_outdated
            or refusal is Refusal.UNLIKE
            or (refusal is Refusal.HOST_VALUE and not self._knows(leaves, has_home))
        ):
            return None
        try:
            return self._resolve(refusal, leaves, deadline)
        except errors.SliceResizedError:
            return None

    def _knows(self, leaves: list[Any], is_placed: bool) -> bool:
        """Whether the host values among the leaves are of kinds seen before."""
        for leaf, kinds in zip(leaves, self.constants.kinds, strict=True):
            if type(leaf) is Array:
                is_placed = True
            elif kind_of(leaf) not in kinds:
                return False
        return is_placed or current() is self.asked

    def uses(self, slice_: Slice) -> bool:
        """Whether a slice is part of it."""
        return any(mesh.name == slice_.mesh_spec.name for mesh in self.bound.program.meshes)

    def unbind(self) -> None:
        """A slice of it lies elsewhere: the next call binds it again. Cluster.steady is held."""
        self.call.stale = True
        self._registration = None

    def outdate(self) -> None:
        """A slice of it has got another shape: whoever needs it compiles again. Cluster.steady is held."""
        self.is_outdated = True
        self.unbind()

    def _bind_again(self) -> None:
        """Lowers to the devices where its slices lie now: nothing is traced or partitioned."""
        cluster = self._lowering.cluster
        with in_time(self._lock):
            while self.call.stale:
                registration, bound = self._lowering.register()
                with cluster.steady:
                    if bound.bindings != self._lowering.bind().bindings:
                        continue
                    self.bound = bound
                    self._registration = registration
                    self.call.bind(registration.number, registration.group, *_shared(bound))

    def run(self, leaves: list[Any], deadline: _core.Deadline | None = None) -> list[Array]:
        """Puts what is no array yet where the program wants it, and submits.

        Raises:
            SliceResizedError: it is outdated.
        """
        kinds = _jaxlib.value_checks()
        if not kinds:
            return self._run(leaves, deadline)
        with jax.debug_nans(False), jax.debug_infs(False):  # embedded, this thread is the host as well
            out = self._run(leaves, deadline)
            value_checks.check(kinds, self.bound.program.name, out, self._lowering.traced.result_names)
        return out

    def _run(self, leaves: list[Any], deadline: _core.Deadline | None) -> list[Array]:
        if self.is_outdated:
            self._bind_again()
        if self._snapshots is not None:
            self._snapshots.look()
        if self.state is None:
            return self._run_all(leaves, deadline)
        with self.state.turn(leaves) as given:
            return self.state.take(self._run_all(given, deadline))

    def _run_all(self, leaves: list[Any], deadline: _core.Deadline | None) -> list[Array]:
        def submit(*before: Any) -> list[Array]:
            given = [*leaves, *before]
            return self._resolve(self.call(given, deadline), given, deadline)

        if not self.calls_back:
            return submit()
        lowering = self._lowering
        results: list[Array] = lowering.cluster.effects.run(lowering.program, self.call.inputs, submit, move)
        return results

    def _enter(self, leaves: list[Any], deadline: _core.Deadline | None = None) -> list[Array] | Refusal:
        if self.is_outdated:  # what it closes over has other layouts
            return Refusal.STALE
        if self._snapshots is not None:
            self._snapshots.look()
        if self.state is None:
            return cast(list[Array] | Refusal, self.call(leaves, deadline))
        if not self.state.takes(leaves):
            return Refusal.UNLIKE
        with self.state.turn(leaves) as given:
            out: list[Array] | Refusal = self.call(given, deadline)
            return self.state.take(out) if isinstance(out, list) else out

    def _resolve(self, out: list[Array] | Refusal, leaves: list[Any], deadline: _core.Deadline | None) -> list[Array]:
        """The results for leaves of this signature. `out` is what `call` gave for them. While it is a refusal, this
        removes the reason and calls again."""
        given: list[Any] = []
        while not isinstance(out, list):
            if out is Refusal.STALE or self.is_outdated:
                self._bind_again()  # of one that is outdated, this raises
            elif out is Refusal.SHARED:
                donated = [position for position in self.call.donated if position < len(leaves)]
                if self.state is not None:
                    leaves = self.state.look(leaves)  # somebody reads a variable's or a reference's array since
                    donated = [position for position in donated if not self.state.is_given(position)]
                given = given or [leaves[position] for position in donated]
                leaves = self._copy_shared(leaves)
            else:  # a host value; or an array of another layout, which `put_leaf` refuses
                before, leaves = (
                    leaves,
                    [
                        leaf if type(leaf) is Array and leaf.layout is layout else self.constants.put(position, leaf)
                        for position, (leaf, layout) in enumerate(zip(leaves, self.call.inputs, strict=True))
                    ],
                )
                if all(map(operator.is_, leaves, before)):
                    raise errors.ProgramError("internal: arguments were put to other layouts than the program's")
            out = self.call(leaves, deadline)
        for array in given:  # those that were copied
            array.delete()
        return out

    def _copy_shared(self, leaves: list[Any]) -> list[Any]:
        """MEM-4: a donated argument is copied when something else may still read it."""
        times = collections.Counter(map(id, (*leaves, *self.call.closed_over)))

        def is_shared(array: Array) -> bool:
            return not array.is_deleted() and (array.shared or array.cached is not None or times[id(array)] > 1)

        return [
            copy(leaf) if position in self.call.donated and is_shared(leaf) else leaf
            for position, leaf in enumerate(leaves)
        ]

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimate of one run, for one device of each slice ("flops", "bytes accessed", ...), from the hosts."""
        return cost_of(self.bound.program, self._analyze())

    def flops(self) -> dict[int, float]:
        """XLA's estimate of the floating-point operations of each computation on one device, by its number; 0 where XLA
        has none. From the hosts."""
        return {number: max(0.0, what.cost.get("flops", 0.0)) for number, what in self._analyze().items()}

    def memory_analysis(self) -> MemoryAnalysis:
        """What XLA says of the memory of its computations on one device, from the hosts."""
        return memory_of(self.bound.program, self._analyze())

    def _analyze(self) -> dict[int, ComputationAnalysis]:
        if self.call.stale:
            self._bind_again()
        registration = self._registration
        assert registration is not None
        if isinstance(registration, CompositeRegistration):
            raise errors.ProgramError(
                f"program {self._lowering.traced.name!r} has loops that the controller orders; XLA's analysis is given "
                "for programs without such loops only: analyze the loop's body as a program"
            )
        found: dict[int, ComputationAnalysis] = self._lowering.cluster.control().analyze(registration.number)
        if len(found) < len(self.bound.program.computations):
            raise errors.HostLostError(f"not every host of program {self._lowering.traced.name!r} answers")
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on arguments of this very signature.

        Raises:
            ProgramError: they have another one, or JAX traces the call: what is compiled cannot be transformed.
        """
        leaves, tree = tree_flatten((args, kwargs))
        if any(map(_jaxlib.is_tracer, leaves)):
            raise errors.ProgramError(
                f"program {self._lowering.traced.name!r} is compiled for one signature, so JAX cannot transform this "
                "call (jax.grad, jax.vmap, jax.jit and the like); call the function that was lowered"
            )
        if tree != self.in_tree:
            raise errors.ProgramError(f"compiled for arguments of structure {self.in_tree}, got {tree}")
        for leaf, layout, name in zip(leaves, self.call.inputs, self.names, strict=not self.calls_back):
            kind = leaf if type(leaf) is Array else as_argument(leaf, f"argument {name}")
            if (kind.shape, kind.dtype) != (layout.shape, layout.dtype):
                raise errors.ProgramError(
                    f"argument {name}: compiled for {layout.dtype}{list(layout.shape)}, got "
                    f"{kind.dtype}{list(kind.shape)}"
                )
        for position, leaf in enumerate(leaves):
            if _jaxlib.is_reference(leaf) != (self.state is not None and self.state.is_given(position)):
                wanted = "an array" if _jaxlib.is_reference(leaf) else "a reference (jax.new_ref)"
                raise errors.ProgramError(f"argument {self.names[position]}: compiled for {wanted}, got {leaf!r}")
        return tree_unflatten(self.out_tree, self.run(leaves))


def current_shapes(work: Callable[[], _Result]) -> _Result:
    """Finds what is compiled for the slices' shapes of now and runs it: does `work` again if a slice gets another shape
    meanwhile.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return work()
        except errors.SliceResizedError:
            if attempt == _ATTEMPTS - 1:
                raise
            if attempt > 0:  # JAX has kept the trace of a loop's body, say, that calls a function of the old mesh
                jax.clear_caches()
    raise AssertionError("the last attempt raises")


def move(array: Array, devices: Slice, spec: tuple[tuple[str, ...], ...]) -> Array:
    """The array on another slice, or sharded otherwise: a program of one transfer.

    Raises:
        PlacementError: the slice belongs to another cluster.
    """

    def make() -> Callable[[Any], Any]:
        return functools.partial(device_put, mesh=devices.mesh_spec, spec=specs.to_partition_spec(spec))

    return _run_one("device_put", lambda: (devices.mesh_spec.name, spec), make, devices, array)


def copy(array: Array) -> Array:
    """The same value in memory of its own, where the array lives."""
    home: Slice = array.layout.slice

    def make() -> Callable[[Any], Any]:
        spec = specs.to_partition_spec(array.layout.spec[: array.ndim])
        barrier = jax.lax.optimization_barrier
        return placed(barrier, home.mesh_spec, in_shardings=spec, out_shardings=spec, name="copy")

    return _run_one("copy", tuple, make, home, array)


@_jaxlib.outside_meshes
def _run_one(
    name: str,
    target: Callable[[], Hashable],
    make: Callable[[], Callable[[Any], Any]],
    home: Slice,
    array: Array,
) -> Array:
    """Runs the function that `make` gives on one array. It is compiled once per name, target and layout."""
    session: Session = home.cluster
    return current_shapes(lambda: _compiled_one(session, name, target(), make, home, array).run([array])[0])


def _compiled_one(
    session: Session, name: str, target: Hashable, make: Callable[[], Callable[[Any], Any]], home: Slice, array: Array
) -> Compiled:
    key = (name, target, array.layout, _jaxlib.trace_modes())
    known: Compiled | None = session.moves.get(key)
    if known is None:
        session.control()
        argument = abstractify(array, f"the argument of {name!r}", session)
        used = [home, array.layout.slice]
        for slice_ in used:
            remember(slice_)
        traced = trace(make(), [argument], {}, name=name)
        options = Options(platforms=(home.lowering_platform,))
        program = compile_traced(traced, options, default_mesh=home.mesh_spec)
        lowering = Lowering(traced, program, session, used)
        known = session.moves[key] = lowering.compile(tree_structure(((0,), {})))
    return known
