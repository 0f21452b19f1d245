"""A mixture of experts on slices: rows visit the experts that were chosen for them, and the others do nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pathways import errors
from pathways.api.nn.gates import DSelectKGate, TopKGate
from pathways.api.programs.exchange import exchange
from pathways.api.programs.placed import jit
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.added_primitives.grouped_blocks import over_blocks

_NOWHERE = -1


class Mixed(NamedTuple):
    """What a mixture gives."""

    #: `[n, ...]`, beside the rows: the weighted sum of the experts' results.
    results: jax.Array
    #: A scalar beside the rows, to add to the loss: the gate's penalty.
    penalty: jax.Array
    #: `int32[]`, beside the rows: how many visits were left out, because the expert's shard was full.
    dropped: jax.Array


@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """Experts on one or several slices; each row goes to those that its gate chose (`pw.exchange`).

    The experts lie on the devices of `slices`, in their order, the same number on each device. Call it in a program,
    with rows that are on the slice `home`:

        mixture = pw.nn.MixtureOfExperts(expert, gate, home=model, slices=[left, right], capacity=64)
        params = mixture.init(jax.random.key(0), init_expert)

        @pw.program
        def loss(params, x, y):
            mixed = mixture(params, x)
            return error(mixed.results, y) + mixed.penalty

    A row visits the `visits` experts with the largest weights, of those that have a weight. `TopKGate` gives k of them
    a weight. A `DSelectKGate` that has not converged can give more; with `visits` = `gate.experts` none is left out,
    and with fewer the others count as 0: the weights are not scaled up. Rows beyond the `capacity` of a device are left
    out (`Mixed.dropped`), or fail the run.

    An expert computes in blocks of `block` rows; blocks without rows are skipped. So the time follows the rows that
    come, and only the memory follows the capacity. This holds for gradients, too: a reverse pass visits the same blocks
    once. It computes each block again, because of an expert only the parameters and the rows are saved.

    Args:
        expert: `expert(params, rows)`: `[block, ...]` to `[block, ...]`, for the parameters of one expert; each row
            alone. Differentiable in both.
        gate: a `TopKGate` with `features`, or a `DSelectKGate`.
        home: the slice of the rows.
        slices: where the experts are, one slice or several. The number of experts must be a multiple of their devices.
        capacity: rows that a device has room for.
        visits: experts that a row visits at most; `gate.k` if not given.
        block: rows that an expert computes at once, at most `capacity`.
        overflow: "drop" or "error".

    Raises:
        ProgramError: an argument is none of these.
    """

    expert: Callable[[Any, Any], Any]
    gate: TopKGate | DSelectKGate
    _: dataclasses.KW_ONLY
    home: Slice
    slices: Slice | Sequence[Slice]
    capacity: int
    visits: int | None = None
    block: int = 128
    overflow: Literal["error", "drop"] = "drop"

    def __post_init__(self) -> None:
        if isinstance(self.slices, Sequence):
            object.__setattr__(self, "slices", tuple(self.slices))
        if not callable(self.expert):
            raise errors.ProgramError(f"expert of MixtureOfExperts is {self.expert!r}; expected a function")
        if not isinstance(self.gate, TopKGate | DSelectKGate):
            raise errors.ProgramError(
                f"gate of MixtureOfExperts is {self.gate!r}; expected a TopKGate or a DSelectKGate"
            )
        if not self._places or not all(isinstance(each, Slice) for each in (self.home, *self._places)):
            raise errors.ProgramError(
                f"home of MixtureOfExperts is {self.home!r}, slices are {self.slices!r}; expected slices, one or more"
            )
        if self.overflow not in ("error", "drop"):
            raise errors.ProgramError(f'overflow of MixtureOfExperts is {self.overflow!r}; expected "error" or "drop"')
        if self.gate.experts % self._devices:
            raise errors.ProgramError(
                f"MixtureOfExperts has {self.gate.experts} experts on {self._devices} devices; expected a multiple of "
                f"{self._devices}"
            )
        for name, most in (("visits", self.gate.experts), ("capacity", None), ("block", None)):
            value = self._visits if name == "visits" else getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
                limit = f"1 to {most}" if most else "1 or more"
                raise errors.ProgramError(f"{name} of MixtureOfExperts is {value!r}; expected an int of {limit}")

    @property
    def _places(self) -> tuple[Slice, ...]:
        return self.slices if isinstance(self.slices, tuple) else (self.slices,)

    @property
    def _devices(self) -> int:
        return sum(each.size for each in self._places)

    @property
    def _visits(self) -> int:
        return self.gate.k if self.visits is None else self.visits

    def init(self, key: jax.Array, init_expert: Callable[[jax.Array], Any]) -> dict[str, Any]:
        """`{"gate": ..., "experts": [...]}`: the gate's parameters, and per slice those of its experts, stacked.

        `init_expert(key)` gives the parameters of one expert, a pytree of arrays.
        """
        gate_key, *keys = jax.random.split(key, self.gate.experts + 1)
        each = [init_expert(k) for k in keys]
        stacked = []
        for first, count in self._parts():
            stacked.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each[first : first + count]))
        return {"gate": self.gate.init(gate_key), "experts": stacked}

    def _parts(self) -> list[tuple[int, int]]:
        """Per slice: its first expert, and how many it has."""
        per_device, first, parts = self.gate.experts // self._devices, 0, []
        for each in self._places:
            parts.append((first, each.size * per_device))
            first += each.size * per_device
        return parts

    def _check(self, params: Any) -> None:
        """Refuses parameters that are not those of `init`, above all those for another number of experts."""
        is_tree = isinstance(params, Mapping) and {"gate", "experts"} <= params.keys()
        if (
            not is_tree
            or not isinstance(params["experts"], list | tuple)
            or len(params["experts"]) != len(self._places)
        ):
            raise errors.ProgramError(
                f"params of MixtureOfExperts are a {jax.tree.structure(params)!s:.200}; expected "
                f'{{"gate": ..., "experts": [...]}}, as init gives them, with one pytree per slice: {len(self._places)}'
            )
        for place, (mine, (_, count)) in enumerate(zip(params["experts"], self._parts(), strict=True)):
            leaves = jax.tree_util.tree_leaves_with_path(mine)
            if not leaves:
                raise errors.ProgramError(
                    f'params["experts"][{place}] of MixtureOfExperts has no array; expected at least one, with the '
                    f"parameters of the {count} experts of slice {place}"
                )
            for path, leaf in leaves:
                if np.shape(leaf)[:1] != (count,):
                    raise errors.ProgramError(
                        f'params["experts"][{place}]{jax.tree_util.keystr(path)} of MixtureOfExperts has shape '
                        f"{np.shape(leaf)}; expected [{count}, ...], for the {count} experts of slice {place}"
                    )

    def __call__(self, params: Any, x: Any) -> Mixed:
        """`x`: `[n, features]` on `home`; n must be a multiple of its devices. `params`: as `init` gives them."""
        self._check(params)
        shape, features = np.shape(x), self.gate.features
        if len(shape) != 2 or shape[0] % self.home.size or (features is not None and shape[1] != features):
            raise errors.ProgramError(
                f"x of MixtureOfExperts has shape {shape}; expected [n, {features or 'features'}], n a multiple of "
                f"the {self.home.size} devices of home. Put other dimensions into the first, and pad it"
            )
        here = functools.partial(jit, devices=self.home)
        ways, weights, penalty = here(self._route, name="route")(params["gate"], x)
        returned, left_out = [], []
        rows = here(functools.partial(jnp.repeat, repeats=self._visits, axis=0), name="visits")(x)
        for slice_, theirs, (to, local) in zip(self._places, params["experts"], ways, strict=True):
            sent = exchange(
                (rows, local),
                to,
                to=slice_,
                capacity=self.capacity,
                overflow=self.overflow,
                unsent=_NOWHERE,
            )
            cut = PartitionSpec(slice_.axis_names)
            run = jax.shard_map(self._run, mesh=slice_.mesh, in_specs=cut, out_specs=cut, check_vma=False)
            returned.append(sent.back(jit(run, devices=slice_, name="experts")(theirs, *sent.rows, sent.count)))
            left_out.append((to, sent.slots))
        results, dropped = here(self._combine, name="combine")(weights, tuple(returned), tuple(left_out))
        return Mixed(results, penalty, dropped)

    def _route(self, params: Any, x: Any) -> tuple[Any, Any, Any]:
        """Per slice: the device of each visit, or -1, and the expert's number there. Then weights `[n, visits]`."""
        gating = self.gate(params, x)
        weights = jnp.broadcast_to(gating.weights, (x.shape[0], self.gate.experts))  # a static gate has one row
        largest, chosen = jax.lax.top_k(weights, self._visits)
        expert, has_weight = chosen.reshape(-1), largest.reshape(-1) > 0
        per_device = self.gate.experts // self._devices
        ways = []
        for first, count in self._parts():
            number = expert - first
            is_here = has_weight & (number >= 0) & (number < count)
            to = jnp.where(is_here, number // per_device, _NOWHERE).astype(jnp.int32)
            ways.append((to, (number % per_device).astype(jnp.int32)))
        return tuple(ways), largest, gating.penalty

    def _run(self, params: Any, rows: Any, local: Any, count: Any) -> Any:
        """On one device: its experts, each over its rows only. `count`: `[1]`.

        The rows are sorted by expert, each expert's into blocks of its own. So there are at most `size / block` full
        blocks, and one more per expert. There is one pass over those that have rows, also backward.
        """
        size, experts = rows.shape[0], len(jax.tree.leaves(params)[0])
        block = min(self.block, size)
        most = size // block + experts
        is_there = jnp.arange(size) < count[0]
        kind = jax.eval_shape(self.expert, jax.tree.map(lambda leaf: leaf[0], params), rows[:block])
        if getattr(kind, "shape", ())[:1] != (block,):
            raise errors.ProgramError(
                f"expert of MixtureOfExperts gives {kind} for {block} rows; expected one array [{block}, ...], with a "
                "result for each row"
            )

        is_its = is_there & (local == jnp.arange(experts)[:, None])  # [experts, size]
        ends = jnp.cumsum(-(-is_its.sum(1) // block), dtype=jnp.int32)
        first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        nth = jnp.cumsum(is_its, 1) - 1
        place = jnp.where(is_there, jnp.sum(jnp.where(is_its, first[:, None] * block + nth, 0), 0), most * block)
        origin = jnp.full(most * block, size).at[place].set(jnp.arange(size), mode="drop")
        given = rows.at[origin].get(mode="fill", fill_value=0)
        made = over_blocks(self.expert, ends, params, given.reshape(most, block, *rows.shape[1:]))
        return made.reshape(most * block, *kind.shape[1:]).at[place].get(mode="fill", fill_value=0)

    def _combine(self, weights: Any, returned: Any, left_out: Any) -> tuple[Any, Any]:
        total = functools.reduce(jnp.add, returned)  # a visit has a result of one slice, and zeros of the others
        total = total.reshape(*weights.shape, *total.shape[1:])
        weights = weights.reshape(*weights.shape, *(1,) * (total.ndim - 2))
        dropped = sum(jnp.sum((to >= 0) & (slots < 0)) for to, slots in left_out)
        return jnp.sum(total * weights.astype(total.dtype), 1), jnp.asarray(dropped, np.int32)
