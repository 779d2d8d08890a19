"""Messages of any protobuf type that are valid on the wire and meant badly: hypothesis strategies from descriptors.

A message is a good one with a few fields set to extremes, or a few fields alone; and its bytes may be spoilt.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct, Value
from hypothesis import strategies as st

# Names and texts that mean something to somebody: templates, formats, paths, headers, terminals, tokenizers.
HOSTILE_TEXTS = (
    "",
    "\0",
    "\ufffd",
    "\U0010ffff",
    "\u202e\u200d\ufeff",
    "e\u0301" * 50,
    "a\r\nx-request-id: b",
    "__class__",
    "messages",
    "{{ 7 * 7 }}{% raw %}",
    "{%",
    "%s%n{0}{}",
    "../../etc/passwd",
    "<|end|>",
    "<tool_call>{}</tool_call>",
    "</think>",
    '{"type": "object", "properties": {"a": {"$ref": "#"}}}',
    "[" * 500,
    "(a*)*b",
    "\\",
    "root ::= root",
    "NaN",
    "x" * 300,
    "日" * 30_000,
)
_FLOATS = (0.0, -0.0, 1.0, 1e-45, -1e-9, 1.5, -1.0, 2.0, 3.4e38, float("inf"), float("-inf"), float("nan"))
_UNSIGNED = (0, 1, 2, 3, 16, 255, 511, 512, 4096, 2**31 - 1, 2**31)
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
# A hundred messages in each other are what parsers take, and a level of a Struct is up to three.
_DEPTHS = (0, 1, 5, 36)
_LEAVES = (Value(), Value(number_value=float("nan")), Value(number_value=1e300), Value(string_value="x"))
_GROUPS = (90, 120, 5000)
_MAX_DEPTH = 4
# Hardly ever right, and nothing else is looked at then.
_SELECTORS = ("model", "lora_name", "request_id", "image", "image_url")
_SPOILT = ("whole",) * 9 + ("cut", "changed", "longer", "deep")

_ROLES = st.sampled_from((1, 2, 3, 4, 5, 5, 6))
Words = st.SearchStrategy[str]
texts = st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=12)


def _integers(kind: int) -> st.SearchStrategy[int]:
    low, high = _LIMITS[kind]
    some = [number for number in (low, -2, -1, *_UNSIGNED, high) if low <= number <= high]
    return st.sampled_from(some) | st.integers(max(low, -2), 300) | st.integers(low, high)


def _scalars(field: FieldDescriptor, words: Words) -> st.SearchStrategy[object]:
    kind = field.cpp_type
    if kind in _LIMITS:
        return _integers(kind)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from(_FLOATS) | st.floats(width=32)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        # Numbers without a name are valid on the wire.
        return st.sampled_from((-1, 0, 1, 2, 3, 4, 999, 2**31 - 1))
    return words if field.type == FieldDescriptor.TYPE_STRING else st.binary(max_size=64)


def _fill_struct(draw: st.DrawFn, struct: Struct, words: Words) -> None:
    """Objects and lists in each other, around a value that may be none at all."""
    value = struct.fields[draw(words)]
    for level in range(draw(st.sampled_from(_DEPTHS))):
        value = value.struct_value.fields["a"] if level % 2 else value.list_value.values.add()
    value.MergeFrom(draw(st.sampled_from(_LEAVES)))


@st.composite
def messages(draw: st.DrawFn, good: Message, words: Words = texts) -> Message:
    """Of the type of `good`, which is where most of them begin."""
    message = type(good)()
    if draw(st.sampled_from((True, True, True, True, False))):
        message.CopyFrom(good)
    _spoil(draw, message, words, 0)
    return message


def _spoil(draw: st.DrawFn, message: Message, words: Words, depth: int) -> None:
    fields = [field for field in message.DESCRIPTOR.fields if field.name not in _SELECTORS or draw(st.booleans())]
    if not fields:
        return
    for field in draw(st.lists(st.sampled_from(fields), max_size=3, unique_by=lambda one: one.number)):
        _set(draw, message, field, words, depth)


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor, words: Words, depth: int) -> None:
    if _is_map(field):
        _set_map(draw, getattr(message, field.name), field.message_type, words)
    elif field.message_type is not None:
        _set_message(draw, message, field, words, depth)
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(_scalars(field, words), max_size=4)))
    else:
        values = _ROLES if field.name == "role" else _scalars(field, words)
        setattr(message, field.name, draw(values))


def _set_map(draw: st.DrawFn, container: object, entry: Descriptor, words: Words) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    if value.message_type is None:
        container.update(draw(st.dictionaries(_scalars(key, words), _scalars(value, words), max_size=3)))


def _set_message(draw: st.DrawFn, message: Message, field: FieldDescriptor, words: Words, depth: int) -> None:
    if field.message_type.full_name == "google.protobuf.Struct":
        _fill_struct(draw, getattr(message, field.name), words)
    elif depth < _MAX_DEPTH:
        value = getattr(message, field.name)
        for _ in range(draw(st.integers(1, 2)) if field.is_repeated else 1):
            part = value.add() if field.is_repeated else value
            part.SetInParent()
            _spoil(draw, part, words, depth + 1)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@st.composite
def wire_bytes(draw: st.DrawFn, good: Message, words: Words = texts) -> bytes:
    """A message as it is, or with bytes that were cut off, changed or put in: also text that is not UTF-8."""
    data = bytearray(draw(messages(good, words)).SerializeToString())
    kind = draw(st.sampled_from(_SPOILT))
    if kind == "deep":
        # Fields that nobody knows, in each other.
        num_groups = draw(st.sampled_from(_GROUPS))
        return bytes(data) + b"\x0b" * num_groups + b"\x0c" * num_groups
    if kind == "whole":
        return bytes(data)
    if kind == "longer" or not data:
        return bytes(data) + draw(st.binary(max_size=16))
    place = draw(st.integers(0, len(data) - 1))
    if kind == "cut":
        del data[place:]
    elif kind == "changed":
        data[place] = draw(st.sampled_from((0x00, 0x7F, 0x80, 0xFF)))
    return bytes(data)


def empty_message(descriptor: Descriptor) -> Message:
    return GetMessageClass(descriptor)()
