"""The messages of the IFRT proxy protocol, as classes, from the descriptors that the installed jaxlib carries.

`pathways/proxy` calls `message`. jaxlib publishes no `.proto` files, but its library holds their descriptors, because
protobuf's C++ registers them when it is loaded. So the door and the JAX beside it always speak of the same fields. The
library is searched, not loaded: this module imports neither jaxlib nor JAX. Any thread may call.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import pathlib
from typing import Any

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.message import DecodeError

from pathways import errors

LIBRARY = "libjax_common.so"
#: Files whose messages the door reads or writes; those on which they depend come with them.
ROOTS = (
    "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto",
    "xla/python/ifrt_proxy/common/array_util.proto",
    "xla/python/ifrt_proxy/contrib/pathways/status_annotator.proto",
    "xla/python/ifrt/custom_call_program.proto",
    "xla/python/ifrt/ir/ifrt_ir_program.proto",
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/ifrt/layout_serdes.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
    "xla/python/pjrt_ifrt/pjrt_layout_serdes.proto",
    "xla/xla_data.proto",
)
#: What Python's protobuf has itself.
KNOWN = (any_pb2, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
#: Of the protocol: the oldest and the newest version of jaxlib 0.10.2 to 0.12.
PROTOCOLS = (16, 25)
#: Of what is serialized within it. The newest names the sources of a remapped array by device; a jaxlib without that
#: field is older.
_SERDES = (2, 6)
_NEWEST_FIELD = ("xla.ifrt.RemapPlanProto", "input_devices_for_output")
_BEFORE = 3
# XlaCompileOptionsProto and IfrtIrCompileOptionsProto depend on all of XLA's options. The door reads devices alone, and
# passes the options on as they came. So it has messages of its own with these fields; the others are fields that nobody
# knows. A field is of bytes, of numbers, of text, or of a message; with a star there may be many.
OPTIONS: dict[str, list[tuple[str, int, str]]] = {
    "XlaOptions": [("compile_options", 1, "bytes")],
    "CompileOptions": [("executable_build_options", 3, ".pathways.proxy.BuildOptions")],
    "BuildOptions": [("device_assignment", 9, ".xla.DeviceAssignmentProto")],
    "IfrtIrOptions": [("device_ids", 1, "int32*"), ("compile_option_overrides", 2, ".pathways.proxy.Override*")],
    "Override": [("key", 1, "string"), ("value", 2, "bytes")],
}
_WIRE_LENGTH = 2
_LAST_FIELD = 14  # of FileDescriptorProto


@functools.cache
def message(name: str) -> Any:
    """The class of the message with the full name `name`, such as "xla.ifrt.proxy.IfrtRequest".

    Raises:
        UnsupportedVersionError: The installed jaxlib has no such message.
    """
    try:
        found = _pool().FindMessageTypeByName(name)
    except KeyError:
        raise _unknown(f"has no message {name}") from None
    return message_factory.GetMessageClass(found)


def serdes() -> tuple[int, int]:
    """The oldest and the newest version of what is serialized that the installed jaxlib knows."""
    name, field = _NEWEST_FIELD
    has_newest = field in message(name).DESCRIPTOR.fields_by_name
    return _SERDES[0], _SERDES[1] if has_newest else _BEFORE


def _unknown(what: str) -> errors.UnsupportedVersionError:
    return errors.UnsupportedVersionError(
        f"the installed jaxlib {what}, so that the proxy cannot speak the IFRT proxy protocol; install a jaxlib that "
        "this release of pathways knows (pip install 'jaxlib>=0.10.2,<0.13')"
    )


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    """All files that ROOTS name or need."""
    pool = descriptor_pool.DescriptorPool()
    added = set()
    for module in KNOWN:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        added.add(module.DESCRIPTOR.name)
    with open(_library(), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:

        def add(name: str) -> None:
            if name in added:
                return
            added.add(name)
            descriptor = descriptor_in(text, name)
            for needed in descriptor.dependency:
                add(needed)
            pool.Add(descriptor)

        for root in ROOTS:
            add(root)
    pool.Add(_options_file())
    return pool


def _library() -> pathlib.Path:
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = pathlib.Path(folder) / LIBRARY
        if path.is_file():
            return path
    raise _unknown(f"has no {LIBRARY}" if spec else "is missing")


def descriptor_in(text: bytes | mmap.mmap, name: str) -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of the file `name`, which lies somewhere in `text` in protobuf's form.

    Raises:
        UnsupportedVersionError: It is not there.
    """
    beginning = b"\n" + bytes([len(name)]) + name.encode()  # its first field: the name
    start = text.find(beginning)
    while start >= 0:
        try:
            found = descriptor_pb2.FileDescriptorProto.FromString(text[start : _end(text, start)])
            if found.name == name and (found.message_type or found.enum_type):
                return found
        except (ValueError, IndexError, DecodeError):  # the name stands there for another reason
            pass
        start = text.find(beginning, start + 1)
    raise _unknown(f"has no descriptor of {name}")


def _end(text: bytes | mmap.mmap, start: int) -> int:
    """Where the FileDescriptorProto that begins at `start` ends: at the first bytes that are no field of one. A second
    name begins the next descriptor.
    """
    at = start
    while True:
        tag, after = _varint(text, at)
        field, wire = tag >> 3, tag & 7
        if wire not in (0, _WIRE_LENGTH) or not 1 <= field <= _LAST_FIELD or (field == 1 and at != start):
            return at
        value, after = _varint(text, after)
        at = after + value if wire == _WIRE_LENGTH else after


def _varint(text: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = text[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _options_file() -> descriptor_pb2.FileDescriptorProto:
    """The file of OPTIONS."""
    made = descriptor_pb2.FileDescriptorProto(
        name="pathways/proxy.proto", package="pathways.proxy", syntax="proto3", dependency=["xla/xla_data.proto"]
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in OPTIONS.items():
        one = made.message_type.add(name=name)
        for field, number, type_text in fields:
            what = type_text.removesuffix("*")
            label = kinds.LABEL_OPTIONAL if what == type_text else kinds.LABEL_REPEATED
            if what.startswith("."):
                one.field.add(name=field, number=number, label=label, type=kinds.TYPE_MESSAGE, type_name=what)
            else:
                kind = kinds.Type.Value(f"TYPE_{what.upper()}")
                one.field.add(name=field, number=number, label=label, type=kind)
    return made
