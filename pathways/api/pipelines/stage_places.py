"""Where the parameters of a pipeline's stages and its batch live: derived from the stages. For `Pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways import errors
from pathways.api.arrays.array import Array
from pathways.api.arrays.place import Target, put, specs_of
from pathways.api.arrays.tree_paths import Leaf, is_kept, leaves_of
from pathways.api.programs.placed import PlacedFunction


def place_params(
    stages: Sequence[Any], params: Any, specs: Any, per_stage: Callable[[Any], Any] | None, what: str
) -> Any:
    """`params`, each leaf on the slice of the first stage that reads it. See `Pipeline.place`."""
    leaves, rebuild = leaves_of(params, f"params of {what}")
    homes = _homes(stages, params, leaves, what) if per_stage is None else _read(stages, params, per_stage, what)
    names = f"params of {what}"
    if specs is None:
        wanted = [
            (None if home is None else home[1], f"leaf {leaf.path!r} of {names}")
            for home, leaf in zip(homes, leaves, strict=True)
        ]
    else:
        wanted = specs_of(params, leaves, specs, names, depth=5)
    targets: list[Target | None] = []
    for home, leaf, (spec, name) in zip(homes, leaves, wanted, strict=True):
        if is_kept(leaf.value):
            targets.append(None)
            continue
        assert home is not None
        stage = stages[home[0]]
        if isinstance(stage, PlacedFunction):
            targets.append(Target(stage.slice, spec, name))
            continue
        if not isinstance(leaf.value, Array):
            raise errors.ProgramError(
                f"leaf {leaf.path!r} of {names}, of shape {leaf.shape}: stages[{home[0]}] is a function that may call "
                "placed functions of several slices, so its parameters have no slice that follows from it. Place them "
                "first (pw.place(params, slice, rules); `init` of a mixture of experts does), then they stay there"
            )
        targets.append(None)
    return rebuild(put(leaves, targets))


def place_batch(stages: Sequence[Any], loss: PlacedFunction[..., Any] | None, given: tuple[Any, ...], what: str) -> Any:
    """The batch on the slice of the first stage, and the targets on that of the loss. See `Pipeline.place_batch`."""
    placed = []
    for number, value in enumerate(given):
        function, position = (stages[0], 1) if number == 0 else (loss, number)
        name = f"batch of {what}" if number == 0 else f"targets[{number - 1}] of {what}"
        if function is None:
            raise errors.ProgramError(f"{what} has no loss, so it takes no targets, got {len(given) - 1}")
        if not isinstance(function, PlacedFunction):
            raise errors.ProgramError(
                f"{name}: the first stage is no placed function, so no slice follows from it; pass the batch as it is, "
                "or use pw.place"
            )
        leaves, rebuild = leaves_of(value, name)
        specs = function.argument_specs(position, value)
        placed.append(
            rebuild(
                put(
                    leaves,
                    [
                        Target(function.slice, None if spec is None else _whole(spec), f"leaf {leaf.path!r} of {name}")
                        for leaf, spec in zip(leaves, specs, strict=True)
                    ],
                )
            )
        )
    return tuple(placed) if len(placed) > 1 else placed[0]


def _whole(spec: Any) -> Any:
    """The spec, but with the first dimension whole: the microbatches are cut from it, and each has rows everywhere."""
    spec = getattr(spec, "spec", spec)
    return jax.sharding.PartitionSpec(None, *tuple(spec)[1:])


def _homes(stages: Sequence[Any], params: Any, leaves: Sequence[Leaf], what: str) -> list[tuple[int, Any] | None]:
    """For each leaf of a list by stages: its stage, and how that cuts it."""
    if not isinstance(params, list | tuple) or len(params) != len(stages):
        got = f"{len(params)}" if isinstance(params, list | tuple) else f"an object of type {type(params).__name__}"
        raise errors.ProgramError(
            f"params of {what}: expected a list or tuple with one pytree per stage, {len(stages)} in all, got {got}. "
            "For parameters of another form, give per_stage=, a function that makes that list of them"
        )
    found: list[tuple[int, Any] | None] = []
    for number, (stage, of_stage) in enumerate(zip(stages, params, strict=True)):
        found += [(number, spec) for spec in _specs(stage, of_stage)]
    assert len(found) == len(leaves)
    return found


def _read(
    stages: Sequence[Any], params: Any, per_stage: Callable[[Any], Any], what: str
) -> list[tuple[int, Any] | None]:
    """For each leaf of any tree: the first stage that reads it by `per_stage`, and how that stage cuts it."""
    leaves, rebuild = leaves_of(params, f"params of {what}")
    arrays = [number for number, leaf in enumerate(leaves) if not is_kept(leaf.value)]

    def cut(given: Sequence[Any]) -> Any:
        values = [leaf.value for leaf in leaves]
        for number, value in zip(arrays, given, strict=True):
            values[number] = value
        trees = per_stage(rebuild(values))
        if not isinstance(trees, list | tuple) or len(trees) != len(stages):
            got = f"{len(trees)}" if isinstance(trees, list | tuple) else f"an object of type {type(trees).__name__}"
            raise errors.ProgramError(
                f"per_stage of {what}: expected it to return a list with one pytree per stage, {len(stages)} in all, "
                f"got {got}"
            )
        # Per stage, what is traced, with what the stage says of it.
        specs.extend(_specs(stage, tree) for stage, tree in zip(stages, trees, strict=True))
        return [[leaf for leaf in jax.tree.leaves(tree) if not is_kept(leaf)] for tree in trees]

    specs: list[list[Any]] = []
    abstract = [
        jax.ShapeDtypeStruct(leaves[n].shape, jax.dtypes.result_type(leaves[n].value))
        if not hasattr(leaves[n].value, "dtype")
        else jax.ShapeDtypeStruct(leaves[n].shape, leaves[n].value.dtype)
        for n in arrays
    ]
    traced, shapes = jax.make_jaxpr(cut, return_shape=True)(abstract)
    number_of = {variable: number for number, variable in zip(arrays, traced.jaxpr.invars, strict=True)}
    found: list[tuple[int, Any] | None] = [None] * len(leaves)
    results = iter(traced.jaxpr.outvars)
    for stage, (shape, of_stage) in enumerate(zip(shapes, specs, strict=True)):
        for _, spec in zip(shape, of_stage, strict=True):
            variable = next(results)
            number = number_of.get(variable) if isinstance(variable, jax.extend.core.Var) else None
            if number is not None and found[number] is None:
                found[number] = (stage, spec)
    lost = [leaf for number, leaf in enumerate(leaves) if found[number] is None and number in arrays]
    if lost:
        raise errors.ProgramError(
            f"leaf {lost[0].path!r} of params of {what}, of shape {lost[0].shape}: per_stage hands it to no stage as "
            "it is, so no slice follows for it; expected each leaf to be handed to a stage unchanged (one that is cut "
            "into layers for several stages is to be cut before)"
        )
    return found


def _specs(stage: Any, params: Any) -> list[Any]:
    """How a stage cuts each leaf of its parameters; None: replicated."""
    if isinstance(stage, PlacedFunction):
        return stage.argument_specs(0, params)
    return [None] * len(jax.tree.leaves(params))
