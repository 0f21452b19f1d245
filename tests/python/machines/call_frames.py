"""Frames of HTTP/2 for callers that send what no client of gRPC would."""

from __future__ import annotations

from recorded_calls import recorded

DATA, HEADERS = 0, 1


def frame_of(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def opening() -> tuple[bytes, bytes]:
    """What a client sends before its first call, and the content of the frame with that call's headers."""
    whole = recorded("/test.Calls/Once", [b""])
    at = 24
    while whole[at + 3] != HEADERS:
        at += 9 + int.from_bytes(whole[at : at + 3], "big")
    return whole[:at], whole[at + 9 : at + 9 + int.from_bytes(whole[at : at + 3], "big")]


def call_until_message() -> bytes:
    """A connection's beginning, with a call on stream 1 whose message has not come."""
    before, headers = opening()
    return before + frame_of(HEADERS, 4, 1, headers)


def call_of_no_text(method: str) -> bytes:
    """A call whose method is this, with a byte in it that is no text."""
    whole = recorded(f"{method}_", [b""])
    broken = whole.replace(f"{method}_".encode(), method.encode() + b"\x80")
    assert broken != whole
    return broken


def padded_message() -> bytes:
    """An empty message, with a byte behind it that HTTP/2 lets nobody read."""
    return frame_of(DATA, 8, 1, b"\x01" + bytes(6))
