"""Writes docs/api.md and docs/engine-api.md from the protos and their comments: `make api-doc`.

`--check` changes nothing and fails when a committed file differs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

ROOT = Path(__file__).parent.parent
# Where a child is in a descriptor, as source locations write it: numbers of the fields in descriptor.proto.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
SERVICE_METHOD, ENUM_VALUE, FILE_PACKAGE = 2, 2, 2

PAGES = {
    "docs/api.md": (
        "stepwire.v1",
        "# API reference\n\nThe public API of a frontend (port 50051) and `AdminService` (port 50052). How calls fail\n"
        "is in [errors.md](errors.md), what may change in [versioning.md](versioning.md).",
    ),
    "docs/engine-api.md": (
        "stepwire.engine.v1",
        "# The engine's API\n\nWhat an engine core serves on port 50061: the stream of the frontends, and the feed of\n"
        "its prefix cache. Not for applications; [api.md](api.md) is.",
    ),
}


def descriptors() -> list[FileDescriptorProto]:
    """All protos of the project with their comments, in the order of their names."""
    names = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "set"
        arguments = ["--include_source_info", f"--descriptor_set_out={out}", "-I", "protos", *names]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=ROOT, check=True)
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


class Page:
    """The text of one package."""

    def __init__(self, package: str, files: Iterable[FileDescriptorProto]) -> None:
        self._package = package
        self._files = sorted((file for file in files if file.package == package), key=lambda file: file.name)
        self._comments: dict[tuple[int, ...], str] = {}

    def text(self, head: str) -> str:
        parts = [head, "Generated from the protos by `make api-doc`.", self._contents()]
        for file in self._files:
            self._comments = {tuple(at.path): _words(at.leading_comments) for at in file.source_code_info.location}
            parts += self._of_file(file)
        return "\n\n".join(part for part in parts if part) + "\n"

    def _contents(self) -> str:
        rows = []
        for service in (service for file in self._files for service in file.service):
            names = ", ".join(f"`{method.name}`" for method in service.method)
            rows.append(f"| [{service.name}](#{service.name.lower()}) | {names} |")
        return "\n".join(["| Service | RPCs |", "|---|---|", *rows])

    def _of_file(self, file: FileDescriptorProto) -> Iterator[str]:
        yield f"## {Path(file.name).name}"
        yield self._comments.get((FILE_PACKAGE,), "")
        for number, service in enumerate(file.service):
            path = (FILE_SERVICE, number)
            yield f"### {service.name}"
            yield self._comments.get(path, "")
            rows = []
            for index, method in enumerate(service.method):
                about = self._cell((*path, SERVICE_METHOD, index))
                rows.append(f"| `{method.name}` | {self._request_and_answer(method)} | {about} |")
            yield "\n".join(["| RPC | Request → answer | |", "|---|---|---|", *rows])
        for number, message in enumerate(file.message_type):
            yield from self._of_message(message, message.name, (FILE_MESSAGE, number))
        for number, enum in enumerate(file.enum_type):
            yield from self._of_enum(enum, enum.name, (FILE_ENUM, number))

    def _request_and_answer(self, method: MethodDescriptorProto) -> str:
        request, answer = self._type(method.input_type), self._type(method.output_type)
        return f"{'stream ' * method.client_streaming}{request} → {'stream ' * method.server_streaming}{answer}"

    def _of_message(self, message: DescriptorProto, name: str, path: tuple[int, ...]) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield f"#### {name}"
        yield self._comments.get(path, "")
        if message.field:
            rows = [
                f"| {field.number} | `{field.name}` | {self._field_type(field, message)} | "
                f"{self._about_field(field, message, path, index)} |"
                for index, field in enumerate(message.field)
            ]
            yield "\n".join(["| | Field | Type | |", "|---|---|---|---|", *rows])
        for number, nested in enumerate(message.nested_type):
            yield from self._of_message(nested, f"{name}.{nested.name}", (*path, MESSAGE_NESTED, number))
        for number, enum in enumerate(message.enum_type):
            yield from self._of_enum(enum, f"{name}.{enum.name}", (*path, MESSAGE_ENUM, number))

    def _of_enum(self, enum: EnumDescriptorProto, name: str, path: tuple[int, ...]) -> Iterator[str]:
        yield f"#### {name}"
        yield self._comments.get(path, "")
        rows = [
            f"| {value.number} | `{value.name}` | {self._cell((*path, ENUM_VALUE, index))} |"
            for index, value in enumerate(enum.value)
        ]
        yield "\n".join(["| | Value | |", "|---|---|---|", *rows])

    def _about_field(
        self, field: FieldDescriptorProto, message: DescriptorProto, path: tuple[int, ...], index: int
    ) -> str:
        text = self._cell((*path, MESSAGE_FIELD, index))
        if not field.HasField("oneof_index") or field.proto3_optional:
            return text
        oneof = message.oneof_decl[field.oneof_index]
        about = self._cell((*path, MESSAGE_ONEOF, field.oneof_index))
        return f"One of `{oneof.name}`. {about} {text}".replace("  ", " ").strip()

    def _field_type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        for nested in message.nested_type:
            if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
                key, value = (self._type_of(entry) for entry in nested.field)
                return f"map of {key} → {value}"
        label = "repeated " if field.label == field.LABEL_REPEATED else "optional " if field.proto3_optional else ""
        return label + self._type_of(field)

    def _type_of(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._type(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _type(self, full_name: str) -> str:
        name = full_name.removeprefix(f".{self._package}.")
        return full_name[1:] if name == full_name else f"[{name}](#{name.lower().replace('.', '')})"

    def _cell(self, path: tuple[int, ...]) -> str:
        return " ".join(self._comments.get(path, "").split()).replace("|", "\\|")


def _words(comment: str) -> str:
    """Without the lines that speak to buf."""
    lines = (re.sub("^ ", "", line) for line in comment.splitlines())
    return "\n".join(line for line in lines if not line.startswith("buf:")).strip()


def main() -> int:
    """Exit code 1 when --check finds a stale page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    files, stale = descriptors(), []
    for name, (package, head) in PAGES.items():
        text, file = Page(package, files).text(head), ROOT / name
        if not is_check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run make api-doc\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
