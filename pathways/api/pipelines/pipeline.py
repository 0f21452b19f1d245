"""`pw.pipeline`: a model in stages, each on a slice, whose microbatches follow a schedule.

A call is ordinary Python that a program traces: for each microbatch, in the scope of that microbatch, the stages one
after the other. `pathways/compiler/schedule` reads the scopes and puts the steps into order.

A stage is a placed function, or any function that calls placed ones: a mixture of experts. The slices of the latter are
known when it has been traced, so a pipeline with such a stage is traced twice: first alone, for its slices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from pathways import _jaxlib, errors
from pathways.api.pipelines import keys, stage_places
from pathways.api.pipelines.microbatches import add_up, check_reduce, checked_count, cut, scoped
from pathways.api.programs.placed import PlacedFunction, jit
from pathways.api.programs.program import Program
from pathways.api.programs.tracing import call_pipeline, is_tracing
from pathways.compiler.added_primitives.fan_out import fan_out
from pathways.compiler.inlining import placed_meshes
from pathways.compiler.ir import MeshSpec
from pathways.compiler.lengths import Lengths, per_stage
from pathways.compiler.options import check_schedule
from pathways.compiler.orders import CHUNKED
from pathways.compiler.pipeline_spec import OwnSchedule, PipelineSpec, schedule_name
from pathways.compiler.placed import function_name

#: A placed function, or a function that calls some.
Stage = PlacedFunction[..., Any] | Callable[[Any, Any], Any]

_ARRAYS = (jax.Array, np.ndarray)


class Pipeline(Program[..., Any]):
    """A model in stages. Made by `pipeline`."""

    def __init__(self, model: _Model) -> None:
        self._model = model
        super().__init__(model.run, name=model.name)
        self.__name__ = self.__qualname__ = model.name

    def __call__(self, params: Any, batch: Any, *targets: Any, key: Any = None) -> Any:
        """Inside a program's trace: the calls of its stages. Alone: one run of a program of its own.

        Args:
            params, batch, targets: see `pw.pipeline`.
            key: a random key, for stages and a loss with a parameter `key`. In microbatch m, stages[s] gets

                    jax.random.fold_in(jax.random.fold_in(key, m), s)

                and the loss the same with the number of stages for s. So the keys depend on the key and these numbers
                alone: all schedules, slices and shardings have the same ones. The same in plain JAX:

                    def model(params, batch, targets, key):
                        losses = []
                        for m, (x, t) in enumerate(zip(jnp.split(batch, M), jnp.split(targets, M))):
                            of_microbatch = jax.random.fold_in(key, m)
                            for s, stage in enumerate(stages):
                                x = stage(params[s], x, key=jax.random.fold_in(of_microbatch, s))
                            losses.append(loss(x, t))
                        return sum(losses) / M

        Raises:
            ProgramError: what `pw.pipeline` says; a key that is none, that nobody takes, or that a stage misses.
        """
        if is_tracing():
            return self._model.run(params, batch, *targets, key=key)
        return super().__call__(params, batch, *targets, **keys.given(key))

    def place(self, params: Any, specs: Any = None, *, per_stage: Callable[[Any], Any] | None = None) -> Any:
        """Puts parameters where the stages read them: each leaf on the slice of its stage.

            params = model.place(init())  # [of stage 0, of stage 1, ...]
            state = optimizer.init(params)  # it lies as the parameters do
            state = pw.place(saved, like=params)  # so does what comes from elsewhere

        Args:
            params: a list with one pytree per stage; with `per_stage`, any tree. A `jax.ShapeDtypeStruct` comes back
                with a sharding, and moves nothing.
            specs: how leaves are cut: rules or a prefix, as for `pw.place`; the number of the stage begins a path of a
                list ("0/w_in"). None: as `in_shardings` of the stage says, else replicated.
            per_stage: `per_stage(params)` returns the list that the pipeline is called with. A leaf that several stages
                read, such as a tied embedding, lives with the first of them.

        Returns:
            The same tree of `pw.Array`s.

        Raises:
            ProgramError: another number of stages; a leaf that `per_stage` hands to no stage as it is; a host value for
                a stage that is no placed function: place it first.
            ShardingError: as `pw.place`.
        """
        return self._model.place(params, specs, per_stage)

    def place_batch(self, batch: Any, *targets: Any) -> Any:
        """Puts a batch on the slice of the first stage, and targets on the slice of the loss, ahead of a call.

        Dimensions are cut as `in_shardings` of the stage and of the loss says, but the first one is whole on each
        device, because the microbatches are cut from it. NumPy arrays that are passed to a call go the same way.

        Returns:
            The batch, or a tuple (batch, *targets).

        Raises:
            ProgramError: targets without a loss, or a first stage that is no placed function.
            ShardingError: as `pw.place`.
        """
        return self._model.place_batch((batch, *targets))

    def __repr__(self) -> str:
        return f"<pw.pipeline {self._model.name!r} of {self._model.depth} stages>"


class _Model:
    """What a call of a pipeline calls."""

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: PlacedFunction[..., Any] | None,
        reduce: str,
        spec: PipelineSpec,
        lengths: Any,
    ) -> None:
        """`spec`: without slices. `lengths`: as the user gives them."""
        self._stages = tuple(stages)
        self._loss = loss
        self._reduce = reduce
        self._spec = spec
        self._lengths = lengths
        self.name = spec.name
        self.depth = len(stages)
        if all(isinstance(stage, PlacedFunction) for stage in stages):
            self.spec_of([], None, [])

    def spec_of(self, params: Sequence[Any], x: Any, of_stage: Sequence[Any]) -> PipelineSpec:
        """The pipeline on the slices of now, of the shapes that they have now. `of_stage`: the keys of a microbatch.

        Raises:
            ProgramError: the stages visit slices in a way that the schedule has not.
            OptionError: wrong lengths.
        """
        each: list[tuple[MeshSpec, ...] | None] = [
            (stage.slice.mesh_spec,) if isinstance(stage, PlacedFunction) else None for stage in self._stages
        ]
        for number, stage in enumerate(self._stages):
            if None not in each:
                break
            # A new function each time, so that JAX gives no trace that it keeps for other types of values.
            traced, x = jax.make_jaxpr(lambda p, x, k, stage=stage: stage(p, x, **keys.given(k)), return_shape=True)(
                params[number], x, of_stage[number]
            )
            each[number] = each[number] or self._slices_of(number, traced)
        slices = [found for found in each if found is not None]
        if self._loss is not None:
            slices.append((self._loss.slice.mesh_spec,))
        meshes, beside = tuple(found[0] for found in slices), tuple(found[1:] for found in slices)
        what = f"pipeline {self.name!r}"
        lengths = _lengths(self._lengths, self.depth, meshes, what)
        spec = dataclasses.replace(self._spec, meshes=meshes, beside=beside if any(beside) else (), lengths=lengths)
        _check_slices(spec, what)
        return spec

    def _slices_of(self, number: int, traced: Any) -> tuple[MeshSpec, ...]:
        """The slices of a stage that is no placed function, in the order of its calls."""
        found = tuple(dict.fromkeys(placed_meshes(traced)))
        if not found:
            raise errors.ProgramError(
                f"stages[{number}] of pipeline {self.name!r}: expected a placed function, pw.jit(fun, devices=slice), "
                f"or a function that calls some, got {self._stages[number]!r}, which calls none"
            )
        return found

    def place(self, params: Any, specs: Any, per_stage: Callable[[Any], Any] | None) -> Any:
        """The parameters on the slices of their stages."""
        return stage_places.place_params(self._stages, params, specs, per_stage, f"pipeline {self.name!r}")

    def place_batch(self, given: tuple[Any, ...]) -> Any:
        """Batch and targets on the slices that read them."""
        return stage_places.place_batch(self._stages, self._loss, given, f"pipeline {self.name!r}")

    def run(self, params: Any, batch: Any, *targets: Any, key: Any = None) -> Any:
        """The calls of all microbatches, and what the pipeline returns."""
        self._check_arguments(params, targets)
        each_key = keys.keys_of(
            (*self._stages, self._loss), key, self._spec.microbatches, f"pipeline {self._spec.name!r}"
        )
        count = self._spec.microbatches
        size, part_of = cut({"batch": batch, "targets": targets}, count, f"pipeline {self._spec.name!r}")
        spec = self.spec_of(params, part_of(0)["batch"], each_key[0]) if is_tracing() else self._spec
        name = call_pipeline(spec)
        one: Callable[..., tuple[Any, list[Any]]] = functools.partial(self._one, name)
        each = [[of_stage] * count for of_stage in params]  # by stage and microbatch
        if is_tracing():
            each = [fan_out(of_stage, count) for of_stage in params]
            if all(isinstance(stage, PlacedFunction) for stage in self._stages):
                one = self._traced_once(name, [of_stage[0] for of_stage in each])
        outputs: list[Any] = []
        more: list[Any] = []  # what the loss returns beside the scalar, per microbatch; empty if that is nothing
        for number in range(count):
            part = part_of(number)
            with scoped(name, number):
                own = [of_stage[number] for of_stage in each]
                x, rest = one(own, part["batch"], part["targets"], each_key[number])
            outputs.append(x)
            more += rest
        if self._loss is None:
            return self._join(outputs, size)
        total = add_up(outputs, self._reduce)
        return (total, jax.tree.map(lambda *leaves: jnp.stack(leaves), *more)) if more else total

    def _one(
        self, name: str, params: Sequence[Any], x: Any, targets: Any, of_stage: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """The calls of one microbatch: what it returns, and in a list what the loss returns beside the scalar."""
        more: list[Any] = []
        for stage, function in enumerate(self._stages):
            with scoped(name, None, stage):
                x = function(params[stage], x, **keys.given(of_stage[stage]))
        if self._loss is not None:
            with scoped(name, None, len(self._stages)):
                x = self._scalar(self._loss(x, *targets, **keys.given(of_stage[-1])), more)
        return x, more

    def _traced_once(self, name: str, params: Any) -> Callable[..., tuple[Any, list[Any]]]:
        """`_one` as a `jax.jit` that all microbatches call. What is no array among `params` may be static for a stage,
        so it is no argument of the `jax.jit`; it is the same for all microbatches.
        """
        leaves, tree = jax.tree.flatten(params)
        arrays = [n for n, leaf in enumerate(leaves) if _jaxlib.is_tracer(leaf) or isinstance(leaf, _ARRAYS)]

        def microbatch(given: Sequence[Any], x: Any, targets: Any, of_stage: Any) -> tuple[Any, list[Any]]:
            filled = dict(zip(arrays, given, strict=True))
            own = tree.unflatten(filled.get(n, leaf) for n, leaf in enumerate(leaves))
            return self._one(name, own, x, targets, of_stage)

        jitted = jax.jit(microbatch)

        def call(params: Any, x: Any, targets: Any, of_stage: Any) -> tuple[Any, list[Any]]:
            found = jax.tree.leaves(params)
            return cast("tuple[Any, list[Any]]", jitted([found[n] for n in arrays], x, targets, of_stage))

        return call

    def _check_arguments(self, params: Any, targets: tuple[Any, ...]) -> None:
        name, count = self._spec.name, len(self._stages)
        if not isinstance(params, list | tuple):
            raise errors.ProgramError(
                f"params of pipeline {name!r}: expected a list or tuple with one pytree per stage, {count} in all, got "
                f"an object of type {type(params).__name__}"
            )
        if len(params) != count:
            raise errors.ProgramError(
                f"params of pipeline {name!r}: expected one pytree per stage, {count} in all, got {len(params)}"
            )
        if targets and self._loss is None:
            raise errors.ProgramError(
                f"pipeline {name!r} has no loss, so it takes (params, batch), got {len(targets)} more arguments; give "
                "pw.pipeline a loss="
            )

    def _scalar(self, result: Any, more: list[Any]) -> Any:
        """The loss of a microbatch. What else the loss function returns is appended to `more`."""
        pair = isinstance(result, tuple) and len(result) == 2
        value = result[0] if pair else result
        if pair:
            more.append(result[1])
        if jax.tree.structure(value) != jax.tree.structure(0) or jnp.shape(value) != ():
            raise errors.ProgramError(
                f"loss of pipeline {self._spec.name!r}: expected it to return a scalar, or (scalar, more), got "
                f"{jax.tree.map(lambda x: jax.typeof(x).str_short(), result)}"
            )
        return value

    def _join(self, outputs: Sequence[Any], size: int) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs[0]):
            if jnp.shape(leaf)[:1] != (size,):
                raise errors.ProgramError(
                    f"result{jax.tree_util.keystr(path)} of the last stage of pipeline {self._spec.name!r}: expected "
                    f"the microbatch's {size} examples as its first dimension, because the microbatches are joined "
                    f"there, got {jax.typeof(leaf).str_short()}"
                )
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def pipeline(
    stages: Sequence[Stage],
    *,
    microbatches: int,
    schedule: str | OwnSchedule = "1F1B",
    loss: Callable[..., Any] | None = None,
    reduce: str = "mean",
    lengths: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None,
    name: str | None = None,
) -> Pipeline:
    """A model in stages, whose microbatches follow a schedule: `model(params, batch, *targets)`.

    `params` is a list with one pytree per stage. If an array is in two of them, the stages share it. The leaves of
    `batch` and `targets` have the batch as their first dimension. The model returns the reduced loss, or the last
    stage's output if there is no loss. `model.place(params)` puts the parameters where the stages read them. With
    `key=`, stages get random keys of their own. It may be called in a program or alone, and `jax.value_and_grad`,
    `jax.grad` and `jax.vmap` may be around it in a program.

    Args:
        stages: placed functions `stage(params, x) -> x`, in order. `params` and `x` are any pytrees. Neighbours on one
            slice are one stage of the schedule. A stage may also be a function that calls placed functions, such as a
            `pw.nn.MixtureOfExperts`. It is on the slice of its first call; its other slices are its own.
        microbatches: into how many equal parts the batch is cut.
        schedule: "1F1B", "GPipe", "ZeroBubbleH1", "auto", or "none" (the order of the text: one microbatch after the
            other); with stages on the slices in turn, several per slice, "Interleaved1F1B" or "Circular". Or an order
            of your own, `order(stage, stages, microbatches, chunks) -> [(phase, microbatch, chunk), ...]` with phase
            "F" (forward), "B" (backward) and, if backward steps are to be divided, "W" (gradients of weights); all of
            them for each stage. `stages` is then the number of slices, and `chunks` the number of stages on each.
        loss: `loss(output, *targets)` returns a scalar, or a scalar and more. A plain function runs on the last stage's
            slice. What else it returns is stacked: its leaves get a first dimension of `microbatches`, and the model
            returns (loss, more).
        reduce: "mean" or "sum" of the microbatches' losses.
        lengths: how long a stage takes for one microbatch, in seconds: `{"F": 0.01, "B": 0.02}`, with "W" if "B" is
            without the weights' gradients, and "T" for a transfer to the next stage; or a list with one of these per
            stage, and one more for a loss on a slice of its own. "auto" and `schedule_plot` use them.
        name: shown in plans and errors.

    Raises:
        ProgramError: an argument is not as described; when called, also a batch that does not divide. It names the
            argument.
        OptionError: an unknown schedule, or wrong lengths.
        ScheduleError: when called, if the calls cannot follow the schedule; it says why.
    """
    name = str(name or "pipeline")
    what = f"pipeline {name!r}"
    if not isinstance(stages, list | tuple) or not stages:
        raise errors.ProgramError(f"stages of {what}: expected a list of placed functions, got {stages!r}")
    for number, stage in enumerate(stages):
        if not callable(stage):
            raise errors.ProgramError(
                f"stages[{number}] of {what}: expected a placed function, pw.jit(fun, devices=slice), got {stage!r} of "
                f"type {type(stage).__name__}"
            )
    microbatches = checked_count(microbatches, what)
    check_reduce(reduce, what)
    if not callable(schedule):
        schedule = check_schedule(schedule)
    if not (loss is None or callable(loss)):
        raise errors.ProgramError(f"loss of {what}: expected a function loss(output, *targets), got {loss!r}")
    placed: PlacedFunction[..., Any] | None = None
    if loss is not None:
        if not isinstance(loss, PlacedFunction):
            if not isinstance(stages[-1], PlacedFunction):
                raise errors.ProgramError(
                    f"loss of {what}: expected a placed function, pw.jit(loss, devices=slice), because the last stage "
                    f"is none and has no slice before it is traced, got {loss!r}"
                )
            loss = jit(loss, devices=stages[-1].slice, name=function_name(loss))
        placed = cast("PlacedFunction[..., Any]", loss)
    return Pipeline(_Model(stages, placed, reduce, PipelineSpec(name, schedule, microbatches), lengths))


def _check_slices(spec: PipelineSpec, what: str) -> None:
    """Refuses stages that come back to a slice, unless the schedule has several chunks per slice.

    Then the stages must visit the slices in turn, because the schedules are defined for that.
    """
    if spec.schedule == "none":
        return
    places = spec.places()
    _check_beside(spec, places, what)
    back = next((n for n, (_, chunk) in enumerate(places) if chunk), None)
    if back is None:
        return
    first = spec.meshes.index(spec.meshes[back])
    where = f"stages[{first}] and stages[{back}] of {what} are on slice {spec.meshes[back].name!r}, with another slice "
    if isinstance(spec.schedule, str) and spec.schedule not in CHUNKED:
        raise errors.ProgramError(
            f"{where}between them; expected one stage per slice under {spec.schedule!r}. Give 'Interleaved1F1B' or "
            "'Circular', which have several, or give each stage a slice"
        )
    depth, chunks = (1 + max(column) for column in zip(*places, strict=True))
    if list(dict.fromkeys(places)) != [(stage, chunk) for chunk in range(chunks) for stage in range(depth)]:
        way = [spec.meshes[places.index(place)].name for place in dict.fromkeys(places)]
        raise errors.ProgramError(
            f"{where}between them, and {what} visits slices in the order {way}; expected each of the {depth} slices in "
            "turn, the same number of times"
        )


def _check_beside(spec: PipelineSpec, places: Sequence[tuple[int, int]], what: str) -> None:
    """Refuses a slice that a stage has beside its own, if another stage or chunk has it, too: it would have two places
    in the order.
    """
    each = [(mesh, *others) for mesh, others in zip(spec.meshes, spec.beside, strict=False)]
    for number, meshes in enumerate(each):
        for mesh in meshes[1:]:
            other = next((n for n, them in enumerate(each) if mesh in them and places[n] != places[number]), None)
            if other is not None:
                raise errors.ProgramError(
                    f"stages[{number}] of {what} has calls on slice {mesh.name!r} beside its own slice "
                    f"{spec.meshes[number].name!r}, and so has stages[{other}]; expected a slice to be of one stage "
                    f"under {schedule_name(spec.schedule or 'none')!r}. Give each of them slices of its own, or give "
                    "schedule 'none'"
                )


def _lengths(given: Any, stages: int, meshes: Sequence[MeshSpec], what: str) -> tuple[Lengths, ...]:
    """The checked lengths, one per entry of `meshes`; empty if none are given. A loss on the last stage's slice is part
    of the last stage.
    """
    if given is None:
        return ()
    count = stages if len(meshes) == stages or meshes[-1] == meshes[-2] else len(meshes)
    each = per_stage(Lengths.of(given, f"lengths of {what}"), count, f"lengths of {what}")
    return (*each, *(Lengths(0.0, 0.0) for _ in meshes[count:]))
