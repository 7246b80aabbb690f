"""Writes a page for each proto file from its comments."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path, PurePosixPath

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

# Comments are found by paths of field numbers and indices: these are fields of FileDescriptorProto.
MESSAGE = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
ENUM = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER
SERVICE = FileDescriptorProto.SERVICE_FIELD_NUMBER
SYNTAX = FileDescriptorProto.SYNTAX_FIELD_NUMBER
MEMBER = 2  # methods of a service, fields of a message, and values of an enum


class ProtoPage:
    """The page of one file. Services, methods, messages and enums have their names as anchors."""

    def __init__(self, file: FileDescriptorProto, homes: dict[str, str]) -> None:
        """`homes` has the file of each message and enum by its full name."""
        self._file = file
        self._homes = homes
        self._comments = {
            tuple(place.path): place.leading_comments for place in file.source_code_info.location
        }

    def markdown(self) -> str:
        parts = [f"# {PurePosixPath(self._file.name).name}", self._comment(SYNTAX)]
        parts += [f"The package is `{self._file.package}`, the file `proto/{self._file.name}`."]
        for i, service in enumerate(self._file.service):
            parts += [_heading(2, service.name), self._comment(SERVICE, i)]
            for j, method in enumerate(service.method):
                sends = self._link(method.input_type, is_stream=method.client_streaming)
                returns = self._link(method.output_type, is_stream=method.server_streaming)
                parts += [_heading(3, f"{service.name}.{method.name}"), f"{sends} → {returns}"]
                parts += [self._comment(SERVICE, i, MEMBER, j)]
        for i, message in enumerate(self._file.message_type):
            parts += [_heading(2, message.name), self._comment(MESSAGE, i)]
            for j, field in enumerate(message.field):
                term = f"**{field.name}** = {field.number}: {self._type(field)}"
                if field.HasField("oneof_index") and not field.proto3_optional:
                    term += f", one of `{message.oneof_decl[field.oneof_index].name}`"
                parts += [_definition(term, self._comment(MESSAGE, i, MEMBER, j))]
        for i, enum in enumerate(self._file.enum_type):
            parts += [_heading(2, enum.name), self._comment(ENUM, i)]
            for j, value in enumerate(enum.value):
                term = f"**{value.name}** = {value.number}"
                parts += [_definition(term, self._comment(ENUM, i, MEMBER, j))]
        return "\n\n".join(parts) + "\n"

    def _link(self, full_name: str, is_stream: bool = False) -> str:
        """Returns a link to a message or an enum, of this file or of one next to it."""
        name = full_name.rpartition(".")[2]
        home = self._homes[full_name]
        page = "" if home == self._file.name else f"{PurePosixPath(home).name}.md"
        return f"{'stream of ' if is_stream else ''}[{name}]({page}#{name})"

    def _type(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            name = self._link(field.type_name)
        else:
            name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        return f"optional {name}" if field.proto3_optional else name

    def _comment(self, *path: int) -> str:
        """Returns a comment as Markdown. Its indented lines are kept as they are."""
        lines = re.sub("^ ", "", self._comments.get(path, ""), flags=re.MULTILINE)
        return re.sub("(?:^ .*\n)+", _fenced, lines, flags=re.MULTILINE).strip()


def _fenced(lines: re.Match[str]) -> str:
    return f"\n```text\n{textwrap.dedent(lines[0])}```\n"


def _heading(level: int, name: str) -> str:
    return f"{'#' * level} {name} {{ #{name} }}"


def _definition(term: str, comment: str) -> str:
    return f"{term}\n:   {textwrap.indent(comment or '&nbsp;', '    ').strip()}"


def proto_pages(root: Path) -> dict[str, str]:
    """Returns the Markdown of the page of each proto file below `root`, by the path of the file."""
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.proto"))
    options = ["--include_source_info", "--descriptor_set_out=/dev/stdout"]
    command = ["protoc", f"--proto_path={root}", *options, *paths]
    described = subprocess.run(command, check=True, capture_output=True).stdout
    files = FileDescriptorSet.FromString(described).file
    homes = {
        f".{file.package}.{kind.name}": file.name
        for file in files
        for kind in (*file.message_type, *file.enum_type)
    }
    return {file.name: ProtoPage(file, homes).markdown() for file in files}
