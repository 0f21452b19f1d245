"""Whether bytecode is of the Python that runs here. Bytecode of another one crashes a process."""

from __future__ import annotations

import opcode

_CACHES = opcode._inline_cache_entries  # type: ignore[attr-defined]


def is_own(code: bytes) -> bool:
    """Whether bytecode may be this Python's. That of another one has instructions that are none here, or something in
    the room that this Python leaves free behind instructions; unless it is so simple that the two mean the same.
    """
    at, begins = 0, False
    while at < len(code):
        number, name = code[at], opcode.opname[code[at]]
        if name.startswith("<") or name == "CACHE":
            return False
        begins = begins or name == "RESUME"  # each function has one
        free = 2 * (_CACHES.get(name, 0) if isinstance(_CACHES, dict) else _CACHES[number])
        at += 2 + free
        if any(code[at - free : at]):
            return False
    return begins and at == len(code)
