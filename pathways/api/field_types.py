"""Whether what a user says of a cluster has the types that its fields say. Used by the targets of `connect`."""

from __future__ import annotations

import dataclasses
import numbers
import types
import typing
from typing import Any

from pathways import errors

_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}


def check_types(target: Any) -> None:
    """Checks each field of a dataclass.

    Raises:
        OptionError: a value is not of its field's type.
    """
    hints = typing.get_type_hints(type(target))
    for field in dataclasses.fields(target):
        hint, value = hints[field.name], getattr(target, field.name)
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
        if not any(_is(value, kind) for kind in kinds):
            raise errors.OptionError(
                f"{type(target).__name__} expects {field.name}= of type {field.type}, got {value!r:.100}"
            )


def _is(value: Any, kind: Any) -> bool:
    """Numbers are those of other libraries, too; a bool is none."""
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(kind) or kind)
