"""Layouts: XLA's text of one, such as "{1,0:T(8,128)E(4)S(5)}", as a message."""

from __future__ import annotations

import re
from typing import Any

_TEXT = re.compile(r"\{(?P<order>[\d,]*)(?::(?P<rest>.*))?\}", re.DOTALL)
_TILES = re.compile(r"T((?:\([\d,*]*\))+)")
_ONE_TILE = re.compile(r"\(([\d,]*)\)")
_BITS, _SPACE = re.compile(r"E\((\d+)\)"), re.compile(r"S\((\d+)\)")


def default_text(rank: int) -> str:
    """XLA's text of the layout of an array that nobody chose: the last dimension is the innermost."""
    return "{" + ",".join(map(str, reversed(range(rank)))) + "}"


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
