"""Programs: a user's Python, traced once per signature into one dataflow, then one message per call.

A call with arguments of a known signature goes straight to `_core.Call`; everything else here runs once per signature.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from pathways import _core, _jaxlib, errors
from pathways._jaxlib import trace_modes
from pathways.api.arrays import references, variables
from pathways.api.arrays.array import Array
from pathways.api.pipelines.schedule_plot import HasPath, SchedulePlot, make
from pathways.api.programs.closing_over import ClosesOver
from pathways.api.programs.compiled import Compiled, Lowering, current_shapes
from pathways.api.programs.first_calls import FirstCall
from pathways.api.programs.lowered import Lowered, Tracing
from pathways.api.programs.lowering import lower
from pathways.api.programs.registration import in_time
from pathways.api.programs.signature import LeafName, Split, abstractify, static_key
from pathways.api.programs.stages import Handle
from pathways.api.programs.timed import TimedProgram
from pathways.api.programs.tracing import Interop, Trace, is_tracing, tracing
from pathways.api.session import Session, current
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.lengths import Lengths
from pathways.compiler.options import Options
from pathways.compiler.pipeline import forget_compiled
from pathways.compiler.placed import (
    both_forms,
    check_arguments,
    function_name,
    parameter_names,
    positional_parameters,
    staged,
)
from pathways.compiler.statics import key_of
from pathways.compiler.trace import Traced, names_of, trace, which
from pathways.process.collection import collection_is_rare

P = ParamSpec("P")
R = TypeVar("R")
_Instance = TypeVar("_Instance")
_Rest = ParamSpec("_Rest")

_programs: weakref.WeakSet[Program[..., Any]] = weakref.WeakSet()  # guarded by _programs_lock
_programs_lock = threading.Lock()


def clear_caches() -> None:
    """All programs of this process forget what they have compiled, and so free what they close over."""
    with _programs_lock:
        programs = list(_programs)
    for program in programs:
        program.clear_cache()
    forget_compiled()


class Program(Handle, Generic[P, R]):
    """A program and its compiled signatures. Made by `program` and `jit`. For type checkers it has the signature of the
    function that it was made of; what it returns are `pw.Array`s, which pass for the `jax.Array`s of that signature.
    """

    def __init__(
        self,
        fun: Callable[P, R],
        *,
        name: str | None = None,
        home: Slice | None = None,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Sequence[str] | None = None,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Sequence[str] | None = None,
        options: Mapping[str, Any] | Options | None = None,
    ) -> None:
        if not callable(fun):
            raise errors.ProgramError(f"expected a function, got {fun!r} of type {type(fun).__name__}")
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._name = str(name or function_name(fun))
        self._home = home
        self._static_argnums, self._static_argnames = both_forms(fun, static_argnums, static_argnames)
        self._donate_argnums, self._donate_argnames = both_forms(fun, donate_argnums, donate_argnames)
        self._positional = positional_parameters(fun)
        self._has_static = bool(self._static_argnums or self._static_argnames)
        check_arguments(
            fun,
            self._name,
            static=(static_argnums, static_argnames, self._static_argnums, self._static_argnames),
            donate=(donate_argnums, donate_argnames, self._donate_argnums, self._donate_argnames),
        )
        self._options = Options.of(options)
        self._compiled: dict[Hashable, Compiled] = {}
        self._compiling: dict[Hashable, Lowering] = {}  # the last one that a deadline left to the hosts; or none
        self._last: Compiled | None = None  # what the last call ran; without static arguments only
        self._staged: Any = None  # see `_stage`
        #: With static arguments: by number and names of a call's arguments, see `_find_static`.
        self._routes: dict[Hashable, tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], dict[Any, Compiled]]] = {}
        self._lock = threading.RLock()
        with _programs_lock:
            _programs.add(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Submits one run and returns its results as arrays that are still to come."""
        out: R = self._submit(args, kwargs)
        return out

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: _core.Deadline | None = None) -> Any:
        # One function, because each Python frame costs a tenth of the call.
        known = self._last
        leaves: list[Any] | None
        if known is not None and known.modes == trace_modes():
            if known.is_flat and not kwargs:
                leaves = [*args]
            else:
                leaves = known.given.leaves((args, kwargs))
        else:
            known, leaves = self._find_static(args, kwargs) if self._has_static else (None, None)
        if known is not None and leaves is not None:
            out: Any = known.enter(leaves, deadline)
            if type(out) is not list:
                out = known.resolve_if_fitting(out, leaves, self._home is not None, deadline)
            if out is not None:
                return out[0] if known.is_flat else known.returned.fill(out)
        return self._call_slowly(args, kwargs, deadline)

    def _find_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Compiled | None, list[Any] | None]:
        """What a call with these static arguments ran before, and this call's leaves; None: it takes the long way."""
        route = self._routes.get((len(args), *kwargs))
        if route is None:
            return None, None
        positions, names, dynamic, known = route
        last = known.get(static_key(args, kwargs, positions, names))
        if last is None or last.modes != trace_modes():
            return None, None
        if last.is_flat and len(names) == len(kwargs):
            leaves = [args[n] for n in dynamic]
            if all(type(leaf) is Array for leaf in leaves):
                return last, leaves
        rest = {key: value for key, value in kwargs.items() if key not in names}
        return last, last.given.leaves((tuple([args[n] for n in dynamic]), rest))

    def _learn_static(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: Compiled) -> None:
        """Calls like this one have that signature, until another one with the same static arguments comes."""
        shape = (len(args), *kwargs)
        route = self._routes.get(shape)
        if route is None:
            positions, dynamic, static_names = self._static(len(args))
            route = positions, tuple(name for name in kwargs if name in static_names), dynamic, {}
            route = self._routes.setdefault(shape, route)
        positions, names, _, known = route
        key = static_key(args, kwargs, positions, names)
        if key is not None and (compiled.in_tree.num_leaves or self._home is not None):
            known[key] = compiled

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: _core.Deadline | None) -> Any:
        if is_tracing() or _jaxlib.is_recording():
            return self._fun(*args, **kwargs)
        if _jaxlib.is_jit_disabled():
            return self._call_eagerly(args, kwargs)
        if any(_jaxlib.is_tracer(leaf) for leaf in jax.tree_util.tree_leaves((args, kwargs))):
            if _jaxlib.is_staging():
                return self._stage(args, kwargs)
            # An eager jax.grad or jax.vmap: its placed steps run one by one.
            return _jaxlib.outside_meshes(self._fun)(*args, **kwargs)
        # A mesh that is set for this process does not concern slices. The next call under it is short again.
        settings = trace_modes()
        return current_shapes(lambda: self._run_found(args, kwargs, deadline, settings))

    @_jaxlib.outside_meshes
    def _run_found(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: _core.Deadline | None, settings: Any
    ) -> Any:
        compiled, leaves = self._find(args, kwargs)
        compiled.modes = settings
        checked = bool(_jaxlib.value_checks())  # the short ways look at no value, and know nothing of callbacks
        if checked:
            out = self._run_checked(compiled, leaves, deadline, args, kwargs)
        else:
            self._last = None if compiled.calls_back or self._has_static else compiled
            out = compiled.run(leaves, deadline)
        if not compiled.calls_back:
            compiled.constants.learn(leaves)
            if self._has_static and not checked:
                self._learn_static(args, kwargs, compiled)
        return compiled.returned.fill(out)

    def _call_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under `jax.disable_jit`: the user's Python itself. What is done to arrays of a slice runs there, op by op."""
        return self._fun(*args, **kwargs)

    def _stage(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as JAX records it: for `jax.eval_shape` and the like; lowering it for this process is refused."""
        Interop.install()
        if self._staged is None:
            self._staged = staged(self._fun, self._name, self._static_argnums, self._static_argnames)
        return self._staged(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Program[P, R]: ...
    @overload
    def __get__(
        self: Program[Concatenate[_Instance, _Rest], R], instance: _Instance, owner: type | None = None
    ) -> Callable[_Rest, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method where it stands in a class, as a function of `jax.jit` is."""
        return self if instance is None else types.MethodType(self, instance)

    def _run_checked(
        self, compiled: Compiled, leaves: list[Any], deadline: _core.Deadline | None, args: Any, kwargs: Any
    ) -> list[Array]:
        """A run under `jax.debug_nans`. As JAX does, it goes step by step to find which of a program's computations it
        was."""
        before = compiled.state.arrays(leaves) if compiled.state is not None else []
        try:
            return compiled.run(leaves, deadline)
        except FloatingPointError as error:
            if self._home is None:
                after = compiled.state.arrays(leaves) if compiled.state is not None else []
                for variable, array in before:  # nothing was donated
                    variable._array = array
                try:
                    self._fun(*args, **kwargs)
                except FloatingPointError as first:
                    raise FloatingPointError(f"{first}; in program {self._name!r}") from None
                except Exception:  # JAX traces the body of a loop or a branch, and calls nothing there step by step
                    error.add_note("it is not known which call made it: the program does not run step by step")
                finally:
                    for variable, array in after:
                        variable._array = array
            raise error from None

    def with_timeout(self, seconds: float) -> TimedProgram[P, R]:
        """This program with a deadline on its runs: `seconds` after the call, whatever is not there fails.

        The time counts from the call on. A call that still waits then, for the hosts to compile or for room among the
        runs under way, raises `DeadlineExceededError` itself. The hosts go on compiling, for a later call.

        A result that is late fails at once, for whoever waits for it or asks later, with `DeadlineExceededError`. A run
        that no host was granted yet is dropped; one that was goes on to its end on all its hosts, in its place in the
        order, and what it makes is freed with the results' arrays. What was submitted on top of a late result goes on
        with it if its run was granted, and fails if it was dropped.

        Args:
            seconds: more than 0.

        Returns:
            A view: called as this program is, and sharing what this one has compiled.
        """
        return TimedProgram(self, seconds)

    def trace(self, *args: Any, **kwargs: Any) -> Tracing:
        """Traces for these arguments (arrays, or `jax.ShapeDtypeStruct`s): `.jaxpr`, `.out_info`, `.lower()`."""
        split = self._split(args, kwargs)
        traced, cluster, used = self._trace(split)
        return Tracing(
            traced,
            split,
            functools.partial(self._partition, traced, cluster, used),
            functools.partial(self._lower_plainly, split),
            functools.partial(self._shown_jaxpr, traced, split),
        )

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces, partitions and lowers for these arguments (arrays, or `jax.ShapeDtypeStruct`s); runs nothing."""
        return self.trace(*args, **kwargs).lower()

    def schedule_plot(
        self,
        *args: Any,
        path: str | os.PathLike[str] | None = None,
        measured: str | os.PathLike[str] | HasPath | None = None,
        lengths: Any = None,
        **kwargs: Any,
    ) -> SchedulePlot:
        """What each device does when, for these arguments (arrays, or `jax.ShapeDtypeStruct`s); runs nothing.

        Before a run, a model gives the times, from the order of the plan and from lengths: `lengths`, else those given
        to `pw.pipeline` or `pw.program`, else the flops that XLA counts for each computation (the hosts compile the
        program for that), else forward = 1 and backward = 2 for each stage. The title says which of these it was.

        Args:
            path: an SVG file to write, too.
            measured: a file of `pw.trace`, or the `pw.trace` itself when its block is over. The plot then has the times
                of the last whole run of the program in it, for these arguments.
            lengths: of one microbatch's steps on each stage, in seconds: `{"F": forward, "B": backward}`, or one such
                per stage. "W" is the time for the gradients of the weights if "B" is without them, "T" the time of a
                transfer to the next stage; both are 0 when missing. Sums of gradients, and what is no part of the
                pipeline, take no time then.

        Returns:
            A plot to print; see `SchedulePlot` for its rows, its bubble, its bound and its lengths.

        Raises:
            OptionError: wrong `lengths`, or both `lengths` and `measured`; a path that does not end in ".svg".
            ProgramError: the program has loops that are not unrolled.
            TraceFileError: `measured` is no trace, or has no whole run of this program.
            ProgramError, ShardingError, CompileError: as `lower`, for these arguments.
        """
        if lengths is not None and measured is not None:
            raise errors.OptionError("schedule_plot takes lengths= or measured=, got both")
        lowered = self.lower(*args, **kwargs)
        pipelines = lowered.bound.program.pipelines
        if lowered.logical.loops:
            raise errors.ProgramError(
                f"program {self._name!r} has loops that the controller orders; schedule_plot shows programs without "
                "such loops only: pw.program(unroll=n) unrolls a loop of up to n iterations"
            )
        if lengths is not None:
            known = [Lengths.of(lengths)] * max(len(pipelines), 1)
        else:
            known = [each.lengths or self._options.lengths for each in pipelines] or [self._options.lengths]
        return make(lowered, known, measured, path)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The results' shapes and types for these arguments, as `jax.ShapeDtypeStruct`s; compiles nothing."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets what it has compiled and traced; the next call does both again."""
        # Without the lock, because `jax.clear_caches` may come from a thread that compiles another program.
        self._last = self._staged = None
        self._compiled, self._compiling, self._routes = {}, {}, {}

    def _static(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...], Sequence[str]]:
        """Of a call with `count` positional arguments: which are static, which are not, and the static names."""
        parameters = parameter_names(self._fun, count)
        static = which(self._static_argnums, self._static_argnames, parameters, self._positional)
        dynamic = tuple(n for n in range(count) if n not in static)
        return tuple(sorted(static)), dynamic, names_of(self._static_argnames)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
        static, dynamic, static_names = self._static(len(args))
        dynamic_kwargs = {key: value for key, value in kwargs.items() if key not in static_names}
        leaves, tree = tree_flatten((tuple(args[n] for n in dynamic), dynamic_kwargs))
        constants = (
            tuple(key_of(args[n]) for n in static),
            tuple(sorted((key, key_of(value)) for key, value in kwargs.items() if key in static_names)),
        )
        return Split(args, kwargs, leaves, tree, constants, dynamic)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Compiled, list[Any]]:
        split = self._split(args, kwargs)
        cluster = self._cluster(split.leaves) or current()
        cluster.control()  # of one that is closed, or a forked child's parent's, nothing is compiled
        abstract = tuple(
            abstractify(leaf, LeafName(self._fun, self._name, split, number), cluster)
            for number, leaf in enumerate(split.leaves)
        )
        try:
            key = (split.tree, abstract, split.constants, trace_modes(), id(cluster))
            known = self._known(key)
        except TypeError as error:
            raise errors.ProgramError(f"a static argument of program {self._name!r} is not hashable: {error}") from None
        if known is None:
            with in_time(self._lock):
                known = self._known(key)
                if known is None:
                    self._compiled = {each: is_for for each, is_for in self._compiled.items() if not is_for.is_outdated}
                    with cluster.first_calls.begin(self._name) as call:
                        lowering = self._compiling.pop(key, None) or self._lower(split, call)
                        call.stage("compile")
                        try:
                            known = lowering.compile(split.tree)
                        except errors.DeadlineExceededError:
                            self._compiling = {key: lowering}  # the hosts go on, for a call that comes later
                            raise
                    known.asked = cluster
                    self._compiled[key] = known
        return known, split.leaves

    def _known(self, key: Hashable) -> Compiled | None:
        known = self._compiled.get(key)
        return None if known is None or known.is_outdated else known

    def _cluster(self, leaves: Sequence[Any]) -> Session | None:
        """Whose this call is by its arguments; None: that of the slices that it turns out to use."""
        if self._home is not None:
            return self._home.cluster
        for leaf in leaves:
            array = references.array_of(leaf) if _jaxlib.is_reference(leaf) else leaf
            if type(array) is Array:
                return array.layout.slice.cluster
        return None

    def _lower(self, split: Split, call: FirstCall) -> Lowering:
        with collection_is_rare():
            call.stage("trace")
            traced = self._trace(split)
            call.stage("partition")
            return self._partition(*traced)

    @_jaxlib.outside_meshes
    def _trace(self, split: Split) -> tuple[Traced, Session, list[Slice]]:
        """The traced program, the cluster it is for, and the slices it uses."""
        cluster = self._cluster(split.leaves)
        (cluster or current()).control()
        arguments = [
            abstractify(leaf, LeafName(self._fun, self._name, split, number), cluster)
            for number, leaf in enumerate(split.leaves)
        ]
        dynamic, dynamic_kwargs = tree_unflatten(split.tree, arguments)
        rest = iter(dynamic)
        merged = [next(rest) if number in split.dynamic else arg for number, arg in enumerate(split.args)]
        kwargs = {key: dynamic_kwargs.get(key, value) for key, value in split.kwargs.items()}
        checked = bool(_jaxlib.value_checks())
        thread = threading.get_ident()
        outer = tracing.get(thread)
        here = tracing[thread] = Trace(donates=not checked)
        try:
            traced = trace(
                self._fun,
                merged,
                kwargs,
                name=self._name,
                static_argnums=self._static_argnums,
                static_argnames=self._static_argnames,
                donate_argnums=() if checked else self._donate_argnums,
                donate_argnames=() if checked else self._donate_argnames,
                closed_over=ClosesOver(cluster, self._home),
                state=here,
            )
            variables.check(traced)
        finally:
            if outer is None:
                del tracing[thread]
            else:
                tracing[thread] = outer
        if cluster is None:
            cluster = here.slices[0].cluster if here.slices else current()
        return traced, cluster, [*here.slices, *(() if self._home is None else (self._home,))]

    @_jaxlib.outside_meshes
    def _lower_plainly(self, split: Split, platforms: tuple[str, ...], private: dict[str, Any]) -> Any:
        raise errors.ProgramError(
            f"program {self._name!r} cannot be exported: what it says of slices is lost outside of a cluster. Export "
            "its placed functions, or the plain function: jax.export.export(jax.jit(fun))"
        )

    def _shown_jaxpr(self, traced: Traced, split: Split, *, is_exported: bool) -> Any:
        del split, is_exported
        return traced.jaxpr

    @_jaxlib.outside_meshes
    def _partition(self, traced: Traced, cluster: Session, used: list[Slice]) -> Lowering:
        home = self._home.mesh_spec if self._home is not None else cluster.home_mesh()
        kinds = sorted({each.lowering_platform for each in used}) or [cluster.home_slice().lowering_platform]
        if len(kinds) > 1:
            raise errors.ProgramError(
                f"program {self._name!r} uses slices of several kinds of devices ({', '.join(kinds)}), but a program "
                "is lowered for one: make a program for each, and pass arrays from one to the other with pw.device_put"
            )
        options = dataclasses.replace(self._options, platforms=tuple(kinds))
        return lower(traced, options, home, cluster, used, is_placed=self._home is not None)

    def __repr__(self) -> str:
        return f"<pathways program {self._name!r}>"
