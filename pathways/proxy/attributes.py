"""Attribute maps: names with plain values, as clients send and get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathways.proxy.behind import Attribute


def fill_attributes(values: Mapping[str, Attribute], proto: Any) -> None:
    """Writes an AttributeMapProto."""
    for name, value in values.items():
        target = proto.attributes[name]
        if isinstance(value, bool):
            target.bool_value = value
        elif isinstance(value, int):
            target.int64_value = value
        elif isinstance(value, float):
            target.float_value = value
        else:
            target.string_value = value.encode()


def attributes_of(proto: Any) -> dict[str, Attribute]:
    """The values of an AttributeMapProto, without lists of numbers, which no client of ours sends."""
    found: dict[str, Attribute] = {}
    for name, value in proto.attributes.items():
        kind = value.WhichOneof("value")
        if kind == "string_value":
            found[name] = value.string_value.decode(errors="replace")
        elif kind in ("bool_value", "int64_value", "float_value"):
            found[name] = getattr(value, kind)
    return found
