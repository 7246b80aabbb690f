#!/usr/bin/env python3
"""Writes what several languages must know of the API, from the proto files and contract.json.

    python3 proto/generate.py            writes the regions of the files that it lists
    python3 proto/generate.py --check    writes nothing; fails and names each file that is not current

A region is the lines between `[generated: NAME]` and `[end]`, in comments; REGIONS has its content by NAME. A score is
a field of ScoreResponse whose comment begins with its element type and shape, such as "f32 [rows]: ". The comment of a
value of `enum Output` names the scores that it returns, as "ScoreResponse.NAME".
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
MARK = r" *(?://|#|<!--) \["
REGION = re.compile(rf"^(?P<head>{MARK}generated: (\w+)\].*\n)(?:.*\n)*?(?={MARK}end\])", re.M)
FIELD = re.compile(r"(?:(optional|repeated)\s+)?(?:(\w+)\s+)?(\w+)\s*=\s*(\d+);")
ARRAY = re.compile(r"(f32|f64|i32|u32|u8) \[([^\]]+)\]: (.*)")
SETTINGS = json.loads((FOLDER / "contract.json").read_text())
TYPES, ELEMENTS, SHAPES = SETTINGS["types"], SETTINGS["elements"], SETTINGS["shapes"]
COMPUTED, NUMPY = SETTINGS["computed_by_batching"], SETTINGS["numpy"]


def cpp_name(name: str) -> str:
    """Returns "kSumPSquared" of "sum_p_squared"."""
    return "k" + "".join(word.capitalize() for word in name.split("_"))


@dataclass
class Field:
    """A field of a message, or a value of an enum, which has no type."""

    label: str
    type: str
    name: str
    number: int
    comment: str

    def __post_init__(self) -> None:
        match = ARRAY.match(self.comment)
        self.element, self.shape, self.doc = match.groups() if match else ("", "", self.comment)
        self.cpp = cpp_name(self.name)
        self.cpp_element, self.wire_element, self.dtype = ELEMENTS.get(self.element, [""] * 3)
        self.cpp_shape, self.python_shape, self.asked_by = SHAPES.get(self.shape, [""] * 3)

    @property
    def kind(self) -> str:
        """Returns the type, "enum" or "message"."""
        return BLOCKS[self.type].kind if self.type in BLOCKS else self.type


@dataclass
class Block:
    """A message or an enum."""

    kind: str
    name: str
    fields: list[Field] = field(default_factory=list)


def blocks_of(text: str) -> Iterator[Block]:
    """Yields the messages and enums of a proto file."""
    block, comment, label = None, [], ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        if match := re.match(r"(message|enum) (\w+) \{", line):
            block = Block(match[1], match[2])
        if block is None:
            pass
        elif line.startswith("oneof "):
            label = "optional"
        elif line == "}" and label:
            label = ""
        elif line.endswith("}"):
            yield block
            block = None
        elif match := FIELD.fullmatch(line):
            name = match[3].removeprefix("OUTPUT_").lower()
            number, about = int(match[4]), " ".join(comment)
            block.fields.append(Field(match[1] or label, match[2], name, number, about))
        elif line and not line.endswith("{"):
            sys.exit(f"generate.py: error: not understood in {block.name}: {line}")
        comment = []


BLOCKS = {
    block.name: block
    for name in ("scoring", "weights", "local")
    for block in blocks_of((FOLDER / "logprobd" / "v1" / f"{name}.proto").read_text())
}
OUTPUTS = [output for output in BLOCKS["Output"].fields if output.number]
SCORES = [score for score in BLOCKS["ScoreResponse"].fields if score.shape]
ENGINE_SCORES = [score for score in SCORES if score.name not in COMPUTED]
ROW_SCORES = [score for score in SCORES if score.shape == "rows"]
OPERATOR_SCORES = [
    s for s in SCORES if s.shape.startswith("rows") and s.name not in SETTINGS["not_in_operator"]
]
REQUEST = BLOCKS["ScoreRequest"].fields
PARSED = [each for each in REQUEST if each.name not in SETTINGS["parsed_by_hand"]]


def outputs_of(score: Field) -> list[Field]:
    """Returns the values of enum Output that ask for a score; other shapes than [rows] have none."""
    found = [o for o in OUTPUTS if re.search(rf"ScoreResponse\.{score.name}\b", o.comment)]
    if bool(found) != (score.shape == "rows"):
        sys.exit(f"generate.py: error: {score.name}: which value of enum Output returns it?")
    return found


def bits(outputs: list[Field]) -> str:
    """Returns an expression for an OutputSet."""
    first, *others = [f"Output::{output.cpp}" for output in outputs] or ["{}"]
    return f"OutputSet({first})" + "".join(f".With({o})" for o in others) if others else first


def server_column(score: Field) -> str:
    outputs, scored, span = outputs_of(score), "{}", "nullptr"
    if score in ENGINE_SCORES:
        users = [user for user in SCORES if score.name in COMPUTED.get(user.name, ())]
        scored = bits(outputs + [output for user in users for output in outputs_of(user)])
        span = f"&ScoreSpans::{score.name}"
    return (
        f'OutputColumn<{score.cpp_element}>{{"{score.name}", {score.number}, '
        f"ColumnShape::{score.cpp_shape}, {bits(outputs)}, {scored}, "
        f"&ScoreColumns::{score.name}, {span}}},"
    )


def client_column(score: Field) -> str:
    bit = f"output::{outputs_of(score)[0].cpp}" if outputs_of(score) else "0"
    return (
        f'ScoreColumn<{score.cpp_element}>{{"{score.name}", {score.number}, {bit}, '
        f"ColumnShape::{score.cpp_shape}, &ScoreColumns::{score.name}}},"
    )


def request_member(each: Field) -> str:
    if each.shape:
        return f"std::vector<{each.cpp_element}> {each.name};"
    template = TYPES[each.kind].get("member")
    if template is None:
        sys.exit(f"generate.py: error: {each.name}: read it by hand and name it in parsed_by_hand")
    if each.number >= 64:  # kNumbersMax of wire_parser.cc
        sys.exit(f"generate.py: error: {each.name}: the parser wants numbers below 64")
    member = template.format(each.name)
    return re.sub(r"(\w+) (\w+) = 0", r"std::optional<\1> \2", member) if each.label else member


def parse_case(each: Field) -> str:
    member = f"{each.name}_number" if each.kind == "enum" else each.name
    return f"case Request::{each.cpp}FieldNumber: return set(request_.{member});"


def python_output(output: Field) -> str:
    types = {s.name: (s.wire_element, s.dtype) for s in SCORES if output in outputs_of(s)}
    return f'"{output.name}": Output({output.number}, {types}),'.replace("'", '"')


def docstring(score: Field, width: int) -> str:
    """Returns the documentation of an array, in Python's types."""
    doc = re.sub(r"^1 when (.*), else 0\.", r"whether \1.", score.doc)
    shape = score.python_shape + (f" {score.dtype}" if score.dtype != "float32" else "")
    lines = textwrap.wrap(f'"""{shape}: {doc}', width)
    one_line = len(lines) == 1 and len(lines[0]) <= width - 3
    return f'{lines[0]}"""' if one_line else "\n".join([*lines, '"""'])


def python_property(score: Field) -> str:
    body = f'{docstring(score, 92)}\nreturn self._get("{score.name}")\n'
    return f"@property\ndef {score.name}(self) -> Array:\n{textwrap.indent(body, '    ')}"


def python_field(message: Block, each: Field) -> str:
    is_message = each.kind == "message"
    annotation = each.type if is_message else TYPES[each.kind]["python"]
    options = f", message={each.type}" if is_message else ""
    always = not is_message or f"{message.name}.{each.name}" in SETTINGS["always_present"]
    if each.label == "repeated":
        annotation, options = f"list[{annotation}]", f", repeated=True{options}"
    elif each.label or not always:
        annotation, options = f"{annotation} | None", f", optional=True{options}"
    arguments = f'{each.number}, "{TYPES[each.kind]["kind"]}"{options}'
    line = f"{each.name}: {annotation} = wire({arguments})"
    return line if len(line) <= 96 else line.replace(arguments, f"\n    {arguments}\n")


def python_class(message: Block) -> str:
    body = "\n".join(python_field(message, each) for each in message.fields) or "pass"
    return f"@dataclass\nclass {message.name}:\n{textwrap.indent(body, '    ')}\n\n"


def messages() -> list[Block]:
    """Returns the messages, each behind those that it contains."""
    found: dict[str, Block] = {}

    def add(block: Block) -> None:
        for each in block.fields:
            if each.kind == "message":
                add(BLOCKS[each.type])
        found.setdefault(block.name, block)

    for block in [block for block in BLOCKS.values() if block.kind == "message"]:
        add(block)
    return list(found.values())


def score_row(score: Field) -> str:
    head = "| score | type and shape | asked for by | meaning |\n|---|---|---|---|\n"
    asked_by = score.asked_by or f"outputs={outputs_of(score)[0].name}"
    row = f"| `{score.name}` | {score.element} [{score.shape}] | `{asked_by}` | {score.doc} |"
    return head + row if score is SCORES[0] else row


def cpp_constant(each: dict[str, Any]) -> str:
    kind, value = "int32_t", str(each["value"])
    if each["unit"] == "ms":
        kind, value = "absl::Duration", f"absl::Milliseconds({value})"
    return f"/// {each['description']}\ninline constexpr {kind} {cpp_name(each['name'])} = {value};"


def python_constant(each: dict[str, Any]) -> str:
    name, value = each["name"].upper(), each["value"]
    line = f"{name}_SECONDS = {value / 1000}" if each["unit"] == "ms" else f"{name} = {value}"
    return f'{line}\n"""{each["description"]}"""'


# The content of each region: a text for each of some fields, scores, messages or constants.
REGIONS: dict[str, tuple[list[Any], Callable[[Any], str]]] = {
    "output_bits": (OUTPUTS, lambda output: f"{output.cpp} = {output.number},"),
    "output_names": (OUTPUTS, lambda output: f'"{output.name}",'),
    "columns": (SCORES, lambda s: f"std::vector<{s.cpp_element}> {s.name};"),
    "engine_columns": (ENGINE_SCORES, lambda s: f"absl::Span<{s.cpp_element}> {s.name};"),
    "output_table": (SCORES, server_column),
    "row_score_pointers": (
        [score for score in ROW_SCORES if score in ENGINE_SCORES],
        lambda score: f"std::pair{{&ScoreSpans::{score.name}, &Params::{score.name}}},",
    ),
    "client_table": (sorted(SCORES, key=lambda s: list(SHAPES).index(s.shape)), client_column),
    "request_members": (PARSED, request_member),
    "request_numbers": ([each for each in PARSED if not each.shape], parse_case),
    "request_arrays": ([each for each in PARSED if each.shape], parse_case),
    "python_outputs": (OUTPUTS, python_output),
    "python_messages": (messages(), python_class),
    "python_arrays": ([s for s in SCORES if s.shape != "candidates"], python_property),
    "fake_scores": (ROW_SCORES, lambda s: f'out["{s.name}"][row] = {NUMPY[s.name]}'),
    "adapter_scores": (OPERATOR_SCORES, lambda s: f"{s.name}: Tensor\n{docstring(s, 96)}"),
    "score_table": (SCORES, score_row),
    "cpp_policy": (SETTINGS["policy"], cpp_constant),
    "python_policy": (SETTINGS["policy"], python_constant),
}


def written(text: str) -> str:
    """Returns the text of a file with its regions filled."""

    def fill(match: re.Match[str]) -> str:
        head, (items, text_of) = match["head"], REGIONS[match[2]]
        indent = head[: len(head) - len(head.lstrip())]
        return head + textwrap.indent("".join(f"{text_of(item)}\n" for item in items), indent)

    return REGION.sub(fill, text)


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    stale = 0
    for path in (FOLDER.parent / name for name in SETTINGS["files"]):
        old = path.read_text()
        new = written(old)
        if new != old:
            stale += 1
            print(f"generate.py: {'not current' if check else 'wrote'}: {path}")
            if not check:
                path.write_text(new)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
