"""`pw.place`: a tree onto a slice by rules, or as the parameters lie that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pathways import errors
from pathways.api.arrays.place_rules import Rules, are_rules
from pathways.api.arrays.put import device_put
from pathways.api.arrays.tree_paths import Leaf, is_kept, leaves_of
from pathways.api.slices.virtual_devices import Slice, slice_sharding
from pathways.compiler import specs as compiler_specs


class Target(NamedTuple):
    """Where a leaf goes, and how it is cut there. `name`: of the leaf, for messages."""

    slice: Slice
    spec: Any
    name: str


def place(tree: Any, devices: Slice | None = None, specs: Any = None, *, like: Any = None) -> Any:
    """Puts a tree onto a slice, by rules that look at the path of each leaf.

    The path of a leaf is its keys, joined by "/": "params/Dense_0/kernel", "0/mu/w_in". Keys are those of JAX: of
    dicts, attributes of dataclasses and modules, numbers in lists. flax's boxes (`nn.Partitioned`, `nnx.Variable`) add
    none. Functions and strings in the tree stay as they are.

        rules = [("kernel$", P(None, "model")), ("bias|scale", P())]
        params = pw.place(params, devices, rules)
        state = pw.place(optimizer.init(params), like=params)

    Args:
        tree: arrays and numbers in any pytree: of flax (linen, nnx), optax, dataclasses, dicts, lists. A
            `jax.ShapeDtypeStruct` comes back with a sharding, and moves nothing: for `pw.jit(init, out_shardings=...)`
            and for restoring. In a program, arrays are transferred.
        devices: the slice. With `like`: for what belongs to no parameter; if not given, the slice of the first one.
        specs: rules, a list of pairs `(regular expression, PartitionSpec)`: the first one that `re.search` finds in the
            path counts; None for a spec replicates. A leaf with one element needs no rule. Or a pytree prefix of
            `PartitionSpec`s, as for `pw.device_put`. None replicates everything. With `like`: for arrays that belong to
            no parameter, or have another shape than theirs.
        like: parameters that are placed. A leaf of `tree` belongs to the parameter whose path is the end of its own, as
            "0/mu/w_in" ends in "w_in", and lies as it does: on its slice, cut by its spec. For state that is a list by
            stages, what the optimizer adds may be in the middle: "1/0/mu/w_in" belongs to "1/w_in". A leaf with one
            element, such as the count of Adam, is replicated.

    Returns:
        The same tree of `pw.Array`s. Nothing is put before all leaves have been checked.

    Raises:
        ShardingError: a leaf that no rule matches; a spec with more entries than the array has dimensions, with an axis
            that the slice has not, or with one that does not divide the shape; a rule that is none. It names the path
            of the leaf, its shape and the rules.
        SliceError: `devices` is no slice, or nothing in `like` is on one.
        ProgramError: a leaf that is neither array nor number; names its path.

    Warns:
        UserWarning: a rule that decides no leaf.
    """
    what = "pw.place"
    if devices is not None and not isinstance(devices, Slice):
        raise errors.SliceError(
            f"{what} expects a slice (make_virtual_device_set().add_slice(...)), got an object of type "
            f"{type(devices).__name__}"
        )
    leaves, rebuild = leaves_of(tree, what)
    if like is None:
        if devices is None:
            raise errors.SliceError(f"{what} expects a slice, or like= the placed parameters, got neither")
        at = devices
        wanted = specs_of(tree, leaves, specs, what)
        targets: list[Target | None] = [Target(at, spec, name) for spec, name in wanted]
    else:
        targets = _alike(tree, leaves, _placed(like, what), devices, specs, what)
    return rebuild(put(leaves, targets))


def specs_of(tree: Any, leaves: Sequence[Leaf], specs: Any, what: str, depth: int = 4) -> list[tuple[Any, str]]:
    """The spec of each leaf of a tree by rules or by a prefix, and its name for messages.

    `depth`: how many calls away the user's is, for warnings.
    """
    if not are_rules(specs):
        return [
            (spec, f"leaf {leaf.path!r} of {what}")
            for spec, leaf in zip(compiler_specs.broadcast(specs, tree, f"specs of {what}"), leaves, strict=True)
        ]
    rules = Rules(specs, what)
    found = [
        (None, "")
        if is_kept(leaf.value)
        else (rules.spec_of(leaf), f"leaf {leaf.path!r} of {what}{rules.name_of(leaf)}")
        for leaf in leaves
    ]
    rules.finish(depth)
    return found


def put(leaves: Sequence[Leaf], targets: Sequence[Target | None]) -> list[Any]:
    """Checks all leaves, then puts each one where it belongs; None: it stays as it is."""
    shardings: list[Any] = []
    for leaf, target in zip(leaves, targets, strict=True):
        if target is None or is_kept(leaf.value):
            shardings.append(None)
            continue
        dims = target.slice.spec(target.spec, leaf.shape, target.name)
        shardings.append(target.slice.sharding(compiler_specs.to_partition_spec(dims)))
    out = [leaf.value for leaf in leaves]
    # By path, so that messages of the put name it. The number keeps those apart that are written alike.
    given: dict[str, Any] = {}
    where: dict[str, Any] = {}
    for number, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if sharding is None:
            continue
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            out[number] = jax.ShapeDtypeStruct(
                leaf.shape, leaf.value.dtype, sharding=sharding, weak_type=leaf.value.weak_type
            )
            continue
        key = leaf.path if leaf.path not in given else f"{leaf.path}#{number}"
        given[key], where[key] = (number, leaf.value), sharding
    done = device_put({key: value for key, (_, value) in given.items()}, where) if given else {}
    for key, (number, _) in given.items():
        out[number] = done[key]
    return out


class _Like(NamedTuple):
    shape: tuple[int, ...]
    slice: Slice
    spec: Any


def _placed(like: Any, what: str) -> dict[tuple[str, ...], _Like]:
    """By path: how the parameters lie."""
    found = {}
    for leaf in leaves_of(like, f"like= of {what}")[0]:
        sharding = slice_sharding(getattr(leaf.value, "sharding", None))
        if sharding is not None:
            found[leaf.keys] = _Like(leaf.shape, sharding.slice, sharding.spec)
    if not found:
        raise errors.SliceError(
            f"like= of {what} expects parameters that are placed on a slice, by pw.place or Pipeline.place; no leaf is"
        )
    return found


def _alike(
    tree: Any,
    leaves: Sequence[Leaf],
    placed: Mapping[tuple[str, ...], _Like],
    devices: Slice | None,
    specs: Any,
    what: str,
) -> list[Target | None]:
    home = devices or next(iter(placed.values())).slice
    targets: list[Target | None] = []
    rest: list[tuple[int, Leaf, Slice]] = []  # what lies like no parameter
    for number, leaf in enumerate(leaves):
        if is_kept(leaf.value):
            targets.append(None)
            continue
        found = _owner(leaf.keys, placed)
        if found is not None and found.shape == leaf.shape:
            targets.append(Target(found.slice, found.spec, f"leaf {leaf.path!r} of {what}"))
            continue
        at = home if found is None else found.slice
        targets.append(Target(at, None, f"leaf {leaf.path!r} of {what}"))
        if np.prod(leaf.shape, dtype=int) != 1:
            rest.append((number, leaf, at))
    if not rest:
        return targets
    if specs is None:
        _, leaf, _ = rest[0]
        known = ", ".join(repr("/".join(keys)) for keys in [*placed][:8])
        raise errors.ShardingError(
            f"leaf {leaf.path!r} of {what}, of shape {leaf.shape}, is like no parameter, by path and shape; parameters "
            f"are {known}{' and more' if len(placed) > 8 else ''}. Give specs= for it: rules, or PartitionSpec() to "
            "replicate what is like no parameter"
        )
    if are_rules(specs):
        found_specs = specs_of(None, [leaf for _, leaf, _ in rest], specs, what, 5)
    else:
        every = specs_of(tree, leaves, specs, what)
        found_specs = [every[number] for number, _, _ in rest]
    for (number, _, at), (spec, name) in zip(rest, found_specs, strict=True):
        targets[number] = Target(at, spec, name)
    return targets


def _owner(keys: tuple[str, ...], placed: Mapping[tuple[str, ...], _Like]) -> _Like | None:
    """The parameter that a leaf belongs to: its path without what was added before it or, second, in its middle. The
    longest one counts."""
    for length in range(len(keys), -1, -1):  # how many keys of the parameter's path
        for before in range(length + 1):  # so many of them before what was added
            rest = keys[len(keys) - (length - before) :] if length > before else ()
            found = placed.get((*keys[:before], *rest))
            if found is not None:
                return found
    return None
