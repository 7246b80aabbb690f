#!/usr/bin/env python3
"""Checks the form of Markdown files: prose lines have at most 140 columns, and entries of DECISIONS.md at most 8 lines.

    python3 .ci/check_documents.py [--fix] [ROOT]

Tables, code, headings and comments may be wider. --fix wraps the paragraphs that have a line that is too wide.
"""

import argparse
import pathlib
import re
import subprocess
import textwrap
from collections.abc import Iterator

COLUMNS_MAX = 140
ENTRY_LINES_MAX = 8
MARKER = re.compile(r" *(?:[*+-]|\d+\.) +")  # of an item in a list
# Code and links stay in one line, and no line may begin with what would begin an item, a row or a heading.
CODE = re.compile(r"`[^`]+`")
UNBROKEN = re.compile(r" (?=(?:[*+-]|\d+\.|#+)(?: |$)|[|>])")


def paragraphs(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of lines that are a paragraph or an item of a list."""
    begin, in_code, in_list = None, False, False
    for number, line in enumerate([*lines, ""]):
        text = line.lstrip()
        is_comment_end = text.startswith("<!--") != text.endswith("-->")
        is_fence = text.startswith(("```", "~~~")) or is_comment_end
        is_indented = line.startswith("    ") and begin is None and not in_list
        is_prose = text and not (in_code or is_fence or is_indented) and text[0] not in "|#<"
        if begin is not None and (not is_prose or MARKER.match(line)):
            yield begin, number
            begin = None
        if is_prose and begin is None:
            begin = number
            in_list = bool(MARKER.match(line)) or (in_list and line.startswith(" "))
        in_code ^= is_fence


def wrapped(paragraph: list[str]) -> list[str]:
    marker = MARKER.match(paragraph[0])
    first = marker[0] if marker else re.match(" *", paragraph[0])[0]
    second = paragraph[1] if len(paragraph) > 1 else " " * len(first)
    text = " ".join(line.strip() for line in paragraph)[len(first.lstrip()) :]
    text = CODE.sub(lambda code: code[0].replace(" ", "\0"), text)
    return [
        line.replace("\0", " ")
        for line in textwrap.wrap(
            UNBROKEN.sub("\0", text),
            COLUMNS_MAX,
            initial_indent=first,
            subsequent_indent=re.match(" *", second)[0],
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def fixed(text: str) -> str:
    lines = text.split("\n")
    for begin, end in reversed(list(paragraphs(lines))):
        if any(len(line) > COLUMNS_MAX for line in lines[begin:end]):
            lines[begin:end] = wrapped(lines[begin:end])
    return "\n".join(lines)


def problems(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for begin, end in paragraphs(lines):
        for number in range(begin, end):
            if len(lines[number]) > COLUMNS_MAX:
                yield f"{number + 1}: {len(lines[number])} columns, at most {COLUMNS_MAX}"


def long_entries(decisions: str) -> Iterator[str]:
    for entry in re.split(r"^## ", decisions, flags=re.MULTILINE)[1:]:
        title, *lines = entry.strip().split("\n")
        if re.match(r"\d+\.", title) and len(lines) > ENTRY_LINES_MAX:
            yield f"entry {title!r} has {len(lines)} lines, at most {ENTRY_LINES_MAX}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fix", action="store_true", help="wrap paragraphs that are too wide")
    here = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=here)
    arguments = parser.parse_args()
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(
        command, cwd=arguments.root, check=True, capture_output=True, text=True
    ).stdout
    found = []
    for name in listed.splitlines():
        path = arguments.root / name
        text = path.read_text()
        if arguments.fix and fixed(text) != text:
            path.write_text(text := fixed(text))
        found += [f"{name}:{problem}" for problem in problems(text)]
        if name == "DECISIONS.md":
            found += [f"{name}: {problem}" for problem in long_entries(text)]
    if found:
        raise SystemExit("\n".join(["check_documents.py: error:", *found]))


if __name__ == "__main__":
    main()
