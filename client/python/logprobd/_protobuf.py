"""Encodes plain dataclasses as protobuf, so that the package does not depend on protobuf.

A message is a dataclass whose fields are made with `wire`. Fields are encoded in the order of their
declaration, so a large payload that is declared last is copied once.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, TypeVar

Buffer = bytes | bytearray | memoryview
Message = TypeVar("Message")

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES = {
    "uint": _VARINT,
    "int": _VARINT,
    "sint": _VARINT,
    "bool": _VARINT,
    "double": _FIXED64,
    "float": _FIXED32,
    "string": _LENGTH,
    "bytes": _LENGTH,
    "message": _LENGTH,
}


class DecodeError(ValueError):
    """Raised if bytes are not a message of the expected type."""


@dataclasses.dataclass(frozen=True)
class _Field:
    """How a dataclass field is encoded."""

    number: int
    kind: str
    optional: bool
    repeated: bool
    message: type[Any] | None
    default: Any
    """For a message field, a message whose fields all have their zero value."""


def wire(
    number: int,
    kind: str,
    *,
    optional: bool = False,
    repeated: bool = False,
    message: type[Any] | None = None,
) -> Any:
    """Makes a dataclass field with protobuf number `number`.

    `kind` is one of uint, int, sint, bool, float, double, string, bytes and message. An absent
    optional field is None, a repeated field is a list, and the other fields default to protobuf's
    zero value.
    """
    empty = message() if message is not None else None
    metadata = {"wire": _Field(number, kind, optional, repeated, message, empty)}
    if repeated:
        return dataclasses.field(default_factory=list, metadata=metadata)
    if kind == "message" and message is not None and not optional:
        return dataclasses.field(default_factory=message, metadata=metadata)
    zeros: dict[str, Any] = {"string": "", "bytes": b"", "bool": False, "float": 0.0, "double": 0.0}
    default = None if optional else zeros.get(kind, 0)
    return dataclasses.field(default=default, metadata=metadata)


_fields_of: dict[Any, dict[int, tuple[str, _Field]]] = {}


def _fields(cls: Any) -> dict[int, tuple[str, _Field]]:
    """Returns the names and fields by field number, in the order of their declaration."""
    fields = _fields_of.get(cls)
    if fields is None:
        pairs = ((field.name, field.metadata["wire"]) for field in dataclasses.fields(cls))
        fields = _fields_of[cls] = {field.number: (name, field) for name, field in pairs}
    return fields


def encode(message: Any) -> bytes:
    """Encodes a message. Payloads, also of messages within it, are copied once, into the result."""
    return b"".join(_pieces(message))


def _pieces(message: Any) -> list[Buffer]:
    pieces: list[Buffer] = []
    small = bytearray()
    for name, field in _fields(type(message)).values():
        value = getattr(message, name)
        for item in value if field.repeated else (value,):
            if item is None or not (item or field.repeated or field.optional):
                continue  # the field is absent, or has protobuf's zero value
            required = field.kind == "message" and not (field.repeated or field.optional)
            if required and item == field.default:
                continue
            _put_varint(small, field.number << 3 | _WIRE_TYPES[field.kind])
            if field.kind in ("bytes", "message"):
                parts = [item] if field.kind == "bytes" else _pieces(item)
                _put_varint(small, sum(map(len, parts)))
                pieces.append(bytes(small))
                pieces += parts
                small.clear()
            else:
                _put_value(small, field.kind, item)
    pieces.append(bytes(small))
    return pieces


def _put_value(out: bytearray, kind: str, value: Any) -> None:
    if kind == "float":
        out += struct.pack("<f", value)
    elif kind == "double":
        out += struct.pack("<d", value)
    elif kind == "sint":
        _put_varint(out, (value << 1) ^ (value >> 63))
    elif kind in ("uint", "int", "bool"):
        _put_varint(out, int(value) & 0xFFFF_FFFF_FFFF_FFFF)
    else:
        data = value.encode()
        _put_varint(out, len(data))
        out += data


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def decode(cls: type[Message], data: Buffer) -> Message:
    """Decodes a message. Its bytes fields are views of `data`, not copies.

    Unknown fields are skipped. Raises DecodeError.
    """
    view = memoryview(data)
    fields = _fields(cls)
    values: dict[str, Any] = {}
    position = 0
    while position < len(view):
        tag, position = _take_varint(view, position)
        number, wire_type = tag >> 3, tag & 7
        raw, position = _take_raw(view, position, wire_type)
        known = fields.get(number)
        if known is None:
            continue
        name, field = known
        if wire_type != _WIRE_TYPES[field.kind]:
            raise DecodeError(f"field {number} ({name}) has wire type {wire_type}")
        value = _from_raw(field, raw)
        if field.repeated:
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    return cls(**values)


def _take_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(view) and shift < 70:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7
    raise DecodeError("a varint is truncated or longer than 10 bytes")


def _take_raw(view: memoryview, position: int, wire_type: int) -> tuple[Any, int]:
    if wire_type == _VARINT:
        return _take_varint(view, position)
    if wire_type == _LENGTH:
        length, position = _take_varint(view, position)
    elif wire_type in (_FIXED32, _FIXED64):
        length = 4 if wire_type == _FIXED32 else 8
    else:
        raise DecodeError(f"wire type {wire_type} is not supported")
    end = position + length
    if end > len(view):
        raise DecodeError(f"a field of {length} bytes is truncated")
    return view[position:end], end


def _from_raw(field: _Field, raw: Any) -> Any:
    kind = field.kind
    if kind == "uint":
        return raw
    if kind == "int":
        return raw - (1 << 64) if raw >> 63 else raw
    if kind == "sint":
        return (raw >> 1) ^ -(raw & 1)
    if kind == "bool":
        return raw != 0
    if kind == "float":
        return struct.unpack("<f", raw)[0]
    if kind == "double":
        return struct.unpack("<d", raw)[0]
    if kind == "bytes":
        return raw
    if kind == "message":
        assert field.message is not None
        return decode(field.message, raw)
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(f"field {field.number} is not UTF-8") from error
