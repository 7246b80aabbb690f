"""Lists the small bugs that could be put into a file of C++ or Python, from its syntax tree.

The kinds are those that reviews and users found in this project: they are the keys of `RULES`. A
bug changes one expression or statement; whether it compiles, and whether it makes a difference, is
for draw.py to find out.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator

import tree_sitter
import tree_sitter_cpp
import tree_sitter_python

LANGUAGES = {
    ".cc": tree_sitter.Language(tree_sitter_cpp.language()),
    ".h": tree_sitter.Language(tree_sitter_cpp.language()),
    ".py": tree_sitter.Language(tree_sitter_python.language()),
}
Node = tree_sitter.Node
Change = tuple[Node, str]
"""A node and the text that replaces it."""

OPPOSITES = {
    "compare": {
        "<": ["<=", ">"],
        "<=": ["<", ">="],
        ">": [">=", "<"],
        ">=": [">", "<="],
        "==": ["!="],
        "!=": ["=="],
        "is": ["is not"],
        "is not": ["is"],
        "in": ["not in"],
        "not in": ["in"],
    },
    "logic": {"&&": ["||"], "||": ["&&"], "and": ["or"], "or": ["and"]},
    "arithmetic": {
        "+": ["-"],
        "-": ["+"],
        "*": ["+"],
        "+=": ["=", "-="],
        "-=": ["=", "+="],
        "|=": ["="],
        "&=": ["="],
        "++": ["--"],
    },
    "constant": {"true": ["false"], "false": ["true"], "True": ["False"], "False": ["True"]},
    "jump": {"break": ["continue"], "continue": ["break"]},
}
OPERATIONS = {
    "binary_expression",
    "assignment_expression",
    "update_expression",
    "comparison_operator",
    "boolean_operator",
    "binary_operator",
    "augmented_assignment",
}
CALLS = {"call_expression", "call"}
ASSIGNMENTS = {"assignment_expression", "assignment", "augmented_assignment", "update_expression"}
NAMES = {"identifier", "field_expression", "attribute", "number_literal", "integer", "this", "self"}
LEAVES = {"return_statement", "continue_statement", "break_statement", "throw_statement"}
LEAVES |= {"raise_statement"}
LOGS = re.compile(r"Log(Debug|Info|Warning|Error|Always)|log(ger)?\.\w+|_?print|warnings\.warn")
"""Calls whose text is for people; removing one is not tried."""
PYTHON_TYPE = re.compile(r"([A-Z]\w*|str|int|float|bytes|bool)( \| .*)?")


@dataclasses.dataclass(frozen=True)
class Bug:
    file: str
    """Relative to the root of the repository."""
    line: int
    """Line of the changed text, from 1."""
    kind: str
    """A key of RULES."""
    begin: int
    end: int
    """Bytes of the file that the bug replaces."""
    old: str
    new: str
    context: str
    """The line of the file without its indentation."""
    place: str = "1 of 1"
    """Which of the file's bugs with the same context, old and new text it is, as in "1 of 2"."""

    def apply(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]


def text_of(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def swap_tokens(kind: str) -> Callable[[Node], Iterator[Change]]:
    """Returns the rule that replaces an operator, a constant or a jump by its opposites."""
    opposites = OPPOSITES[kind]

    def rule(node: Node) -> Iterator[Change]:
        is_token = node.parent is not None and (
            node.child_count == 0 or node.type in ("is not", "not in")
        )
        if kind == "constant":
            yield from ((node, new) for new in opposites.get(text_of(node), []) if is_token)
            if node.type in ("number_literal", "integer") and re.fullmatch(r"\d+", text_of(node)):
                number = int(text_of(node))
                yield from ((node, str(new)) for new in (number + 1, number - 1) if new >= 0)
        elif kind == "jump":
            yield from ((node, new) for new in opposites.get(node.type, []) if is_token)
        elif is_token and node.parent.type in OPERATIONS:
            if any("string" in sibling.type for sibling in node.parent.children):
                return  # a message that is put together
            yield from ((node, new) for new in opposites.get(node.type, []))

    return rule


def negate_condition(node: Node) -> Iterator[Change]:
    if node.type not in (
        "if_statement",
        "elif_clause",
        "while_statement",
        "conditional_expression",
    ):
        return
    condition = node.child_by_field_name("condition")
    if condition is None:
        return
    if condition.type == "condition_clause":
        condition = condition.child_by_field_name("value") or condition
        if condition.type in ("condition_clause", "declaration"):
            return
    not_ = "!" if condition.parent and condition.parent.type != node.type else "not "
    if node.type == "conditional_expression":
        not_ = "!"
    yield condition, f"{not_}({text_of(condition)})"


def drop_extreme(node: Node) -> Iterator[Change]:
    if node.type not in CALLS:
        return
    function, arguments = called(node)
    if not re.fullmatch(r"(std::)?(max|min)(<.*>)?", function) or len(arguments) != 2:
        return
    yield from ((node, text_of(argument)) for argument in arguments)
    name = node.child_by_field_name("function")
    yield name, function.replace("max", "mi_").replace("min", "max").replace("mi_", "min")


def called(node: Node) -> tuple[str, list[Node]]:
    """Returns the text of a call's function, and its arguments without comments."""
    function = node.child_by_field_name("function")
    arguments = node.child_by_field_name("arguments")
    listed = arguments.named_children if arguments is not None else []
    return (text_of(function) if function is not None else ""), [
        argument for argument in listed if argument.type != "comment"
    ]


def remove_statement(node: Node) -> Iterator[Change]:
    """Removes a call whose result is not used, or an assignment to something that exists."""
    if node.type != "expression_statement" or not node.named_children:
        return
    value = node.named_children[0]
    inner = value.named_children[0] if value.type in ("await", "await_expression") else value
    if inner.type in CALLS:
        function, _ = called(inner)
        if LOGS.fullmatch(function) or function.isupper() or "static_assert" in function:
            return
    elif inner.type == "assignment":
        left = inner.child_by_field_name("left")
        if left is None or left.type not in ("attribute", "subscript"):
            return  # a name that is not bound would be an error of its own
    elif inner.type not in ASSIGNMENTS | {"delete_expression"}:
        return
    yield node, "pass" if is_python(node) else ";"


def remove_guard(node: Node) -> Iterator[Change]:
    """Removes an `if` that only leaves: a refusal, the end of a loop, a case that is skipped."""
    if node.type != "if_statement" or node.child_by_field_name("alternative") is not None:
        return
    body = node.child_by_field_name("consequence")
    if body is None:
        return
    statements = [body] if body.type in LEAVES else body.named_children
    if statements and statements[-1].type in LEAVES and len(statements) <= 2:
        yield node, "pass" if is_python(node) else ";"


def return_early(node: Node) -> Iterator[Change]:
    """Lets a function without a result return at once."""
    body = node.child_by_field_name("body")
    if node.type != "function_definition" or body is None:
        return
    statements = [child for child in body.named_children if child.type != "comment"]
    if is_python(node):
        if re.search(r"\breturn [^\n]|\byield\b", text_of(body)):
            return
        if statements[0].named_children and statements[0].named_children[0].type == "string":
            statements = statements[1:]
        if statements:
            yield statements[0], "return"
    elif statements:
        result = node.child_by_field_name("type")
        if result is not None and text_of(result) == "void":
            yield statements[0], f"if (true) return; {text_of(statements[0])}"


def swap_arguments(node: Node) -> Iterator[Change]:
    if node.type not in CALLS:
        return
    _, arguments = called(node)
    for left, right in zip(arguments, arguments[1:], strict=False):
        if {left.type, right.type} <= NAMES and left.text != right.text:
            list_ = node.child_by_field_name("arguments")
            text, base = list_.text or b"", list_.start_byte
            swapped = (
                text[: left.start_byte - base]
                + (right.text or b"")
                + text[left.end_byte - base : right.start_byte - base]
                + (left.text or b"")
                + text[right.end_byte - base :]
            )
            yield list_, swapped.decode()


def take_first(node: Node) -> Iterator[Change]:
    """Reads the first element for each: one row's value for all rows."""
    if node.type not in ("subscript_expression", "subscript"):
        return
    index = node.child_by_field_name("indices") or node.child_by_field_name("subscript")
    if index is None or is_target(node):
        return
    inner = index.named_children[0] if index.type == "subscript_argument_list" else index
    if is_python(node) and PYTHON_TYPE.fullmatch(text_of(inner)):
        return  # as in the alias `Rows = Sequence[int]`
    if inner.type in ("identifier", "binary_expression", "binary_operator"):
        yield inner, "0"


def is_target(node: Node) -> bool:
    parent = node.parent
    return (
        parent is not None
        and parent.type in ASSIGNMENTS
        and parent.child_by_field_name("left") == node
    )


def is_python(node: Node) -> bool:
    root = node
    while root.parent is not None:
        root = root.parent
    return root.type == "module"


RULES: dict[str, Callable[[Node], Iterator[Change]]] = {
    "compare": swap_tokens("compare"),
    "logic": swap_tokens("logic"),
    "arithmetic": swap_tokens("arithmetic"),
    "constant": swap_tokens("constant"),
    "jump": swap_tokens("jump"),
    "negate": negate_condition,
    "extreme": drop_extreme,
    "statement": remove_statement,
    "guard": remove_guard,
    "return": return_early,
    "arguments": swap_arguments,
    "first": take_first,
}


def walk(node: Node) -> Iterator[Node]:
    """Yields the nodes of a tree without types, defaults of C++'s parameters and conditions of its
    preprocessor."""
    if node.type in ("template_argument_list", "preproc_include", "static_assert_declaration"):
        return
    if node.type in ("type", "decorator", "enumerator_list", "optional_parameter_declaration"):
        return
    if node.type == "comparison_operator" and text_of(node).startswith("sys.version_info"):
        return  # the tests run with one version
    yield node
    condition = node.child_by_field_name("condition") if node.type.startswith("preproc") else None
    for child in node.children:
        if child != condition:
            yield from walk(child)


def bugs_of(file: str, source: bytes) -> list[Bug]:
    """Returns every bug that the rules know for a file."""
    tree = tree_sitter.Parser(LANGUAGES[pathlib.PurePath(file).suffix]).parse(source)
    lines = source.decode(errors="replace").split("\n")
    found = []
    same: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for node in walk(tree.root_node):
        for kind, rule in RULES.items():
            for changed, new in rule(node):
                row = changed.start_point[0]
                bug = Bug(
                    file=file,
                    line=row + 1,
                    kind=kind,
                    begin=changed.start_byte,
                    end=changed.end_byte,
                    old=text_of(changed),
                    new=new,
                    context=lines[row].strip(),
                )
                found.append(bug)
                same[bug.context, bug.old, bug.new].append(bug.begin)
    return [
        dataclasses.replace(bug, place=f"{1 + sorted(begins).index(bug.begin)} of {len(begins)}")
        for bug in found
        for begins in [same[bug.context, bug.old, bug.new]]
    ]
