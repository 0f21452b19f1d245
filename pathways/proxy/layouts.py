"""Layouts: XLA's text of one, such as "{1,0:T(8,128)E(4)S(5)}", and what a client may ask of an array's."""

from __future__ import annotations

import re
from typing import Any

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import not_implemented

_TEXT = re.compile(r"\{(?P<order>[\d,]*)(?::(?P<rest>.*))?\}", re.DOTALL)
_TILES = re.compile(r"T((?:\([\d,*]*\))+)")
_ONE_TILE = re.compile(r"\(([\d,]*)\)")
_BITS, _SPACE = re.compile(r"E\((\d+)\)"), re.compile(r"S\((\d+)\)")


def fill(text: str, proto: Any) -> None:
    """Writes an xla.LayoutProto from XLA's text; from an empty one, nothing."""
    found = _TEXT.fullmatch(text.strip())
    if not found:
        return
    proto.minor_to_major.extend(int(n) for n in found["order"].split(",") if n)
    rest = found["rest"] or ""
    if tiles := _TILES.search(rest):
        for tile in _ONE_TILE.finditer(tiles[1]):
            proto.tiles.add(dimensions=[int(n) for n in tile[1].split(",") if n])
    if bits := _BITS.search(rest):
        proto.element_size_in_bits = int(bits[1])
    if space := _SPACE.search(rest):
        proto.memory_space = int(space[1])


def check_default(proto: Any, rank: int) -> None:
    """Refuses an ifrt.LayoutProto that is not the order of rows.

    What lies behind the door puts an array as its devices have it by default.
    """
    kind, data = proto.serialized_layout.type_name, proto.serialized_layout.data
    rows = list(range(rank))
    if kind == "xla::ifrt::CompactLayout":
        is_default = list(message("xla.ifrt.CompactLayoutProto").FromString(data).major_to_minor) == rows
    elif kind == "xla::ifrt::PjRtLayout":
        layout = message("xla.ifrt.PjRtLayoutProto").FromString(data).xla_layout
        is_default = list(layout.minor_to_major) == rows[::-1] and not layout.tiles
    else:
        is_default = not kind
    if not is_default:
        raise not_implemented(
            "an array with a layout of its own cannot be put through this proxy yet; put it without a layout, and let "
            "a jitted function with `out_shardings` of a `Format` change it"
        )
