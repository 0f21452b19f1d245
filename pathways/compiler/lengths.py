"""How long the steps of a pipeline's stages take, as users give it: `lengths=`. Pure."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pathways import errors

_KEYS = {"F": "forward", "B": "backward", "W": "weights", "T": "transfer"}


class Lengths(NamedTuple):
    """How long the steps of one stage take for one microbatch.

    With `weights` of 0, `backward` is the whole backward step. Otherwise `backward` is its part without the gradients
    of the weights, `weights` is the part with them, and a schedule that does not divide the step takes both together.
    `transfer` is how long a result of the stage is on its way to another one.
    """

    forward: float
    backward: float
    weights: float = 0.0
    transfer: float = 0.0

    @classmethod
    def of(cls, given: Any, name: str = "lengths") -> tuple[Lengths, ...]:
        """Checks what a user gives: one mapping for all stages, or a sequence with one per stage.

        Args:
            given: `{"F": .., "B": .., "W": .., "T": ..}`, in seconds or any other unit; "W" and "T" may be missing.
            name: of the argument, for errors.

        Returns:
            One item for all stages, or one per stage.

        Raises:
            OptionError: another key, a missing one, or a length that is no finite number from 0 on.
        """
        if isinstance(given, Lengths):
            return (given,)
        if isinstance(given, Mapping):
            return (cls._one(given, name),)
        if isinstance(given, Sequence) and not isinstance(given, str) and given:
            return tuple(
                each if isinstance(each, Lengths) else cls._one(each, f"{name}[{n}]") for n, each in enumerate(given)
            )
        raise errors.OptionError(
            f'{name}: expected {{"F": seconds, "B": seconds}} or a sequence with one such per stage, got {given!r}'
        )

    def then(self, other: Lengths) -> Lengths:
        """Those of this stage and of another one, if both are one stage."""
        return Lengths(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
            max(self.transfer, other.transfer),
        )

    @classmethod
    def _one(cls, given: Any, name: str) -> Lengths:
        if not isinstance(given, Mapping) or not {"F", "B"} <= given.keys() <= _KEYS.keys():
            raise errors.OptionError(
                f'{name}: expected a mapping with the keys "F" (forward) and "B" (backward), and perhaps "W" (the '
                f'gradients of weights) and "T" (transfer to the next stage), got {given!r}'
            )
        for key, value in given.items():
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 <= value < float("inf"):
                raise errors.OptionError(f"{name}[{key!r}]: expected a number of seconds from 0 on, got {value!r}")
        if not any(given.values()):
            raise errors.OptionError(f"{name}: expected a length above 0, got {given!r}")
        return cls(**{_KEYS[key]: float(value) for key, value in given.items()})


def per_stage(lengths: Sequence[Lengths], stages: int, name: str = "lengths") -> tuple[Lengths, ...]:
    """One item per stage, of one for all stages or of one for each.

    Raises:
        OptionError: there are as many as another number of stages has.
    """
    if len(lengths) not in (1, stages):
        raise errors.OptionError(
            f"{name}: expected one item for all stages, or one for each of {stages} stages, got {len(lengths)} items"
        )
    return tuple(lengths) if len(lengths) == stages else (lengths[0],) * stages
